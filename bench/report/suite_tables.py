# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/figures.md from what bench/gpu/decode_peers.py and bench/cpu/cpu_vs_torch.py wrote, and that of docs/accuracy.md from the
record of what the kernels have passed."""
import json
import statistics

from bench import ROOT
from bench.report.parts import NAMES, libraries, median_range, source, table

OF_BYTES = ("decode", "ragged")  # kinds whose time is that of reading keys and values; of the others operations tell more


def to_best(point):
    """flash3's speed divided by that of the fastest peer; None without either."""
    others = [us for name, us in point["us"].items() if name != "flash3"]
    return min(others) / point["us"]["flash3"] if others and "flash3" in point["us"] else None


def rate(point, name):
    """The rate that a library reaches there, shown after its time: the share of the memory's bandwidth, or TFLOP/s."""
    if point["kind"] in OF_BYTES:
        return f" ({100 * point['share_of_peak'][name]:.0f} %)" if "share_of_peak" in point else ""
    return f" ({point['tflops'][name]:.0f} TFLOP/s)"


def row(point, names):
    peers = [name for name in names if name != "flash3"]
    us, best = point["us"], to_best(point)
    cells = [f"`{point['case']}`", f"{point['kv_bytes'] / 1e6:.0f}"]
    cells += [f"{us[name]:.1f}{rate(point, name)}" if name in us else "" for name in names]
    cells += [f"{us[name] / us['flash3']:.3f}" if name in us and "flash3" in us else "" for name in peers]
    return [*cells, f"{best:.3f}" if best else "", f"{100 * max(point['spread_p10_p90'].values(), default=0):.1f} %",
            point["sm_mhz"], point["watts"]]


def sums(points, names):
    lines = []
    for name in names[1:]:
        ratios = [point["us"][name] / point["us"]["flash3"] for point in points if name in point["us"] and "flash3" in point["us"]]
        if ratios:
            lines.append(f"- flash3 / {NAMES[name]}, over these {len(ratios)} points: {median_range(ratios)}")
    for kind in dict.fromkeys(point["kind"] for point in points):
        ratios = [ratio for point in points if point["kind"] == kind and (ratio := to_best(point))]
        if ratios:
            lines.append(f"- flash3 / the fastest peer, {kind}: {median_range(ratios)}; flash3 leads at {sum(r >= 1 for r in ratios)} of "
                         f"{len(ratios)}")
    return "\n".join(lines)


def decode_points(path, report, up="../"):
    points = report["cache_points"]
    names = ["flash3", *(name for name in NAMES if any(name in point["us"] for point in points))]
    clocks, watts = ([point[field] for point in points] for field in ("sm_mhz", "watts"))
    header = ["case", "K and V, MB", *(f"{NAMES.get(name, name)} µs" for name in names), *(f"/ {NAMES[name]}" for name in names[1:]),
              "/ the fastest", "widest spread, p10 to p90", "MHz", "W"]
    dtypes = " and ".join(dict.fromkeys(point.get("dtype", report["dtype"]) for point in points))
    lines = [f"{libraries(report)}; {dtypes}, CUDA graphs over buffers of 640 MB or more, schedules made before; median of "
             f"{report['samples']} samples of {report['sample_ms']:g} ms, interleaved in one process; the GPU ran at {statistics.median(clocks):.0f} MHz "
             f"and {statistics.median(watts):.0f} W in the median. In brackets the share of the memory's bandwidth by the data sheet that reading K and V "
             "once takes, or TFLOP/s. Ratios are of speeds: above 1 flash3 is faster.",
             table(header, [row(point, names) for point in points])]
    lines += [text] if (text := sums(points, names)) else []
    # A library says the same of many points.
    refusals = {}
    for point in points:
        for name, why in point["refused"].items():
            refusals.setdefault(f"{NAMES.get(name, name)}: {why}", []).append(point["case"])
    reasons = [f"{why} (`{cases[0]}`{f' and {len(cases) - 1} more' if len(cases) > 1 else ''})" for why, cases in refusals.items()]
    reasons += [f"{NAMES.get(name, name)}: {why}" for name, why in report.get("missing", {}).items()]
    reasons += [f"`{case}`: {why}" for case, why in report.get("failed", {}).items()]
    if reasons:
        lines.append("Without a result, in the libraries' own words: " + "; ".join(reasons) + ".")
    return "\n\n".join([*lines, f"From {source(path, report, up)}."])


# The tables of what bench/cpu/cpu_vs_torch.py measures.


def cpu_heading(report):
    return (f"{report['device']}, {report['instructions']}; torch {report['torch']}, scaled_dot_product_attention on "
            f"the CPU with as many threads; calls interleaved in one process, medians. Load average of the machine at the end: "
            f"{report['load_average']:.1f}.")


def group_of(result):
    """Many queries, or one, or their gradients."""
    dtype, _, seq_q = result["case"].split("/")[:3]
    what = "backward" if result["case"].endswith("/bwd") else "one query" if seq_q == "q1" else "as many queries as keys"
    return f"{dtype}, {what}"


def cpu_summary(path, report, up="../"):
    groups = {}
    for r in report["results"]:
        groups.setdefault(group_of(r), []).append(r)
    rows = []
    for name, results in groups.items():
        speedups = [r["speedup"] for r in results]
        best = max(r["flash3"]["gflops"] for r in results)
        rows.append([name, len(results), f"{statistics.geometric_mean(speedups):.2f}", f"{min(speedups):.2f}",
                     f"{max(speedups):.2f}", f"{best:.0f}"])
    header = ["", "cases", "speed-up over torch, geometric mean", "least", "most", "flash3's highest GFLOP/s"]
    return "\n\n".join([cpu_heading(report), table(header, rows),
                        f"Over all {len(report['results'])} cases: geometric mean {report['geometric_mean_speedup']:.2f}. "
                        f"From {source(path, report, up)}."])


def cpu_points(path, report, up="../"):
    rows = [[f"`{r['case']}`", f"{r['flash3']['median_ms']:.3f}", f"{r['torch']['median_ms']:.3f}",
             f"{r['flash3']['gflops']:.0f}", f"{r['flash3']['kv_gb_per_s']:.1f}", f"{r['speedup']:.2f}"]
            for r in report["results"]]
    header = ["case", "flash3 ms", "torch ms", "flash3 GFLOP/s", "GB/s of K and V", "speed-up"]
    return "\n\n".join([cpu_heading(report), table(header, rows), f"From {source(path, report, up)}."])


# What the GPU kernels have passed, in docs/accuracy.md, from the record that `flash3 verify --record` wrote (CONTRIBUTING.md says what it is).

RECORD = "tests/verified/hopper.json"
TABLES = ("full", "backward", "ragged", "ragged-backward", "masks", "masks-backward", "quantize", "decode")


def verified_text(record):
    """A paragraph; parts that the record does not have are left out."""
    parts = record["parts"]
    where = ", ".join(sorted({part["device"].partition(",")[0] for part in parts.values()}))
    when = ", ".join(sorted({f"{part['date'][:10]} at {part['commit']}" for part in parts.values()}))
    passed = [f"{sum(parts[name]['passed'] for name in TABLES if name in parts):,} cases of the tables"]
    if "random" in parts:
        passed.append(f"{parts['random']['forward']:,} random forward and {parts['random']['backward']:,} random backward problems")
    if "repeat" in parts:
        passed.append(f"{parts['repeat']['passed']} cases {parts['repeat']['repetitions']:,} times over with the same bits")
    if "sanitizer" in parts:
        passed.append(f"{parts['sanitizer']['passed']} cases under compute-sanitizer's memcheck, racecheck, synccheck and initcheck")
    listed = ", ".join(passed[:-1]) + (" and " if len(passed) > 1 else "") + passed[-1]
    failed = sum(part["failed"] for part in parts.values())
    launched = len(record["kernels"]) - len(record["not_launched"])
    return (f"{launched} of {len(record['kernels'])} GPU kernels have passed\n{listed},\nand failed {failed or 'none'} ({where}, {when}).\n"
            f"[{RECORD}](../{RECORD}) has a hash of each one's machine code, and `gate.kernels_verified` lists those that have changed since.")


def load_record():
    return json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
