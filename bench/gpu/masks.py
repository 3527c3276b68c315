# SPDX-License-Identifier: Apache-2.0
"""Times masks as data beside the calls that they replace, and beside torch's FlexAttention.

    PYTHONPATH=build/release/python python3 -m bench.gpu.masks --json r.json [--only docs] [--flex]

A point is a mask: causal; documents of one packed batch, beside cu_seqlens of the same documents; a window with sink tokens; a prefix;
block lists and random bits, beside the full call. Forward and backward are CUDA graphs, in samples of 12 ms that alternate in one process
(gpu_peers.py), of data N(0, 1) in bfloat16. TFLOP/s count visible pairs alone: 4 * d for each in the forward, 10 * d in the backward. The
results of a mask are compared with those of the call beside it where that has the same pairs.
"""
import dataclasses
import sys

import torch

import flash3
from bench.gpu.gpu_peers import Sensors, measure, measure_points


@dataclasses.dataclass
class Case:
    name: str
    seq: int
    dim: int
    pairs: float  # that are seen, of a head
    mask: flash3.masks.MaskSource
    plain: dict  # options of the call beside it, or of the full call
    plain_pairs: float
    same: bool  # whether that has the same pairs
    mask_mod: object = None  # torch's
    heads: int = 16


def document_lengths(seq, seed=0):
    """Lengths from 256 to about 8k tokens."""
    generator, lengths = torch.Generator().manual_seed(seed), []
    while sum(lengths) < seq:
        lengths.append(min(int(2 ** torch.empty(1).uniform_(8, 13, generator=generator).item()), seq - sum(lengths)))
    return lengths


def causal(seq=16384, dim=128):
    pairs = seq * (seq + 1) / 2
    ranges = torch.stack([torch.zeros(seq), torch.arange(1, seq + 1)]).int().cuda()
    return Case(f"causal/{seq}", seq, dim, pairs, flash3.masks.ranges(ranges, seq_k=seq), {"causal": True}, pairs, True,
                lambda b, h, i, j: i >= j)


def documents(seq=32768, dim=128):
    lengths = document_lengths(seq)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().cuda()
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    plain = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return Case(f"documents/{seq}/d{dim}", seq, dim, pairs, flash3.masks.documents(ids, causal=True), plain, pairs, True,
                lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))


def window_with_sinks(seq=32768, dim=128, window=1024, sinks=64):
    i = torch.arange(seq)
    first = (i - window + 1).clamp(min=0)
    seen = (i + 1 - first) + torch.minimum(first, torch.tensor(sinks))
    return Case(f"window_with_sinks/{seq}", seq, dim, float(seen.sum()), flash3.masks.window_with_sinks(window, sinks, seq, device="cuda"),
                {"causal": True, "window": (window - 1, 0)}, float((i + 1 - first).sum()), False,
                lambda b, h, i, j: (i >= j) & ((i - j < window) | (j < sinks)))


def prefix(seq=16384, dim=128, tokens=4096):
    ends = torch.arange(1, seq + 1).clamp(min=tokens)
    return Case(f"prefix/{seq}", seq, dim, float(ends.sum()), flash3.masks.prefix(tokens, seq, seq, device="cuda"), {"causal": True},
                seq * (seq + 1) / 2, False, lambda b, h, i, j: (i >= j) | (j < tokens))


def blocks(density, size=128, seq=32768, dim=128, heads=16):
    n = seq // size
    kept = max(1, round(density * n))
    indices = torch.rand(heads, n, n, device="cuda").argsort(-1)[..., :kept].sort(-1).values.int()
    counts = torch.full((heads, n), kept, dtype=torch.int32, device="cuda")
    mask = flash3.masks.blocks(counts, indices, size, size, seq_q=seq, seq_k=seq)
    seen = torch.zeros(heads, n, n, dtype=torch.bool, device="cuda").scatter_(2, indices.long(), True)
    return Case(f"blocks/{size}/{density}", seq, dim, float(kept * n * size * size), mask, {}, float(seq) * seq, False,
                lambda b, h, i, j: seen[h, i // size, j // size], heads)


def bits(seq=8192, dim=128):
    dense = torch.rand(seq, seq, device="cuda") < 0.5
    return Case(f"bits/{seq}", seq, dim, float(dense.sum()), flash3.masks.dense(dense), {}, float(seq) * seq, False,
                lambda b, h, i, j: dense[i, j])


POINTS = {"causal4k": lambda: causal(4096), "causal16k": causal, "docs32k": documents, "docs32k_d64": lambda: documents(dim=64),
          "docs32k_d256": lambda: documents(dim=256), "swa32k": window_with_sinks, "prefix16k": prefix,
          "bs128_d10": lambda: blocks(0.10), "bs128_d25": lambda: blocks(0.25), "bs128_d50": lambda: blocks(0.50),
          "bs64_d10": lambda: blocks(0.10, 64), "bs64_d25": lambda: blocks(0.25, 64), "bs64_d50": lambda: blocks(0.50, 64),
          "rand8k": bits}


def graph_of(call):
    """What replays a graph of the call. It holds what the call reads."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay(held=(call, result)):
        graph.replay()
    return replay


def calls_of(case, options, packed):
    """Graphs of the forward and the backward of a call, and its output."""
    shape = (case.seq, case.heads, case.dim) if packed else (1, case.seq, case.heads, case.dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(i)).bfloat16() for i in range(4))
    out, lse = flash3.attention(q, k, v, return_lse=True, **options)
    forward = graph_of(lambda: flash3.attention(q, k, v, **options))
    backward = graph_of(lambda: flash3.attention_backward(dout, q, k, v, out, lse, **options))
    dq, dk, dv = flash3.attention_backward(dout, q, k, v, out, lse, **options)[:3]
    return forward, backward, [x.reshape(-1, case.heads, case.dim) for x in (out, dq, dk, dv)]


def flex_calls(case):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    block_mask = create_block_mask(case.mask_mod, 1, case.heads if case.name.startswith("blocks") else None, case.seq, case.seq, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    q, k, v, dout = (torch.randn(1, case.heads, case.seq, case.dim, device="cuda").bfloat16() for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, block_mask=block_mask)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    with torch.no_grad():
        attend(q, k, v, block_mask=block_mask)

    def forward():
        with torch.no_grad():
            attend(q, k, v, block_mask=block_mask)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def run(case, samples, flex):
    masked = calls_of(case, {"mask": case.mask.make()}, False)
    plain = calls_of(case, case.plain, "cu_seqlens_q" in case.plain)
    errors = {}
    if case.same:
        errors = {name: float((a.float() - b.float()).abs().max()) for name, a, b in zip(("out", "dq", "dk", "dv"), masked[2], plain[2])}
    peer = flex_calls(case) if flex else None
    row = {"point": case.name, "differences": errors}
    for which, name, flops in ((0, "forward", 4), (1, "backward", 10)):
        calls = {"mask": masked[which], "plain": plain[which]}
        if peer:
            calls["flex"] = peer[which]
        with Sensors() as sensors:
            times = {who: t[0] for who, t in measure(calls, samples).items()}
        rate = {who: case.heads * case.dim * flops * (case.plain_pairs if who == "plain" else case.pairs) / t / 1e9 for who, t in times.items()}
        row[name] = {**{f"{who}_ms": round(t, 4) for who, t in times.items()}, **{f"{who}_tflops": round(x, 1) for who, x in rate.items()},
                     "rate_ratio": round(rate["mask"] / rate["plain"], 4), "sm_mhz": sensors.mhz, "watts": sensors.watts}
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    measure_points(__doc__, POINTS, lambda name, make, samples, flex: run(make(), samples, flex), "mask_points")
