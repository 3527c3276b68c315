# SPDX-License-Identifier: Apache-2.0
"""The table of docs/figures.md from what bench/distributed/context_parallel.py wrote."""
import statistics

from bench.distributed.context_points import BARS, PASSES, PEERS, meshes, methods, ways
from bench.report.parts import median_range, source, table

NAMES = {"alone": "alone", "ring": "ring", "all_gather": "all-gather", "ulysses": "Ulysses", "torch_allgather": "torch, all-gather",
         "torch_alltoall": "torch, all-to-all", "plain_ring": "plain ring"}
GIB = 2**30


def names_of(ranks):
    return NAMES | {f"mesh_{ring}x{heads}": f"ring {ring} × Ulysses {heads}" for ring, heads in meshes(ranks)}


def cell(point, name, what):
    """TFLOP/s, and in brackets the share of one GPU's."""
    if name not in point["tflops"]:
        return ""
    share = point.get("of_alone", {}).get(name)
    return f"{point['tflops'][name][what]:.0f}" + (f" ({100 * share[what]:.1f} %)" if share else "")


def of_ring(point, what):
    """What copies take without kernels beside them, and how much of it is under kernels."""
    ring = point.get("ring")
    if not ring:
        return ["", "", ""]
    return [f"{ring['copies_ms'][what]:.2f}", f"{ring['computing_ms'][what]:.2f}", f"{100 * ring['hidden'][what]:.0f} %"]


def memory(point):
    """The ring's peak, then the bytes of the own tensors and of two blocks of K and V."""
    peak = point["memory"].get("ring")
    return f"{peak / GIB:.2f}, {point['own_bytes'] / GIB:.2f}, {point['two_blocks_bytes'] / GIB:.2f}" if peak else ""


def rows(point, names):
    clocks, watts = ("–".join(str(x) for x in sorted({min(point[field]), max(point[field])})) for field in ("sm_mhz", "watts"))
    made = []
    for i, what in enumerate(PASSES):
        spread = max((values[what] for values in point["spread"].values()), default=0)
        made.append([f"`{point['case']}`, {what}", *(cell(point, name, what) for name in names), NAMES.get(point["auto"], point["auto"]),
                     *of_ring(point, what), memory(point) if i == 0 else "", f"{100 * spread:.1f} %", clocks, watts])
    return made


def sums(points, ranks):
    """How the ring and the best method stand to one GPU's speed, by kind and pass."""
    lines = []
    for kind in dict.fromkeys(point["kind"] for point in points):
        for what in PASSES:
            some = [point["of_alone"] for point in points if point["kind"] == kind and "of_alone" in point]
            best = [max(of_ours) for shares in some if (of_ours := [shares[name][what] for name in methods(ranks) if name in shares])]
            ring = [shares["ring"][what] for shares in some if "ring" in shares]
            if best:
                bar = BARS[kind][what]
                lines.append(f"- {kind}, {what}: the fastest method has {median_range(best)} of one GPU's speed, at least {bar:.2f} at "
                             f"{sum(share >= bar for share in best)} of {len(best)} points" +
                             (f"; the ring {median_range(ring)}" if ring else ""))
    ratios = []
    for point in points:
        for what in PASSES:
            ours, theirs = ([point["tflops"][name][what] for name in names if name in point["tflops"]] for names in (methods(ranks), PEERS))
            if ours and theirs and max(theirs) > 0:  # below 0.005 TFLOP/s a speed is 0.0 here
                ratios.append(max(ours) / max(theirs))
    if ratios:
        lines.append(f"- the fastest method / the fastest peer, over {len(ratios)} passes: {median_range(ratios)}")
    return "\n".join(lines)


def without(report):
    """Why results are missing, and with what the peers computed."""
    reasons, notes, titles = {}, {}, names_of(report["ranks"])
    for point in report["context_points"]:
        for name, why in point["refused"].items():
            reasons.setdefault(f"{titles.get(name, name)}: {why}", []).append(point["case"])
        for name, said in point["notes"].items():
            notes.setdefault(f"{titles[name]}: {said}", []).append(point["case"])
    parts = []
    for title, found in (("The peers computed with", notes), ("Without a result, in the libraries' own words", reasons)):
        texts = [f"{text.rstrip('.')} (`{cases[0]}`{f' and {len(cases) - 1} more' if len(cases) > 1 else ''})" for text, cases in found.items()]
        if title.startswith("Without"):
            texts += [f"`{case}`: {why}" for case, why in report["failed"].items()]
        if texts:
            parts.append(f"{title}: " + "; ".join(texts) + ".")
    return parts


def context_points(path, report, up="../"):
    points = report["context_points"]
    names = [name for name in ways(report["ranks"]) if any(name in point["tflops"] for point in points)]
    clocks = [mhz for point in points for mhz in point["sm_mhz"]]
    versions = ", ".join(f"{name} {report[name.lower()]}" for name in ("driver", "torch", "cuDNN", "NCCL") if name.lower() in report)
    header = ["point", *(names_of(report["ranks"])[name] for name in names), "auto takes", "copies, ms", "kernels, ms", "copies hidden",
              "the ring's peak, own tensors, two blocks of K and V, GiB", "widest spread", "MHz", "W"]
    lines = [f"{report['ranks']} × {report['device']}, {versions}; {report['dtype']}, causal, tokens of each rank as the name says; steps of forward "
             f"and backward, at most {report['samples']} samples of {report['sample_ms']:g} ms or one step, interleaved in one run, of the slowest "
             f"rank, the median; {statistics.median(clocks):.0f} MHz in the median. A link gives {report['link']['gbps']:g} GB/s while as much comes; "
             f"the shortest message takes {report['link']['message_us']:g} µs. TFLOP/s of a GPU, and in brackets the share of one GPU's at the same "
             "work, without copies and merging. Copies: the ring's messages alone; kernels: the ring without them; hidden: the share of the copies "
             "that the ring does not show.",
             table(header, [row for point in points for row in rows(point, names)])]
    lines += [text] if (text := sums(points, report["ranks"])) else []
    return "\n\n".join([*lines, *without(report), f"From {source(path, report, up)}."])
