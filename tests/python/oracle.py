# SPDX-License-Identifier: Apache-2.0
"""What the results are compared with: the definition in float64, and the same in the tensors' own dtype.

The rule of all tests, with the largest element of each row, which is the last dimension, as the largest of a tensor
would hide a wrong row of small values: |out - exact| <= 2 |naive - exact| + u |exact| + eps. u is the dtype's unit
roundoff. The naive error is that of the row and of the median row together, as that of one may be small by luck.
"""
import math

import pytest
import torch

from flash3 import _mask_rows

UNIT_ROUNDOFF = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # float32: of a few in a row
EPS = {torch.float32: 5e-7, torch.float16: 2e-4, torch.bfloat16: 2e-3}


def visible(seq_q, seq_k, *, causal=False, window=None, chunk=0, device="cpu"):
    """[seq_q, seq_k] bool: which key a query sees."""
    i = torch.arange(seq_q, device=device)[:, None] + seq_k - seq_q
    j = torch.arange(seq_k, device=device)[None, :]
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    left, right = window or (None, None)
    if causal:
        seen &= j <= i
    if left is not None and left >= 0:
        seen &= j >= i - left
    if right is not None and right >= 0:
        seen &= j <= i + right
    if chunk:
        seen &= torch.div(j, chunk, rounding_mode="floor") == torch.div(i, chunk, rounding_mode="floor")
    return seen


def naive(q, k, v, *, softmax_scale=None, softcap=0.0, sink=None, seen=None, **mask):
    """(out, lse) of dense tensors [batch, seq, heads, dim], in q's dtype, by autograd-friendly torch operations.

    seen: [seq_q, seq_k] bool, instead of a mask's options."""
    groups = q.shape[2] // k.shape[2] if k.shape[2] else 1
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[1], k.shape[1], device=q.device, **mask) if seen is None else seen
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores.float() if scores.dtype != torch.float64 else scores, -1)
    p = torch.exp(scores - lse.to(scores.dtype).masked_fill(lse == -math.inf, 0)[..., None])
    if sink is not None:
        p = p[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def exact(q, k, v, *, sink=None, **options):
    return naive(q.double(), k.double(), v.double(), sink=None if sink is None else sink.double(), **options)


def assert_close(got, exact_value, naive_value, what="out", relative=0.0, slack=0.0):
    """The rule above. Elements that are -inf in the exact value must be so. An error that the naive value does not have may be
    added: relative, of each row's largest element, and slack, a number for each row."""
    assert got.shape == exact_value.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(exact_value.shape)}"
    finite = torch.isfinite(exact_value)
    assert torch.equal(torch.isfinite(got), finite), f"{what}: infinite elsewhere than the exact value"
    if got.numel() == 0:
        return

    def rows(x):
        return x.double().abs().masked_fill(~finite, 0).amax(-1)

    dtype = got.dtype
    error = rows(got.double() - exact_value.double())
    naive_error = rows(naive_value.double() - exact_value.double())
    allowed = 2 * (naive_error + naive_error.median()) + (UNIT_ROUNDOFF[dtype] + relative) * rows(exact_value) + slack + EPS[dtype]
    worst = (error / allowed).argmax()
    assert (error <= allowed).all(), f"{what}: error {error.flatten()[worst]:.3e}, allowed {allowed.flatten()[worst]:.3e}"


def slacks_of_scores(reference, q, k, v, out, dout, rounding, *, dlse=None, softmax_scale=None, largest_weight=1.0):
    """{"dq", "dk"}: slack for assert_close of gradients of which the naive ones round less: no score that is a bias alone, and
    the dS of a row of one weight, which is exactly 0 there. reference(q, k, v): the exact out, with all weights kept.

    dS = P (dP - D + dlse), where D = sum(dout * out). A score is wrong by rounding / 2, hence a weight by the factor 1 + rounding
    and D by rounding * max|dP|; out is rounded. So dS is wrong by no more than P * wrong, where wrong = 4 rounding (max|dP| + |dlse|) +
    u sum|dout * out|. dq = softmax_scale * dS k, where a row of P sums up to 1 at most; dk = softmax_scale * dS' q."""
    groups, roundoff = out.shape[2] // k.shape[2], UNIT_ROUNDOFF[out.dtype]
    scale = 1 / math.sqrt(k.shape[-1]) if softmax_scale is None else softmax_scale
    q, k, v, out, dout = (x.detach().double() for x in (q, k, v, out, dout))
    largest_dp = torch.einsum("bihd,bjhd->bihj", dout, v.repeat_interleave(groups, 2)).abs().amax(-1) * largest_weight
    if dlse is not None:
        largest_dp = largest_dp + dlse.detach().double().abs().transpose(1, 2)
    wrong = scale * (4 * rounding * largest_dp + roundoff * (dout * out).abs().sum(-1))  # [batch, seq_q, heads_q]
    of_each_key = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)[None, :, None].expand(*k.shape[:3], -1)
    p = reference(q, k, of_each_key)  # [batch, seq_q, heads_q, seq_k]
    dk = torch.einsum("bihj,bih->bjh", p, wrong * q.abs().amax(-1))
    return {"dq": wrong * k.abs().amax((1, 3)).repeat_interleave(groups, 1)[:, None], "dk": dk.unflatten(2, (-1, groups)).sum(-1)}


# What tests of masks compare with: booleans pair by pair.


def pairs(batch, heads, seq_q, seq_k, sees):
    """[batch, heads, seq_q, seq_k] bool of a function of four numbers."""
    return torch.tensor([[[[bool(sees(b, h, i, j)) for j in range(seq_k)] for i in range(seq_q)] for h in range(heads)] for b in range(batch)],
                        dtype=torch.bool).view(batch, heads, seq_q, seq_k)


def check(source, wanted, device="cpu"):
    got = source.to_dense(*wanted.shape)
    assert got.shape == wanted.shape and got.device.type == device
    assert torch.equal(got.cpu(), wanted), (got.cpu() != wanted).nonzero()[:5].tolist()


def scattered(b, h, q, k):
    return (q * 7 + k * 13) % 5 < 2


@pytest.fixture
def small_parts(monkeypatch):
    """Rows are made and read a block at a time."""
    monkeypatch.setattr(_mask_rows, "AT_ONCE", 1)
