# SPDX-License-Identifier: Apache-2.0
"""What callers of FlashAttention-3 do, and what they rely on, each in a test of its own."""
import flash_attn_interface as fa
import pytest
import torch

import flash3
from cache_cases import Case
from flash_attn_3 import _C
from test_attention import make, pack

OPS = torch.ops.flash_attn_3


def kvcache(**arguments):
    return fa.flash_attn_with_kvcache(**arguments, return_softmax_lse=True)


def same(results, wanted):
    return all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_results_of_the_kvcache(device):
    case = Case(device, torch.bfloat16, page_size=16)
    out, lse, out_accum, lse_accum = kvcache(**case.arguments)
    assert out.shape == (4, 2, 4, 24) and lse.shape == (4, 4, 2) and out_accum.numel() == lse_accum.numel() == 0
    assert out_accum.dtype == lse_accum.dtype == torch.float32 and out_accum.device == out.device
    assert torch.equal(fa.flash_attn_with_kvcache(**case.arguments), out)
    packed = kvcache(**Case(device, torch.bfloat16, packed_q=True).arguments)
    assert packed[0].dim() == 3 and packed[1].shape == (4, packed[0].shape[0])


@pytest.mark.parametrize("given", [{"rotary_seqlens": "lengths"}, {"cu_seqlens_k_new": "ends"}], ids=str)
def test_what_comes_without_its_companion_is_ignored(device, given):
    case = Case(device, torch.bfloat16)
    lengths = {"lengths": case.arguments["cache_seqlens"], "ends": case.ends([1, 2, 3, 4])}
    wanted = kvcache(**case.arguments)
    assert same(kvcache(**case.arguments, **{name: lengths[x] for name, x in given.items()}), wanted)


HINTS = [{"num_splits": 4}, {"num_splits": 300}, {"num_splits": 1}, {"num_splits": None}, {"num_splits": -1}, {"sm_margin": 16},
         {"pack_gqa": True}, {"pack_gqa": False}, {"num_splits": 8, "sm_margin": 3, "pack_gqa": True}]


@pytest.mark.parametrize("hints", HINTS, ids=str)
def test_hints_change_no_result(device, hints):
    q, k, v = make(device, torch.bfloat16)
    for options in ({}, {"causal": True, "return_attn_probs": True}):
        wanted = fa.flash_attn_func(q, k, v, **options)
        assert same([wanted], [fa.flash_attn_func(q, k, v, **options, **hints)]) if not options else same(
            fa.flash_attn_func(q, k, v, **options, **hints), wanted)
    packed = pack(device, torch.bfloat16)
    assert torch.equal(fa.flash_attn_varlen_func(*packed, 64, 100, **hints), fa.flash_attn_varlen_func(*packed, 64, 100))
    case = Case(device, torch.bfloat16, page_size=16, causal=True)
    assert same(kvcache(**case.arguments, **hints), kvcache(**case.arguments))
    assert same(fa._flash_attn_forward(q, k, v, **hints), fa._flash_attn_forward(q, k, v))
    assert torch.equal(torch.compile(lambda: fa.flash_attn_func(q, k, v, **hints), backend="aot_eager", fullgraph=True)(),
                       fa.flash_attn_func(q, k, v))
    torch._dynamo.reset()


def test_a_margin_reaches_flash3s_calls(monkeypatch):
    """In the operator of each call, and on the way that needs none."""
    seen = []

    def watched(name, function, options):
        def call(*args, **named):
            seen.append((name, options(args, named)["sm_margin"]))
            return function(*args, **named)
        return call

    monkeypatch.setattr(fa, "run_forward", watched("function", fa.run_forward, lambda args, named: args[3]))
    monkeypatch.setattr(_C, "flash3_call", watched("operator", _C.flash3_call, lambda args, named: named))
    q, k, v = make("cpu", torch.bfloat16)
    packed, codes = pack("cpu", torch.bfloat16), [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    fa.flash_attn_func(q, k, v, sm_margin=3, return_attn_probs=True)
    fa.flash_attn_varlen_func(*packed, 64, 100, sm_margin=4)
    fa.flash_attn_func(*codes, sm_margin=5)
    OPS.fwd(q, k, v, sm_margin=6)
    OPS.fwd(q, k, v, out=torch.empty(2, 33, 4, 32, dtype=torch.bfloat16), sm_margin=7)
    assert seen == [("function", 3), ("function", 4), ("function", 5), ("operator", 6), ("operator", 7)]


def test_a_margin_below_none():
    q, k, v = make("cpu", torch.bfloat16)
    for call in (lambda: fa.flash_attn_func(q, k, v, sm_margin=-1), lambda: fa.flash_attn_with_kvcache(q, k, v, sm_margin=-1),
                 lambda: OPS.fwd(q, k, v, sm_margin=-1)):
        with pytest.raises(ValueError, match="sm_margin = -1 but it must be at least 0"):
            call()


def test_softcap_of_less_than_none(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    assert torch.equal(fa.flash_attn_func(q, k, v, softcap=-1.0), fa.flash_attn_func(q, k, v))
    packed = pack(device, torch.bfloat16)
    assert torch.equal(fa.flash_attn_varlen_func(*packed, 64, 100, softcap=-1.0), fa.flash_attn_varlen_func(*packed, 64, 100))
    with torch.no_grad():
        assert torch.equal(fa.flash_attn_func(q, k, v, softcap=-1.0), fa.flash_attn_with_kvcache(q, k, v, softcap=-2.0))
        assert torch.equal(OPS.fwd(q, k, v, softcap=-1.0)[0], fa.flash_attn_func(q, k, v))


def test_wide_values():
    q, k, v = make("cpu", torch.bfloat16, dim=64, dim_v=512)
    wanted = flash3.attention(q, k, v)
    for call in (fa.flash_attn_func, fa._flash_attn_forward, OPS.fwd, OPS._flash_attn_forward):
        out = call(q, k, v)
        assert torch.equal(out if torch.is_tensor(out) else out[0], wanted)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v), flash3.attention_with_kv_cache(q, k, v))
    with pytest.raises(ValueError, match=r"^v.shape\[3\] = 513 but head_dim_v must be from 1 to 512"):
        fa.flash_attn_func(q, k, torch.cat([v, v[..., :1]], -1))


@pytest.mark.parametrize("name", ["cache_seqlens", "page_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new",
                                  "rotary_seqlens"])
def test_lengths_of_64_bits(name):
    sizes = {"page_table": {"page_size": 16}, "cache_batch_idx": {"elements": True}, "cache_leftpad": {"leftpad": True},
             "cu_seqlens_q": {"packed_q": True}, "cu_seqlens_k_new": {"new": "packed"},
             "rotary_seqlens": {"new": "dense", "rotary": "halves", "rotary_offsets": True}}
    arguments = Case(dtype=torch.bfloat16, **sizes.get(name, {})).arguments
    for dtype in (torch.int64, torch.float32):
        with pytest.raises(TypeError, match=rf"^{name}.dtype = .*int32"):
            kvcache(**{**arguments, name: arguments[name].to(dtype)})


ERRORS = {
    "k is given but v is not": lambda a: {"v": None},
    "k is given but cache_seqlens is not": lambda a: {"cache_seqlens": None},
    "rotary_cos is given but k is not": lambda a: {"k": None, "v": None},
    "v_cache.shape[2] = 2 but k_cache.shape[2] = 1; k_cache and v_cache must": lambda a: {"k_cache": a["k_cache"][:, :, :1]},
    "k.shape[3] = 8 but k_cache.shape[3] = 32": lambda a: {"k": a["k"][..., :8]},
    "cache_seqlens[0] = 80": lambda a: {"cache_seqlens": a["cache_seqlens"] + 43},
    "page_table[0][0] = 1000000000": lambda a: {"page_table": torch.full_like(a["page_table"], 10**9)},
    "cache_batch_idx = [0, 1, 2, 4] but page_table.shape[0] = 4": lambda a: {"cache_batch_idx": torch.tensor([0, 1, 2, 4], dtype=torch.int32)},
    "cache_batch_idx = [0, 1, -1, 2] but page_table.shape[0]": lambda a: {"cache_batch_idx": torch.tensor([0, 1, -1, 2], dtype=torch.int32)},
    "cache_batch_idx.shape = (3,) but the batch size is 4": lambda a: {"cache_batch_idx": a["cache_seqlens"][:3]},
    "cache_batch_idx.dtype = torch.int64 but": lambda a: {"cache_batch_idx": torch.arange(4)},
    "page_table.shape = (0, 5) but cache_batch_idx is given": lambda a: {"cache_batch_idx": a["cache_seqlens"],
                                                                        "page_table": a["page_table"][:0, :1].expand(0, 5)},
    "attention_chunk = -4 but": lambda a: {"attention_chunk": -4},
    "page_table and block_table are both given": lambda a: {"block_table": a["page_table"]},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_have_the_callers_names(message):
    arguments = Case(dtype=torch.bfloat16, page_size=16, new="dense", rotary="halves").arguments
    before = arguments["k_cache"].clone()
    with pytest.raises((ValueError, TypeError)) as error:
        kvcache(**{**arguments, **ERRORS[message](arguments)})
    if "both" in message:
        assert "both given" in str(error.value)
    else:
        assert str(error.value).startswith(message)
    assert torch.equal(before, arguments["k_cache"])


def meta(arguments, *names):
    return {name: x.to("meta") if isinstance(x, torch.Tensor) and (name in names or not names) else x for name, x in arguments.items()}


def test_tensors_on_another_device():
    arguments = Case(dtype=torch.bfloat16, page_size=16).arguments
    appending = Case(dtype=torch.bfloat16, new="packed", rotary="halves").arguments
    for call in (arguments, appending):
        for name in (name for name, x in call.items() if isinstance(x, torch.Tensor)):
            with pytest.raises(ValueError, match=r"\.device = (meta|cpu) but .* = (meta|cpu); all tensors must be on one device"):
                kvcache(**meta(call, name))
    q, k, v = make("cpu", torch.bfloat16)
    for tensors in ((q.to("meta"), k, v), (q, k.to("meta"), v), (q, k, v.to("meta"))):
        for call in (fa.flash_attn_func, OPS.fwd, OPS._flash_attn_forward, torch.ops.flash3.forward, torch.ops.flash3.inference,
                     lambda *a: OPS.fwd(*a, seqused_k=torch.zeros(2, dtype=torch.int32))):
            with pytest.raises(ValueError, match="all tensors must be on one device"):
                call(*tensors)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        OPS.fwd(q, k, v, seqused_k=torch.zeros(2, dtype=torch.int32, device="meta"))


def test_tensors_without_memory_give_such():
    for sizes in ({"page_size": 16}, {"new": "dense", "rotary": "halves"}, {"packed_q": True, "elements": True}):
        arguments = Case(dtype=torch.bfloat16, **sizes).arguments
        wanted = kvcache(**arguments)
        for got, x in zip(kvcache(**meta(arguments)), wanted, strict=True):
            assert got.device.type == "meta" and got.shape == x.shape and got.dtype == x.dtype
    q, k, v = (x.to("meta") for x in make("cpu", torch.bfloat16))
    assert fa.flash_attn_func(q, k, v).device.type == OPS.fwd(q, k, v)[1].device.type == "meta"


def test_gradients_through_a_cache_raise(device):
    for sizes in ({"page_size": 16}, {"new": "dense"}):
        for name in ("q", "k_cache", "k"):
            arguments = Case(device, torch.bfloat16, **sizes).arguments
            if name not in arguments or name == "k_cache" and "k" in arguments:  # torch allows no writes into such a leaf
                continue
            arguments[name].requires_grad_()
            with torch.no_grad():
                assert not kvcache(**arguments)[0].requires_grad
            out = fa.flash_attn_with_kvcache(**arguments)  # upstream's forward runs as well
            assert torch.equal(out, kvcache(**arguments)[0])
            with pytest.raises(NotImplementedError, match=f"^{name}.requires_grad is True but there are no gradients"):
                out.sum().backward()
            with pytest.raises(Exception, match=f"{name}.requires_grad is True"):
                torch.compile(fa.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)(**arguments)
            torch._dynamo.reset()
    a = Case(device, torch.bfloat16, page_size=16).arguments
    out = OPS._flash_attn_forward(a["q"].requires_grad_(), a["k_cache"], a["v_cache"], page_table=a["page_table"],
                                  seqused_k=a["cache_seqlens"])[0]
    with pytest.raises(NotImplementedError, match="k and v are a cache, and there are no gradients"):
        out.sum().backward()


def test_lengths_alone_have_gradients(device):
    """The private function's: no cache, but keys that do not count."""
    q, k, v = make(device, torch.bfloat16, grad=True)
    used = torch.tensor([5, 50], dtype=torch.int32, device=device)
    out = fa._flash_attn_forward(q, k, v, seqused_k=used)[0]
    wanted = flash3.attention(q, k, v, seqused_k=used)
    assert torch.equal(out, wanted)
    for a, b in zip(torch.autograd.grad(out.sum(), [q, k, v]), torch.autograd.grad(wanted.sum(), [q, k, v])):
        torch.testing.assert_close(a, b)


def test_an_append_is_counted_as_a_write(device):
    """Who saved the cache for a backward must not get gradients of other keys."""
    arguments = Case(device, torch.bfloat16, new="dense").arguments
    leaf = torch.ones((), device=device, dtype=torch.bfloat16, requires_grad=True)
    product = (arguments["k_cache"] * leaf).sum()
    kvcache(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("page_size", (None, 16))
@pytest.mark.parametrize("q_dtype", (torch.bfloat16, torch.float8_e4m3fn), ids=str)
def test_fp8_caches(device, q_dtype, page_size):
    case = Case(device, torch.bfloat16, page_size=page_size, new="dense", causal=True).arguments
    batch, _, heads_k, _ = case["k"].shape
    descale = {f"{name}_descale": torch.rand(batch, heads_k, device=device) + 0.5 for name in "qkv"}
    narrow = ("k_cache", "v_cache", *(("q", "k", "v") if q_dtype == torch.float8_e4m3fn else ()))
    fp8 = {name: x.to(torch.float8_e4m3fn) if name in narrow else x for name, x in case.items()}
    own = {name: x.clone() if name in ("k_cache", "v_cache") else x for name, x in fp8.items()}
    out, lse, *_ = kvcache(**fp8, **descale)
    scales = {name.replace("descale", "scale"): x for name, x in descale.items() if name[0] != "q" or q_dtype.itemsize == 1}
    own["k_new"], own["v_new"], own["seqused_k"] = own.pop("k"), own.pop("v"), own.pop("cache_seqlens")
    wanted = flash3.attention_with_kv_cache(**own, **scales, return_lse=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    for name in ("k_cache", "v_cache"):  # what was appended
        assert torch.equal(fp8[name].view(torch.uint8), own[name].view(torch.uint8))
        assert not torch.equal(fp8[name].float(), case[name].to(torch.float8_e4m3fn).float())


def test_first_releases_names(device):
    case = Case(device, torch.bfloat16, page_size=16, causal=True)
    arguments = dict(case.arguments)
    wanted = kvcache(**arguments)[:2]
    arguments["block_table"] = arguments.pop("page_table")
    assert same(kvcache(**arguments, gqa_parallel=True, max_seqlen_k_hint=64), wanted)


def test_transformers_finds_its_parameters():
    """It looks for them in the signatures, and calls with what it finds."""
    import inspect
    varlen, cache = (set(inspect.signature(f).parameters) for f in (fa.flash_attn_varlen_func, fa.flash_attn_with_kvcache))
    assert {"page_table", "block_table", "s_aux", "softcap", "deterministic", "dropout_p"} <= varlen
    assert {"page_table", "block_table", "cache_seqlens"} <= cache


def test_combine(device):
    q, k, v = make(device, torch.bfloat16, seq_k=60)
    parts = [flash3.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 10), (10, 60), (60, 60))]
    out_partial = torch.stack([out for out, _ in parts]).float()
    lse_partial = torch.stack([lse for _, lse in parts]).transpose(-1, -2)
    weights = torch.softmax(lse_partial.double(), 0)
    wanted, wanted_lse = (weights[..., None] * out_partial.double()).sum(0), torch.logsumexp(lse_partial.double(), 0)
    out, lse = fa.flash_attn_combine(out_partial, lse_partial)
    assert out.dtype == torch.float32 and out.shape == q.shape
    torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-6, rtol=1e-6)
    for other in (out_partial.transpose(2, 3).contiguous().transpose(2, 3), out_partial[..., :24]):  # heads first; gaps
        got = fa.flash_attn_combine(other, lse_partial)[0]
        torch.testing.assert_close(got, out[..., :other.shape[-1]])
    wide = torch.cat([out_partial] * 16, -1)  # as of MLA: 512
    torch.testing.assert_close(fa.flash_attn_combine(wide, lse_partial)[0], torch.cat([out] * 16, -1))
    given = torch.empty(2, 4, 33, 32, dtype=torch.bfloat16, device=device).transpose(1, 2)
    assert fa.flash_attn_combine(out_partial, lse_partial, given)[0].data_ptr() == given.data_ptr()
    assert torch.equal(given, out.bfloat16())
    assert torch.equal(fa.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.float16)[0], out.half())
    empty = fa.flash_attn_combine(out_partial[2:], lse_partial[2:])
    assert not empty[0].any() and (empty[1] == -float("inf")).all()
    compiled = torch.compile(fa.flash_attn_combine, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(out_partial, lse_partial)[0], out)
    for wrong, message in (((out_partial[0], lse_partial), "out_partial.ndim = 4 but it must be 5"),
                           ((out_partial, lse_partial[1:]), "lse_partial.shape = "),
                           ((out_partial, lse_partial, given[:1]), "out.shape = ")):
        with pytest.raises(ValueError, match=message):
            fa.flash_attn_combine(*wrong)
    with pytest.raises(TypeError, match="out_partial.dtype = "):
        fa.flash_attn_combine(out_partial.bfloat16(), lse_partial)


# FlashAttention-3's interface with FP8 tensors and descales, over flash3.


def fp8(device, **sizes):
    """FP8 q, k and v, and descales [batch, heads_k] of three different tensors."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make(device, torch.float32, **sizes))
    g = torch.Generator().manual_seed(5)
    return q, k, v, {f"{name}_descale": (torch.rand(2, 2, generator=g) + 0.5).to(device) for name in "qkv"}


def as_scales(descales):
    return {name.replace("descale", "scale"): x for name, x in descales.items()}


def test_fp8(device):
    q, k, v, descales = fp8(device, dim=64)
    for given in ({}, descales, {name: x[:1, :1].expand(2, 2) for name, x in descales.items()}, {"v_descale": descales["v_descale"]}):
        out, lse = fa.flash_attn_func(q, k, v, causal=True, **given, return_attn_probs=True)
        wanted, wanted_lse = flash3.attention(q, k, v, causal=True, **as_scales(given), return_lse=True)
        assert out.dtype == torch.bfloat16 and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    wanted = flash3.attention(q, k, v, **as_scales(descales))
    given = torch.empty_like(wanted)
    assert torch.equal(fa._flash_attn_forward(q, k, v, out_=given, **descales)[0], wanted) and torch.equal(given, wanted)
    assert torch.equal(OPS.fwd(q, k, v, **descales)[0], wanted)
    assert torch.equal(OPS._flash_attn_forward(q, k, v, **descales)[0], wanted)
    lengths = torch.tensor([10, 50], dtype=torch.int32, device=device)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **descales),
                       flash3.attention(q, k, v, seqused_k=lengths, **as_scales(descales)))
    grouped = torch.cat([x.view(torch.uint8)[:, :33] for x in (q, k, v)], 2).view(torch.float8_e4m3fn)
    assert torch.equal(fa.flash_attn_qkvpacked_func(grouped, num_heads_q=4, **descales),
                       flash3.attention(q, k[:, :33], v[:, :33], **as_scales(descales)))
    compiled = torch.compile(lambda q: fa.flash_attn_func(q, k, v, **descales), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), wanted)


def test_fp8_of_packed_sequences(device):
    q, k, v, cu_q, cu_k = pack(device, torch.float32, dim=64)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    descales = {f"{name}_descale": (torch.arange(12, device=device).view(6, 2) / 10 + 0.3) for name in "qkv"}
    out, lse = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 64, 100, causal=True, **descales, return_attn_probs=True)
    for b in range(6):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = fa.flash_attn_func(q[rows][None], k[keys][None], v[keys][None], causal=True,
                                   **{name: x[b:b + 1] for name, x in descales.items()})
        # On a GPU the tiles may differ, and so the weights' rounding.
        step = float(alone.abs().amax()) / 16 if alone.is_cuda and alone.numel() else 1e-5
        torch.testing.assert_close(out[rows][None], alone, rtol=0.016, atol=step)


def test_fp8_has_no_gradients():
    q, k, v, _ = fp8("cpu")
    with pytest.raises(NotImplementedError, match="no FP8 backward; it takes the float16"):  # upstream's forward runs too
        fa.flash_attn_func(q.requires_grad_(), k, v).sum().backward()
    out, lse = flash3.attention(q.detach(), k, v, return_lse=True)
    with pytest.raises(NotImplementedError, match="no FP8 backward"):
        fa._flash_attn_backward(out, q.detach(), k, v, out, lse)


def test_fp8_errors_have_upstreams_names():
    q, k, v, _ = fp8("cpu")
    for name, descale, error, message in (("q", torch.ones(2, 4), ValueError, r"q_descale.shape\[1\] = 4 but k.shape\[2\] = 2"),
                                          ("k", torch.ones(3, 2), ValueError, r"k_descale.shape\[0\] = 3 but q.shape\[0\] = 2"),
                                          ("v", torch.ones(2, 2).half(), TypeError, "v_descale.dtype = ")):
        for function in (fa.flash_attn_func, lambda *a, **o: OPS.fwd(*a, **o)):
            with pytest.raises(error, match="^" + message):
                function(q, k, v, **{f"{name}_descale": descale})


def test_descales_of_16_bits_are_ignored(device):
    """As upstream does: vLLM gives them whatever the dtype."""
    q, k, v = make(device, torch.bfloat16)
    ones = torch.full((2, 2), 3.0, device=device)
    assert torch.equal(fa.flash_attn_func(q, k, v, q_descale=ones, k_descale=ones, v_descale=ones), flash3.attention(q, k, v))


def test_kvcache_of_the_first_releases(device):
    q, k, v, _ = fp8(device, seq_q=1, dim=64)
    one, two = torch.tensor([0.5], device=device), torch.tensor([2.0], device=device)
    results = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, causal=True, gqa_parallel=False, max_seqlen_k_hint=50,
                                         descale_q=one, descale_k=two, descale_v=two, return_softmax_lse=True)
    used = torch.full((2,), 20, dtype=torch.int32, device=device)
    wanted = flash3.attention(q, k, v, causal=True, seqused_k=used, q_scale=one, k_scale=two, v_scale=two, return_lse=True)
    assert len(results) == 2 and all(torch.equal(a, b) for a, b in zip(results, wanted))
    with pytest.raises(TypeError, match="descale_k and k_descale are both given"):
        fa.flash_attn_with_kvcache(q, k, v, k_descale=one, descale_k=one)
