# SPDX-License-Identifier: Apache-2.0
"""The adapters for serving engines: the calls of vLLM's and SGLang's backends, as they spell them, against the definition."""
import re

import pytest
import torch

import oracle
from flash3.integrations import sglang, vllm

# Queries and keys of each sequence. The last of a decoding batch is padding, as captured graphs have it.
BATCHES = {
    "decode": ((1, 1, 1, 0), (37, 1, 64, 0)),
    "chunked_prefill": ((16, 21), (16, 50)),
    "mixed": ((1, 33, 1, 5), (20, 33, 3, 48)),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request, device):
    if device == "cuda" and request.param == torch.float32:
        pytest.skip("Hopper takes 16 bits")
    return request.param


class Batch:
    """Packed queries and a KV cache in pages. Entries of the page table after the last key name no page."""

    def __init__(self, device, dtype, lens_q, lens_k, *, page_size=16, heads_q=4, heads_k=2, dim=32, dim_v=32, layout="NHD",
                 seed=0):
        g = torch.Generator().manual_seed(seed)
        self.device, self.lens_q, self.lens_k = device, lens_q, lens_k
        counts = [-(-n // page_size) for n in lens_k]
        pages = sum(counts) + 3
        shape = (pages, page_size, heads_k)
        if layout == "HND":  # heads before tokens in memory
            cache = torch.randn(2, pages, heads_k, page_size, dim, generator=g).transpose(2, 3)
        elif layout == "pages_first":  # keys and values of a page side by side
            cache = torch.randn(pages, 2, page_size, heads_k, dim, generator=g).transpose(0, 1)
        else:
            cache = torch.randn(2, *shape, dim, generator=g)
        self.k, v = cache.to(device, dtype).unbind(0)
        self.v = v[..., :dim_v]
        self.q = torch.randn(sum(lens_q), heads_q, dim, generator=g).to(device, dtype)
        self.sink = torch.randn(heads_q, generator=g).to(device, dtype)
        order = iter(torch.randperm(pages, generator=g).tolist())
        self.table = self.ints([[next(order) if i < n else 10**9 for i in range(max(counts) + 1)] for n in counts])
        self.cu_q, self.cu_k = (self.ints([0, *torch.tensor(lens).cumsum(0).tolist()]) for lens in (lens_q, lens_k))
        self.max_q, self.max_k = max(lens_q), max(lens_k)
        self.seq_lens = self.ints(lens_k)
        self.descale = torch.ones(1, device=device).expand(len(lens_q), heads_k)

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def keys(self, b):
        """k and v of sequence b, [seq_k, heads_k, dim]."""
        page_size, n = self.k.shape[1], self.lens_k[b]
        pages = self.table[b, :-(-n // page_size)].long()
        return [x[pages].flatten(0, 1)[:n] for x in (self.k, self.v)]

    def check(self, out, lse=None, **options):
        """out [total, heads, dim_v] and lse [heads, total] against attention of each sequence."""
        start = 0
        for b, n in enumerate(self.lens_q):
            k, v = self.keys(b)
            call = [x[None] for x in (self.q[start:start + n], k, v)]
            (exact, exact_lse), (naive, naive_lse) = oracle.exact(*call, **options), oracle.naive(*call, **options)
            oracle.assert_close(out[start:start + n], exact[0], naive[0], f"out of sequence {b}")
            if lse is not None:
                oracle.assert_close(lse[:, start:start + n], exact_lse[0], naive_lse[0], f"lse of sequence {b}")
            start += n
        assert start == out.shape[0] and (lse is None or tuple(lse.shape) == (out.shape[1], start))


def merged(parts):
    """What engines make of parts of the keys, each (out [total, heads, dim], lse [heads, total]): those of all keys, in float64."""
    outs, lses = (torch.stack(x).double() for x in zip(*parts))
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse)  # a row that no part sees has none of this use
    return (weights.transpose(1, 2)[..., None] * outs).sum(0), lse


# ---- vLLM ----

MASKS = {
    "causal": {},
    "window": {"window_size": [6, 0]},
    "no_window": {"window_size": [-1, -1]},
    "softcap": {"softcap": 3.0},
    "sink": {"s_aux": True},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", BATCHES)
def test_vllm_decoder(device, dtype, name, options):
    """FlashAttentionImpl.forward, with a plan in advance as the metadata builder asks for one."""
    a = Batch(device, dtype, *BATCHES[name], seed=1)
    output = torch.full((len(a.q) + 3, 4, 32), 7.0, device=device, dtype=dtype)
    plan = vllm.get_scheduler_metadata(
        batch_size=len(a.lens_q), max_seqlen_q=a.max_q, max_seqlen_k=a.max_k, num_heads_q=4, num_heads_kv=2, headdim=32,
        cache_seqlens=a.seq_lens, qkv_dtype=dtype, cu_seqlens_q=a.cu_q, page_size=16, causal=True,
        window_size=options.get("window_size", (-1, -1)), num_splits=32)
    sink = a.sink if options.get("s_aux") else None
    result = vllm.flash_attn_varlen_func(
        q=a.q, k=a.k, v=a.v, out=output[:len(a.q)], cu_seqlens_q=a.cu_q, max_seqlen_q=a.max_q, seqused_k=a.seq_lens,
        max_seqlen_k=a.max_k, softmax_scale=0.3, causal=True, alibi_slopes=None, window_size=options.get("window_size"),
        block_table=a.table, softcap=options.get("softcap", 0), scheduler_metadata=plan, fa_version=3, q_descale=a.descale,
        k_descale=a.descale, v_descale=a.descale, num_splits=32, s_aux=sink)
    assert result.data_ptr() == output.data_ptr()
    assert (output[len(a.q):] == 7).all()
    window = options.get("window_size")
    a.check(result, causal=True, softmax_scale=0.3, window=window, softcap=options.get("softcap", 0.0), sink=sink)


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_vllm_alibi(device, dtype, name, of_batch):
    a = Batch(device, dtype, *BATCHES[name], seed=6)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    if of_batch:
        slopes = slopes * torch.arange(1, len(a.lens_q) + 1, device=device)[:, None]
    out = vllm.flash_attn_varlen_func(q=a.q, k=a.k, v=a.v, cu_seqlens_q=a.cu_q, max_seqlen_q=a.max_q, seqused_k=a.seq_lens, max_seqlen_k=a.max_k,
                                      causal=True, alibi_slopes=slopes, block_table=a.table, fa_version=2)
    for b, n in enumerate(a.lens_q):
        q, (k, v) = a.q[int(a.cu_q[b]):][:n], (x.repeat_interleave(2, 1).double() for x in a.keys(b))
        distance = torch.arange(len(k), device=device) - torch.arange(n, device=device)[:, None] - (len(k) - n)
        scores = torch.einsum("ihd,jhd->hij", q.double(), k) / q.shape[-1] ** 0.5
        scores = scores - (slopes[b] if of_batch else slopes).double()[:, None, None] * distance.abs()
        wanted = torch.einsum("hij,jhd->ihd", scores.masked_fill(distance > 0, -torch.inf).softmax(-1).nan_to_num(), v)
        torch.testing.assert_close(out[int(a.cu_q[b]):][:n].double(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("layout", ["HND", "pages_first"])
@pytest.mark.parametrize("page_size", [16, 48])
def test_vllm_layouts_of_the_cache(device, dtype, layout, page_size):
    a = Batch(device, dtype, *BATCHES["mixed"], layout=layout, page_size=page_size, heads_q=6, dim=24, dim_v=16, seed=2)
    out, lse = vllm.flash_attn_varlen_func(a.q, a.k, a.v, a.max_q, a.cu_q, a.max_k, seqused_k=a.seq_lens, causal=True,
                                           block_table=a.table, return_softmax_lse=True, fa_version=2)
    a.check(out, lse, causal=True)


@pytest.mark.parametrize("sink", [False, True])
def test_vllm_cascade(device, dtype, sink):
    """cascade_attention: the pages that all sequences share once for all queries, then the rest, and both merged."""
    a = Batch(device, dtype, (3, 1, 5), (40, 33, 64), seed=3)
    shared, page_size = 2, 16
    a.table[:, :shared] = a.table[0, :shared].clone()
    common, total, scale = shared * page_size, len(a.q), 0.2
    s_aux = a.sink if sink else None
    prefix = vllm.flash_attn_varlen_func(
        q=a.q, k=a.k, v=a.v, cu_seqlens_q=a.ints([0, total]), seqused_k=a.ints([common]), max_seqlen_q=total, max_seqlen_k=common,
        softmax_scale=scale, causal=False, window_size=[-1, -1], block_table=a.table[:1], softcap=0, return_softmax_lse=True,
        scheduler_metadata=None, fa_version=3, q_descale=a.descale[:1], k_descale=a.descale[:1], v_descale=a.descale[:1],
        s_aux=s_aux, num_splits=1)
    suffix = vllm.flash_attn_varlen_func(
        q=a.q, k=a.k, v=a.v, cu_seqlens_q=a.cu_q, seqused_k=a.seq_lens - common, max_seqlen_q=a.max_q,
        max_seqlen_k=a.max_k - common, softmax_scale=scale, causal=True, window_size=[-1, -1], block_table=a.table[:, shared:],
        softcap=0, return_softmax_lse=True, scheduler_metadata=None, fa_version=3, q_descale=a.descale, k_descale=a.descale,
        v_descale=a.descale, num_splits=1)
    out, lse = merged([prefix, suffix])
    a.check(out.to(dtype), lse.float(), causal=True, softmax_scale=scale, sink=s_aux)


def test_vllm_encoder(device, dtype):
    """_forward_encoder_attention: no cache."""
    a = Batch(device, dtype, (5, 17, 1), (5, 17, 1), page_size=64, seed=4)
    k, v = (torch.cat(x) for x in zip(*(a.keys(b) for b in range(3))))
    out = torch.empty_like(a.q)
    vllm.flash_attn_varlen_func(
        q=a.q, k=k, v=v, out=out, cu_seqlens_q=a.cu_q, cu_seqlens_k=a.cu_q, max_seqlen_q=17, max_seqlen_k=17, softmax_scale=0.2,
        causal=False, alibi_slopes=None, window_size=[3, 3], softcap=0, fa_version=3, q_descale=a.descale, k_descale=a.descale,
        v_descale=a.descale, num_splits=0)
    a.check(out, softmax_scale=0.2, window=(3, 3))


def test_vllm_mla_prefill(device, dtype):
    """Head dims of keys and values differ; a tensor tells the longest length."""
    a = Batch(device, dtype, (9, 20), (9, 20), page_size=32, heads_q=2, heads_k=2, dim=48, dim_v=32, seed=5)
    k, v = (torch.cat(x) for x in zip(*(a.keys(b) for b in range(2))))
    out, lse = vllm.flash_attn_varlen_func(
        q=a.q, k=k, v=v, softmax_scale=0.1, cu_seqlens_q=a.cu_q, cu_seqlens_k=a.cu_q, max_seqlen_q=torch.tensor(20),
        max_seqlen_k=torch.tensor(20), causal=True, return_softmax_lse=True, fa_version=3)
    a.check(out, lse, causal=True, softmax_scale=0.1)


def dealt(a, world):
    """The caches of ranks that get keys one by one in turn: of each the pages, their table and the lengths."""
    for rank in range(world):
        own = [[x[rank::world] for x in a.keys(b)] for b in range(len(a.lens_k))]
        lengths = [len(k) for k, _ in own]
        page_size, width = 4, -(-max(lengths) // 4)
        k, v = (x.new_zeros(len(own) * width, page_size, *x.shape[2:]) for x in (a.k, a.v))
        for b, (own_k, own_v) in enumerate(own):
            for pages, keys in ((k, own_k), (v, own_v)):
                pages.flatten(0, 1)[b * width * page_size:][:len(keys)] = keys
        yield k, v, a.ints([[b * width + i for i in range(width)] for b in range(len(own))]), a.ints(lengths)


def test_vllm_decode_context_parallel(device, dtype):
    """_forward_with_dcp: the keys that were there, dealt over ranks, and the new ones."""
    world, lens_q, context = 3, (1, 4, 2), (20, 7, 1)
    a = Batch(device, dtype, lens_q, tuple(x + y for x, y in zip(lens_q, context)), seed=6)
    old = Batch(device, dtype, lens_q, context, seed=6)
    old.k, old.v, old.table = a.k, a.v, a.table
    parts = []
    for k, v, table, lengths in dealt(old, world):
        parts.append(vllm.flash_attn_varlen_func(
            q=a.q, k=k, v=v, out=None, cu_seqlens_q=a.cu_q, max_seqlen_q=a.max_q, seqused_k=lengths,
            max_seqlen_k=int(lengths.max()), softmax_scale=0.2, causal=False, alibi_slopes=None, window_size=[-1, -1],
            block_table=table, softcap=0, return_softmax_lse=True, scheduler_metadata=None, fa_version=3, q_descale=a.descale,
            k_descale=a.descale, v_descale=a.descale))
    new = [torch.cat([a.keys(b)[i][context[b]:] for b in range(3)]) for i in range(2)]
    parts.append(vllm.flash_attn_varlen_func(
        q=a.q, k=new[0], v=new[1], out=None, cu_seqlens_q=a.cu_q, max_seqlen_q=a.max_q, cu_seqlens_k=a.cu_q, max_seqlen_k=a.max_q,
        softmax_scale=0.2, causal=True, alibi_slopes=None, window_size=[-1, -1], softcap=0, return_softmax_lse=True, fa_version=3,
        q_descale=a.descale, k_descale=a.descale, v_descale=a.descale))
    out, lse = merged(parts)
    a.check(out.to(dtype), lse.float(), causal=True, softmax_scale=0.2)


@pytest.mark.parametrize("world", [2, 5])
def test_vllm_keys_of_one_rank_under_a_causal_mask(device, dtype, world):
    a = Batch(device, dtype, (4, 1, 0, 6), (9, 1, 3, 6), seed=7)
    parts, total = [], a.seq_lens
    for rank, (k, v, table, lengths) in enumerate(dealt(a, world)):
        out = torch.empty_like(a.q)
        parts.append(vllm.flash_attn_varlen_func(
            q=a.q, k=k, v=v, max_seqlen_q=a.max_q, cu_seqlens_q=a.cu_q, max_seqlen_k=int(lengths.max()), seqused_k=lengths,
            block_table=table, softmax_scale=0.2, causal=True, return_softmax_lse=True, fa_version=3, scheduler_metadata=None,
            num_splits=0, cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=total, out=out))
        assert parts[-1][0] is out
    out, lse = merged(parts)
    a.check(out.to(dtype), lse.float(), causal=True, softmax_scale=0.2)
    assert not all(torch.isfinite(lse).all() for _, lse in parts)  # some rank has no key that some query sees


def vllm_call(**change):
    a = Batch("cpu", torch.float32, *BATCHES["mixed"])
    call = dict(q=a.q, k=a.k, v=a.v, max_seqlen_q=a.max_q, cu_seqlens_q=a.cu_q, max_seqlen_k=a.max_k, seqused_k=a.seq_lens,
                block_table=a.table, causal=True, fa_version=3)
    return vllm.flash_attn_varlen_func(**{**call, **{name: x(a) if callable(x) else x for name, x in change.items()}})


@pytest.mark.parametrize("q_is_fp8", (False, True))
@pytest.mark.parametrize("engine", (vllm, sglang), ids=("vllm", "sglang"))
def test_fp8_caches(device, engine, q_is_fp8):
    """Codes and scales of an engine's FP8 cache, against the numbers that they are."""
    a = Batch(device, torch.bfloat16, *BATCHES["mixed"])
    batch, heads_k = a.seq_lens.shape[0], a.k.shape[-2]
    one = {name: torch.tensor(x, device=device).expand(batch, heads_k) for name, x in
           (("q_descale", 0.5), ("k_descale", 0.75), ("v_descale", 1.25))}
    codes = [x.to(torch.float8_e4m3fn) for x in (a.q, a.k, a.v)]
    q = codes[0] if q_is_fp8 else a.q
    if engine is vllm:
        def attend(q, k, v, **descales):
            return vllm.flash_attn_varlen_func(q, k, v, a.max_q, a.cu_q, a.max_k, seqused_k=a.seq_lens, block_table=a.table,
                                               causal=True, fa_version=3, **descales)
    else:
        def attend(q, k, v, **descales):
            return sglang.flash_attn_with_kvcache(q, k, v, page_table=a.table, cache_seqlens=a.seq_lens, cu_seqlens_q=a.cu_q,
                                                  max_seqlen_q=a.max_q, causal=True, **descales)
    out = attend(q, *codes[1:], **one)
    assert out.dtype == torch.bfloat16
    wide = q.float() * 0.5 if q_is_fp8 else q.float()
    wanted = attend(wide.bfloat16(), (codes[1].float() * 0.75).bfloat16(), (codes[2].float() * 1.25).bfloat16())
    torch.testing.assert_close(out, wanted, atol=0.15 if q_is_fp8 and device == "cpu" else 2e-2, rtol=0)


@pytest.mark.parametrize("change,error,message", (
    (dict(alibi_slopes=torch.ones(4), cp_world_size=2, cp_tot_seqused_k=torch.ones(1, dtype=torch.int32)), NotImplementedError,
     "alibi_slopes is given but cp_world_size = 2"),
    (dict(dropout_p=0.1), NotImplementedError, "dropout_p = 0.1 but"),
    (dict(return_attn_probs=True), NotImplementedError, "return_attn_probs = True but"),
    (dict(output_scale=torch.zeros(1)), NotImplementedError, "output_scale is given"),
    (dict(mask_mod=lambda a: print), NotImplementedError, "mask_mod is given"),
    (dict(aux_tensors=[1]), NotImplementedError, "aux_tensors = [1] but"),
    (dict(block_sparse_tensors=(1,)), NotImplementedError, "block_sparse_tensors = (1,) but"),
    (dict(dynamic_causal=torch.zeros(1)), NotImplementedError, "dynamic_causal is given"),
    (dict(fa_version=4), NotImplementedError, "fa_version = 4 but flash3 is taken for versions 2 and 3"),
    (dict(k=lambda a: a.k.to(torch.float8_e5m2)), NotImplementedError, "k.dtype = torch.float8_e5m2 but"),
    (dict(v=lambda a: a.v.to(torch.uint8)), NotImplementedError, "v.dtype = torch.uint8 but"),
    (dict(seqused_k=None), ValueError, "cu_seqlens_k is not given and seqused_k is not given"),
    (dict(cu_seqlens_k=lambda a: a.cu_k), ValueError, "cu_seqlens_k is given and seqused_k is given"),
    (dict(cu_seqlens_k=lambda a: a.cu_k, seqused_k=None), ValueError, "cu_seqlens_k is given and so is a page table"),
    (dict(window_size=[3]), ValueError, "window_size = [3] but it must be (left, right)"),
    (dict(out=lambda a: a.q[1:]), ValueError, "out.shape = (39, 4, 32) but q.shape = (40, 4, 32)"),
    (dict(out=lambda a: a.q.half()), TypeError, "out.dtype = torch.float16 but q.dtype = torch.float32"),
    (dict(max_seqlen_k=47), ValueError, "max_seqlen_k = 47 but sequence 3 has 48 tokens"),
    (dict(cp_world_size=2, cp_rank=2), ValueError, "cp_rank = 2 but cp_world_size = 2"),
    (dict(cp_world_size=2), ValueError, "cp_world_size = 2 but cp_tot_seqused_k is not given"),
    (dict(cp_world_size=2, window_size=(3, 0)), NotImplementedError, "window_size = (3, 0) with cp_world_size = 2"),
    (dict(cp_world_size=2, block_table=None), NotImplementedError, "cp_world_size = 2 without a block_table"),
), ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_vllm_errors(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        vllm_call(**change)


# ---- SGLang ----

@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", [{}, {"window_size": (6, 0)}, {"sinks": True}], ids=["plain", "window", "sinks"])
@pytest.mark.parametrize("name", BATCHES)
def test_sglang_extend_and_decode(device, dtype, name, options, page_size):
    """FlashAttentionBackend.forward_extend and forward_decode."""
    a = Batch(device, dtype, *BATCHES[name], page_size=page_size, seed=8)
    more = {"sinks": a.sink} if "sinks" in options else {}
    window = options.get("window_size", (-1, -1))
    out = sglang.flash_attn_with_kvcache(
        q=a.q, k_cache=a.k, v_cache=a.v, page_table=a.table, cache_seqlens=a.seq_lens, cu_seqlens_q=a.cu_q,
        cu_seqlens_k_new=a.cu_k, max_seqlen_q=a.max_q, softmax_scale=0.3, causal=True, window_size=window, softcap=0.0,
        k_descale=None, v_descale=None, return_softmax_lse=False, num_splits=0, ver=3, **more)
    a.check(out, causal=True, softmax_scale=0.3, window=window, sink=more.get("sinks"))


def test_sglang_cascade(device, dtype):
    """A tree of drafts: all queries on the keys that are there, each one on its own drafts, and both merged."""
    a = Batch(device, dtype, (2, 3), (30, 17), page_size=1, seed=9)
    drafts = Batch(device, dtype, (1,) * 5, (1, 2, 3, 1, 2), page_size=1, seed=9)
    drafts.k, drafts.v, drafts.q = a.k, a.v, a.q
    o, softmax_lse, *_ = sglang.flash_attn_with_kvcache(
        q=a.q, k_cache=a.k, v_cache=a.v, page_table=a.table, cache_seqlens=a.seq_lens, cu_seqlens_q=a.cu_q,
        cu_seqlens_k_new=a.cu_k, max_seqlen_q=3, softmax_scale=0.2, causal=False, window_size=(-1, -1), softcap=0.0, k_descale=None,
        v_descale=None, return_softmax_lse=True, num_splits=0)
    own, own_lse, *_ = sglang.flash_attn_with_kvcache(
        q=a.q, k_cache=a.k, v_cache=a.v, page_table=drafts.table, cache_seqlens=drafts.seq_lens, cu_seqlens_q=drafts.cu_q,
        cu_seqlens_k_new=drafts.cu_k, max_seqlen_q=1, softmax_scale=0.2, causal=False, window_size=(-1, -1), softcap=0.0,
        k_descale=None, v_descale=None, return_softmax_lse=True, num_splits=0)
    a.check(o, softmax_lse, softmax_scale=0.2)
    drafts.check(own, own_lse, softmax_scale=0.2)


def test_sglang_call_by_place(device, dtype):
    """As its wrapper hands the arguments on: 28 by their place, the rest by name."""
    a = Batch(device, dtype, (2, 9), (30, 9), page_size=4, seed=10)
    given = torch.empty_like(a.q)
    out, lse, *_ = sglang.flash_attn_with_kvcache(
        a.q, a.k, a.v, None, None, None, None, None, a.seq_lens, None, None, a.table, a.cu_q, a.cu_k, 9, None, None, None, None,
        0.2, True, (5, 0), 0, 2.0, True, None, 0, None, sm_margin=0, only_qv=False, return_softmax_lse=True, sinks=None, out=given)
    assert out is given
    a.check(out, lse, causal=True, softmax_scale=0.2, window=(5, 0), softcap=2.0)


def test_sglang_appends(device, dtype):
    """A cache without pages, of the elements of a larger batch, padded on the left; one length for all."""
    a = Batch(device, dtype, (2, 2, 2), (9, 9, 9), page_size=12, seed=11)
    g = torch.Generator().manual_seed(12)
    k, v = torch.randn(2, 3, 2, 2, 32, generator=g).to(device, dtype)
    elements, padding = a.table[:, 0].clone(), a.ints([2, 0, 5])
    out, lse = sglang.flash_attn_with_kvcache(a.q.unflatten(0, (3, 2)), a.k, a.v, k, v, cache_seqlens=7, cache_batch_idx=elements,
                                              cache_leftpad=padding, causal=True, attention_chunk=4, return_softmax_lse=True)
    for b in range(3):
        own = slice(int(padding[b]), 9)
        call = [x[None] for x in (a.q[2 * b:2 * b + 2], a.k[elements[b].item(), own], a.v[elements[b].item(), own])]
        (exact, exact_lse), (naive, naive_lse) = (f(*call, causal=True, chunk=4) for f in (oracle.exact, oracle.naive))
        oracle.assert_close(out[b], exact[0], naive[0])
        oracle.assert_close(lse[b], exact_lse[0], naive_lse[0], "lse")
        assert torch.equal(a.k[elements[b].item(), 7:9], k[b]) and torch.equal(a.v[elements[b].item(), 7:9], v[b])


def test_sglang_varlen(device, dtype):
    """The parts of an MLA prefill: keys that were there in one chunk of them, then the new ones."""
    a = Batch(device, dtype, (9, 20), (15, 4), page_size=32, heads_q=2, heads_k=2, dim=48, dim_v=32, seed=13)
    k, v = (torch.cat(x) for x in zip(*(a.keys(b) for b in range(2))))
    output, lse, *_ = sglang.flash_attn_varlen_func(
        q=a.q, k=k, v=v, cu_seqlens_q=a.cu_q, cu_seqlens_k=a.cu_k, max_seqlen_q=20, max_seqlen_k=15, softmax_scale=0.2,
        causal=False, return_softmax_lse=True)
    a.check(output, lse, softmax_scale=0.2)
    out = sglang.flash_attn_varlen_func(a.q, k, v, a.cu_q, a.cu_k, torch.tensor(20), torch.tensor(15), causal=True,
                                        window_size=(4, 0), sinks=a.sink[:2])
    a.check(out, causal=True, window=(4, 0), sink=a.sink[:2])


def test_sglang_varlen_of_a_dense_batch(device, dtype):
    a = Batch(device, dtype, (7, 7), (7, 7), page_size=7, seed=14)
    k, v = (torch.stack(x) for x in zip(*(a.keys(b) for b in range(2))))
    out = sglang.flash_attn_varlen_func(a.q.unflatten(0, (2, 7)), k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=7,
                                        max_seqlen_k=7, causal=True)
    a.check(out.flatten(0, 1), causal=True)


@pytest.mark.parametrize("change,message", (
    (dict(only_qv=True), "only_qv = True but"),
    (dict(score_mod=lambda a: print), "score_mod is given"),
    (dict(aux_tensors=[1]), "aux_tensors = [1] but"),
    (dict(ver=4), "ver = 4 but flash3 is taken for version 3"),
    (dict(k_cache=lambda a: a.k.to(torch.float8_e5m2)), "k_cache.dtype = torch.float8_e5m2 but"),
), ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_sglang_refuses(change, message):
    a = Batch("cpu", torch.float32, *BATCHES["mixed"])
    call = dict(q=a.q, k_cache=a.k, v_cache=a.v, page_table=a.table, cache_seqlens=a.seq_lens, cu_seqlens_q=a.cu_q, causal=True)
    call.update({name: x(a) if callable(x) else x for name, x in change.items()})
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        sglang.flash_attn_with_kvcache(**call)
    if "k_cache" in change:
        return
    dense = dict(q=a.q, k=a.q[:, :2], v=a.q[:, :2], cu_seqlens_q=a.cu_q, cu_seqlens_k=a.cu_q)
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        sglang.flash_attn_varlen_func(**dense, **{name: call[name] for name in change})


def test_versions_are_told_apart():
    with pytest.raises(ValueError, match="fa_version = 5 but it must be 2, 3 or 4"):
        vllm.is_fa_version_supported(5)
    with pytest.raises(NotImplementedError, match="compiles FlashAttention-4"):
        vllm.compile_flash_attn_varlen_func_from_specs()
    if not torch.cuda.is_available():
        assert not sglang.is_fa3_supported()
