#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""flash3 beside its peers on one GPU, interleaved in one process: torch SDPA's cuDNN and FA2 backends, FA3 and FA4 where they are,
and for ragged batches FlexAttention.

    python3 -m bench.gpu.peers --lib build/release/libflash3.so --json bench/results/forward_h200.json
    python3 -m bench.gpu.peers --lib build/release/libflash3.so --backward --json bench/results/backward_h200.json

The paper's points: 16k tokens in all, hidden size 2048, bf16, N(0,1) data. A sample is 12 ms of back-to-back calls, so that
launch time hides; samples of all libraries rotate; the median counts. TFLOP/s count 4·S²·d·H·B, half of it for causal.

--backward times the gradients instead, 2.5 times as many operations; --deterministic all of them in their deterministic mode,
and flash3 in its default one too.

--ragged times what `flash3 bench --suite ragged` lists instead, but for equal lengths: long-tailed causal lengths and the dense
call with the same cost per token, thousands of short sequences, sinks and softcaps and the plain call, a window of 128 keys. FA2
runs through torch's nested tensors, FlexAttention compiled with a mask of documents. TFLOP/s count what the mask leaves.

--fp8 times FP8 forwards beside those of 16 bits: flash3's on e4m3 tensors with scales for blocks and from bf16 tensors in one call,
flash3_quantize alone, cuDNN's FP8 (out in e4m3) where the package nvidia-cudnn-frontend is found, FA3's where fa3_fwd
is, and torch's FP8 GEMM, 8192 rows, columns and reduction, interleaved with them: what FP8 reaches in a large product.

Clocks and watts are those that NVML reports while the samples run. Needs torch with CUDA, pynvml, and a Hopper GPU.

--ceiling measures, before and after, what the tensor cores sustain (flash3 bench --ceiling): each figure then comes with its
share of the first. --energy runs each library alone for a second at each point: its own watts and picojoules per operation.
"""
import argparse
import json
import pathlib
import site
import subprocess
import sys
import tempfile
import time

from bench import result_file
from bench.gpu.ragged_points import beside_of, ragged_suite
from bench.result_file import commit_of

PEERS = ("cudnn", "fa2", "fa3", "fa4")
RAGGED_PEERS = ("fa2", "fa4", "flex")
FP8_PEERS = ("cudnn", "cudnn_fp8", "fa3_fp8", "fp8_gemm")


def numbers(text):
    return [int(number) for number in text.split(",")]


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, metavar="[NAME=]PATH",
                        help="libflash3.so; several to compare builds")
    parser.add_argument("--peers", help="any of cudnn,fa2,fa3,fa4 (default: cudnn,fa2); with --ragged of fa2,fa4,flex (default: all); "
                                        "with --fp8 of cudnn,cudnn_fp8,fa3_fp8,fp8_gemm (default: all)")
    parser.add_argument("--site", metavar="DIR", action="append", default=[],
                        help="a folder of Python packages, e.g. one that holds FA4 or cudnn; may be given again")
    parser.add_argument("--fa3", metavar="FILE", help="the library of FlashAttention-3's operators (fa3_peers.py says which); for the peer fa3")
    parser.add_argument("--fa3-build", metavar="TEXT", help='the build that --fa3 or fa3_fp8 is, e.g. "PyPI xformers 0.0.34, CUDA 12.8"')
    parser.add_argument("--dims", type=numbers, default="64,128,256")
    parser.add_argument("--seqs", type=numbers, default="512,1024,2048,4096,8192,16384", help="not with --ragged")
    parser.add_argument("--ragged", action="store_true", help="ragged batches, sinks, softcaps and a window")
    parser.add_argument("--filter", action="append", default=[], help="with --ragged: only cases whose id contains this")
    parser.add_argument("--fp8", action="store_true", help="FP8 forwards beside those of 16 bits")
    parser.add_argument("--backward", action="store_true", help="the gradients instead of the forward")
    parser.add_argument("--deterministic", action="store_true", help="with --backward: the same bits each time")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--ceiling", metavar="PROGRAM", help="the command line flash3: measure the tensor cores' ceiling too")
    parser.add_argument("--energy", nargs="?", type=float, const=1.0, default=0, metavar="SECONDS",
                        help="run each library alone for so long (1 s if none are given) at each point")
    parser.add_argument("--json", help="write the results here, after each point")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    args = parser.parse_args(arguments)

    args.commit = commit_of(args.commit, parser.error)
    known = RAGGED_PEERS if args.ragged else FP8_PEERS if args.fp8 else PEERS
    if args.peers is None:
        args.peers = ",".join(known) if args.ragged or args.fp8 else "cudnn,fa2"
    args.peers = [name for name in args.peers.split(",") if name]
    for name in args.peers:
        if name not in known:
            parser.error(f"--peers names '{name}'; there are {', '.join(known)}")
    args.libs = {}
    for text in args.lib:
        name, _, path = text.rpartition("=")
        name = name or "flash3"
        if name in args.libs or name in PEERS + RAGGED_PEERS + FP8_PEERS:
            parser.error(f"--lib {text}: the name '{name}' is taken; give another: NAME=PATH")
        if not pathlib.Path(path).is_file():
            parser.error(f"--lib {text}: there is no file {path}")
        args.libs[name] = path
    for folder in args.site:
        if not pathlib.Path(folder).is_dir():
            parser.error(f"--site {folder}: there is no such folder")
    if args.fa3 and not pathlib.Path(args.fa3).is_file():
        parser.error(f"--fa3 {args.fa3}: there is no such file")
    if "fa3" in args.peers and not args.fa3:
        parser.error("--peers names fa3: give --fa3, the library of its operators")
    if args.fa3 and not args.fa3_build:
        parser.error("--fa3 needs --fa3-build: a result without the peer's build is worth nothing")
    if args.ceiling and not pathlib.Path(args.ceiling).is_file():
        parser.error(f"--ceiling {args.ceiling}: there is no such program")
    if args.deterministic and not args.backward:
        parser.error("--deterministic is for --backward: every forward is deterministic")
    if args.ragged and (args.deterministic or args.energy):
        parser.error("--deterministic and --energy are not for --ragged")
    if args.fp8 and (args.ragged or args.backward or args.energy):
        parser.error("--fp8 is by itself: not with --ragged, --backward or --energy")
    if args.filter and not args.ragged:
        parser.error("--filter is for --ragged; --dims and --seqs choose among the other points")
    if args.samples < 2:
        parser.error(f"--samples {args.samples}: at least 2, for the spread")
    if args.energy < 0:
        parser.error(f"--energy {args.energy:g}: seconds, not below 0")
    return args


def ragged_points(args):
    """The points that the arguments ask for."""
    points = [point for point in ragged_suite(args.backward, dims=args.dims)
              if all(text in f"/{point.case}/" for text in args.filter)]
    if not points:
        raise SystemExit("no case matches the filter")
    return points


def ceiling(program, dtype="bf16"):
    """What `flash3 bench --ceiling` measures now, a dict."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "ceiling.json"
        done = subprocess.run([pathlib.Path(program).resolve(), "bench", "--ceiling", "--json", file, "--dtype", dtype],
                              capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{program} bench --ceiling: {done.stderr.strip()}")
        return json.loads(file.read_text(encoding="utf-8"))["ceiling"][0]


def ceiling_line(when, c):
    return (f"ceiling {when}: {c['tflops']:.1f} TFLOP/s, {c['sm_clock_mhz']:.0f} MHz, {c.get('watts', 0):.0f} W, "
            f"{c.get('pj_per_flop', 0):.3f} pJ/FLOP")


def forward_calls(gpu, shape, libs, args):
    """(calls by name, the outputs of ours, FA2's outputs, more fields of the point)."""
    qkv = shape.tensors()
    outs = {name: [qkv[0].new_full(qkv[0].shape, float("nan"))] for name in libs}
    calls = {name: lib.forward(*qkv, *outs[name], shape.causal) for name, lib in libs.items()}
    calls.update(gpu.peers(qkv, shape.causal, args.peers))
    return calls, outs, [gpu.fa2(qkv, shape.causal)().transpose(1, 2)], {}


def backward_calls(gpu, shape, libs, args):
    """As forward_calls."""
    *qkv, dout = shape.tensors(4)
    calls, gradients = gpu.flash3_backward(libs, qkv, dout, shape.causal, args.deterministic)
    memory = {name: call.workspace_bytes for name, call in calls.items()}
    peers, refused = gpu.backward_peers(qkv, dout, shape.causal, args.peers, args.deterministic)
    calls.update(peers)
    more = {"workspace_bytes": memory, "score_matrix_bytes": 2 * shape.batch * shape.heads * shape.seq**2}
    if refused:
        more["refused"] = refused
    return calls, gradients, gpu.fa2_backward(qkv, dout, shape.causal)(), more


def largest_difference(ours, reference):
    return max((mine.float() - theirs.float()).abs().max().item() for tensors in ours.values()
               for mine, theirs in zip(tensors, reference))


def measure_point(gpu, shape, libs, args, top):
    """One point as the JSON has it; top: the ceiling in TFLOP/s, or None."""
    calls, ours, reference, more = (backward_calls if args.backward else forward_calls)(gpu, shape, libs, args)
    flops = shape.backward_flops if args.backward else shape.flops
    with gpu.Sensors() as sensors:
        times = gpu.measure(calls, args.samples)
    tflops = {name: flops / ms[0] / 1e9 for name, ms in times.items()}
    point = {**shape.__dict__, "tflops": {name: round(value, 1) for name, value in tflops.items()},
             "spread_p10_p90": {name: round((ms[2] - ms[1]) / ms[0], 4) for name, ms in times.items()},
             "sm_mhz": sensors.mhz, "watts": sensors.watts, "max_abs_diff_to_fa2": largest_difference(ours, reference), **more}
    if top:
        point["share_of_ceiling"] = {name: round(value / top, 4) for name, value in tflops.items()}
    if args.energy:
        point["alone"] = {name: gpu.measure_alone(call, args.energy, flops) for name, call in calls.items()}
    return point


def measure_ragged_point(gpu, ragged, point, libs, args, top):
    """As measure_point, of a point of ragged_points; ragged: the module ragged_peers."""
    calls, results, refused = ragged.make_calls(point, libs, args.peers)
    beside = beside_of(point)
    beside_calls, _, beside_refused = ragged.make_calls(beside, libs, ()) if beside else ({}, {}, {})
    interleaved = calls | {f"{name} beside": call for name, call in beside_calls.items()}
    with gpu.Sensors() as sensors:
        times = gpu.measure(interleaved, args.samples) if interleaved else {}
    mine = {name: times[name] for name in calls}
    record = {"case": point.case, "group": point.group, "sequences": len(point.lengths), "tokens": point.tokens,
              "longest": point.longest, "cost_per_token": round(point.cost_per_token, 1), "flops": point.flops, "bytes": point.bytes,
              "ms": {name: round(ms[0], 4) for name, ms in mine.items()},
              "tflops": {name: round(point.flops / ms[0] / 1e9, 1) for name, ms in mine.items()},
              "gbps": {name: round(point.bytes / ms[0] / 1e6, 1) for name, ms in mine.items()},
              "spread_p10_p90": {name: round((ms[2] - ms[1]) / ms[0], 4) for name, ms in mine.items()},
              "sm_mhz": sensors.mhz, "watts": sensors.watts}
    if beside:
        tflops = {name: beside.flops / times[f"{name} beside"][0] / 1e9 for name in beside_calls}
        record["beside"] = {"case": beside.case, "tflops": {name: round(value, 1) for name, value in tflops.items()}}
        record["ratio_to_beside"] = {name: round(point.flops / mine[name][0] / 1e9 / value, 4)
                                     for name, value in tflops.items() if name in mine}
        if beside_refused:
            record["beside"]["refused"] = beside_refused
    if top:
        record["share_of_ceiling"] = {name: round(value / top, 4) for name, value in record["tflops"].items()}
    ours, peers = {name: results[name]() for name in libs if name in results}, [name for name in args.peers if name in results]
    if ours and peers:
        record["max_abs_diff"] = {name: largest_difference(ours, results[name]()) for name in peers}
    if refused:
        record["refused"] = refused
    return record


def fp8_error(out, reference):
    """RMS of the difference, of the reference's own RMS."""
    return ((out - reference).square().mean() / reference.square().mean()).sqrt().item()


def measure_fp8_point(gpu, fp8, shape, libs, args, top):
    """As measure_point; fp8: the module fp8_peers; top: the FP8 ceiling, of which the calls in FP8 have a share."""
    calls, results, reference, refused = fp8.make_calls(shape, libs, args.peers)
    with gpu.Sensors() as sensors:
        times = gpu.measure(calls, args.samples)
    quantizers = {f"{name}_quantize": name for name in libs}
    tflops = {name: (fp8.GEMM_FLOPS if name == "fp8_gemm" else shape.flops) / ms[0] / 1e9 for name, ms in times.items()
              if name not in quantizers}
    point = {**shape.__dict__, "tflops": {name: round(value, 1) for name, value in tflops.items()},
             "ms": {name: round(ms[0], 4) for name, ms in times.items()},
             "spread_p10_p90": {name: round((ms[2] - ms[1]) / ms[0], 4) for name, ms in times.items()},
             "sm_mhz": sensors.mhz, "watts": sensors.watts,
             "error_to_fa2": {name: float(f"{fp8_error(out(), reference):.3g}") for name, out in results.items()}}
    in_fp8 = [name for name in tflops if name in libs or name in ("cudnn_fp8", "fa3_fp8", "fp8_gemm")]
    if top:
        point["share_of_ceiling"] = {name: round(tflops[name] / top, 4) for name in in_fp8}
    if refused:
        point["refused"] = refused
    return point


def fp8_line(point, ours):
    """What measure_fp8_point gives, in words."""
    values = "  ".join(f"{name} {value:.1f}" for name, value in point["tflops"].items())
    mine = point["tflops"][ours]
    text = f"d {point['dim']:3} {'causal' if point['causal'] else 'full  '} {point['seq']:6}  {values}"
    text += "".join(f"  /{name} {mine / point['tflops'][name]:.3f}" for name in (f"{ours}_bf16", "cudnn_fp8", "fa3_fp8", "fp8_gemm")
                    if name in point["tflops"])
    if "share_of_ceiling" in point:
        text += f"  /ceiling {point['share_of_ceiling'][ours]:.3f}"
    text += f"  quantize {point['ms'][f'{ours}_quantize']:.4f} ms  {point['sm_mhz']} MHz {point['watts']} W  error"
    text += "".join(f" {name} {value:.1e}" for name, value in point["error_to_fa2"].items())
    return text + "".join(f"  no {name}: {why}" for name, why in point.get("refused", {}).items())


def ragged_line(record, ours):
    """What measure_ragged_point gives, in words."""
    values = "  ".join(f"{name} {ms:.3f} ms {record['tflops'][name]:.1f} TFLOP/s {record['gbps'][name]:.0f} GB/s"
                       for name, ms in record["ms"].items())
    text = f"{record['case']}: cost/token {record['cost_per_token']:.0f}  {values}"
    if ours in record.get("ratio_to_beside", {}):
        text += f"  to {record['beside']['case']} {record['ratio_to_beside'][ours]:.3f}"
    if ours in record["ms"]:
        text += "".join(f"  /{name} {ms / record['ms'][ours]:.3f}" for name, ms in record["ms"].items() if name != ours)
    text += f"  {record['sm_mhz']} MHz {record['watts']} W"
    text += "".join(f"  diff to {name} {value:.1e}" for name, value in record.get("max_abs_diff", {}).items())
    return text + "".join(f"  no {name}: {why}" for name, why in record.get("refused", {}).items())


def line(point, ours):
    values = "  ".join(f"{name} {value:6.1f}" for name, value in point["tflops"].items())
    text = f"d {point['dim']:3} {'causal' if point['causal'] else 'full  '} {point['seq']:6}  {values}"
    if "cudnn" in point["tflops"]:
        text += f"  /cudnn {point['tflops'][ours] / point['tflops']['cudnn']:.3f}"
    if "share_of_ceiling" in point:
        text += f"  /ceiling {point['share_of_ceiling'][ours]:.3f}"
    if "alone" in point:
        text += "  pJ/FLOP " + " ".join(f"{a['pj_per_flop']:.2f}" for a in point["alone"].values())
    text += f"  {point['sm_mhz']} MHz {point['watts']} W  diff {point['max_abs_diff_to_fa2']:.1e}"
    return text + "".join(f"  no {name}: {why}" for name, why in point.get("refused", {}).items())


def main():
    args = parse_args()
    # Only now what takes seconds to load, or is not there.
    from bench.gpu import gpu_peers as gpu
    from bench.flash3_torch import Flash3
    for folder in args.site:
        site.addsitedir(folder)
    if args.fa3:
        gpu.fa3_peers.load(args.fa3)
    libs = {name: Flash3(path) for name, path in args.libs.items()}
    ours = next(iter(libs))
    if args.ragged:
        ragged_points(args)  # before the ceiling, which takes long, if the filter leaves none

    result = {**gpu.describe(), "commit": args.commit, "date": time.strftime("%Y-%m-%d"),
              "dtype": "e4m3" if args.fp8 else "bf16", "pass": "backward" if args.backward else "forward", "sample_ms": gpu.SAMPLE_MS, "samples": args.samples}
    if args.fa3_build:
        result["fa3"] = args.fa3_build
    if args.backward:
        result["deterministic"] = args.deterministic
    if args.deterministic:
        gpu.use_deterministic()
    if args.ceiling:
        result["ceiling"] = {"before": ceiling(args.ceiling, result["dtype"])}
        print(ceiling_line("before", result["ceiling"]["before"]), flush=True)
    points = result["ragged_points" if args.ragged else "fp8_points" if args.fp8 else "points"] = []

    def write():
        if args.json:
            result_file.write(args.json, result)

    top = result["ceiling"]["before"]["tflops"] if args.ceiling else None
    if args.ragged:
        from bench.gpu import ragged_peers
        for shape in ragged_points(args):
            point = measure_ragged_point(gpu, ragged_peers, shape, libs, args, top)
            points.append(point)
            print(ragged_line(point, ours), flush=True)
            write()
    elif args.fp8:
        from bench.gpu import fp8_peers
        result["cudnn_frontend"] = fp8_peers.frontend_version()
        for shape in gpu.suite(args.dims, args.seqs):
            point = measure_fp8_point(gpu, fp8_peers, shape, libs, args, top)
            points.append(point)
            print(fp8_line(point, ours), flush=True)
            write()
    else:
        for shape in gpu.suite(args.dims, args.seqs):
            point = measure_point(gpu, shape, libs, args, top)
            points.append(point)
            print(line(point, ours), flush=True)
            write()
    if args.ceiling:
        result["ceiling"]["after"] = ceiling(args.ceiling, result["dtype"])
        drift = result["ceiling"]["after"]["tflops"] / top - 1
        print(f"{ceiling_line('after', result['ceiling']['after'])}: {100 * drift:+.1f} %", flush=True)
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
