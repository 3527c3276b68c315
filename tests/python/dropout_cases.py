# SPDX-License-Identifier: Apache-2.0
"""Inputs and the definition of attention with dropout, for its tests."""
import math

import torch

import flash3
from oracle import visible

HEADS, HEADS_K, DIM, DIM_V = 6, 2, 40, 24


def share(p):
    """The part of the weights that is dropped: p as the library rounds it."""
    return min(round(p * 65536), 65535) / 65536


def reference(q, k, v, kept, p, *, seen=None, softmax_scale=None, softcap=0.0, sink=None, alibi_slopes=None, bias=None, bias_table=None,
              mask=None, **band):
    """(out, lse) of dense tensors in q's dtype, by operations that autograd knows."""
    seq_q, seq_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(groups, 2)) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(seq_k, device=q.device)[None] - torch.arange(seq_q, device=q.device)[:, None] - (seq_k - seq_q)
    if alibi_slopes is not None:
        scores = scores - (alibi_slopes.double()[:, None, None] * distance.abs()).to(scores.dtype)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if bias_table is not None:
        most = bias_table.shape[1] // 2
        scores = scores + bias_table[:, distance.clamp(-most, most) + most].to(scores.dtype)
    scores = scores.masked_fill(~(visible(seq_q, seq_k, device=q.device, **band) if seen is None else seen), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), -1)
    weights = torch.exp(scores - lse.to(scores.dtype).masked_fill(lse == -math.inf, 0)[..., None])[..., :seq_k]
    weights = weights * torch.as_tensor(kept).to(weights) / (1 - share(p))
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(groups, 2)), lse


def make(dtype, batch, seq_q, seq_k, seed=0, dims=(DIM, DIM_V), device="cpu"):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, seq_q, HEADS, dims[0]), (batch, seq_k, HEADS_K, dims[0]), (batch, seq_k, HEADS_K, dims[1]))
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def keeps(sizes, p, **chosen):
    return flash3.dropout_mask(sizes[0], HEADS, *sizes[1:], p, **chosen)


def precision(device, tolerance=1e-2):
    """(dtype of q, k and v, tolerance): float32 on the CPU, float16 with a tolerance of its own on a GPU."""
    return (torch.float32, 1e-5) if device == "cpu" else (torch.float16, tolerance)
