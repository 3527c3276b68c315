# SPDX-License-Identifier: Apache-2.0
"""docs/migration.md: both halves of each block run, and have the same results.

FlashAttention-2 and xformers themselves need a GPU: functions by oracle.py's definition take their places. The masks are those of xformers
0.0.35, read off what its `materialize` gives; the arguments those of flash-attn 2.8.
"""
import pathlib
import re
import sys
import types

import pytest

torch = pytest.importorskip("torch")
from oracle import naive  # noqa: E402

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/migration.md").read_text(encoding="utf-8")
SETUP, *BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def _rotated(x, cos, sin, offsets, interleaved):
    half = cos.shape[1]
    positions = offsets.long()[:, None] + torch.arange(x.shape[1])
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    turned, rest = x[..., :2 * half], x[..., 2 * half:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, a * s + b * c
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False):
    assert dropout_p == 0 and alibi_slopes is None
    out, lse = naive(q, k, v, softmax_scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q, kv, *arguments, **options):
    return flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def flash_attn_qkvpacked_func(qkv, *arguments, **options):
    return flash_attn_func(*qkv.unbind(2), *arguments, **options)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    assert cu_seqlens_q.diff().max() <= max_seqlen_q and cu_seqlens_k.diff().max() <= max_seqlen_k
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return torch.cat([flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0]
                      for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])])


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, causal=False,
                            rotary_interleaved=True):
    if rotary_cos is not None:
        q, k = (_rotated(x, rotary_cos, rotary_sin, cache_seqlens, rotary_interleaved) for x in (q, k))
    outs = []
    for b, count in enumerate(cache_seqlens.tolist()):
        end = count + (k.shape[1] if k is not None else 0)
        if k is not None:
            k_cache[b, count:end], v_cache[b, count:end] = k[b], v[b]
        outs.append(flash_attn_func(q[b:b + 1], k_cache[b:b + 1, :end], v_cache[b:b + 1, :end], causal=causal))
    return torch.cat(outs)


def unpad_input(hidden_states, attention_mask):
    where, lengths = attention_mask.flatten().nonzero()[:, 0], attention_mask.sum(1).int()
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    return hidden_states.flatten(0, 1)[where], where, ends, int(lengths.max()), lengths


def pad_input(hidden_states, indices, batch, seqlen):
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    rows[indices] = hidden_states
    return rows.unflatten(0, (batch, seqlen))


class LowerTriangularFromBottomRightMask:
    options = {"causal": True}


class LocalAttentionFromBottomRightMask:
    def __init__(self, window_left, window_right):
        self.options = {"window": (window_left, window_right)}


class LowerTriangularFromBottomRightLocalAttentionMask:
    def __init__(self, _window_size):
        self.options = {"causal": True, "window": (_window_size - 1, -1)}


class BlockDiagonalMask:
    def __init__(self, lengths, causal=False):
        self.lengths, self.causal = lengths, causal

    @classmethod
    def from_seqlens(cls, q_seqlen):
        return cls(q_seqlen)

    def make_causal(self):
        return BlockDiagonalMask(self.lengths, True)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    assert p == 0
    if query.ndim == 5:
        return memory_efficient_attention(*(x.flatten(2, 3) for x in (query, key, value)), attn_bias, p, scale).unflatten(2, query.shape[2:4])
    if isinstance(attn_bias, BlockDiagonalMask):
        parts = zip(*(x.split(attn_bias.lengths, 1) for x in (query, key, value)))
        return torch.cat([naive(*part, softmax_scale=scale, causal=attn_bias.causal)[0] for part in parts], 1)
    return naive(query, key, value, softmax_scale=scale, **(attn_bias.options if attn_bias else {}))[0]


def _module(name, *members):
    module = types.ModuleType(name)
    vars(module).update({member.__name__: member for member in members})
    return module


MODULES = [
    _module("flash_attn", flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
            flash_attn_with_kvcache),
    _module("flash_attn.bert_padding", pad_input, unpad_input),
    _module("xformers"),
    _module("xformers.ops", memory_efficient_attention, LowerTriangularFromBottomRightMask),
    _module("xformers.ops.fmha"),
    _module("xformers.ops.fmha.attn_bias", LocalAttentionFromBottomRightMask, LowerTriangularFromBottomRightLocalAttentionMask,
            BlockDiagonalMask),
]


@pytest.fixture
def scope(monkeypatch):
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    found = {}
    exec(SETUP, found)
    return found


def results(out):
    return list(out) if isinstance(out, tuple) else [out]


def test_there_are_blocks_of_each_library():
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    counts = {section.splitlines()[0]: section.count("\n# flash3\n") for section in sections}
    assert counts == {"FlashAttention-2": 6, "FlashAttention-3": 3, "torch's scaled_dot_product_attention": 3, "xformers": 3, "cuDNN": 1}
    assert len(BLOCKS) == sum(counts.values())


@pytest.mark.parametrize("block", BLOCKS, ids=[re.sub(r"\W+", "_", block.partition("\n# flash3\n")[2])[:60] for block in BLOCKS])
def test_both_halves(block, scope):
    theirs, ours = block.split("\n# flash3\n")
    exec(theirs, scope)
    wanted = results(scope.pop("out"))
    exec(ours, scope)
    got = results(scope.pop("out"))
    assert len(got) == len(wanted) and "flash3." in ours
    for x, y in zip(got, wanted):
        assert x.shape == y.shape and y.any()
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-5, atol=1e-5)
