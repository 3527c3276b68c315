#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/figures.md, docs/fp8.md, docs/transformers.md, and README.md's table of speed, from the committed measurements in
bench/results, and in docs/accuracy.md what the kernels have passed, from their record.

    python3 -m bench.report.tables [--check]
    python3 -m bench.report.tables --csv DIR       # every point of these measurements

Reads what bench/gpu/peers.py (GPU), bench/cpu/cpu_vs_torch.py (CPU), `flash3 bench --json` (flash3 alone), bench/gpu/call_overhead.py,
bench/gpu/needle.py, bench/gpu/cache_needle.py, bench/cpu/fp8_backward_study.py, bench/gpu/decode_peers.py, bench/distributed/context_parallel.py,
bench/cpu/transformers_models.py and examples/07_train_gpt.py wrote, newest first.
`--check` compares instead of writing: the gate that keeps the figures and the measurements together.
"""
import argparse
import csv
import json
import pathlib
import re
import statistics
import sys

from bench import RESULTS, ROOT
from bench.report.bias_table import bias_summary, bias_table, load_biases
from bench.report.context_table import context_points
from bench.report.fp8_backward_table import STUDY, study_tables
from bench.report.models_table import every_model, models_tables
from bench.report.needle_table import cache_needle_tables, needle_tables
from bench.report.parts import NAMES, NOT_MEASURED, libraries, median_range, source, table
from bench.report.suite_tables import cpu_points, cpu_summary, decode_points, load_record, verified_text
from bench.report.summary_tables import (cache_summary, context_summary, fp8_summary, in_order, newest_of_each_device, ragged_summary, short_name,
                                         speed_over_peers)

sys.path.insert(0, str(ROOT / "tools/codegen"))
from generated_block import update  # noqa: E402

FP8_NAMES = {"cudnn": "cuDNN, bf16", "cudnn_fp8": "cuDNN, FP8 (out in e4m3)", "fa3_fp8": "FlashAttention-3, FP8 without scales",
             "fp8_gemm": "FP8 GEMM"}
FP8_PEERS = ("cudnn_fp8", "fa3_fp8")


def load():
    """(GPU reports, the same of the backward, of ragged batches, of FP8, CPU reports, reports of flash3 alone, of calls from Python,
    of trainings, of needles, of needles in KV caches, of calls on a KV cache, of several GPUs, of transformers' models), each as (path,
    report), newest first, of the CPU the one of most cases; and the paths of other files."""
    gpu, backward, ragged, fp8, cpu, alone, calls, trained, needle, cache_needle, cache, context, models, other = ([] for _ in range(14))
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if "study" in report:
            continue  # docs/fp8.md alone
        if "bias_points" in report:
            continue  # bias_table.py loads it
        if "points" in report:
            (backward if report.get("pass") == "backward" else gpu).append((path, report))
        elif "ragged_points" in report:
            ragged.append((path, report))
        elif "fp8_points" in report:
            fp8.append((path, report))
        elif "results" in report and "torch" in report:
            cpu.append((path, report))
        elif "metadata" in report and alone_kind(report):
            alone.append((path, report))
        elif "call_overhead_us" in report:
            calls.append((path, report))
        elif report.get("example") == "train_gpt":
            trained.append((path, report))
        elif "needle_points" in report:
            needle.append((path, report))
        elif "cache_needle_points" in report:
            cache_needle.append((path, report))
        elif report.get("cache_points"):
            cache.append((path, report))
        elif report.get("context_points"):
            context.append((path, report))
        elif "transformers_models" in report:
            models.append((path, report))
        else:
            other.append(path)
    # The one with the most points of a day.
    newest = lambda item: (item[1].get("date") or item[1]["metadata"]["date"], len(item[1].get("points", ())))
    cpu.sort(key=lambda item: len(item[1]["results"]), reverse=True)
    lists = [reports if reports is cpu else sorted(reports, key=newest, reverse=True) for reports in
             (gpu, backward, ragged, fp8, cpu, alone, calls, trained, needle, cache_needle, cache, context, models)]
    return *lists, other


def mask(point):
    return "causal" if point["causal"] else "full"


def ours(point):
    """The library's own column: the first that is not a peer."""
    return next(name for name in point["tflops"] if name not in NAMES)


def value(point, name):
    return point["tflops"].get(name)


def ratio(point, peer):
    theirs = value(point, peer)
    return value(point, ours(point)) / theirs if theirs else None


def ratio_to_best(point):
    """To the fastest of the peers at this point."""
    ratios = [r for peer in NAMES if (r := ratio(point, peer))]
    return min(ratios) if ratios else None


def ceiling_text(c):
    """One measurement of `flash3 bench --ceiling` in words."""
    text = f"{c['tflops']:.0f} TFLOP/s at {c['sm_clock_mhz']:.0f} MHz"
    return text + (f", {c['watts']:.0f} W, {c['pj_per_flop']:.2f} pJ/FLOP" if "pj_per_flop" in c else "")


def ceiling_heading(report):
    if "ceiling" not in report:
        return ""
    runs = "; ".join(f"{when} the samples {ceiling_text(c)}" for when, c in report["ceiling"].items())
    return f" Ceiling (WGMMA alone on operands in shared memory): {runs}; shares are of the first."


def is_backward(report):
    return report.get("pass") == "backward"


def what(report):
    if not is_backward(report):
        return "forward"
    if report["deterministic"]:
        return "deterministic backward (flash3_default: flash3 without that demand)"
    return "backward"


def memory_text(report):
    """What the backward's workspace takes at most, beside the score matrix of the same point."""
    point = max(report["points"], key=lambda p: p["workspace_bytes"][ours(p)])
    return (f"Workspace: at most {point['workspace_bytes'][ours(point)] / 2**20:.1f} MiB (head_dim {point['dim']} {mask(point)} "
            f"{point['seq']}), where the score matrix would take {point['score_matrix_bytes'] / 2**20:.0f} MiB.")


def gpu_heading(report):
    points = report["points"]
    tokens, hidden = {p["batch"] * p["seq"] for p in points}, {p["heads"] * p["dim"] for p in points}
    clocks, watts = [p["sm_mhz"] for p in points], [p["watts"] for p in points]
    return (f"{libraries(report)}; {report['dtype']}, {what(report)}, batch · seq = {', '.join(map(str, sorted(tokens)))}, heads · head_dim = "
            f"{', '.join(map(str, sorted(hidden)))}{'' if is_backward(report) else ', flash3 without LSE'}; median of {report['samples']} "
            f"samples of {report['sample_ms']:g} ms, interleaved in one process; the GPU ran at {min(clocks)} to "
            f"{max(clocks)} MHz and {min(watts)} to {max(watts)} W."
            f"{ceiling_heading(report)}")


def gpu_summary(path, report, up="../"):
    """What the chart of a report does not show: ratios, shares of the ceiling, and how it was measured."""
    points, lines = report["points"], []
    best = [r for p in points if (r := ratio_to_best(p))]
    if best:
        lines.append(f"- The ratio to the fastest of the other libraries: {median_range(best)}; flash3 leads at {sum(r >= 1 for r in best)} of "
                     f"{len(best)} points.")
    shares = [(p["share_of_ceiling"][ours(p)], p["seq"]) for p in points if "share_of_ceiling" in p]
    if shares:
        most = max(seq for _, seq in shares)
        longest = [share for share, seq in shares if seq == most]
        lines.append(f"- The share of the ceiling: {median_range([share for share, _ in shares])}; at {most} tokens {min(longest):.2f} … "
                     f"{max(longest):.2f}.")
    if is_backward(report):
        lines.append(f"- {memory_text(report)}")
    clocks, watts = ([p[field] for p in points] for field in ("sm_mhz", "watts"))
    return "\n".join([*lines, f"- {libraries(report)}; {min(clocks)} to {max(clocks)} MHz, {min(watts)} to {max(watts)} W.",
                      f"- From {source(path, report, up)}."])


def gpu_points(path, report, up="../"):
    points = report["points"]
    names = list(dict.fromkeys(name for p in points for name in p["tflops"]))
    peers = [name for name in names if name in NAMES]
    with_ceiling, with_energy = (any(field in p for p in points) for field in ("share_of_ceiling", "alone"))
    with_memory = is_backward(report)
    rows = []
    for p in points:
        cells = [f"{p['dim']} {mask(p)} {p['seq']}", p["batch"], p["heads"]]
        cells += [f"{value(p, name):.1f}" if value(p, name) else "" for name in names]
        cells += [f"{r:.3f}" if (r := ratio(p, peer)) else "" for peer in peers]
        if with_ceiling:
            cells.append(f"{p['share_of_ceiling'][ours(p)]:.3f}")
        if with_energy:
            cells += [f"{p['alone'][name]['pj_per_flop']:.2f}" if name in p["alone"] else "" for name in names]
        if with_memory:
            cells += [f"{p['workspace_bytes'][ours(p)] / 2**20:.1f}", f"{p['score_matrix_bytes'] / 2**20:.0f}"]
        rows.append([*cells, f"{100 * max(p['spread_p10_p90'].values()):.1f} %", p["sm_mhz"], p["watts"]])
    header = ["head_dim, mask, seq", "batch", "heads", *(f"{NAMES.get(n, n)} TFLOP/s" for n in names),
              *(f"/ {NAMES[n]}" for n in peers), *(["share of the ceiling"] if with_ceiling else []),
              *(f"{NAMES.get(n, n)} alone, pJ/FLOP" for n in names if with_energy),
              *(["workspace, MiB", "score matrix (not stored), MiB"] if with_memory else []), "widest spread, p10 to p90", "MHz", "W"]
    return "\n\n".join([gpu_heading(report), table(header, rows), f"From {source(path, report, up)}."])


def ragged_points(path, report, up="../"):
    """What bench/gpu/peers.py --ragged wrote. TFLOP/s, but milliseconds too, which alone tell something about short sequences."""
    points = report["ragged_points"]
    names = list(dict.fromkeys(name for p in points for name in p["ms"]))
    mine = next((name for name in names if name not in NAMES), None)
    rows = []
    for p in points:
        cells = [f"`{p['case']}`", p["sequences"], f"{p['cost_per_token']:.0f}"]
        cells += [f"{p['ms'][n]:.3f} ({p['tflops'][n]:.0f}, {p['gbps'][n]:.0f})" if n in p["ms"] else "" for n in names]
        cells += [f"{p['ms'][n] / p['ms'][mine]:.3f}" if n in p["ms"] and mine in p["ms"] else "" for n in names if n in NAMES]
        beside = p.get("ratio_to_beside", {}).get(mine)
        cells += [f"{beside:.3f} of `{p['beside']['case']}`" if beside else ""]
        rows.append([*cells, f"{100 * max(p['spread_p10_p90'].values(), default=0):.1f} %", p["sm_mhz"], p["watts"]])
    header = ["case", "sequences", "cost/token", *(f"{NAMES.get(n, n)} ms (TFLOP/s, GB/s)" for n in names),
              *(f"/ {NAMES[n]}" for n in names if n in NAMES), "of the dense or plain call's TFLOP/s",
              "widest spread, p10 to p90", "MHz", "W"]
    refusals = dict.fromkeys(f"{NAMES.get(name, name)}: {why}" for p in points for name, why in p.get("refused", {}).items())
    lines = [f"{report['device']}, driver {report['driver']}, torch {report['torch']}; {report['dtype']}, {report['pass']}; median of "
             f"{report['samples']} samples of {report['sample_ms']:g} ms, interleaved in one process.{ceiling_heading(report)}",
             table(header, rows)]
    if refusals:
        lines.append("Empty cells, in the libraries' own words: " + "; ".join(refusals) + ".")
    return "\n\n".join([*lines, f"From {source(path, report, up)}."])


def fp8_points(path, report, up="../"):
    """What bench/gpu/peers.py --fp8 wrote: flash3's FP8 beside 16 bits, cuDNN's FP8 and a GEMM."""
    points = report["fp8_points"]
    names = list(dict.fromkeys(name for p in points for name in p["tflops"]))
    mine = names[0]
    titles = {mine: f"{mine}, FP8", f"{mine}_bf16": f"{mine}, bf16", f"{mine}_from_bf16": f"{mine}, FP8 with quantise", **FP8_NAMES}
    # What the FP8 forward is divided by, and what it is with quantise.
    beside = [name for name in names if name in (f"{mine}_bf16", *FP8_NAMES)]
    with_quantize = f"{mine}_from_bf16", f"{mine}_bf16"

    def quotient(p, above, below):
        return p["tflops"][above] / p["tflops"][below] if above in p["tflops"] and below in p["tflops"] else None

    def cell(number, form=".3f"):
        return "" if number is None else format(number, form)

    with_ceiling = any("share_of_ceiling" in p for p in points)
    errors = list(dict.fromkeys(name for p in points for name in p["error_to_fa2"] if name != f"{mine}_from_bf16"))
    rows = []
    for p in points:
        cells = [f"{p['dim']} {mask(p)} {p['seq']}", p["batch"], p["heads"], *(cell(p["tflops"].get(n), ".1f") for n in names)]
        cells += [cell(p["ms"].get(f"{mine}_quantize"), ".4f"), *(cell(quotient(p, mine, n)) for n in beside),
                  cell(quotient(p, *with_quantize))]
        if with_ceiling:
            cells.append(cell(p.get("share_of_ceiling", {}).get(mine)))
        cells += ["" if n not in p["error_to_fa2"] else f"{100 * p['error_to_fa2'][n]:.2f} %" for n in errors]
        rows.append([*cells, f"{100 * max(p['spread_p10_p90'].values()):.1f} %", p["sm_mhz"], p["watts"]])
    header = ["head_dim, mask, seq", "batch", "heads", *(f"{titles.get(n, n)} TFLOP/s" for n in names), "quantise ms",
              *(f"/ {titles[n]}" for n in beside), f"with quantise / {titles[with_quantize[1]]}",
              *(["share of the ceiling"] if with_ceiling else []), *(f"{titles.get(n, n)}: error" for n in errors),
              "widest spread, p10 to p90", "MHz", "W"]
    lines = [f"{libraries(report)}; FP8 forward; "
             f"median of {report['samples']} samples of {report['sample_ms']:g} ms, interleaved in one process. FP8 GEMM: "
             f"torch._scaled_mm, 8192 rows, columns and reduction. Errors: RMS of the difference to FlashAttention-2 in bf16, of its "
             f"out's own RMS.{ceiling_heading(report)}", table(header, rows)]
    ratios = [(titles[n], [r for p in points if (r := quotient(p, mine, n))]) for n in beside]
    ratios.append((f"{titles[with_quantize[1]]}, with quantise", [r for p in points if (r := quotient(p, *with_quantize))]))
    lines.append("\n".join(f"- {titles[mine]} / {title}, over these {len(r)} points: {median_range(r)}" for title, r in ratios if r))
    best = [min(at) for p in points if (at := [r for n in FP8_PEERS if (r := quotient(p, mine, n))])]
    if best:
        lines[-1] += (f"\n- {titles[mine]} / the faster of the others' FP8, over these {len(best)} points: {median_range(best)}; flash3 leads at "
                      f"{sum(r >= 1 for r in best)}")
    refusals = dict.fromkeys(f"{titles.get(name, name)}: {why}" for p in points for name, why in p.get("refused", {}).items())
    if refusals:
        lines.append("Empty cells, in the libraries' own words: " + "; ".join(refusals) + ".")
    return "\n\n".join([*lines, f"From {source(path, report, up)}."])


def alone_kind(report):
    """What `flash3 bench --json` measured, for the title of its table; None for a run that needs none."""
    if "ablation" in report:
        return "parts of the forward kernel's schedule switched off"
    if report.get("metadata", {}).get("suite") == "window":
        return "time against the window"
    if report.get("metadata", {}).get("suite") == "ragged":
        return "ragged batches, sinks and softcaps"
    if report.get("metadata", {}).get("suite") == "fp8":
        return "FP8 beside 16 bits, and what bringing the tensors to FP8 takes"
    if any("sustained_ms" in r for r in report["results"]):
        return "burst and sustained"
    return "the ceiling" if not report["results"] and "ceiling" in report else None


# Columns of the tables of flash3 alone: title, field, format. A column is there if a row has its field.
ALONE_COLUMNS = (("ms", "median_ms", ".4f"), ("burst TFLOP/s", "burst_tflops", ".1f"), ("TFLOP/s", "tflops", ".1f"),
                 ("keys a query sees", "keys_per_query", ".1f"), ("µs a key", "us_per_key", ".4f"), ("GB/s", "gbps", ".0f"),
                 ("sequences", "sequences", "d"), ("cost/token", "cost_per_token", ".0f"), ("beside", "beside", "s"),
                 ("of its TFLOP/s", "ratio", ".3f"), ("quantise ms", "quantize_ms", ".4f"), ("share of the ceiling", "share_of_ceiling", ".3f"),
                 ("that beside: share of its ceiling", "beside_share_of_ceiling", ".3f"),
                 ("MHz", "sm_clock_mhz", ".0f"), ("W", "watts", ".0f"), ("pJ/FLOP", "pj_per_flop", ".2f"))


def ablation_table(path, report, up):
    about = report["metadata"]
    rows = [[r["schedule"], r["tile"], f"{r['tflops']:.1f}", f"{r['share_of_full']:.3f}",
             f"{r['paper_tflops']:.0f}" if "paper_tflops" in r else "", f"{r['paper_share_of_full']:.3f}" if "paper_tflops" in r else ""]
            for r in report["ablation"]]
    return "\n\n".join([f"{about['device']}: {alone_kind(report)}; `{about['case']}`; {about['how']}.",
                        table(["schedule", "tile", "TFLOP/s", "of full", "the paper's TFLOP/s", "of its full"], rows),
                        f"From {source(path, report, up)}."])


def alone_table(path, report, up="../"):
    if "ablation" in report:
        return ablation_table(path, report, up)
    about, results, kind = report["metadata"], report["results"], alone_kind(report)
    columns = [column for column in ALONE_COLUMNS if any(column[1] in r for r in results)]
    if kind != "time against the window":
        columns = [column for column in columns if column[1] not in ("keys_per_query", "us_per_key")]
    if kind != "ragged batches, sinks and softcaps":
        columns = [column for column in columns if column[1] != "gbps"]
    lines = [f"{about['device']}: {kind}; {about['how']}." if "how" in about else f"{about['device']}: {kind}."]
    lines += [f"Ceiling, {c['dtype']}, head_dim {c['head_dim']}, {c['when']}{'' if c['when'] == 'alone' else ' the cases'}: "
              f"{ceiling_text(c)}." for c in report.get("ceiling", [])]
    if results:
        rows = [[f"`{r['case']}`", *(format(r[field], form) if field in r else "" for _, field, form in columns)]
                for r in results]
        lines.append(table(["case", *(title for title, _, _ in columns)], rows))
    return "\n\n".join([*lines, f"From {source(path, report, up)}."])


C_FUNCTION, RECORDED = "C function", ", recorded by autograd"


def call_table(path, report, up="../"):
    """Microseconds of a call above the C function's, from what bench/gpu/call_overhead.py wrote."""
    times = report["call_overhead_us"]
    launch = times[C_FUNCTION]

    def cell(name):
        return f"{times[name] - launch:.1f}" if name in times else ""

    # Two names of torch's own differ by more than the ending.
    recorded = {"torch scaled_dot_product_attention": "torch's" + RECORDED}
    names = [name for name in times if name != C_FUNCTION and not name.endswith(RECORDED)]
    rows = [[f"`{name.removeprefix('torch ') if name in recorded else name}`" + (" of torch" if name in recorded else ""),
             cell(name), cell(recorded.get(name, name + RECORDED))] for name in names]
    return (f"{report['device']}, torch {report['torch']}: µs of CPU time above the C function, which with its launch takes "
            f"{launch:.1f}; median of {report['rounds']} rounds of {report['calls']} calls.\n\n" +
            table(["call", "µs", "recorded by autograd"], rows) + f"\n\nFrom {source(path, report, up)}.")


def training_table(path, report, up="../"):
    """The losses of examples/07_train_gpt.py, and its speed."""
    size, losses, speed = report["size"], report["loss"], report["tokens_per_second"]
    names, steps = list(losses), len(next(iter(losses.values())))
    mean = lambda values, end: statistics.fmean(values[max(0, end - 10):end])
    ends = sorted({*range(10, steps, max(10, steps // 40 * 10)), steps})
    rows = [[f"{max(0, end - 10)} … {end - 1}", *(f"{mean(losses[name], end):.4f}" for name in names)] for end in ends]
    rows.append(["tokens/s", *(f"{speed[name]:,}" for name in names)])
    return (f"{report['device']}, torch {report['torch']}: a GPT of {size['layers']} layers, dim {size['dim']}, {size['heads']} heads, "
            f"{size['batch']} × {size['length']} tokens a step; both from seed {report['seed']}, their steps alternating. Mean loss of ten "
            "steps, nats per byte.\n\n" + table(["steps", *names], rows) + f"\n\nFrom {source(path, report, up)}.")


def of_speed():
    """The names of the files in bench/results that the table of speed and README.md's figure are of, newest first."""
    gpu, backward, _, fp8, *_ = load()
    plain = [item for item in backward if not item[1]["deterministic"]]
    return [path.name for reports in (gpu, plain, fp8) for items in newest_of_each_device(reports).values() for path, _ in items]


def summaries(gpu, backward, ragged, fp8, cpu, calls, trained, cache, context):
    """docs/figures.md's sections, each a summary of one suite: (heading, text)."""
    plain_backward = [item for item in backward if not item[1]["deterministic"]]
    of_gpu, of_backward = newest_of_each_device(gpu), newest_of_each_device(plain_backward)
    devices = in_order(of_gpu, of_backward, newest_of_each_device(fp8))
    found = [("Speed beside other libraries", speed_over_peers(gpu, plain_backward, fp8, cpu))]
    for what, of_device in (("forward", of_gpu), ("backward", of_backward)):
        device = next((device for device in devices if device in of_device), None)
        if device:
            found.append((f"{what.capitalize()}, {short_name(device)}", gpu_summary(*of_device[device][0])))
    found += [("FP8 beside 16 bits", fp8_summary(fp8)), ("Ragged batches", ragged_summary(ragged)),
              ("ALiBi, biases and dropout", bias_summary()), ("KV cache", cache_summary(cache)),
              ("Several GPUs", context_summary(context)), ("CPU", "\n\n".join(cpu_summary(*item) for item in cpu) or NOT_MEASURED)]
    for title, reports, write in (("What a call costs the host", calls, call_table), ("Training a small GPT", trained, training_table)):
        found.append((title, "\n\n".join(write(*item) for item in reports) or NOT_MEASURED))
    return found


def every_table(gpu, backward, ragged, fp8, cpu, alone, calls, trained, needle, cache_needle, cache, context, models):
    """(path, its tables of every point and the text around them) of each file that has one."""
    for reports, write in ((gpu, gpu_points), (backward, gpu_points), (ragged, ragged_points), (fp8, fp8_points), (cache, decode_points),
                           (context, context_points), (cpu, cpu_points), (alone, alone_table), (calls, call_table), (trained, training_table)):
        for path, report in reports:
            yield path, write(path, report, "")
    for item in needle:
        yield item[0], needle_tables(item, "", full=True)
    for item in cache_needle:
        yield item[0], cache_needle_tables(item)
    for path, report in load_biases():
        yield path, bias_table(path, report, "")
    yield RESULTS / STUDY, study_tables(full=True)
    for path, report in models:
        yield path, every_model(report)


def write_csv(folder, texts):
    """NAME.csv, the table of bench/results/NAME.json, with NAME_2.csv and so on where it has more, and NAME.txt, how it was measured.
    texts: (path, text) as every_table gives it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts:
        about = re.sub(r"(^\|.*\n?)+", "", text, flags=re.M)
        (folder / f"{path.stem}.txt").write_text(re.sub(r"\n{3,}", "\n\n", about).strip() + "\n", encoding="utf-8")
        for number, lines in enumerate(re.findall(r"(?:^\|.*\n?)+", text, re.M), 1):
            rows = [[cell.strip().strip("`").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.splitlines()]
            with open(folder / f"{path.stem}{f'_{number}' if number > 1 else ''}.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([rows[0], *rows[2:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--csv", metavar="DIR", type=pathlib.Path, help="write the tables of every point to this folder instead, a CSV file each")
    args = parser.parse_args()
    gpu, backward, ragged, fp8, cpu, alone, calls, trained, needle, cache_needle, cache, context, models, _ = load()
    if args.csv:
        write_csv(args.csv, every_table(gpu, backward, ragged, fp8, cpu, alone, calls, trained, needle, cache_needle, cache, context, models))
        return 0
    plain_backward = [item for item in backward if not item[1]["deterministic"]]
    status = update("README.md", "speed", speed_over_peers(gpu, plain_backward, fp8, cpu), args.check)
    status |= update("docs/accuracy.md", "verified", verified_text(load_record()), args.check)
    status |= update("docs/fp8.md", "needle", needle_tables(needle[0] if needle else None), args.check)
    status |= update("docs/fp8.md", "backward", study_tables(), args.check)
    status |= update("docs/transformers.md", "models", models_tables(models[0] if models else None), args.check)
    sections = summaries(gpu, backward, ragged, fp8, cpu, calls, trained, cache, context)
    status |= update("docs/figures.md", "summary", "\n\n".join(f"### {title}\n\n{text}" for title, text in sections), args.check)
    if status:
        print("the figures are not what bench/results holds: run bench/report/tables.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
