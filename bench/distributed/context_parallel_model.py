#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What flash3.distributed would reach on more GPUs, from what bench/distributed/context_parallel.py measured on a few.

    PYTHONPATH=build/release/python python3 -m bench.distributed.context_parallel_model [bench/results/context_parallel_4_h200.json]

Prints, for one causal sequence, the share of one GPU's speed at the same work that each rank keeps, for as many tokens on each rank as were measured.
The formulas are those by which method="auto" chooses (flash3/distributed/_cost.py), with measured rates in the place of its estimates:

- the kernel: TFLOP/s of "alone" at the same point and pass; a rank that sees more keys is as fast;
- a step of the ring: what "computing" takes above "alone", for each of the measured steps: merging, more calls, less in each;
- the link in a host: what each GPU sends while as much comes; the network: --network Gb/s for each of the --nics of a host, shared by its GPUs, at
  --efficiency of that; a message's latency: the measured one everywhere.

Assumptions: a ring that passes from host to host sends every step at the network's speed, and its copies are under kernels as far as these take
longer; no copy slows a kernel. In a host, ranks of an all-gather copy each other's keys at the rate that the file has for that. Otherwise it and Ulysses send to all ranks of other hosts at the network's speed and to those of the own host at the
link's, one after the other. An all-gather's call costs what _cost.py says. No rank waits for another one; hosts have no other traffic.

The backward has 2.5 times the operations and, beside the keys: in the ring float32 gradients, of which the last step's are under no kernel; after
an all-gather by messages all of them under none, by copies half of them, and the sums of all ranks' parts; in Ulysses as much as the forward, or
float32 gradients where ranks share KV heads.

Below the table stands how far the prediction for the measured ranks is from the measurement. Documents are not predicted: what ranks send of them
depends on where they are cut.
"""
import argparse
import json
import pathlib
import statistics
import sys

from bench import RESULTS
from bench.distributed.context_points import ELEMENT, METHODS, PASSES
from bench.report.parts import table

RANKS = (2, 4, 8, 64)


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="?", default=str(RESULTS / "context_parallel_4_h200.json"), help="what bench/distributed/context_parallel.py wrote")
    parser.add_argument("--host", type=int, default=8, help="GPUs of a host")
    parser.add_argument("--network", type=float, default=400, metavar="GBIT", help="Gb/s of a network adapter")
    parser.add_argument("--nics", type=int, default=8, help="network adapters of a host")
    parser.add_argument("--efficiency", type=float, default=0.9, help="what messages reach of the network")
    args = parser.parse_args(arguments)
    if not pathlib.Path(args.json).is_file():
        parser.error(f"{args.json}: there is no such file")
    for name in ("host", "network", "nics", "efficiency"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name):g}: above 0")
    return args


def link_rates(report, ranks, args):
    """(bytes a second in a ring, and in an exchange of all with all) of a rank."""
    inside = report["link"]["gbps"] * 1e9
    if ranks <= args.host:
        return inside, inside
    outside = min(inside, args.efficiency * args.network * 1e9 / 8 * args.nics / args.host)
    share = (ranks - args.host) / (ranks - 1)  # of the others that are in other hosts
    return outside, 1 / (share / outside + (1 - share) / inside)


def rates_of(cost, report, point, what, link):
    """cost.Rates of a pass at a point. cost: the module flash3.distributed._cost."""
    call = cost.RATES["cuda"].call
    rows = point["tokens"] * point["heads"] * point["dim"]
    step = 0.0
    if "ring" in point and point["ranks"] > 1:
        step = (point["ring"]["computing_ms"][what] - point["ms"]["alone"][what]) / 1e3 / (point["ranks"] - 1)
    # _cost.py has a step as a call and 12 bytes of each element of the sums; these take what is left of the measured step.
    memory = 3 * 4 * rows / (step - call) if step > call else float("inf")
    kernels = [1e12 * point["tflops"]["alone"][name] for name in PASSES]
    copy = report["link"].get("copy_gbps", 0) * 1e9
    return cost.Rates(*kernels, link, memory, copy, report["link"]["message_us"] / 1e6, call)


def seconds_of(cost, report, point, method, what, ranks, args):
    """(seconds of a pass, or why not; of its kernels alone)."""
    of_ring, of_all = link_rates(report, ranks, args)
    rates = rates_of(cost, report, point, what, of_ring if method == "ring" else of_all)
    shape = cost.Shape(1, point["tokens"], point["heads"], point["heads_k"], 2 * point["dim"], ELEMENT, 0.5)
    seconds, _ = cost.pass_times(shape, (ranks,), rates, what == "backward")[method]
    work = 2 * shape.part * shape.tokens**2 * ranks * shape.heads_q * shape.dims * PASSES[what]
    return seconds, work / getattr(rates, what)


def share(cost, report, point, method, what, ranks, args):
    """The share of one GPU's speed; None: the method cannot run so."""
    seconds, work = seconds_of(cost, report, point, method, what, ranks, args)
    return None if isinstance(seconds, str) else work / seconds


def predictions(cost, report, args, all_ranks=RANKS):
    """[(point, method, {pass: measured share}, {ranks: {pass: share or None}})] of the causal points that have what is needed."""
    made = []
    for point in report["context_points"]:
        if point["kind"] != "causal" or "alone" not in point["ms"]:
            continue
        for method in METHODS:
            found = {ranks: {what: share(cost, report, point, method, what, ranks, args) for what in PASSES} for ranks in all_ranks}
            made.append((point, method, point.get("of_alone", {}).get(method), found))
    return made


def percents(values):
    if values is None or None in values.values():
        return ""
    return " / ".join(f"{100 * value:.1f}" for value in values.values())


def errors_of(made, ranks):
    """How far predictions for the measured ranks are off, in percentage points: predicted less measured, by pass."""
    return {what: [100 * (found[ranks][what] - measured[what]) for _, _, measured, found in made
                   if measured and found.get(ranks, {}).get(what) is not None] for what in PASSES}


def text_of(cost, report, args):
    measured_ranks = report["ranks"]
    all_ranks = sorted({measured_ranks, *RANKS})
    made = predictions(cost, report, args, all_ranks)
    if not made:
        return "There is no causal point with a time alone.\n"
    rows = [[point["case"], method, percents(measured), *(percents(found[ranks]) for ranks in all_ranks)]
            for point, method, measured, found in made]
    link = report["link"]
    lines = [f"{report['device']}: share of one GPU's speed, forward / backward, in %; {link['gbps']:g} GB/s and {link['message_us']:g} µs a "
             f"message in a host of {args.host}, {args.nics} adapters of {args.network:g} Gb/s at {args.efficiency:g} between hosts. Empty: the "
             "heads cannot be dealt out, or it was not measured.", "",
             table(["point", "method", f"{measured_ranks} measured", *(f"{ranks} predicted" for ranks in all_ranks)], rows), ""]
    for what, errors in errors_of(made, measured_ranks).items():
        if errors:
            sizes = [abs(error) for error in errors]
            lines.append(f"{what}, {measured_ranks} ranks, predicted less measured: {statistics.mean(errors):+.1f} percentage points in the mean, "
                         f"off by {statistics.median(sizes):.1f} in the median and {max(sizes):.1f} at most, of {len(errors)}")
    return "\n".join(lines) + "\n"


def main(arguments=None):
    args = parse_args(arguments)
    from flash3.distributed import _cost
    print(text_of(_cost, json.loads(pathlib.Path(args.json).read_text(encoding="utf-8")), args), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
