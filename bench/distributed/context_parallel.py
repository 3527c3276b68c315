#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""flash3.distributed on several GPUs of one host, beside one GPU's speed and other context parallelism, interleaved in one run.

    PYTHONPATH=build/release/python python3 -m bench.distributed.context_parallel --json bench/results/context_parallel_h200.json
    python3 -m bench.distributed.context_parallel --list [--points REGEX]
    PYTHONPATH=build/release/python python3 -m bench.distributed.context_parallel --profile context_profile_h200.json

Started once, it starts a process for each GPU (NCCL; --device cpu: gloo, a few tokens, for the tests). A point is causal self-attention in bf16 at
head dim 128, 64 query heads on 8 KV heads or 16 on 16, with as many tokens on each rank: one sequence, or packed documents of log-normal lengths.

A step is a forward and its backward through autograd, steps one after the other; each pass is the time between two CUDA events in the stream, so that
backward is what follows the forward's last kernel. Ranks begin a sample together, its time is that of the slowest, the order of all ways is another one for each
sample, and
the median counts. A sample is 20 ms of steps or one step; steps of 0.6 s or more have 3 samples of "ring" and "alone", and one of each other way.
TFLOP/s are those of a GPU, by the pairs that the causal mask leaves, 2.5 times as many in the backward.

alone: one GPU's kernel at the same work: this rank's own queries against all keys that they see, which are there already, in the fewest calls of
flash3.attention (at most two rectangles, or one call of packed sequences). No copy, no merging, no sum of gradients. of_alone is its time over
another way's.
ring, all_gather, ulysses: flash3.distributed.attention. auto names the one that it takes by itself. mesh_RxH: its ulysses_ring, rings of R ranks
whose rows of H share heads; for as many meshes as the ranks make.
torch_allgather, torch_alltoall: torch's context_parallel with its two rotations, over scaled_dot_product_attention with cuDNN or, where that fails,
FA2, with enable_gqa or, where that fails, K and V expanded to all heads: notes says which.
plain_ring: what one writes first, on the same operators of torch: neighbouring tokens, and K and V waited for between steps.
computing, copies: the ring without its messages (what would come is there), and its messages alone. hidden = 1 - (ring - computing) / copies is the
share of the copies under kernels; overlap = 1 - (ring - alone) / copies counts merging and shorter calls as copies that show.

Before, each way's result and gradients are compared with float32 at a small size, and some rows of the result at the point's own: a way that errs by
more than 2 % has no time, and refused says why. memory is the peak of a step above what was there before it. Clocks and watts are those that NVML
reports while the samples run.

--profile measures nothing: it writes the timeline of a call of the ring and of one of all-gather, at three points, which bench/report/draw.py draws
(bench/distributed/context_profile.py says what is in it). --timeout is 60 s then, and --seconds 40.

A process that ends or that is late by 60 s ends all. The ways that took them along are left out, and the rest is measured by new processes, three
times at most. After --timeout all are ended. Needs the package flash3 and torch; with CUDA, pynvml and Hopper GPUs.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from bench import environment, result_file
from bench.distributed.context_points import PASSES, PEERS, context_suite, methods
from bench.result_file import commit_of

SAMPLE_MS = {"cuda": 20.0, "cpu": 1.0}
POINT_SECONDS = 12  # for the samples of a point, as far as they are not the fewest
HEAVY = 0.6  # seconds of a step
FEWEST = 3
LONGEST = 6.0  # seconds of a step of a peer
RESTARTS = 3
GRACE = 5  # seconds for others to say why they end
BACKENDS = ("cudnn", "fa2")


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only name the points")
    parser.add_argument("--points", metavar="REGEX", default="", help="only points whose name has a match")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="processes (default: as many as there are GPUs; on the CPU 2)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"any of {','.join(PEERS)} (default: all)")
    parser.add_argument("--backends", default=",".join(BACKENDS),
                        help="what the peers may compute with: any of cudnn,fa2 (default: both, the first that works)")
    parser.add_argument("--samples", type=int, default=5, help="the most of a way at a point")
    parser.add_argument("--sm-margin", type=int, default=0, help="multiprocessors that flash3's forward kernels leave to NCCL's")
    parser.add_argument("--seconds", type=float, help="begin no point later than this; 0: all points (default: 125)")
    parser.add_argument("--timeout", type=float, help="seconds, after which all processes are ended (default: 300)")
    parser.add_argument("--high-priority", action="store_true", help="NCCL's stream goes first: its kernels get the multiprocessors that are next free")
    parser.add_argument("--profile", metavar="FILE", help="only write the timelines of some calls here")
    parser.add_argument("--json", help="write the results here, after each point")
    parser.add_argument("--commit", help="of the package, where there is no git to ask")
    args = parser.parse_args(arguments)

    try:
        pattern = re.compile(args.points)
    except re.error as error:
        parser.error(f"--points {args.points}: {error}")
    if args.ranks is not None and args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: at least 2")
    args.cases = [point.case for point in context_suite(args.ranks or 2, args.device) if pattern.search(point.case)]
    if not args.cases:
        parser.error(f"--points {args.points}: no point's name has a match; --list names them")
    if args.list:
        return args
    args.commit = commit_of(args.commit, parser.error)
    for option, known in (("peers", PEERS), ("backends", BACKENDS)):
        names = [name for name in getattr(args, option).split(",") if name]
        setattr(args, option, names)
        for name in names:
            if name not in known:
                parser.error(f"--{option} names '{name}'; there are {', '.join(known)}")
    if args.peers and not args.backends:
        parser.error("--backends names none; the peers need one")
    args.seconds, args.timeout = (
        given if given is not None else default for given, default in zip((args.seconds, args.timeout), (40, 60) if args.profile else (125, 300)))
    if args.samples < 1:
        parser.error(f"--samples {args.samples}: at least 1")
    if args.seconds < 0:
        parser.error(f"--seconds {args.seconds:g}: not below 0")
    if args.timeout <= 0:
        parser.error(f"--timeout {args.timeout:g}: above 0")
    if args.sm_margin < 0:
        parser.error(f"--sm-margin {args.sm_margin}: not below 0")
    return args


def sample_counts(costs, samples):
    """How many samples each way has, of {way: seconds of a sample}."""
    light = [cost for cost in costs.values() if cost < HEAVY]
    fewest = min(FEWEST, samples)
    many = max(fewest, min(samples, int(POINT_SECONDS / sum(light)))) if light else fewest
    return {name: many if cost < HEAVY else fewest if name in ("ring", "alone") else 1 for name, cost in costs.items()}


def too_long(records, way, point):
    """Why a peer is not run at a point: a step would take too long, by the last record of the same heads. None: it is run."""
    for record in reversed(records):
        if (record["heads"], record["heads_k"]) == (point.heads, point.heads_k) and way in record["ms"]:
            seconds = sum(record["ms"][way].values()) / 1e3 * point.flops["forward"] / record["flops"]["forward"]
            return f"a step would take about {seconds:.0f} s" if seconds > LONGEST else None
    return None


def spread(times):
    """What the times differ by, of their median."""
    return round((max(times) - min(times)) / statistics.median(times), 4)


def figures(times, flops, copied):
    """What follows from the samples {way: [[forward, backward] in ms]}; flops: by pass; copied: bytes of the ring's forward."""
    of_pass = {name: {what: [sample[i] for sample in samples] for i, what in enumerate(PASSES)} for name, samples in times.items()}
    ms = {name: {what: statistics.median(values) for what, values in passes.items()} for name, passes in of_pass.items()}
    parts = {name: ms.pop(name) for name in ("computing", "copies") if name in ms}
    record = {"ms": {name: {what: round(value, 4) for what, value in passes.items()} for name, passes in ms.items()},
              "spread": {name: {what: spread(of_pass[name][what]) for what in PASSES} for name in ms},
              "taken": {name: len(samples) for name, samples in times.items()},
              "tflops": {name: {what: round(flops[what] / value / 1e9, 2) for what, value in passes.items()} for name, passes in ms.items()}}
    if "alone" in ms:
        record["of_alone"] = {name: {what: round(ms["alone"][what] / passes[what], 4) for what in PASSES} for name, passes in ms.items()
                              if name != "alone"}
    if "ring" in ms and len(parts) == 2:
        ring = {f"{name}_ms": {what: round(value, 4) for what, value in passes.items()} for name, passes in parts.items()}
        ring |= {"bytes": round(copied), "gbps": round(copied / parts["copies"]["forward"] / 1e6, 2)}
        for field, other in (("hidden", parts["computing"]), ("overlap", ms.get("alone"))):
            if other:
                ring[field] = {what: round(1 - (ms["ring"][what] - other[what]) / parts["copies"][what], 4) for what in PASSES}
        record["ring"] = ring
    return record


def percent(values):
    return "/".join(f"{100 * value:.1f}" for value in values.values())


def line(record):
    """A point in words."""
    text = f"{record['case']:27} TFLOP/s forward/backward:"
    for name, speed in record["tflops"].items():
        text += f"  {name} {'/'.join(f'{value:.0f}' for value in speed.values())}"
        if name in record.get("of_alone", {}):
            text += f" ({percent(record['of_alone'][name])} %)"
    if "ring" in record:
        ring = record["ring"]
        text += f"  copies {'/'.join(f'{ms:.2f}' for ms in ring['copies_ms'].values())} ms {ring['gbps']:.0f} GB/s hidden {percent(ring['hidden'])} %"
    if record["memory"].get("ring"):
        text += f"  ring's peak {record['memory']['ring'] / 2**30:.2f} GiB, own {record['own_bytes'] / 2**30:.2f}"
    text += f"  auto {record['auto']}  {record['sm_mhz']} MHz {record['watts']} W"
    text += "".join(f"  {name}: {said}" for name, said in record["notes"].items())
    return text + "".join(f"  no {name}: {why}" for name, why in record["refused"].items())


def watch(children, until, errors):
    """None if all processes end well; otherwise, after all have been ended, which did not, and what they said. errors: their files."""
    why = None
    try:
        while why is None:
            codes = [child.poll() for child in children]
            if any(code not in (None, 0) for code in codes):
                grace = time.monotonic() + GRACE
                while time.monotonic() < grace and None in [child.poll() for child in children]:
                    time.sleep(0.05)
                rank, code = next((rank, code) for rank, code in enumerate(codes) if code not in (None, 0))
                why = f"rank {rank} ended with {code}"
            elif None not in codes:
                return None
            elif time.monotonic() > until:
                why = f"rank {codes.index(None)} has not ended in time (--timeout)"
            else:
                time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()
    for rank, file in enumerate(errors):
        text = pathlib.Path(file).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why += "".join(f"\n  rank {rank}: {said}" for said in text[-12:])
    return why


def start(args, folder):
    """(processes, files of what they say of errors), one for each rank."""
    folder = pathlib.Path(folder)
    (folder / "config.json").write_text(json.dumps(vars(args)), encoding="utf-8")
    files = [folder / f"errors{rank}" for rank in range(args.ranks)]
    children = []
    for rank, file in enumerate(files):
        with open(file, "w", encoding="utf-8") as errors:
            program = f"from bench.distributed import context_ranks; context_ranks.main({str(folder)!r}, {rank})"
            children.append(subprocess.Popen([sys.executable, "-c", program], stderr=errors, env=environment()))
    return children, files


def leave_out(args, working, why):
    """Notes in the results what took the processes along, so that new ones leave it out. False: there is nothing to go on with."""
    file = pathlib.Path(args.json)
    case, way = working.get("case"), working.get("way")
    if not file.is_file() or case not in args.cases:
        return False
    result = json.loads(file.read_text(encoding="utf-8"))
    if way is None:
        result["failed"][case] = why.splitlines()[0]
    else:
        result["lost"][way] = f"it took its processes along at {case}: {why.splitlines()[0]}"
    result_file.write(file, result)
    return True


def run_profile(args):
    """Starts the processes that profile. Returns what went wrong, or None."""
    args.began = time.time()
    pathlib.Path(args.profile).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        children, errors = start(args, folder)
        return watch(children, time.monotonic() + args.timeout, errors)


def run(args):
    """Starts the processes, again where one is lost. Returns what went wrong, or None."""
    args.began, until = time.time(), time.monotonic() + args.timeout
    pathlib.Path(args.json).unlink(missing_ok=True)
    for restarts in range(RESTARTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            children, errors = start(args, folder)
            why = watch(children, until, errors)
            if why is None:
                return None
            file = pathlib.Path(folder) / "working.json"
            working = json.loads(file.read_text(encoding="utf-8") or "{}") if file.is_file() else {}
        print(f"{working.get('case')}, {working.get('way')}: {why}", file=sys.stderr, flush=True)
        if restarts == RESTARTS or time.monotonic() > until or not leave_out(args, working, why):
            return why.splitlines()[0]
    return None


def count_gpus():
    import torch
    return torch.cuda.device_count()


def main(arguments=None):
    args = parse_args(arguments)
    if args.list:
        print("\n".join(args.cases))
        return 0
    if args.ranks is None:
        args.ranks = 2 if args.device == "cpu" else count_gpus()
        if args.ranks < 2:
            raise SystemExit(f"there are {args.ranks} GPUs; at least 2 are needed, or --device cpu")
    if args.profile:
        why = run_profile(args)
        if why:
            print(f"ended: {why}", file=sys.stderr)
        return 1 if why else 0
    with tempfile.TemporaryDirectory() as folder:
        args.json = args.json or f"{folder}/results.json"
        why = run(args)
        if why:
            print(f"ended: {why}", file=sys.stderr)
            return 1
        result = json.loads(pathlib.Path(args.json).read_text(encoding="utf-8"))
    # Heads that cannot be dealt to so many ranks are no fault.
    wrong = any("errs by" in record["refused"].get(name, "") or name in ("alone", "ring") and name in record["refused"]
                for record in result["context_points"] for name in ("alone", *methods(args.ranks)))
    return 1 if result["failed"] or result["lost"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
