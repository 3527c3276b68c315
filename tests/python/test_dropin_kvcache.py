# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache and what else of the drop-in takes a KV cache, against the definition in float64, caches bit for
bit; and torch.ops.flash_attn_3 there: opcheck, compilers, and scheduler metadata."""
import itertools

import pytest
import torch

import flash_attn_interface as fa
from cache_cases import Case

OPS = torch.ops.flash_attn_3
CHECKS = ("test_schema", "test_faketensor")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kvcache(**arguments):
    return fa.flash_attn_with_kvcache(**arguments, return_softmax_lse=True)


def needs(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("Hopper takes 16 bits")


PLACES = {"dense": {}, "elements": {"elements": True}, "padded": {"leftpad": True},
          "elements, padded": {"elements": True, "leftpad": True},
          **{f"pages of {size}": {"page_size": size} for size in (1, 2, 3, 16, 64)},
          **{f"shared pages of {size}": {"page_size": size, "shares_pages": True} for size in (1, 3, 16)},
          "padded pages": {"page_size": 16, "leftpad": True},
          **{f"rows of a table of pages of {size}": {"page_size": size, "elements": True, "leftpad": True} for size in (1, 16)}}


@pytest.mark.parametrize("new", [None, "dense", "packed"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_places(device, place, new):
    dtype = torch.bfloat16
    for rotary, causal, packed_q in itertools.product((None, "interleaved", "halves") if new else (None,), (True, False), (True, False)):
        case = Case(device, dtype, **place, new=new, rotary=rotary, causal=causal, packed_q=packed_q)
        results = case.check(kvcache, f"{rotary}, causal={causal}, packed_q={packed_q}:")
        if new is None:  # nothing was written: once more gives the same bits
            assert all(torch.equal(a, b) for a, b in zip(results, kvcache(**case.arguments)))


MASKS = [{}, {"causal": True}, {"window_size": (5, 0)}, {"window_size": (3, 2)}, {"window_size": (-1, 1)}, {"window_size": (0, 0)},
         {"attention_chunk": 8, "causal": True}, {"attention_chunk": 5}, {"softcap": 2.0, "causal": True}, {"softcap": -1.0},
         {"softmax_scale": 0.3}, {"causal": True, "window_size": (9, -1), "softcap": 5.0, "softmax_scale": 0.5}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_masks(device, dtype, options):
    needs(device, dtype)
    for page_size, new, seq_q in itertools.product((None, 16), (None, "packed"), (1, 5)):
        Case(device, dtype, page_size=page_size, new=new, rotary=new and "halves", seq_q=seq_q, **options).check(kvcache, f"{page_size}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(device, dtype):
    needs(device, dtype)
    for sink_dtype in {torch.float32, dtype}:
        sink = torch.tensor([0.5, -1.0, 2.0, -float("inf")], device=device).to(sink_dtype)
        Case(device, dtype, page_size=16, new="dense", causal=True, s_aux=sink).check(kvcache)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (20, 59), (192, 128), (256, 256)], ids=str)
def test_heads_and_dims(device, heads, dims):
    Case(device, torch.bfloat16, heads=heads, dim=dims[0], dim_v=dims[1], page_size=16, new="dense", rotary="interleaved",
         causal=True).check(kvcache)


@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [True, False])
def test_rotary_tables_and_offsets(device, tables, offsets):
    for rotary, causal in itertools.product(("interleaved", "halves"), (True, False)):
        case = Case(device, torch.bfloat16, new="packed", rotary=rotary, causal=causal, rotary_offsets=offsets, table_dtype=tables)
        case.check(kvcache)


@pytest.mark.parametrize("lengths", [(0,), (1,), (0, 0), (1, 1, 1), (60, 1, 0), (62,)], ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 64])
def test_short_and_full(device, lengths, page_size):
    for new, seq_q in itertools.product((None, "dense"), (1, 3)):
        out, lse = Case(device, torch.bfloat16, lengths=lengths, page_size=page_size, new=new, seq_q=seq_q, causal=True).check(kvcache)
        if new is None and lengths[-1] == 0:
            assert not out[-1].any() and (lse[-1] == -float("inf")).all()


def test_batches_of_nothing(device):
    for sizes in ({"lengths": (5,), "seq_q": 0}, {"lengths": (5, 3), "seq_q": 0, "page_size": 16}):
        out, lse = Case(device, torch.bfloat16, **sizes).check(kvcache)
        assert out.numel() == lse.numel() == 0


@pytest.mark.parametrize("seed", range(12))
def test_random(device, seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    new, place = pick(None, "dense", "packed"), pick(*PLACES.values())
    lengths = tuple(int(n) for n in torch.randint(0, 62, (pick(1, 2, 7),), generator=g))
    heads_k, group = pick(1, 2, 3), pick(1, 3, 4)
    Case(device, pick(torch.bfloat16, torch.float16), lengths=lengths, seq_q=pick(1, 2, 17), heads=(heads_k * group, heads_k),
         dim=pick(16, 64, 72), dim_v=pick(8, 64, 100), new=new, rotary=new and pick(None, "interleaved", "halves"),
         packed_q=pick(True, False), seed=seed, **place, **pick(*MASKS)).check(kvcache, f"seed {seed}:")


def test_a_decode_loop_is_a_prefill(device):
    """Token after token with the cache gives what one causal call gives."""
    dtype, steps = torch.bfloat16, 20
    q, k, v = (torch.randn(2, steps, h, 32, device=device).to(dtype) for h in (4, 2, 2))
    k_cache, v_cache = (torch.zeros(16, 4, 2, 32, device=device, dtype=dtype) for _ in range(2))  # pages of 4
    table = torch.randperm(16).view(2, 8).int().to(device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    outs = []
    for n in range(steps):
        now = slice(n, n + 1)
        outs.append(fa.flash_attn_with_kvcache(q[:, now], k_cache, v_cache, k[:, now], v[:, now], cache_seqlens=lengths,
                                               page_table=table, causal=True))
        lengths += 1
    wanted = fa.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(outs, 1), wanted, atol=2e-2, rtol=2e-2)


def test_cache_seqlens_is_one_number(device):
    case = Case(device, torch.bfloat16, lengths=(9, 9, 9), page_size=16, packed_q=True, new="dense")
    a = {**case.arguments, "cache_seqlens": 9}
    case.arguments = a
    case.check(kvcache)
    with pytest.raises(TypeError):
        kvcache(**{**a, "cache_seqlens": 9.5})


def by_fwd(**a):
    """The operator, called by position with all 34 arguments, as torch does."""
    window = a.get("window_size", (-1, -1))
    return OPS.fwd(a["q"], a["k_cache"], a["v_cache"], a.get("k"), a.get("v"), None, None, a.get("cu_seqlens_q"), None,
                   a.get("cu_seqlens_k_new"), None, a["cache_seqlens"], a.get("max_seqlen_q"), None, a.get("page_table"),
                   a.get("cache_batch_idx"), a.get("cache_leftpad"), a.get("rotary_cos"), a.get("rotary_sin"), a.get("rotary_seqlens"),
                   None, None, None, a.get("softmax_scale"), a.get("causal", False), *window, a.get("attention_chunk", 0),
                   a.get("softcap", 0.0), a.get("rotary_interleaved", True), None, 0, None, 0)


def by_private(**a):
    window = a.pop("window_size", (-1, -1))
    names = {"k_cache": "k", "v_cache": "v", "k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k", "cache_batch_idx": "kv_batch_idx",
             "cache_leftpad": "leftpad_k", "rotary_seqlens": "seqlens_rotary"}
    return fa._flash_attn_forward(**{names.get(name, name): x for name, x in a.items()}, window_size=window)


@pytest.mark.parametrize("call", [by_fwd, by_private])
@pytest.mark.parametrize("place", ["dense", "elements, padded", "pages of 3", "shared pages of 16"])
def test_private_functions_and_operators(device, call, place):
    for new, packed_q in itertools.product((None, "dense", "packed"), (True, False)):
        for rotary in ("interleaved", "halves"):
            case = Case(device, torch.bfloat16, **PLACES[place], new=new, rotary=new and rotary, packed_q=packed_q, window_size=(9, 0))
            case.check(call, f"{new}, {rotary}:")
            results = call(**case.arguments)
            assert len(results) == 4 and results[2].numel() == results[3].numel() == 0


def test_default_of_the_operators_rotary(device):
    """fwd's is not interleaved, _flash_attn_forward's is."""
    for operator, rotary in ((OPS.fwd, "halves"), (OPS._flash_attn_forward, "interleaved")):
        def call(**a):
            return operator(a["q"], a["k_cache"], a["v_cache"], a["k"], a["v"], seqused_k=a["cache_seqlens"],
                            rotary_cos=a["rotary_cos"], rotary_sin=a["rotary_sin"])
        Case(device, torch.bfloat16, new="dense", rotary=rotary).check(call)


def test_given_memory(device):
    case = Case(device, torch.bfloat16, page_size=3, new="dense", causal=True)
    out = torch.full((4, 4, 2, 24), 7.0, device=device, dtype=torch.bfloat16).transpose(1, 2)

    def call(**a):
        return OPS.fwd(a["q"], a["k_cache"], a["v_cache"], a["k"], a["v"], None, out, seqused_k=a["cache_seqlens"],
                       page_table=a["page_table"], is_causal=True)
    assert case.check(call)[0].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("name", ["page_table", "block_table"])
def test_varlen_with_pages(device, name):
    for size, by_ends in itertools.product((1, 16), (True, False)):
        case = Case(device, torch.bfloat16, page_size=size, shares_pages=True, packed_q=True, causal=True)

        def call(**a):
            ends = case.ends(list(case.lengths))
            lengths = {} if by_ends else {"seqused_k": a["cache_seqlens"]}
            return fa.flash_attn_varlen_func(a["q"], a["k_cache"], a["v_cache"], a["cu_seqlens_q"], ends if by_ends else None,
                                             a["max_seqlen_q"], 40, causal=True, return_attn_probs=True, **lengths,
                                             **{name: a["page_table"]})
        case.check(call)


def test_compile(device):
    for place, new in itertools.product(("dense", "pages of 16", "elements, padded"), (None, "dense", "packed")):
        case = Case(device, torch.bfloat16, **PLACES[place], new=new, rotary=new and "halves", causal=True)
        case.check(torch.compile(kvcache, fullgraph=True, backend="aot_eager"), f"{place}, {new}:")
        torch._dynamo.reset()


def test_compile_with_other_lengths(device):
    """A step of decoding compiles once: a cache that it wrote is read by what follows it in the graph."""
    def step(q, k_cache, v_cache, k, v, lengths):
        out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return out, k_cache.float().sum(), lengths + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = [torch.zeros(2, 16, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(4)]
    lengths = torch.tensor([0, 3], dtype=torch.int32, device=device)
    for _ in range(4):
        q, k, v = (torch.randn(2, 1, h, 32, device=device).bfloat16() for h in (4, 2, 2))
        wanted = step(q, *caches[:2], k, v, lengths)
        got = compiled(q, *caches[2:], k, v, lengths)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted)) and all(torch.equal(a, b) for a, b in zip(caches[:2], caches[2:]))
        lengths = got[2]


def of_fwd(case):
    """A case's tensors and options, as fwd and _flash_attn_forward name them."""
    names = {"cache_seqlens": "seqused_k", "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k"}
    a = {names.get(name, name): x for name, x in case.arguments.items()}
    return tuple(a.pop(name) for name in ("q", "k_cache", "v_cache")), a


@pytest.mark.parametrize("sizes", [{"page_size": 16}, {"elements": True, "leftpad": True}, {"page_size": 3, "packed_q": True}], ids=str)
def test_opcheck_of_forwards(device, sizes):
    tensors, options = of_fwd(Case(device, torch.bfloat16, **sizes))
    torch.library.opcheck(OPS.fwd.default, tensors, options, test_utils=CHECKS)
    torch.library.opcheck(OPS._flash_attn_forward.default, tensors, options)


def test_opcheck_of_the_others(device):
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=device)
    torch.library.opcheck(OPS.get_scheduler_metadata.default, (2, 1, 64, 4, 2, 64, 64, torch.bfloat16, lengths), test_utils=CHECKS)
    parts = torch.randn(3, 2, 5, 4, 16, device=device), torch.randn(3, 2, 5, 4, device=device)
    torch.library.opcheck(OPS.fwd_combine.default, parts, test_utils=CHECKS)
    torch.library.opcheck(OPS.fwd_combine.default, (*parts, torch.empty(2, 5, 4, 16, device=device)), test_utils=CHECKS)


def test_compile_of_a_forward_on_pages(device):
    tensors, options = of_fwd(Case(device, torch.bfloat16, page_size=16))
    compiled = torch.compile(lambda *a: OPS._flash_attn_forward(*a, **options)[:2], fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(*tensors), OPS._flash_attn_forward(*tensors, **options)))


def test_a_compiler_must_not_miss_an_append():
    """fwd's schema, which is upstream's, does not say that the cache is written."""
    case = Case(dtype=torch.bfloat16, new="dense").arguments
    for operator in (OPS.fwd, OPS._flash_attn_forward):
        call = torch.compile(lambda: operator(case["q"], case["k_cache"], case["v_cache"], case["k"], case["v"],
                                              seqused_k=case["cache_seqlens"])[1], backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="k_new is given but the schema of this operator"):
            call()
        torch._dynamo.reset()


def metadata(lengths, batch, seq_q=1, seq_k=64, **options):
    return fa.get_scheduler_metadata(batch, seq_q, seq_k, 4, 2, options.pop("headdim", 32), lengths, **options)


@pytest.mark.parametrize("options,vectors", [
    ({}, 3), ({"seq_q": 2}, 3), ({"causal": True}, 3), ({"causal": True, "seq_q": 2}, 4), ({"window_size": (5, 0)}, 3),
    ({"causal": True, "seq_q": 2, "window_size": (5, 3)}, 3), ({"window_size": (-1, 0), "seq_q": 2}, 4),
    ({"window_size": (63, -1), "seq_q": 2}, 3), ({"attention_chunk": 16, "seq_q": 2, "causal": True}, 3),
    ({"causal": True, "headdim": 128, "page_size": 16}, 4), ({"causal": True, "headdim": 64, "page_size": 16}, 3),
    ({"causal": True, "headdim": 128}, 3), ({"window_size": (70, 1), "seq_q": 3}, 3), ({"window_size": (70, 2), "seq_q": 3}, 3),
    ({"causal": True, "seq_q": 2, "max_seqlen_k_new": 2}, 4), ({"num_splits": 7, "has_softcap": True, "sm_margin": 2}, 3),
], ids=str)
def test_metadata_has_upstreams_size(device, options, vectors):
    """vectors of the batch size, rounded up to fours, and one number; a fourth vector for causal masks."""
    for batch in (1, 4, 5, 300):
        lengths = torch.full((batch,), 7, dtype=torch.int32, device=device)
        made = metadata(lengths, batch, **options)
        assert made.shape == (vectors * ((batch + 3) // 4 * 4) + 1,) and made.dtype == torch.int32 and made.device == lengths.device


def test_metadata_as_servers_use_it(device):
    """A buffer for the largest batch, of which each step takes a slice; with and without new keys."""
    largest = 12
    buffer = torch.full((1 + (largest + 3) // 4 * 4 * 4,), -7, dtype=torch.int32, device=device)
    for batch in (12, 5, 1):
        for new in (None, "dense"):
            sizes = {"lengths": tuple(range(3, 3 + batch)), "page_size": 16, "new": new, "causal": True}
            case, other = Case(device, torch.bfloat16, **sizes), Case(device, torch.bfloat16, **sizes)
            made = metadata(case.arguments["cache_seqlens"], batch, 2, page_size=16, causal=True, max_seqlen_k_new=2)
            n = made.shape[0]
            buffer[:n] = made
            wanted = fa.flash_attn_with_kvcache(**other.arguments)
            assert torch.equal(fa.flash_attn_with_kvcache(**case.arguments, scheduler_metadata=buffer[:n]), wanted)
            tensors, options = of_fwd(Case(device, torch.bfloat16, **{**sizes, "new": None}))
            options["is_causal"] = options.pop("causal")
            for again in range(2):  # it may be used again
                OPS.fwd(*tensors, **options, scheduler_metadata=buffer[:n])


def test_wrong_metadata():
    a = Case(dtype=torch.bfloat16).arguments
    right = metadata(a["cache_seqlens"], 4)
    for wrong, error, message in (
            (right.long(), TypeError, "scheduler_metadata.dtype = torch.int64 but it must be torch.int32"),
            (right[1:], ValueError, r"scheduler_metadata.shape = \(12,\) but the batch size is 4"),
            (metadata(a["cache_seqlens"], 8), ValueError, r"contiguous and \[13\] or \[17\]"),
            (right.repeat(2)[::2], ValueError, "contiguous"), (right[None], ValueError, "scheduler_metadata.shape"),
            (right.to("meta"), ValueError, "scheduler_metadata.device = meta but q.device = cpu"), ([], TypeError, "is a list")):
        with pytest.raises(error, match=message):
            fa.flash_attn_with_kvcache(**a, scheduler_metadata=wrong)
        if isinstance(wrong, torch.Tensor) and not wrong.is_meta:
            with pytest.raises(error, match=message):
                OPS.fwd(a["q"], a["k_cache"], a["v_cache"], seqused_k=a["cache_seqlens"], scheduler_metadata=wrong)
    for named, error in (({"cache_seqlens": a["cache_seqlens"].long()}, TypeError), ({"num_heads_kv": 3}, ValueError),
                         ({"batch_size": -1}, ValueError), ({"cache_seqlens": None}, TypeError)):
        with pytest.raises(error):
            fa.get_scheduler_metadata(**{**dict(batch_size=4, max_seqlen_q=1, max_seqlen_k=64, num_heads_q=4, num_heads_kv=2, headdim=32,
                                                cache_seqlens=a["cache_seqlens"]), **named})
