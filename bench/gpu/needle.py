#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A needle in a haystack: whether attention in FP8 finds one key among many, and what sums of up to 128k terms lose.

    python3 -m bench.gpu.needle --lib build/release/libflash3.so --json bench/results/needle_h200.json

256 query rows in each of two heads, each aligned with a key of its own whose weight is the level: 0.99, 0.9, 0.5, or "noise", where
it just stands out of what the others sum up to. Data: N(0, 1), and "model", channels of log-normal widths with an outlier in each 32; V has
outliers everywhere. And rows without a needle, for which every key weighs the same and V has one sign: "equal" (q = 0) and
"near equal" (q of N(0, 1/4)).

Beside each other: flash3 in bf16; flash3 in FP8, on tensors of flash3_quantize with scales for blocks and the rotation; FlashAttention-3's
FP8 (--site, where fa3_fwd is), unsplit, on tensors of flash3_quantize with scales for heads and the rotation; and exact sums of the
weights that flash3 rounds. Each out is compared with float64 of the same FP8 tensors, and of the 16-bit ones; bench/gpu/haystack.py has the definitions:

found       share of rows whose out differs from the exact one by at most 1 % of its length; near: by at most 10 %
retrieved   share of rows whose out points to the value of their own needle, of all rows' needles
error       RMS of the difference, of the exact out's RMS
gain        the part of the exact out that is there

Needs torch, and with --device cuda, the default, a Hopper GPU and pynvml.
"""
import argparse
import pathlib
import platform
import random
import site
import sys
import time

from bench import result_file
from bench.gpu.peers import numbers
from bench.result_file import commit_of

PEERS = ("fa3_fp8",)


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", required=True, help="libflash3.so")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keys", type=numbers, default="8192,32768,131072")
    parser.add_argument("--dims", type=numbers, default="64,128,256")
    parser.add_argument("--rows", type=int, default=256, help="queries of a head")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--peers", help="fa3_fp8, or nothing (default: fa3_fp8 with --device cuda)")
    parser.add_argument("--site", metavar="DIR", action="append", default=[], help="a folder of Python packages, e.g. one that holds fa3_fwd")
    parser.add_argument("--fa3-build", metavar="TEXT", help="the build of FlashAttention-3 that fa3_fwd is")
    parser.add_argument("--seed", type=int, help="of the data (default: a new one, which the result names)")
    parser.add_argument("--json", help="write the results here, after each point")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    args = parser.parse_args(arguments)

    args.commit = commit_of(args.commit, parser.error)
    if args.peers is None:
        args.peers = ",".join(PEERS) if args.device == "cuda" else ""
    args.peers = [name for name in args.peers.split(",") if name]
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers names '{name}'; there is {', '.join(PEERS)}")
        if args.device == "cpu":
            parser.error(f"--peers names '{name}', which runs on a GPU; --device is cpu")
    if not pathlib.Path(args.lib).is_file():
        parser.error(f"--lib {args.lib}: there is no such file")
    for folder in args.site:
        if not pathlib.Path(folder).is_dir():
            parser.error(f"--site {folder}: there is no such folder")
    for option, values in (("--keys", args.keys), ("--dims", args.dims), ("--rows", [args.rows]), ("--heads", [args.heads])):
        if min(values) < 1:
            parser.error(f"{option} has {min(values)}; at least 1")
    if args.rows > min(args.keys):
        parser.error(f"--rows {args.rows} but --keys has {min(args.keys)}: each row of a head has a key of its own")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31)
    return args


def run_bf16(lib, stack, backend):
    """(out, the q, k and v whose exact result it is compared with)."""
    out = stack.q.new_full(stack.q.shape, float("nan"))
    lib.forward(stack.q, stack.k, stack.v, out, False, backend)()
    return out, (stack.q, stack.k, stack.v)


def run_fp8(lib, stack, backend):
    from bench.gpu import haystack
    quantize, made = lib.to_fp8(stack.q, stack.k, stack.v, backend=backend)
    quantize()
    out = stack.q.new_full(stack.q.shape, float("nan"))
    lib.fp8_forward(made | {"out": out}, causal=0, backend=backend)()
    return out, haystack.standing_for(made)


def run_fa3_fp8(lib, stack, backend):
    from bench.gpu import fa3_peers
    from bench.gpu import haystack
    quantize, made = lib.to_fp8(stack.q, stack.k, stack.v, scales="heads", backend=backend)
    quantize()
    return fa3_peers.fp8_scaled(made), haystack.standing_for(made)


def measure(lib, stack, backend, peers):
    """{"weight", "libraries", "refused"} of a Haystack; a library that fails is among the refused, with what it says."""
    from bench.gpu import haystack
    import torch
    runs = {"flash3_bf16": run_bf16, "flash3_fp8": run_fp8, **{name: run_fa3_fp8 for name in peers}}
    unquantised, weight = haystack.exact(stack.q, stack.k, stack.v)
    record = {"weight": float(f"{weight.median().item():.4g}"), "libraries": {}, "refused": {}}
    for name, run in runs.items():
        try:
            out, tensors = run(lib, stack, backend)
            own = unquantised if name == "flash3_bf16" else haystack.exact(*tensors)[0]
            record["libraries"][name] = haystack.agreement(out.double(), own, unquantised, stack)
            if name == "flash3_fp8":
                rounded = haystack.exact(*tensors, rounded=True)[0]
                record["libraries"]["exact_sums"] = haystack.agreement(rounded.to(out.dtype).double(), own, unquantised, stack)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # every library has its own kinds, and what it says is the result
            record["refused"][name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return record


def points(args):
    """(what the JSON says of a point, its Haystack), one after the other."""
    from bench.gpu import haystack
    for keys in args.keys:
        for dim in args.dims:
            sizes = keys, args.rows, args.heads, dim, args.device
            about = {"keys": keys, "dim": dim}
            for data in haystack.DATA:
                stack, directions = haystack.spread(data, *sizes)
                for level in haystack.LEVELS:
                    yield {**about, "data": data, "level": level}, haystack.aimed(stack, directions, level)
            for kind in haystack.FLAT:
                yield {**about, "data": "one sign", "level": kind}, haystack.flat(kind, *sizes)


def line(point):
    """A point in words."""
    text = f"{point['keys']:6} keys d {point['dim']:3} {point['data']:8} {point['level']:10} weight {point['weight']:.2g}"
    for name, got in point["libraries"].items():
        retrieved = f" retrieved {100 * got['retrieved']:.0f} %" if "retrieved" in got else ""
        text += (f"  {name}: found {100 * got['found']:.0f} %, near 16 bits {100 * got['near_unquantised']:.0f} %{retrieved}"
                 f" error {100 * got['error']:.2f} % gain {got['gain']:.4f}")
    return text + "".join(f"  no {name}: {why}" for name, why in point["refused"].items())


def describe(device):
    """What a result must tell about the machine."""
    if device == "cuda":
        from bench.gpu import gpu_peers
        return gpu_peers.describe()
    import torch
    return {"device": platform.processor() or platform.machine(), "torch": torch.__version__}


def main(arguments=None):
    args = parse_args(arguments)
    import torch
    from bench.flash3_torch import CPU, HOPPER, Flash3
    for folder in args.site:
        site.addsitedir(folder)
    lib = Flash3(args.lib)
    torch.manual_seed(args.seed)
    result = {**describe(args.device), "flash3": lib.version(), "commit": args.commit, "date": time.strftime("%Y-%m-%d"), "seed": args.seed,
              "rows": args.rows, "heads": args.heads}
    if args.fa3_build:
        result["fa3"] = args.fa3_build
    result["needle_points"] = []
    for about, stack in points(args):
        point = {**about, **measure(lib, stack, CPU if args.device == "cpu" else HOPPER, args.peers)}
        result["needle_points"].append(point)
        print(line(point), flush=True)
        if args.json:
            result_file.write(args.json, result)
    failed = [name for point in result["needle_points"] for name in point["refused"] if name not in PEERS]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
