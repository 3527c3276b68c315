#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `fill_padding` costs on a GPU: the same packed calls with it and without it, interleaved.

    PYTHONPATH=build/release/python python3 -m bench.gpu.fill_padding --json fill_padding_h100.json

Each point is a causal batch of long-tailed lengths (bench/gpu/ragged_points.py) in tensors that have rows after the last sequence, or
none. A sample is 12 ms of back-to-back calls; samples of both sides rotate; the median counts. CUDA graphs hold the calls, so that
the host's time does not. Needs torch with CUDA, pynvml, the Python package and a Hopper GPU.
"""
import argparse
import pathlib
import sys
from itertools import accumulate

import torch

import flash3  # noqa: F401  registers torch.ops.flash3
from bench import result_file
from bench.gpu.gpu_peers import Sensors, measure
from bench.gpu.ragged_points import log_normal_lengths

POINTS = [(tokens, rest, backward) for tokens in (512, 4096, 65536) for rest in (0, tokens // 4) for backward in (False, True)]
HEADS, DIM = 16, 128


def graph_of(call):
    """The call as a CUDA graph's replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def calls_of(tokens, rest, backward):
    """{"plain": a call that leaves rows of no sequence as they are, "filled": one that fills them}."""
    lengths = log_normal_lengths(tokens, 1)
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v, dout = (torch.randn(tokens + rest, HEADS, DIM, device="cuda").bfloat16() for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(HEADS, tokens + rest, device="cuda")
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    options = dict(causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    ops = torch.ops.flash3
    ops.forward_out(q, k, v, out, lse, **options)

    def call(fill):
        if backward:
            return lambda: ops.backward_out(dout, None, q, k, v, out, lse, *gradients, None, fill_padding=fill, **options)
        return lambda: ops.forward_out(q, k, v, out, lse, fill_padding=fill, **options)

    return {name: graph_of(call(fill)) for name, fill in (("plain", False), ("filled", True))}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--commit", required=True, help="that the library was built from")
    parser.add_argument("--samples", type=int, default=41)
    given = parser.parse_args(arguments)
    points = []
    for tokens, rest, backward in POINTS:
        with Sensors() as sensors:
            times = measure(calls_of(tokens, rest, backward), given.samples)
        microseconds = {name: [round(1000 * ms, 2) for ms in of] for name, of in times.items()}
        points.append({"tokens": tokens, "rows_after": rest, "pass": "backward" if backward else "forward", "heads": HEADS,
                       "head_dim": DIM, "microseconds": microseconds,
                       "filled_by_plain": round(times["filled"][0] / times["plain"][0], 4),
                       "sm_mhz": sensors.mhz, "watts": sensors.watts})
        print(points[-1], file=sys.stderr)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": given.commit,
              "samples": given.samples, "points": points}
    result_file.write(given.json, result)


if __name__ == "__main__":
    main()
