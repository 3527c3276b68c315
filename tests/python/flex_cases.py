# SPDX-License-Identifier: Apache-2.0
"""score_mods of FlexAttention, what flash3 makes of them, and what they mean in float64."""
import math
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from flash3 import _attention, _sdpa

BATCH, HEADS, HEADS_K, DIM, LONGEST = 2, 4, 2, 16, 90
SIZES = [(70, 70), (40, 90), (90, 40)]
INF = math.inf


def captured(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17)).to(dtype).requires_grad_()


SLOPES, SLOPES_OF_SEQUENCES = captured(HEADS), captured(BATCH, HEADS)
TABLE = torch.nn.Parameter(captured(HEADS, 11))
FULL, OF_HEADS, PAIRS = captured(BATCH, HEADS, LONGEST, LONGEST), captured(HEADS, LONGEST, LONGEST, dtype=torch.bfloat16), captured(LONGEST, LONGEST)
OF_KEYS, ONE = captured(BATCH, LONGEST), captured()
TENSORS = [SLOPES, SLOPES_OF_SEQUENCES, TABLE, FULL, OF_HEADS, PAIRS, OF_KEYS, ONE]
DOCUMENTS = torch.arange(LONGEST) // 25
RELATIVE = (torch.arange(LONGEST)[:, None] * 5 + torch.arange(LONGEST) * 3) % 11


def alibi_of_attention_gym(heads):
    def alibi_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        bias = (kv_idx - q_idx) * scale
        return score + bias
    return alibi_mod


def t5(score, b, h, q_idx, kv_idx):
    relative = kv_idx - q_idx
    n = torch.abs(relative)
    large = 2 + (torch.log(n.float() / 2) / math.log(20 / 2) * 3).to(torch.long)
    large = torch.min(large, torch.full_like(large, 4))
    return score + TABLE[h, (relative > 0).to(torch.long) * 5 + torch.where(n < 2, n, large)]


def embedded(score, b, h, q_idx, kv_idx):
    return score + torch.nn.functional.embedding((q_idx - kv_idx).clamp(-5, 5) + 5, TABLE.T)[h]


# name: (score_mod, what it becomes, and what if no query sees a later key)
MODS = {
    "scaled": (lambda s, b, h, i, j: s * 1.5, ()),
    "negated": (lambda s, b, h, i, j: -(-s - 1) / 2, ("bias_table",)),
    "softcap": (lambda s, b, h, i, j: 5 * torch.tanh(s / 5), ()),
    "softcap of tensors": (lambda s, b, h, i, j: torch.tanh(s * torch.tensor(0.25) * 0.5).neg() * torch.tensor(-3.0) * 2, ()),
    "alibi": (alibi_of_attention_gym(HEADS), ("bias_table",), ("alibi_slopes",)),
    "slopes": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), ("bias_table",), ("alibi_slopes",)),
    "slopes, both sides": (lambda s, b, h, i, j: s - SLOPES[h] * (j - i).abs(), ("alibi_slopes",)),
    "slopes of sequences": (lambda s, b, h, i, j: s - 2 * (SLOPES_OF_SEQUENCES[b, h] * torch.abs(i - j).float()), ("alibi_slopes",)),
    "relative": (lambda s, b, h, i, j: s + (i - j) * 0.01, ("bias_table",), ("alibi_slopes",)),
    "truncated": (lambda s, b, h, i, j: s + ((j - i) / 3).to(torch.int64), ("bias_table",)),
    "table": (lambda s, b, h, i, j: s + TABLE[h, (j - i).clamp(-5, 5) + 5], ("bias_table",)),
    "t5": (t5, ("bias_table",)),
    "embedding": (embedded, ("bias_table",)),
    "softcap and slopes": (lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - SLOPES[h] * (j - i).abs(), ("alibi_slopes",)),
    "full": (lambda s, b, h, i, j: s + FULL[b, h, i, j], ("bias",)),
    "transposed": (lambda s, b, h, i, j: s + FULL[b, h, j, i], ("bias",)),
    "of heads": (lambda s, b, h, i, j: s + OF_HEADS[h, i, j], ("bias",)),
    "one after the other": (lambda s, b, h, i, j: s + OF_HEADS[h][i][j] * 2, ("bias",)),
    "two of heads": (lambda s, b, h, i, j: s + OF_HEADS[h, i, j] - OF_HEADS[h, j, i].float() * 3, ("bias",)),
    "products": (lambda s, b, h, i, j: s + torch.mm(PAIRS[i].unsqueeze(0), PAIRS[j].unsqueeze(1)).squeeze() / 9, ("bias",)),
    "pairs": (lambda s, b, h, i, j: s + PAIRS[i, j] - PAIRS[0, j], ("bias",)),
    "of keys": (lambda s, b, h, i, j: s + OF_KEYS[b, j], ("bias",)),
    "of rows": (lambda s, b, h, i, j: s + PAIRS[i, 3] + OF_KEYS[b, 0] + SLOPES[h] + ONE, ("bias", "bias_table")),
    "sum": (lambda s, b, h, i, j: (s * 0.7 + OF_HEADS[h, i, j]) + (PAIRS[i, j] - SLOPES[h] * (i - j).abs() + OF_KEYS[b, j]) +
            TABLE[h, (j - i).clamp(-5, 5) + 5], ("alibi_slopes", "bias", "bias_table")),
    "causal": (lambda s, b, h, i, j: torch.where(i >= j, s, -INF), ("bias_table",)),
    "near": (lambda s, b, h, i, j: s.masked_fill((i - j).abs() > 9, -INF), ("bias_table",)),
    "documents": (lambda s, b, h, i, j: torch.where(DOCUMENTS[i] == DOCUMENTS[j], s + TABLE[h, 0], -INF), ("bias", "bias_table")),
    "either": (lambda s, b, h, i, j: torch.where(i >= j, s + OF_KEYS[b, j], s - 1), ("bias",)),
    "places": (lambda s, b, h, i, j: s + TABLE[h, RELATIVE[i, j]], ("bias",)),
}
MASKS = {"all": None, "causal": lambda b, h, i, j: i >= j, "document": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)}


def tensors(seq_q, seq_k, dtype=torch.float32, dim=DIM, requires_grad=True):
    g = torch.Generator().manual_seed(seq_q)
    return [torch.randn(BATCH, h, s, dim, generator=g, dtype=dtype, requires_grad=requires_grad)
            for h, s in ((HEADS, seq_q), (HEADS_K, seq_k), (HEADS_K, seq_k))]


def block_mask_of(mask, seq_q, seq_k):
    return None if MASKS[mask] is None else create_block_mask(MASKS[mask], None, None, seq_q, seq_k, "cpu", BLOCK_SIZE=32)


class _Indexed(TorchFunctionMode):
    """x[i] with tensors i, as torch's FlexAttention means it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], [torch.as_tensor(x) for x in indices])
        return function(*args, **(kwargs or {}))


def meant(q, k, v, score_mod, seen):
    """(out, lse) in float64, with autograd."""
    scores = torch.einsum("bhid,bhjd->bhij", *(x.double() for x in (q, k.repeat_interleave(HEADS // HEADS_K, 1)))) / math.sqrt(q.shape[-1])
    for n in reversed(range(4)):
        score_mod = torch.vmap(score_mod, in_dims=(0, *(0 if n == other else None for other in range(4))))
    with _Indexed():
        scores = score_mod(scores, *map(torch.arange, scores.shape))
    scores = scores if seen is None else scores.masked_fill(~seen, -INF)
    lse = torch.logsumexp(scores, -1)
    hidden = scores.detach().amax(-1, keepdim=True) == -INF
    weights = torch.softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0)
    return weights @ v.double().repeat_interleave(HEADS // HEADS_K, 1), lse


@pytest.fixture
def given(monkeypatch):
    """Options of the calls that reach flash3.attention; one that is left to torch fails."""
    calls = []
    original = _attention.attention

    def recorded(*arguments, **options):
        calls.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr(_attention, "attention", recorded)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*leaves this call to torch")
        monkeypatch.setattr(_sdpa, "_said", set())
        yield calls


def added(options):
    return tuple(sorted({"alibi_slopes", "bias", "bias_table"} & set(options)))
