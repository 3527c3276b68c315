#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""flash3.attention_with_kv_cache beside its peers on one GPU, interleaved in one process: FlashAttention-3's operators (--fa3) and cuDNN
through the package nvidia-cudnn-frontend.

    PYTHONPATH=build/release/python python3 -m bench.gpu.decode_peers --fa3 FILE --fa3-build TEXT --json bench/results/decode_peers_h200.json
    python3 -m bench.gpu.decode_peers --list [--filter REGEX]

bf16, and q, k and v in e4m3 without scales; N(0,1), lengths in seqused_k, page tables that are random permutations; of "sparse" points random keys of one cache. A sample replays a CUDA graph for 5 ms at least; the graph is a call
for each of several buffers in a row, so many that keys and values take 640 MB and no cache holds them, and four calls at least. Schedules, metadata and plans are made
before, as engines make them once a step. Samples of all libraries rotate; the median counts. What the graph leaves is checked for two
sequences against float32; a library that errs by more than 2 % (e4m3: 5 %) has no time. Bytes are those of keys and values that count, read once.

A library that fails is noted with what it says. If it takes the CUDA context with it, the script starts again after that point (with --json),
where this library is left out. Clocks and watts are those that NVML reports while the samples run. Needs the package flash3, torch with
CUDA, pynvml, and a Hopper GPU.
"""
import argparse
import json
import os
import pathlib
import re
import site
import sys
import time

from bench import result_file
from bench.gpu.decode_points import cache_suite
from bench.result_file import commit_of

PEERS = ("fa3", "cudnn")
SAMPLE_MS = 5.0
LARGEST_ERROR = {"bf16": 0.02, "e4m3": 0.05}  # FlashAttention-3 rounds weights to e4m3
PEAK = {"H200": 4800, "H100": 3350}  # GB/s of the memory, by the data sheets


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only name the points")
    parser.add_argument("--filter", metavar="REGEX", default="", help="only points whose name has a match")
    parser.add_argument("--peers", help="any of fa3,cudnn (default: cudnn, and with --fa3 both)")
    parser.add_argument("--fa3", metavar="FILE", help="the library of FlashAttention-3's operators (fa3_peers.py says which)")
    parser.add_argument("--fa3-build", metavar="TEXT", help='the build that --fa3 is, e.g. "PyPI xformers 0.0.34, CUDA 12.8"')
    parser.add_argument("--site", metavar="DIR", action="append", default=[], help="a folder of Python packages, e.g. one that holds cudnn")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0, help="begin no point later than this; 0: all points")
    parser.add_argument("--json", help="write the results here, after each point")
    parser.add_argument("--resume", action="store_true", help="leave out the points that the file of --json has, and keep them")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    args = parser.parse_args(arguments)

    try:
        pattern = re.compile(args.filter)
    except re.error as error:
        parser.error(f"--filter {args.filter}: {error}")
    args.points = [point for point in cache_suite() if pattern.search(point.case)]
    if not args.points:
        parser.error(f"--filter {args.filter}: no point's name has a match; --list names them")
    if args.list:
        return args
    args.commit = commit_of(args.commit, parser.error)
    if args.peers is None:
        args.peers = "fa3,cudnn" if args.fa3 else "cudnn"
    args.peers = [name for name in args.peers.split(",") if name]
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers names '{name}'; there are {', '.join(PEERS)}")
    if "fa3" in args.peers and not args.fa3:
        parser.error("--peers names fa3: give --fa3, the library of its operators")
    if args.fa3 and not pathlib.Path(args.fa3).is_file():
        parser.error(f"--fa3 {args.fa3}: there is no such file")
    if args.fa3 and not args.fa3_build:
        parser.error("--fa3 needs --fa3-build: a result without the peer's build is worth nothing")
    for folder in args.site:
        if not pathlib.Path(folder).is_dir():
            parser.error(f"--site {folder}: there is no such folder")
    if args.samples < 2:
        parser.error(f"--samples {args.samples}: at least 2, for the spread")
    if args.seconds < 0:
        parser.error(f"--seconds {args.seconds:g}: not below 0")
    if args.resume and not (args.json and pathlib.Path(args.json).is_file()):
        parser.error("--resume: there is no file of --json to go on with")
    return args


def says(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ContextLost(Exception):
    """A library's error, or one of the point itself, has ended the CUDA context."""

    def __init__(self, name, why):
        super().__init__(f"{name} took the CUDA context with it: {why}")
        self.name, self.why = name, why


def make_graphs(decode, point, inputs, names):
    """(replays of graphs, errors against float32, why the others have no result), each by name; decode: the module decode_calls."""
    replays, errors, refused = {}, {}, {}
    references = inputs.references(point.buffers - 1)
    for name in names:
        try:
            calls = decode.MAKERS[name](point, inputs)
            replay, out = decode.captured(calls * (point.calls // point.buffers))
            out.fill_(float("nan"))
            replay()
            error = inputs.error(out, references)
        except Exception as failure:  # every library has its own kinds, and what it says is the result
            refused[name] = says(failure)
            if not decode.is_alive():
                raise ContextLost(name, refused[name]) from failure
            continue
        if error <= LARGEST_ERROR[point.dtype]:
            replays[name], errors[name] = replay, float(f"{error:.3g}")
        else:  # NaN too
            refused[name] = f"out errs by {error:.2g}"
    return replays, errors, refused


def figures(point, ms, peak):
    """What follows from the milliseconds of a replay, {name: [median, p10, p90]}; peak: GB/s, or None where it is not known."""
    seconds = {name: times[0] / 1e3 / point.calls for name, times in ms.items()}
    record = {"us": {name: round(1e6 * value, 2) for name, value in seconds.items()},
              "gbps": {name: round(point.kv_bytes / value / 1e9, 1) for name, value in seconds.items()},
              "tflops": {name: round(point.flops / value / 1e12, 1) for name, value in seconds.items()},
              "spread_p10_p90": {name: round((times[2] - times[1]) / times[0], 4) for name, times in ms.items()}}
    if peak:
        record["share_of_peak"] = {name: round(value / peak, 4) for name, value in record["gbps"].items()}
    return record


def measure_point(gpu, decode, point, pool, args, lost, peak):
    """One point as the JSON has it; lost: why libraries are left out, by name."""
    inputs = decode.Inputs(point, pool)
    names = [name for name in ("flash3", *args.peers) if name not in lost]
    replays, errors, refused = make_graphs(decode, point, inputs, names)
    with gpu.Sensors() as sensors:
        ms = gpu.measure(replays, args.samples, SAMPLE_MS) if replays else {}
    about = {name: getattr(point, name) for name in ("kind", "batch", "ctx", "queries", "heads", "heads_k", "dim", "dim_v", "page", "dtype",
                                                     "listed", "buffers", "kv_bytes")}
    return {"case": point.case, **about, **figures(point, ms, peak), "error": errors, "sm_mhz": sensors.mhz, "watts": sensors.watts,
            "refused": refused | lost}


def line(record):
    """A point in words."""
    text = f"{record['case']:36} {record['kv_bytes'] / 1e6:9.1f} MB x{record['buffers']:<3}"
    for name, us in record["us"].items():
        share = f" {100 * record['share_of_peak'][name]:.1f} %" if "share_of_peak" in record else ""
        text += f"  {name} {us:.2f} µs{share} {record['tflops'][name]:.0f} TFLOP/s"
    others = {name: us for name, us in record["us"].items() if name != "flash3"}
    if others and "flash3" in record["us"]:
        best = min(others, key=others.get)
        text += f"  /{best} {others[best] / record['us']['flash3']:.3f}"
    text += f"  {record['sm_mhz']} MHz {record['watts']} W  error" + "".join(f" {name} {value:.1e}" for name, value in record["error"].items())
    return text + "".join(f"  no {name}: {why}" for name, why in record["refused"].items())


def load_peers(args, gpu):
    """Why peers are not there, by name; those are then left out everywhere."""
    missing = {}
    for name, load in (("fa3", lambda: gpu.fa3_peers.load(args.fa3)), ("cudnn", lambda: __import__("cudnn"))):
        if name in args.peers:
            try:
                load()
            except Exception as error:
                missing[name] = says(error)
                print(f"no {name}: {missing[name]}", flush=True)
    args.peers = [name for name in args.peers if name not in missing]
    return missing


def begin(args, gpu):
    """The JSON without points, or the one to go on with."""
    import flash3
    from bench.gpu import fp8_peers
    missing = load_peers(args, gpu)
    if args.resume:
        result = json.loads(pathlib.Path(args.json).read_text(encoding="utf-8"))
        if result["commit"] != args.commit:
            raise SystemExit(f"{args.json} is of commit {result['commit']}, this is {args.commit}: --resume goes on with one commit alone")
        return result
    result = {**gpu.describe(), "cudnn_frontend": fp8_peers.frontend_version(), "flash3": flash3.__version__, "commit": args.commit,
              "date": time.strftime("%Y-%m-%d"), "dtype": "bf16", "sample_ms": SAMPLE_MS, "samples": args.samples, "missing": missing,
              "lost": {}, "failed": {}}
    if args.fa3_build:
        result["fa3"] = args.fa3_build
    return result | {"cache_points": []}


def run(args, gpu, decode, result, write):
    """Measures what is open. What fails as a whole is noted in `failed`, a library that takes the context with it in `lost`."""
    done = {record["case"] for record in result["cache_points"]} | set(result["failed"])
    todo = [point for point in args.points if point.case not in done]
    began, peak = time.monotonic(), next((value for name, value in PEAK.items() if name in result["device"]), None)
    pool = decode.Pool(todo, "cuda") if todo else None
    for point in todo:
        if args.seconds and time.monotonic() - began > args.seconds:
            print(f"{args.seconds:g} s are over; --resume measures the rest", flush=True)
            return
        try:
            record = measure_point(gpu, decode, point, pool, args, result["lost"].get(point.case, {}), peak)
        except ContextLost as lost:
            result["lost"].setdefault(point.case, {})[lost.name] = lost.why
            write()
            raise
        except Exception as error:
            result["failed"][point.case] = says(error)
            print(f"{point.case} failed: {says(error)}", flush=True)
            write()
            if not decode.is_alive():
                raise ContextLost(point.case, says(error)) from error
            continue
        result["cache_points"].append(record)
        print(line(record), flush=True)
        write()


def main(arguments=None):
    args = parse_args(arguments)
    if args.list:
        for point in args.points:
            print(f"{point.case:36} {point.kv_bytes / 1e6:9.1f} MB x{point.buffers}")
        return 0
    # Only now what takes seconds to load, or is not there.
    from bench.gpu import decode_calls
    from bench.gpu import gpu_peers
    for folder in args.site:
        site.addsitedir(folder)
    result = begin(args, gpu_peers)

    def write():
        if args.json:
            result_file.write(args.json, result)

    try:
        run(args, gpu_peers, decode_calls, result, write)
    except ContextLost as lost:
        print(lost, flush=True)
        if not args.json:
            return 1
        os.execv(sys.executable, [sys.executable, *sys.argv, *(["--resume"] if not args.resume else [])])
    return 1 if result["failed"] or any("flash3" in record["refused"] for record in result["cache_points"]) else 0


if __name__ == "__main__":
    sys.exit(main())
