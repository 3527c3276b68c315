# SPDX-License-Identifier: Apache-2.0
"""The table of docs/figures.md from what bench/gpu/decode_peers.py wrote."""
import statistics

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
