#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What one small attention call costs the host: microseconds of CPU time from Python, by the ways to call it.

    PYTHONPATH=build/release/python:bindings/dropin python3 -m bench.gpu.call_overhead [--device cuda] [--json FILE] [--commit NAME]

On a GPU a call is only enqueued, so that what is timed is the host's work: the C function alone (params made beforehand: what the
launch itself costs), an operator, flash3.attention, flash3.sdpa, the drop-in's flash_attn_func, and torch's own attention. On a CPU
the smallest problem is computed too. The ways are interleaved; the median of the rounds counts.
bench/gpu/compare_call_overhead.py does it for two builds beside each other.
"""
import argparse
import contextlib
import ctypes
import importlib.util
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import flash3
from flash3 import _library, arrays
from bench import result_file
from bench.result_file import commit_of


RECORDED = "recorded by autograd"


def prepared(q, k, v, out, lse):
    """One C call with params made beforehand."""
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
    call = arrays._forward(q, k, v, out, lse, {"stream": stream, "num_threads": 1, "causal": True})
    assert call.workspace_size() == 0, "this shape must need no workspace"
    run, params = _library.lib.flash3_forward, ctypes.byref(call.params)
    return lambda keep=call: run(params)


def overridden(function, *tensors):
    """torch's attention inside flash3.sdpa_override."""
    override = flash3.sdpa_override()

    def call():
        function(*tensors, is_causal=True)
    call.context = override
    return call


def ways(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 16, 2, 64, device=device, dtype=dtype) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(1, 2, 16, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    t = [x.transpose(1, 2) for x in (q, k, v)]
    t_leaves = [x.detach().requires_grad_() for x in t]
    step, lengths = q[:, :1], torch.full((1,), 16, dtype=torch.int32, device=device)
    found = {
        "C function": prepared(q, k, v, out, lse),
        "torch.ops.flash3.forward_out": lambda: torch.ops.flash3.forward_out.default(q, k, v, out, lse, causal=True),
        "flash3.attention": lambda: flash3.attention(q, k, v, causal=True),
        f"flash3.attention, {RECORDED}": lambda: flash3.attention(*leaves, causal=True),
        "flash3.attention_with_kv_cache": lambda: flash3.attention_with_kv_cache(step, k, v, seqused_k=lengths, causal=True),
        "flash3.sdpa": lambda: flash3.sdpa(*t, is_causal=True),
        f"flash3.sdpa, {RECORDED}": lambda: flash3.sdpa(*t_leaves, is_causal=True),
        "torch's name in flash3.sdpa_override": overridden(F.scaled_dot_product_attention, *t),
        "torch scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*t, is_causal=True),
        f"torch's, {RECORDED}": lambda: F.scaled_dot_product_attention(*t_leaves, is_causal=True),
    }
    if importlib.util.find_spec("flash_attn_interface"):
        import flash_attn_interface
        found["flash_attn_func"] = lambda: flash_attn_interface.flash_attn_func(q, k, v, causal=True)
        found[f"flash_attn_func, {RECORDED}"] = lambda: flash_attn_interface.flash_attn_func(*leaves, causal=True)
        found["flash_attn_with_kvcache"] = lambda: flash_attn_interface.flash_attn_with_kvcache(
            step, k, v, cache_seqlens=lengths, causal=True)
    return found


def cpu_microseconds(name, call, count, device):
    """CPU time of this thread: waiting for the GPU's queue is not the call's work."""
    with torch.set_grad_enabled(RECORDED in name), getattr(call, "context", contextlib.nullcontext()):
        begin = time.thread_time()
        for _ in range(count):
            call()
        spent = time.thread_time() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return spent / count * 1e6


def one_round(calls, args):
    return {name: cpu_microseconds(name, call, args.calls, args.device) for name, call in calls.items()}


def serve(calls, args):
    """Times a round for each line that is read, and prints it as a line of JSON."""
    for _ in sys.stdin:
        print(json.dumps(one_round(calls, args)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=500, help="in a round; a GPU's queue holds about a thousand")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the package, for --json, where there is no git to ask")
    parser.add_argument("--serve", action="store_true", help="for compare_call_overhead.py: time a round for each line of the input")
    args = parser.parse_args()
    commit = commit_of(args.commit, parser.error) if args.json else None

    torch.set_num_threads(1)
    calls = ways(args.device)
    if args.serve:
        return serve(calls, args)
    one_round(calls, args)
    rounds = [one_round(calls, args) for _ in range(args.rounds)]
    median = {name: round(statistics.median(times[name] for times in rounds), 2) for name in calls}
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
