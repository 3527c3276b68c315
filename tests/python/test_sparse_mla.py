# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention as vLLM calls it (FlashAttnMLASparseImpl): each token is a sequence of one query, whose page table of pages of one
key lists the keys that it sees, in one cache of which k and v are strided views. Against the definition on the listed keys.

All that is not listed is NaN, and so is what surrounds the cache: a single element that is read where it must not be shows."""
import pytest
import torch

import flash3
import flash_attn_interface as fa
from flash3.integrations import vllm
from oracle import assert_close, exact, naive

ROPE, LATENT, BLOCK = 64, 512, 64
WIDE = ROPE + LATENT
SCALE = WIDE ** -0.5


class Call:
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
        q, qv, options = self.q[:, None], self.qv[:, None], {"softmax_scale": SCALE, "causal": True}
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
            (wanted, _), (plain, _) = (f(*call, softmax_scale=SCALE) for f in (exact, naive))
            assert_close(out[t][None, :, None], wanted, plain, f"out of token {t}")


@pytest.mark.parametrize("tokens,heads,most,slots", [(1, 128, 300, 4096), (16, 16, 100, 1024), (128, 4, 70, 4096), (6, 8, 2048, 131072)],
                         ids=lambda n: str(n))
def test_lists_of_keys(device, tokens, heads, most, slots):
    call = Call(device, torch.bfloat16, tokens, heads, most, slots)
    first, *others = call.ways()
    call.check(first)
    assert all(torch.equal(out, first) for out in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("GPU kernels take 16 bits")
    call = Call(device, dtype, 7, 16, 130, 640)
    call.check(next(call.ways()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens,heads", [(1, 128), (16, 128), (128, 16)])
def test_long_lists_on_a_gpu(tokens, heads):
    call = Call("cuda", torch.bfloat16, tokens, heads, 2048, 131072)
    first, *others = call.ways()
    call.check(first)
    assert all(torch.equal(out, first) for out in others)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lists():
    """As engines do it: what a step captured reads the lists and counts of the next."""
    call, other = (Call("cuda", torch.bfloat16, 10, 16, 130, 640, seed) for seed in range(2))
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
