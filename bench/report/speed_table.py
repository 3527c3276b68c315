# SPDX-License-Identifier: Apache-2.0
"""The table of speed in README.md and docs/figures.md: flash3's speed divided by each library's, for each pass and each card, from what
bench/gpu/peers.py and bench/cpu/cpu_vs_torch.py wrote."""
import statistics

from bench.report.parts import NAMES, table

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
