#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call of flash3.distributed.attention costs the host of one rank: microseconds of CPU time of its thread, by method and pass.

    PYTHONPATH=build/release/python python3 -m bench.distributed.context_host_time [--device cuda] [--json FILE] [--commit NAME]
    PYTHONPATH=build/release/python python3 -m bench.distributed.context_host_time --hot ring [--pass backward]

One process stands for rank 0 of several: torch's group "fake" sends nothing, and what should come is whatever memory holds. So there is no other
process to wait for, and what NCCL or gloo themselves cost is not in it. On the CPU a rank has a few tokens of few heads, which are computed too; on a
GPU, kernels are enqueued. Methods and passes are interleaved, and the median of the rounds counts. alone is flash3.attention on the own tokens.
--hot tells where a pass spends its time, by cProfile.
"""
import argparse
import cProfile
import pathlib
import pstats
import statistics
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import flash3
import flash3.distributed
from bench import result_file
from bench.distributed.context_points import METHODS
from bench.result_file import commit_of

WAYS = ("alone", *METHODS)
PASSES = ("inference", "forward", "backward")  # inference: without autograd
SHAPES = {"cpu": (8, 4, 4, 32, torch.float32), "cuda": (256, 8, 8, 128, torch.bfloat16)}  # tokens of a rank, heads_q, heads_k, head_dim


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of the heads: 2, 4")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=50, help="in a round")
    parser.add_argument("--hot", choices=WAYS, help="where a pass of it spends its time")
    parser.add_argument("--pass", dest="hot_pass", choices=PASSES, default="forward", help="the pass of --hot")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the package, where there is no git to ask")
    args = parser.parse_args(arguments)
    args.commit = commit_of(args.commit, parser.error)
    for option in ("rounds", "calls"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: at least 1")
    heads = SHAPES[args.device][1]
    if args.ranks < 2 or heads % args.ranks:
        parser.error(f"--ranks {args.ranks}: at least 2, and a divisor of {heads} heads")
    return args


class Way:
    """Calls of one method on a rank's own tokens of a causal sequence."""

    def __init__(self, name, device, ranks):
        tokens, heads, heads_k, dim, dtype = SHAPES[device]
        self._leaves = [torch.randn(1, tokens, n, dim, device=device, dtype=dtype, requires_grad=True) for n in (heads, heads_k, heads_k)]
        self._dout = torch.randn(1, tokens, heads, dim, device=device, dtype=dtype)
        if name == "alone":
            self._call = lambda: flash3.attention(*self._leaves, causal=True)
        else:
            plan = flash3.distributed.plan(seqlen=tokens * ranks)
            self._call = lambda: flash3.distributed.attention(*self._leaves, plan, method=name, causal=True)

    def calls(self, what, count):
        """Makes so many of a pass; returns a function that does it."""
        if what == "backward":
            outs = [self._call() for _ in range(count)]
            return lambda: [torch.autograd.grad(out, self._leaves, self._dout) for out in outs]

        def forward():
            with torch.set_grad_enabled(what == "forward"):
                for _ in range(count):
                    self._call()
        return forward


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def microseconds(way, what, count, device):
    """CPU time of this thread: waiting for a GPU's queue is not the call's work. Autograd has a thread of its own for a GPU: there, wall time."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    run = way.calls(what, count)
    synchronize(device)
    began = clock()
    run()
    spent = clock() - began
    synchronize(device)
    return spent / count * 1e6


def measured(args):
    """{way: {pass: microseconds}}"""
    ways = {name: Way(name, args.device, args.ranks) for name in WAYS}
    samples = {name: {what: [] for what in PASSES} for name in WAYS}
    for i in range(args.rounds + 1):
        for name, way in ways.items():
            for what, found in samples[name].items():
                spent = microseconds(way, what, args.calls, args.device)
                if i:  # the first round fills caches
                    found.append(spent)
    return {name: {what: round(statistics.median(found), 1) for what, found in passes.items()} for name, passes in samples.items()}


def hot(args):
    way = Way(args.hot, args.device, args.ranks)
    way.calls(args.hot_pass, args.calls)()
    run, profile = way.calls(args.hot_pass, args.calls), cProfile.Profile()
    profile.runcall(run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main(arguments=None):
    args = parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    try:
        if args.hot:
            hot(args)
            return
        found = measured(args)
    finally:
        dist.destroy_process_group()
    print(f"| us of the host, {args.ranks} ranks | {' | '.join(PASSES)} |\n| --- |{' ---: |' * len(PASSES)}")
    for name, passes in found.items():
        print(f"| {name} | {' | '.join(f'{us:.0f}' for us in passes.values())} |")
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        result_file.write(args.json, {"device": device, "torch": torch.__version__, "flash3": flash3.__version__, "commit": args.commit,
                                      "date": time.strftime("%Y-%m-%d"), "ranks": args.ranks, "rounds": args.rounds, "calls": args.calls,
                                      "context_host_us": found})


if __name__ == "__main__":
    main()
