# SPDX-License-Identifier: Apache-2.0
"""docs/figures.md's summary tables of ragged batches, FP8, KV caches and several GPUs: one row for each pass and card, or for each kind of call."""
import statistics

from bench.distributed.context_points import PASSES, PEERS as CONTEXT_PEERS, methods
from bench.report.parts import NAMES, NOT_MEASURED, source, table


def sources(items, up="../"):
    return "From " + "; ".join(source(path, report, up) for path, report in items) + "."


def quotients(points, mine, peer, field="tflops"):
    """flash3's speed divided by the peer's, at the points that have both. field: "tflops", or a time, of which less is better."""
    both = [point[field] for point in points if mine in point[field] and peer in point[field]]
    return [at[mine] / at[peer] if field == "tflops" else at[peer] / at[mine] for at in both]


def leads(points, mine, peers, field="tflops"):
    """At how many of the points that have a peer flash3 is at least as fast as the fastest of them."""
    best = [min(at) for point in points if (at := [r for peer in peers for r in quotients([point], mine, peer, field)])]
    return f"{sum(ratio >= 1 for ratio in best)} of {len(best)}"


def ragged_summary(reports):
    """A summary of what bench/gpu/peers.py --ragged wrote, by pass and card."""
    rows, used = [], []
    peers = [name for name in NAMES if any(name in point["ms"] for _, report in reports for point in report["ragged_points"])]
    for kind in dict.fromkeys(report["pass"] for _, report in reports):
        for device, items in newest_of_each_device([item for item in reports if item[1]["pass"] == kind]).items():
            points = [point for _, report in items for point in report["ragged_points"]]
            mine = next(name for name in points[0]["ms"] if name not in NAMES)
            dense = [share[mine] for point in points if mine in (share := point.get("ratio_to_beside", {}))]
            rows.append([f"{kind}, {short_name(device)}, {len(points)} points", *(range_text(quotients(points, mine, peer, "ms")) for peer in peers),
                         leads(points, mine, peers, "ms"), range_text(dense)])
            used += items
    if not rows:
        return NOT_MEASURED
    header = ["flash3's speed divided by", *(NAMES[peer] for peer in peers), "fastest at", "TFLOP/s divided by those of the dense or plain call"]
    return f"{table(header, rows)}\n\n{sources(used)}"


def fp8_summary(reports):
    """A summary of what bench/gpu/peers.py --fp8 wrote: FP8 beside the card's own 16 bits and a GEMM. The table of speed compares it with other
    libraries' FP8."""
    beside = {"flash3_bf16": "flash3's bf16", "cudnn": "cuDNN's bf16", "fp8_gemm": "the FP8 GEMM"}
    rows, used = [], []
    for device, items in newest_of_each_device(reports).items():
        points = [point for _, report in items for point in report["fp8_points"]]
        rows.append([f"{short_name(device)}, {len(points)} points", *(range_text(quotients(points, "flash3", name)) for name in beside),
                     range_text(quotients(points, "flash3_from_bf16", "flash3_bf16"))])
        used += items
    if not rows:
        return NOT_MEASURED
    header = ["flash3's FP8 speed divided by", *beside.values(), "flash3's bf16, quantise included"]
    return f"{table(header, rows)}\n\n{sources(used)}"


def cache_summary(reports):
    """A summary of what bench/gpu/decode_peers.py wrote, by kind of call and card."""
    rows, used = [], []
    peers = [name for name in NAMES if any(name in point["us"] for _, report in reports for point in report["cache_points"])]
    for device, items in newest_of_each_device(reports).items():
        points = [point for _, report in items for point in report["cache_points"]]
        for kind in dict.fromkeys(point["kind"] for point in points):
            some = [point for point in points if point["kind"] == kind]
            rows.append([f"{kind}, {short_name(device)}, {len(some)} points", *(range_text(quotients(some, "flash3", peer, "us")) for peer in peers),
                         leads(some, "flash3", peers, "us")])
        used += items
    if not rows:
        return NOT_MEASURED
    header = ["flash3's speed divided by", *(NAMES[peer] for peer in peers), "fastest at"]
    return f"{table(header, rows)}\n\n{sources(used)}"


def context_summary(reports):
    """A summary of what bench/distributed/context_parallel.py wrote, by kind, pass and number of GPUs."""
    rows = []
    for _, report in sorted(reports, key=lambda item: item[1]["ranks"]):
        ranks = report["ranks"]
        for kind in dict.fromkeys(point["kind"] for point in report["context_points"]):
            points = [point for point in report["context_points"] if point["kind"] == kind]
            for what in PASSES:
                best = [100 * max(shares) for point in points
                        if (shares := [of[what] for name, of in point.get("of_alone", {}).items() if name in methods(ranks)])]
                over = []
                for point in points:
                    ours, theirs = ([point["tflops"][name][what] for name in names if name in point["tflops"]] for names in (methods(ranks), CONTEXT_PEERS))
                    if ours and theirs and max(theirs) > 0:  # a speed below 0.005 TFLOP/s is 0.0 here
                        over.append(max(ours) / max(theirs))
                shares = f"{statistics.median(best):.0f} % ({min(best):.0f} … {max(best):.0f})" if best else "–"
                rows.append([f"{kind}, {what}, {ranks} × {short_name(report['device'])}, {len(points)} points", shares, range_text(over)])
    if not rows:
        return NOT_MEASURED
    header = ["the fastest method", "share of one GPU's speed", "speed divided by the fastest peer's"]
    return f"{table(header, rows)}\n\n{sources(reports)}"


# The table of speed in README.md and docs/figures.md: flash3's speed divided by each library's, for each pass and each card, from what
# bench/gpu/peers.py and bench/cpu/cpu_vs_torch.py wrote.

FLASH3 = "flash3"
PEERS = ("cudnn", "fa2", "fa3", "fa4")  # an FP8 report calls them the same with _fp8 at the end


def tflops(point, peer):
    return point["tflops"].get(peer)


def newest_of_each_device(reports):
    """{device: its newest (path, report)}, of reports that are sorted, newest first. All that were measured at one commit count: a pass may take two files."""
    found = {}
    for path, report in reports:
        of_device = found.setdefault(report["device"], [])
        if not of_device or of_device[0][1]["commit"] == report["commit"]:
            of_device.append((path, report))
    return found


def in_order(*passes):
    """The devices of some passes, each as newest_of_each_device gives it: the one that has the most of them comes first."""
    return sorted({device for of_device in passes for device in of_device},
                  key=lambda device: (-sum(device in of_device for of_device in passes), device))


def short_name(device):
    """"H200" of "NVIDIA H200", "H100" of "NVIDIA H100 80GB HBM3"."""
    return device.removeprefix("NVIDIA ").split()[0]


def range_text(ratios):
    """The median of some ratios, and in brackets the least and the most."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})" if ratios else "–"


def ratio(point, peer):
    theirs = tflops(point, peer)
    return point["tflops"][FLASH3] / theirs if theirs else None


def row(what, points, peers, suffix):
    """Ratios to each of the peers at the points, and at how many flash3 is at least as fast as the fastest of them there."""
    ratios = [[r for p in points if (r := ratio(p, peer + suffix))] for peer in peers]
    to_best = [min(at) for p in points if (at := [r for peer in peers if (r := ratio(p, peer + suffix))])]
    return [f"{what}, {len(points)} points", *map(range_text, ratios), f"{sum(r >= 1 for r in to_best)} of {len(to_best)}"]


def passes_of_cards(forward, backward, fp8):
    """[(what, e.g. "forward, H200", its points, what a peer's name ends with in them)]: the newest of each pass and card. The arguments are
    lists of (path, report), newest first. A pass and a card without a report have no entry."""
    passes = [("forward", newest_of_each_device(forward), "points", ""), ("backward", newest_of_each_device(backward), "points", ""),
              ("FP8 forward", newest_of_each_device(fp8), "fp8_points", "_fp8")]
    devices = in_order(*(of_device for _, of_device, _, _ in passes))
    return [(f"{what}, {short_name(device)}", [p for _, report in of_device[device] for p in report[field]], suffix)
            for device in devices for what, of_device, field, suffix in passes if device in of_device]


def speed_over_peers(forward, backward, fp8, cpu):
    """The table. forward, backward, fp8, cpu: lists of (path, report), of the GPU newest first."""
    shown = passes_of_cards(forward, backward, fp8)
    peers = [peer for peer in PEERS if any(tflops(p, peer + suffix) for _, points, suffix in shown for p in points)]
    text = table(["flash3's speed divided by", *(NAMES[peer] for peer in peers), "fastest at"],
                 [row(what, points, peers, suffix) for what, points, suffix in shown])
    text += ("\n\nEach cell holds the median, the least and the most. The last column counts the points where flash3 is at least as fast as the fastest"
             "\nof the other libraries.")
    if any(suffix for _, _, suffix in shown):
        text += (" FP8 is compared with FP8: flash3 with a scale for each block of tokens, cuDNN with one for each tensor, FlashAttention-3"
                 "\nwithout scales.")
    for _, report in cpu[:1]:
        text += (f"\nOn a CPU ({report['device']}, {report['instructions']}) flash3 is "
                 f"{report['geometric_mean_speedup']:.1f} times as fast as torch (the geometric mean of {len(report['results'])} cases).")
    return text
