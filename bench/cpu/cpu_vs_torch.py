#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""flash3's CPU backend against torch's scaled_dot_product_attention on the CPU, in one process: the forward and the gradients.

    python3 -m bench.cpu.cpu_vs_torch build/libflash3.so [--json bench/results/cpu_<machine>.json]

Both compute the same tensors, call by call interleaved, so that whatever else the machine does hits both (it should do
nothing else: run it under chrt -r 1 if it does). Reported: the medians, and how many times faster flash3 is. The
outputs are compared too. Needs torch (the CPU wheel is enough).
"""

import argparse
import datetime
import math
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

from bench import ROOT, result_file
from bench.flash3_torch import CPU, Flash3

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAUSE = 0.02  # seconds before every call: OpenMP's threads spin for a while after torch's work and would take our cores


def cases():
    for dtype in ("fp32", "bf16"):
        for dim in (64, 128):
            for seq in (512, 1024, 2048, 4096):
                for causal in (False, True):
                    yield dict(dtype=dtype, batch=1, heads=8, heads_k=8, seq_q=seq, seq_k=seq, dim=dim, causal=causal)
        yield dict(dtype=dtype, batch=1, heads=1, heads_k=1, seq_q=4096, seq_k=4096, dim=128, causal=True)
        yield dict(dtype=dtype, batch=1, heads=8, heads_k=8, seq_q=1, seq_k=4096, dim=128, causal=False)
        yield dict(dtype=dtype, batch=8, heads=32, heads_k=8, seq_q=1, seq_k=4096, dim=128, causal=False)
        yield dict(dtype=dtype, batch=1, heads=1, heads_k=1, seq_q=1, seq_k=65536, dim=128, causal=False)
    yield dict(dtype="fp16", batch=1, heads=8, heads_k=8, seq_q=2048, seq_k=2048, dim=64, causal=False)
    for dtype in ("fp32", "bf16"):
        for dim in (64, 128):
            for seq in (1024, 2048, 4096):
                for causal in (False, True):
                    yield dict(dtype=dtype, batch=1, heads=8, heads_k=8, seq_q=seq, seq_k=seq, dim=dim, causal=causal,
                               backward=True)


def name_of(c):
    heads = f"h{c['heads']}" + (f"x{c['heads_k']}" if c["heads"] != c["heads_k"] else "")
    mask = "causal" if c["causal"] else "full"
    backward = "/bwd" if c.get("backward") else ""
    return f"{c['dtype']}/b{c['batch']}/q{c['seq_q']}/k{c['seq_k']}/{heads}/d{c['dim']}/{mask}{backward}"


def run(flash3, c, threads, seconds):
    dtype = DTYPES[c["dtype"]]
    make = lambda heads, seq: torch.randn(c["batch"], heads, seq, c["dim"]).to(dtype)
    q, k, v = make(c["heads"], c["seq_q"]), make(c["heads_k"], c["seq_k"]), make(c["heads_k"], c["seq_k"])
    sdpa = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=c["causal"], enable_gqa=c["heads"] != c["heads_k"])
    out = torch.empty_like(q)
    by_token = lambda tensors: [x.transpose(1, 2) for x in tensors]
    if c.get("backward"):
        lse, dout, grads = torch.empty(q.shape[:3]), torch.randn_like(q), [torch.empty_like(x) for x in (q, k, v)]
        flash3.forward(*by_token((q, k, v, out)), c["causal"], CPU, threads, lse)()
        names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        ours = flash3.backward(dict(zip(names, by_token((q, k, v, out, dout, *grads)))) | {"lse": lse}, c["causal"],
                               backend=CPU, threads=threads)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        recorded = sdpa(*leaves)
        theirs = lambda: torch.autograd.grad(recorded, leaves, dout, retain_graph=True)
    else:
        ours = flash3.forward(*by_token((q, k, v, out)), c["causal"], CPU, threads)
        theirs, grads = lambda: [sdpa(q, k, v)], [out]

    ours()
    difference = max((mine.float() - other.float()).abs().max().item() for mine, other in zip(grads, theirs()))
    times = {"flash3": [], "torch": []}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["torch"]) < 7:
        for name, call in (("flash3", ours), ("torch", theirs)):
            time.sleep(PAUSE)
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
    pairs = c["seq_q"] * c["seq_k"] / (2 if c["causal"] else 1)
    flops = (10 if c.get("backward") else 4) * c["batch"] * c["heads"] * pairs * c["dim"]
    kv_bytes = 2 * k.numel() * k.element_size()
    result = dict(case=name_of(c), calls=len(times["torch"]), max_difference=difference)
    for name, t in times.items():
        median = statistics.median(t)
        result[name] = dict(median_ms=round(median * 1e3, 4), min_ms=round(min(t) * 1e3, 4),
                            gflops=round(flops / median / 1e9, 1), kv_gb_per_s=round(kv_bytes / median / 1e9, 2))
    result["speedup"] = round(result["torch"]["median_ms"] / result["flash3"]["median_ms"], 3)
    return result


def cpu_model():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.processor())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="path of libflash3.so")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=1.5, help="per case (default %(default)s)")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--json", help="write the figures there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    flash3 = Flash3(args.library)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=ROOT).stdout.strip()
    report = dict(device=cpu_model(), instructions=flash3.describe(CPU), threads=args.threads, torch=torch.__version__,
                  flash3=flash3.version(), commit=commit,
                  date=datetime.date.today().isoformat(), results=[])
    print(f"{report['device']}, {report['instructions']}; torch {torch.__version__}")
    print(f"{'case':42} {'flash3 ms':>10} {'torch ms':>10} {'GFLOP/s':>9} {'KV GB/s':>8} {'speedup':>8}")
    for c in cases():
        if args.only not in name_of(c):
            continue
        r = run(flash3, c, args.threads, args.seconds)
        report["results"].append(r)
        ours = r["flash3"]
        print(f"{r['case']:42} {ours['median_ms']:10.3f} {r['torch']['median_ms']:10.3f} {ours['gflops']:9.1f} "
              f"{ours['kv_gb_per_s']:8.2f} {r['speedup']:7.2f}x", flush=True)
    speedups = [r["speedup"] for r in report["results"]]
    if not speedups:
        sys.exit(f"no case holds '{args.only}'")
    report["load_average"] = round(os.getloadavg()[0], 2)
    # On a machine that is not idle: chrt -r 1 python3 -m bench.cpu.cpu_vs_torch …
    report["real_time_scheduling"] = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    report["geometric_mean_speedup"] = round(math.exp(sum(map(math.log, speedups)) / len(speedups)), 3)
    print(f"geometric mean {report['geometric_mean_speedup']}x, least {min(speedups)}x")
    if args.json:
        result_file.write(args.json, report)


if __name__ == "__main__":
    main()
