# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, by qv and by a v that is a part of k, against the definition on keys side by side."""
import numpy as np
import pytest
import torch

import flash3
import flash_attn_interface as fa
from flash3.integrations import sglang, vllm
from oracle import assert_close, exact, naive

ROPE, LATENT, HEADS = 64, 512, 16
WIDE = ROPE + LATENT
BLOCK = 64  # keys of a block of an engine's cache


def make(device="cpu", dtype=torch.bfloat16, batch=3, seq_q=2, rows=70, heads=HEADS, seed=0):
    """q, qv and a cache of latent parts with the others after them."""
    g = torch.Generator().manual_seed(seed)
    q, qv, cache = (torch.randn(batch, *shape, generator=g) for shape in
                    ((seq_q, heads, ROPE), (seq_q, heads, LATENT), (rows, 1, WIDE)))
    return [x.to(dtype).to(device) for x in (q, qv, cache)]


def split(cache):
    """k and v of a cache."""
    return cache[..., LATENT:], cache[..., :LATENT]


def wide(q, qv):
    return torch.cat([qv, q], -1)


def check(results, q, qv, cache, **options):
    """results: pairs of out and lse. The definition repeats keys for each head, which takes longer than all calls."""
    call = wide(q, qv), cache, cache[..., :LATENT]
    (wanted, lse), (plain, _) = (f(*call, **options) for f in (exact, naive))
    for got in results:
        assert_close(got[0], wanted, plain)
        torch.testing.assert_close(got[1], lse.float(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("heads", (1, 16, 128))
def test_both_ways(dtype, heads):
    q, qv, cache = make(dtype=dtype, heads=heads)
    k, v = split(cache)
    for causal in (False, True):
        check([f(*call, causal=causal, return_lse=True, **options)
               for call, options in (((q, k, v), {"qv": qv}), ((wide(q, qv), cache, v), {}))
               for f in (flash3.attention, flash3.attention_with_kv_cache)], q, qv, cache, causal=causal)


def test_lengths_and_packing():
    q, qv, cache = make()
    k, v = split(cache)
    used, cu = torch.tensor([5, 70, 33], dtype=torch.int32), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    wanted = flash3.attention_with_kv_cache(q, k, v, qv=qv, seqused_k=used, causal=True)
    for b, length in enumerate(used.tolist()):
        one = flash3.attention(q[b:b + 1], k[b:b + 1, :length], v[b:b + 1, :length], qv=qv[b:b + 1], causal=True)
        torch.testing.assert_close(wanted[b:b + 1], one, atol=1e-2, rtol=0)
    packed = flash3.attention_with_kv_cache(q.flatten(0, 1), k, v, qv=qv.flatten(0, 1), seqused_k=used, cu_seqlens_q=cu, causal=True)
    assert torch.equal(packed.unflatten(0, (3, 2)), wanted)
    ends = torch.tensor([0, 70, 140, 210], dtype=torch.int32)
    both = flash3.attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), qv=qv.flatten(0, 1), cu_seqlens_q=cu, cu_seqlens_k=ends)
    torch.testing.assert_close(both.unflatten(0, (3, 2)), flash3.attention(q, k, v, qv=qv), atol=1e-2, rtol=0)


@pytest.mark.parametrize("in_parts", (True, False))
def test_append_in_pages(in_parts):
    """k_new alone fills a cache whose v is a part of k; in parts each has its own."""
    q, qv, cache = make(rows=64)
    pages = cache.unflatten(1, (4, 16)).flatten(0, 1).contiguous()
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    used = torch.tensor([5, 62, 33], dtype=torch.int32)
    new = make(seed=1)[2][:, :2]
    options = dict(page_table=table, seqused_k=used, causal=True, return_lse=True)
    if in_parts:
        k, v = split(pages)
        k_new, v_new = split(new)
        got = flash3.attention_with_kv_cache(q, k, v, qv=qv, k_new=k_new, v_new=v_new, **options)
    else:
        got = flash3.attention_with_kv_cache(wide(q, qv), pages, pages[..., :LATENT], k_new=new, **options)
    for b, length in enumerate(used.tolist()):
        rows = pages.view(3, 64, 1, WIDE)[b:b + 1, :length + 2]
        assert torch.equal(rows[:, :length], cache[b:b + 1, :length]) and torch.equal(rows[:, length:], new[b:b + 1])
        check([[x[b:b + 1] for x in got]], q[b:b + 1], qv[b:b + 1], rows, causal=True)


def test_rotary_is_of_q_and_k_alone():
    q, qv, cache = make(dtype=torch.float32, rows=8)
    k, v = split(cache)
    angles = torch.arange(16)[:, None] / 10 ** torch.arange(ROPE // 2)[None, :]
    used = torch.full((3,), 5, dtype=torch.int32)
    new = make(dtype=torch.float32, seed=1)[2][:, :2]
    got = flash3.attention_with_kv_cache(q, k, v, qv=qv, k_new=new[..., LATENT:], v_new=new[..., :LATENT], seqused_k=used,
                                         rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=True, causal=True)
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, 5:7, None]).flatten(-2)
    assert torch.equal(v[:, 5:7], new[..., :LATENT]) and not torch.equal(k[:, 5:7], new[..., LATENT:])
    torch.testing.assert_close(got, flash3.attention(turned, k[:, :7], v[:, :7], qv=qv, causal=True), atol=1e-5, rtol=0)


def test_arrays_operators_and_schedules():
    q, qv, cache = make(dtype=torch.float32)
    k, v = split(cache)
    wanted = flash3.attention(q, k, v, qv=qv)
    arrays = [x.numpy() for x in (q, k, v, qv)]
    np.testing.assert_array_equal(flash3.attention(*arrays[:3], qv=arrays[3]), wanted.numpy())
    np.testing.assert_array_equal(flash3.attention_with_kv_cache(*arrays[:3], qv=arrays[3]), wanted.numpy())
    assert "with qv" in flash3.explain(q, k, v, qv=qv) and flash3.supported(q, k, v, qv=qv, backend="cpu")
    schedule = flash3.kv_cache_schedule(q, k, v, qv=qv)
    assert torch.equal(flash3.attention_with_kv_cache(q, k, v, qv=qv, schedule=schedule), wanted)
    with pytest.raises(ValueError, match="schedule.key"):
        flash3.attention_with_kv_cache(q, k, v, schedule=schedule)
    for operator in (torch.ops.flash3.forward.default, torch.ops.flash3.attention_with_kv_cache.default):
        torch.library.opcheck(operator, (q, k, v), {"qv": qv}, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda *call: flash3.attention(*call[:3], qv=call[3]), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, qv), wanted)


def test_drop_in_and_engines():
    q, qv, cache = make()
    k, v = split(cache)
    wanted = flash3.attention(q, k, v, qv=qv, causal=True)
    assert torch.equal(fa.flash_attn_func(q, k, v, qv=qv, causal=True), wanted)
    used = torch.full((3,), 70, dtype=torch.int32)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=used, causal=True),
                       flash3.attention_with_kv_cache(q, k, v, qv=qv, seqused_k=used, causal=True))
    assert torch.equal(torch.ops.flash_attn_3.fwd(q, k, v, q_v=qv, is_causal=True)[0], wanted)
    cu, ends = (torch.arange(4, dtype=torch.int32) * n for n in (2, 70))
    rows = [x.flatten(0, 1) for x in (q, k, v, qv)]
    packed = fa.flash_attn_varlen_func(*rows[:3], cu, ends, 2, 70, qv=rows[3], causal=True)
    torch.testing.assert_close(packed.unflatten(0, (3, 2)), wanted, atol=1e-2, rtol=0)
    pages, table = cache.flatten(0, 1)[:192].view(12, 16, 1, WIDE), torch.arange(12, dtype=torch.int32).view(3, 4)
    used.fill_(50)
    cached = flash3.attention_with_kv_cache(q, *split(pages), qv=qv, page_table=table, seqused_k=used, causal=True)
    by_vllm = vllm.flash_attn_varlen_func(rows[0], *split(pages), 2, cu, 64, seqused_k=used, q_v=rows[3], block_table=table, causal=True)
    assert torch.equal(by_vllm.unflatten(0, (3, 2)), cached)
    assert torch.equal(sglang.flash_attn_with_kvcache(q, *split(pages), qv=qv, page_table=table, cache_seqlens=used, causal=True), cached)


@pytest.mark.parametrize("name", ("q", "k", "v", "qv"))
def test_there_are_no_gradients(name):
    tensors = dict(zip("qkv", (*make(dtype=torch.float32)[:1], *split(make(dtype=torch.float32)[2]))),
                   qv=make(dtype=torch.float32)[1])
    tensors[name] = tensors[name].clone().requires_grad_()
    for call in (flash3.attention, flash3.attention_with_kv_cache, fa.flash_attn_func):
        with pytest.raises(NotImplementedError, match="no gradients"):
            call(**tensors).sum().backward() if call is not flash3.attention_with_kv_cache else call(
                tensors["q"], tensors["k"], tensors["v"], qv=tensors["qv"])
    with torch.no_grad():
        flash3.attention(**tensors)


def test_what_is_refused():
    q, qv, cache = make()
    k, v = split(cache)
    whole, used = wide(q, qv), torch.tensor([5, 6, 7], dtype=torch.int32)
    angles = torch.zeros(80, 8)
    for error, message, call in (
            (ValueError, "qv.shape[3] = 511 but v.shape[3] = 512; v and qv must have the same head_dim_v",
             lambda: flash3.attention(q, k, v, qv=qv[..., :511])),
            (ValueError, "qv.shape[2] = 8 but q.shape[2] = 16; q and qv must have the same heads_q",
             lambda: flash3.attention(q, k, v, qv=qv[:, :, :8])),
            (TypeError, "qv.dtype = float16 but q.dtype = bfloat16; q and qv must have the same dtype",
             lambda: flash3.attention(q, k, v, qv=qv.half())),
            (ValueError, "q.shape[3] = 65 and v.shape[3] = 512 but with qv head_dim + head_dim_v must be at most 576",
             lambda: flash3.attention(whole[..., :65], cache[..., :65], v, qv=qv)),
            (NotImplementedError, "qv is given but k_cache.dtype = float8_e4m3fn; with qv nothing may be FP8",
             lambda: flash3.attention_with_kv_cache(q[..., :64], *(x[..., :64].to(torch.float8_e4m3fn) for x in (k, v)),
                                                    qv=qv[..., :64])),
            (ValueError, "must be from 1 to 256", lambda: flash3.attention_with_kv_cache(whole, cache.to(torch.float8_e4m3fn),
                                                                                         v.to(torch.float8_e4m3fn))),
            (ValueError, "unless v_cache is a part of the rows of k_cache",
             lambda: flash3.attention_with_kv_cache(whole, cache, v.clone(), k_new=cache[:, :1].clone(), seqused_k=used)),
            (ValueError, "must lie in no other tensor of the call, but for v_cache in the rows of k_cache where k_new alone is given",
             lambda: flash3.attention_with_kv_cache(whole, cache, v, k_new=cache[:, :1].clone(), v_new=v[:, :1].clone(),
                                                    seqused_k=used)),
            (ValueError, "the values must not get the embedding of the keys",
             lambda: flash3.attention_with_kv_cache(whole, cache, v, k_new=cache[:, :1].clone(), seqused_k=used, rotary_cos=angles.cos(),
                                                    rotary_sin=angles.sin()))):
        with pytest.raises(error) as raised:
            call()
        assert message in str(raised.value)


# ---- lists of keys ----
#
# Sparse latent attention as vLLM calls it (FlashAttnMLASparseImpl): each token is a sequence of one query, whose page table of pages of one
# key lists the keys that it sees, in one cache of which k and v are strided views. All that is not listed is NaN, and so is what surrounds
# the cache: an element that is read where it must not be shows.

class Listed:
    """What vLLM hands over: tokens with lists of up to most of slots keys. Lists are rows of a buffer that is wider than they are."""

    def __init__(self, device, dtype, tokens, heads, most, slots, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.counts = torch.tensor([(most, most - 7, 1, 0, most // 2 + 3)[t % 5] for t in range(tokens)], dtype=torch.int32)
        around = torch.full(((slots // BLOCK + 2) * BLOCK, WIDE), float("nan"), dtype=dtype)
        own = around[BLOCK:-BLOCK]
        buffer = torch.zeros(tokens + 3, most + 5, dtype=torch.int32)
        self.lists = buffer[:tokens, :most]
        for t, count in enumerate(self.counts.tolist()):
            self.lists[t, :count] = 1 + torch.randperm(slots - 1, generator=g)[:count]  # never row 0, where wrong numbers could lead
            self.lists[t, count:] = torch.tensor([-1, slots, 2**31 - 1, -2**31, 0]).repeat(most)[:most - count]
            rows = self.lists[t, :count].long()
            own[rows] = torch.randn(count, WIDE, generator=g).to(dtype)
        self.around, self.q, self.qv = (x.to(device) for x in (around, *(torch.randn(tokens, heads, dim, generator=g).to(dtype)
                                                                           for dim in (ROPE, LATENT))))
        self.lists, self.counts = buffer.to(device)[:tokens, :most], self.counts.to(device)
        self.starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        cache = self.around[BLOCK:-BLOCK].view(-1, BLOCK, WIDE)
        self.k, self.v = cache[:, :, LATENT:].view(-1, 1, 1, ROPE), cache[:, :, :LATENT].view(-1, 1, 1, LATENT)
        assert self.k.stride(0) == self.v.stride(0) == WIDE

    def ways(self):
        """Results [tokens, heads, LATENT] of the adapter, of the drop-in and of flash3 itself."""
        tokens, most = self.lists.shape
        q, qv, options = self.q[:, None], self.qv[:, None], {"softmax_scale": WIDE ** -0.5, "causal": True}
        yield vllm.flash_attn_varlen_func(q=self.q, k=self.k, v=self.v, q_v=self.qv, max_seqlen_q=1, cu_seqlens_q=self.starts,
                                          max_seqlen_k=most, seqused_k=self.counts, block_table=self.lists, fa_version=3, **options)
        yield fa.flash_attn_varlen_func(self.q, self.k, self.v, self.starts, None, 1, most, seqused_k=self.counts, qv=self.qv,
                                        block_table=self.lists, **options)
        yield fa.flash_attn_with_kvcache(q, self.k, self.v, qv=qv, cache_seqlens=self.counts, page_table=self.lists, **options)[:, 0]
        yield flash3.attention_with_kv_cache(q, self.k, self.v, qv=qv, seqused_k=self.counts, page_table=self.lists, **options)[:, 0]

    def check(self, out):
        """Heads are queries here: all read the one KV head."""
        slots = self.around[BLOCK:-BLOCK]
        for t, count in enumerate(self.counts.tolist()):
            rows = slots[self.lists[t, :count].long()][None, :, None]
            call = torch.cat([self.qv, self.q], -1)[t][None, :, None], rows, rows[..., :LATENT]
            (wanted, _), (plain, _) = (f(*call, softmax_scale=WIDE ** -0.5) for f in (exact, naive))
            assert_close(out[t][None, :, None], wanted, plain, f"out of token {t}")


@pytest.mark.parametrize("tokens,heads,most,slots", [(1, 128, 300, 4096), (16, 16, 100, 1024), (128, 4, 70, 4096), (6, 8, 2048, 131072)],
                         ids=lambda n: str(n))
def test_lists_of_keys(device, tokens, heads, most, slots):
    call = Listed(device, torch.bfloat16, tokens, heads, most, slots)
    first, *others = call.ways()
    call.check(first)
    assert all(torch.equal(out, first) for out in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("GPU kernels take 16 bits")
    call = Listed(device, dtype, 7, 16, 130, 640)
    call.check(next(call.ways()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens,heads", [(1, 128), (16, 128), (128, 16)])
def test_long_lists_on_a_gpu(tokens, heads):
    call = Listed("cuda", torch.bfloat16, tokens, heads, 2048, 131072)
    first, *others = call.ways()
    call.check(first)
    assert all(torch.equal(out, first) for out in others)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lists():
    """As engines do it: what a step captured reads the lists and counts of the next."""
    call, other = (Listed("cuda", torch.bfloat16, 10, 16, 130, 640, seed) for seed in range(2))
    next(call.ways())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = next(call.ways())
    for mine, its in ((call.lists, other.lists), (call.around, other.around), (call.counts, other.counts)):
        mine.copy_(its)
    graph.replay()
    call.check(out)
    assert torch.equal(out, next(call.ways()))
