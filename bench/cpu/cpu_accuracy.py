#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The error of flash3's CPU backend, of torch's two, and of plain 16-bit operations, each beside attention in float64 of the same inputs.

    python3 -m bench.cpu.cpu_accuracy --json accuracy_cpu.json

The data is the FlashAttention-3 paper's (section 4.3): N(0, 1) + N(0, 100) · Bernoulli(0.001). Root mean square and largest error of
`out`, by dtype, head dim and length; `python -m flash3.bench plot` draws them. Needs flash3 and torch; takes a minute.
"""
import argparse
import pathlib

import torch

from bench import result_file
from bench.cpu.cpu_report import CALLS, DTYPES, about

SEED, HEADS, DIMS, SEQS = 1, 2, (64, 128, 256), (256, 512, 1024, 2048, 4096)


def outliers(generator, *shape):
    normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    rare = torch.rand(*shape, generator=generator, dtype=torch.float64) < 0.001
    return normal + rare * 10 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def plain(q, k, v):
    """By plain operations, which round scores and probabilities to the inputs' dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2)


def point(dtype, dim, seq, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (outliers(generator, 1, seq, HEADS, dim).to(DTYPES[dtype]) for _ in range(3))
    reference = plain(q.double(), k.double(), v.double())
    rmse, largest = {}, {}
    for name, call in {**CALLS, "plain": plain}.items():
        error = call(q, k, v).double() - reference
        rmse[name] = float(f"{error.square().mean().sqrt().item():.4g}")
        largest[name] = float(f"{error.abs().max().item():.4g}")
    return {"dtype": dtype, "dim": dim, "seq": seq, "heads": HEADS, "rmse": rmse, "max_error": largest}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seqs", type=lambda text: [int(n) for n in text.split(",")], default=SEQS)
    args = parser.parse_args()
    report = {**about(), "seed": SEED, "data": "N(0, 1) with outliers, full mask", "error_points": []}
    for dtype in DTYPES:
        for dim in DIMS:
            for seq in args.seqs:
                report["error_points"].append(found := point(dtype, dim, seq, SEED))
                print(dtype, dim, seq, *(f"{name} {value:.3g}" for name, value in found["rmse"].items()), sep="  ", flush=True)
    result_file.write(args.json, report)


if __name__ == "__main__":
    main()
