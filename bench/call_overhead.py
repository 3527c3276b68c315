#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What one small attention call costs the host: microseconds of CPU time from Python, by the ways to call it.

    PYTHONPATH=build/release/python:bindings/dropin python3 bench/call_overhead.py [--device cuda] [--json FILE] [--commit NAME]

On a GPU a call is only enqueued, so that what is timed is the host's work: the C function alone (params made beforehand: what the
launch itself costs), an operator, flash3.attention, flash3.sdpa, the drop-in's flash_attn_func, and torch's own attention. On a CPU
the smallest problem is computed too. The ways are interleaved; the median of the rounds counts.
"""
import argparse
import ctypes
import importlib.util
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F

import flash3
import result_file
from flash3 import _library, arrays
from peers import commit_of


RECORDED = "recorded by autograd"


def prepared(q, k, v, out, lse):
    """One C call with params made beforehand."""
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
    call = arrays._forward(q, k, v, out, lse, {"stream": stream, "num_threads": 1, "causal": True})
    assert call.workspace_size() == 0, "this shape must need no workspace"
    run, params = _library.lib.flash3_forward, ctypes.byref(call.params)
    return lambda keep=call: run(params)


def ways(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 16, 2, 64, device=device, dtype=dtype) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(1, 2, 16, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    t = [x.transpose(1, 2) for x in (q, k, v)]
    t_leaves = [x.detach().requires_grad_() for x in t]
    found = {
        "C function": prepared(q, k, v, out, lse),
        "torch.ops.flash3.forward_out": lambda: torch.ops.flash3.forward_out.default(q, k, v, out, lse, causal=True),
        "flash3.attention": lambda: flash3.attention(q, k, v, causal=True),
        f"flash3.attention, {RECORDED}": lambda: flash3.attention(*leaves, causal=True),
        "flash3.sdpa": lambda: flash3.sdpa(*t, is_causal=True),
        f"flash3.sdpa, {RECORDED}": lambda: flash3.sdpa(*t_leaves, is_causal=True),
        "torch scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*t, is_causal=True),
        f"torch's, {RECORDED}": lambda: F.scaled_dot_product_attention(*t_leaves, is_causal=True),
    }
    if importlib.util.find_spec("flash_attn_interface"):
        import flash_attn_interface
        found["flash_attn_func"] = lambda: flash_attn_interface.flash_attn_func(q, k, v, causal=True)
        found[f"flash_attn_func, {RECORDED}"] = lambda: flash_attn_interface.flash_attn_func(*leaves, causal=True)
    return found


def cpu_microseconds(name, call, count, device):
    """CPU time of this thread: waiting for the GPU's queue is not the call's work."""
    with torch.set_grad_enabled(RECORDED in name):
        begin = time.thread_time()
        for _ in range(count):
            call()
        spent = time.thread_time() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return spent / count * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=500, help="in a round; a GPU's queue holds about a thousand")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the package, for --json, where there is no git to ask")
    args = parser.parse_args()
    commit = commit_of(args.commit, parser.error) if args.json else None

    torch.set_num_threads(1)
    calls = ways(args.device)
    times = {name: [] for name in calls}
    for name, call in calls.items():
        cpu_microseconds(name, call, args.calls, args.device)
    for _ in range(args.rounds):
        for name, call in calls.items():
            times[name].append(cpu_microseconds(name, call, args.calls, args.device))
    median = {name: round(statistics.median(t), 2) for name, t in times.items()}
    launch = median["C function"]
    for name, value in median.items():
        print(f"{name:48} {value:7.2f} us   {value - launch:+7.2f} us over the C function")
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else flash3.backends()["cpu"]
        report = {"call_overhead_us": median, "device": device, "torch": torch.__version__, "flash3": flash3.version(),
                  "commit": commit, "date": time.strftime("%Y-%m-%d"), "rounds": args.rounds, "calls": args.calls}
        result_file.write(args.json, report)


if __name__ == "__main__":
    main()
