#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What attention adds to the memory of its process, of flash3's CPU backend and of torch's two.

    python3 -m bench.cpu.cpu_memory --json memory_cpu.json

Each point is a process of its own: the most memory that it holds during a call (VmHWM of Linux, set back right before), beyond what
it held with q, k and v in it. A call is the forward, or the forward and the gradients. `scores` is counted and not measured: one score
matrix in the inputs' dtype. What flash3 says that it needs, out, lse and the workspace, is in `told`. `python -m flash3.bench plot` draws
it. torch's math is left out where it would take more than --most GiB. Needs flash3, torch and Linux.
"""
import argparse
import ctypes
import pathlib
import re
import subprocess
import sys

import torch

from bench import environment, result_file
from bench.cpu.cpu_report import CALLS, about

HEADS, DIM, BYTES = 4, 64, 2  # bf16
SEQS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PASSES = ("forward", "forward and backward")


def status(name):
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"^{name}:\s+(\d+) kB", text, re.M)[1]) * 1024


def run(name, which, seq):
    """One call in this process: the bytes that it adds at most."""
    call = CALLS[name]

    def once(length):
        q, k, v = (torch.randn(1, length, HEADS, DIM).bfloat16().requires_grad_(which != PASSES[0]) for _ in range(3))
        ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again from here
        out = call(q, k, v)
        if which != PASSES[0]:
            out.backward(out.detach())
        return status("VmHWM") - before

    once(64)  # libraries, threads and their stacks
    return once(seq)


def told(which, seq):
    """Bytes of out, lse and workspace, and of the gradients, by flash3's own account."""
    import flash3.arrays as c
    q, k, v, out, dq, dk, dv = (torch.empty(1, seq, HEADS, DIM, dtype=torch.bfloat16) for _ in range(7))
    lse = torch.empty(1, HEADS, seq)
    forward = {"out": out.nbytes, "lse": lse.nbytes, "workspace": c.forward_workspace(q, k, v, out, lse)}
    if which == PASSES[0]:
        return forward
    return {**forward, "gradients": 3 * q.nbytes, "backward_workspace": c.backward_workspace(out, q, k, v, out, lse, dq, dk, dv)}


def in_a_process(name, which, seq):
    # What is freed goes back at once: otherwise a call would find the memory of earlier tensors, and seem to need none.
    done = subprocess.run([sys.executable, "-m", "bench.cpu.cpu_memory", "--one", name, which, str(seq)], capture_output=True, text=True,
                          check=True, env=environment(MALLOC_MMAP_THRESHOLD_="65536"))
    return int(done.stdout)


def point(which, seq, most_gib):
    scores = HEADS * seq * seq * BYTES
    found = {}
    for name in CALLS:
        # float32 scores and probabilities, and what their gradients add.
        if name != "torch_math" or 2 * scores * (2 if which == PASSES[0] else 4) < most_gib * 2**30:
            found[name] = in_a_process(name, which, seq)
    return {"pass": which, "seq": seq, "heads": HEADS, "dim": DIM, "dtype": "bf16", "bytes": {**found, "scores": scores},
            "told": told(which, seq)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--seqs", type=lambda text: [int(n) for n in text.split(",")], default=SEQS)
    parser.add_argument("--most", type=float, default=5, help="GiB of a call that is still made")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "PASS", "SEQ"), help="print the bytes of one point alone")
    args = parser.parse_args()
    if args.one:
        print(run(args.one[0], args.one[1], int(args.one[2])))
        return
    if args.json is None:
        parser.error("--json is required")
    report = {**about(), "data": f"bf16, {HEADS} heads of {DIM}; each point in a fresh process", "memory_points": []}
    for which in PASSES:
        for seq in args.seqs:
            report["memory_points"].append(found := point(which, seq, args.most))
            print(which, seq, *(f"{name} {value / 2**20:.1f} MiB" for name, value in found["bytes"].items()), sep="  ", flush=True)
    result_file.write(args.json, report)


if __name__ == "__main__":
    main()
