# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/fp8.md from what bench/cpu/fp8_backward_study.py wrote."""
import json
import statistics

from bench import RESULTS
from bench.report.parts import NOT_MEASURED, source, table

STUDY = "fp8_backward_study_cpu.json"
GRADIENTS = ("dq", "dk", "dv")
DATA = {"normal": "N(0, 1)", "outliers": "outliers", "channels": "wide channels", "minilm_layer0": "MiniLM, layer 0",
        "minilm_layer5": "MiniLM, layer 5", "gpt_layer0": "GPT, layer 0", "gpt_layer1": "GPT, layer 1"}
PARTS = {"kernel_bf16": "flash3, bf16", "fp8": "FP8", "inputs": "of q, k, v, dOut alone", "p_ds": "of P and dS alone", "fp8_dout_e5m2": "FP8, dOut in e5m2",
         "fp8_unrotated": "FP8, not rotated", "s_dp_fp8": "S and dP alone in FP8"}
VARIANTS = {"fp8": "a scale for each tile of dS, 64×128", "fp8_tile_128": "of 128×128", "fp8_scale_per_head": "for each head",
            "fp8_short_sums": "Hopper's sums of FP8, one a tile", "fp8_one_short_sum": "the same, dK's and dV's over all queries"}
FORWARDS = {"kernel_bf16": "bf16 forward and backward", "kernel_fp8_forward": "`compute=\"fp8\"`: FP8 forward, bf16 backward of the 16-bit tensors",
            "kernel_fp8_forward_dequantised": "FP8 forward, bf16 backward of its e4m3 tensors", "fp8": "FP8 forward and backward",
            "fp8_lse_of_16_bits": "exact forward, FP8 backward"}
SHOWN = {**{name: FORWARDS[name] for name in ("kernel_bf16", "kernel_fp8_forward", "kernel_fp8_forward_dequantised", "fp8")},
         "inputs": "the last, rounding q, k, v, dOut alone", "p_ds": "rounding P and dS alone"}
BOUNDS = {"nothing beyond units": "nothing but the unit that binds", "as far from units as bf16": "bf16's tile by that too",
          "same cycles beyond units": "and as many cycles beyond it as bf16 has now", "the same, packing": "with the packing of P and dS",
          "the same, transposed in the kernel": "with Q and dOut transposed in the kernel",
          "the same, a scale for each tile": "with a scale for each tile of dS"}


def percent(value):
    return f"{100 * value:.3g}"


def worst(points, name, which=0):
    """The largest error of each gradient over the points, or nothing where the recipe was not asked for."""
    found = [p["errors"][name] for p in points if name in p["errors"]]
    return [max(errors[g][which] for errors in found) for g in GRADIENTS] if found else []


def by_data(points):
    return {title: chosen for name, title in DATA.items() if (chosen := [p for p in points if p["data"] == name])}


def error_table(points, columns):
    rows = [[title, *(", ".join(map(percent, worst(chosen, name))) for name in columns)] for title, chosen in by_data(points).items()]
    return table(["RMS error of dq, dk, dv, %", *columns.values()], rows)


def cosine_table(points):
    rows = [[title, *(", ".join(f"{x:.1e}" for x in worst(chosen, name, 1)) for name in ("kernel_bf16", "fp8"))]
            for title, chosen in by_data(points).items()]
    return table(["1 − cosine of dq, dk, dv", "flash3, bf16", "FP8"], rows)


def length_table(points):
    chosen = [p for p in points if p["data"] == "normal"]
    lengths = sorted({p["seq"] for p in chosen})
    rows = [[f"d {dim} {'causal' if causal else 'full'}",
             *(", ".join(percent(p["errors"]["fp8"][g][0]) for g in GRADIENTS) for seq in lengths for p in chosen
               if (p["dim"], p["causal"], p["seq"]) == (dim, causal, seq))]
            for dim in sorted({p["dim"] for p in chosen}) for causal in (False, True)]
    return table(["FP8 on N(0, 1), %", *(f"{seq:,}" for seq in lengths)], rows)


def variant_table(points):
    """Where all variants were computed."""
    return error_table([p for p in points if "fp8_short_sums" in p["errors"]], VARIANTS)


def training_table(training):
    runs = training["runs"]
    held_out = {arm: {r["seed"]: r["held_out"] for r in runs if r["arm"] == arm} for arm in training["arms"]}
    rows = []
    for arm, title in training["arms"].items():
        apart = [held_out[arm][seed] - held_out["bf16"][seed] for seed in held_out[arm]]
        last = [statistics.fmean(r["loss"][-50:]) for r in runs if r["arm"] == arm]
        rows.append([title, f"{statistics.fmean(last):.4f}", f"{statistics.fmean(held_out[arm].values()):.4f}",
                     ", ".join(f"{x:+.4f}" for x in apart)])
    return table(["", "loss, last 50 steps", "on held-out text", "held-out loss beyond bf16's, seed by seed"], rows)


def shared_table(units):
    columns = {"bf16": "bf16, {queries}×128", "bf16_64": "bf16, {queries}×128", "fp8": "e4m3, {queries}×128",
               "fp8_transposed_in_kernel": "e4m3, {queries}×128, transposed in the kernel"}
    rows = [[part, *(f"{units[name]['shared_kib'][part]:g}" for name in columns)] for part in units["fp8"]["shared_kib"]]
    rows += [["in all, KiB", *(f"{units[name]['shared_kib_in_all']:g}" for name in columns)]]
    rows += [[f"{title}, cycles for 64×128 pairs", *(f"{units[name][unit]:.0f}" for name in columns)]
             for unit, title in (("shared", "shared memory"), ("tensor", "tensor cores"), ("mufu", "exponentials"))]
    return table(["one tile, d 128", *(title.format(**units[name]) for name, title in columns.items())], rows)


def bound_table(masks):
    rows = [[title, *(f"{masks[mask]['bounds'][name]:.2f}" for mask in masks)] for name, title in BOUNDS.items()]
    rows += [["times what forwards get of such a count, with dOut and the copies made first",
              *(" … ".join(f"{x:.2f}" for x in masks[mask]["expected"]) for mask in masks)]]
    rows += [["cuDNN's FP8 backward, as read, over our bf16", *(" … ".join(f"{x:.2f}" for x in masks[m]["cudnn_fp8_over_flash3_bf16"]) for m in masks)]]
    rows += [["the same over cuDNN's bf16", *(" … ".join(f"{x:.2f}" for x in masks[m]["cudnn_fp8_over_cudnn_bf16"]) for m in masks)]]
    return table(["d 128, 16k: FP8 over our bf16 backward", *masks], rows)


def forward_text(masks):
    def of(name, mask):
        check = masks[mask]["forward_check"][name]
        return f"{mask} {check['measured']:.2f} of {check['expected']:.2f}"
    names = {"flash3": "flash3", "cudnn": "cuDNN", "fa3": "FlashAttention-3"}
    parts = [f"{title} {', '.join(of(name, mask) for mask in masks)}" for name, title in names.items()]
    return "What forwards at d 128, 16k gained by FP8, of what the same count expects: " + "; ".join(parts) + "."


def preparing_text(preparing):
    lengths = sorted({int(key.split()[0]) for key in preparing})
    shares = {seq: ", ".join(percent(preparing[f"{seq} {mask}"]["share"]) for mask in ("full", "causal")) for seq in lengths}
    return ("dOut to e4m3 and transposed copies of Q, K and dOut, % of the bf16 backward's time (full, causal): "
            + "; ".join(f"{seq:,}: {share}" for seq, share in shares.items()) + ".")


def study_tables(full=False):
    """full: all tables, and not only those that decide."""
    path = RESULTS / STUDY
    if not path.exists():
        return NOT_MEASURED
    report = json.loads(path.read_text(encoding="utf-8"))
    points, training, gain = report["error_points"], report["training"], report["gain"]
    size = training["size"]
    seeds = len({run["seed"] for run in training["runs"]})
    about = (f"The GPT of `examples/07_train_gpt.py`, {size['layers']} layers of {size['heads']} heads of {size['dim'] // size['heads']}, "
             f"{size['batch']}×{size['length']} bytes a step, {training['steps']} steps, {seeds} seeds; nats per byte:")
    parts = ["Each figure is the worst of the lengths, head dims and masks.", error_table(points, PARTS if full else SHOWN)]
    parts += [cosine_table(points), length_table(points), variant_table(points)] if full else []
    parts += [error_table(points, FORWARDS), about, training_table(training), shared_table(gain["units"]), bound_table(gain["masks"]),
              forward_text(gain["masks"]), preparing_text(gain["preparing"])] if full else []
    parts += [f"From {source(path, report, '../')}; a CPU with {report['device'].split(',')[0]}, torch {report['torch']}."]
    return "\n\n".join(parts)
