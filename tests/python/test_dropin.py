# SPDX-License-Identifier: Apache-2.0
"""flash_attn_interface, flash_attn_3 and torch.ops.flash_attn_3 over flash3: FlashAttention-3's interface to the letter."""
import inspect
import re
import subprocess
import sys

import pytest
import torch

import flash3
import flash_attn_config
import flash_attn_interface as fa
from test_attention import make, pack

OPS = torch.ops.flash_attn_3

# Names, order and defaults; what follows "|" is ours.
SIGNATURES = {
    "flash_attn_func": """q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
        return_attn_probs=False | s_aux=None, dropout_p=0.0""",
    "flash_attn_varlen_func": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
        return_attn_probs=False | s_aux=None, dropout_p=0.0, page_table=None, block_table=None""",
    "flash_attn_qkvpacked_func": """qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
        return_attn_probs=False""",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": """q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False | s_aux=None,
        gqa_parallel=None, max_seqlen_k_hint=None, descale_q=None, descale_k=None, descale_v=None, block_table=None""",
    "get_scheduler_metadata": """batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
        page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
        num_splits=0, pack_gqa=None, sm_margin=0""",
    "_flash_attn_forward": """q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0 | s_aux=None, deterministic=False, is_causal=None, window_size=None, out=None""",
    "_flash_attn_backward": """dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0 | seqused_q=None,
        seqused_k=None, causal=None, window_size=None""",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    theirs, _, ours = re.sub(r"\s+", " ", SIGNATURES[name]).partition(" | ")
    scope = {"torch": torch}
    exec(f"def wanted({theirs}{', ' + ours if ours else ''}): pass", scope)
    wanted, got = (inspect.signature(f).parameters for f in (scope["wanted"], getattr(fa, name)))
    assert [(p.name, p.default, p.kind) for p in got.values()] == [(p.name, p.default, p.kind) for p in wanted.values()]


SCHEMAS = {
    "fwd": "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
           "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale "
           "softmax_scale is_causal window_size_left window_size_right attention_chunk softcap is_rotary_interleaved "
           "scheduler_metadata num_splits pack_gqa sm_margin | s_aux deterministic",
    "bwd": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k "
           "softmax_scale is_causal window_size_left window_size_right softcap deterministic sm_margin",
    "fwd_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k "
                              "cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size max_seqlen_k_new "
                              "is_causal window_size_left window_size_right attention_chunk has_softcap num_splits pack_gqa "
                              "sm_margin",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    schema = getattr(OPS, name).default._schema
    assert [a.name for a in schema.arguments] == SCHEMAS[name].replace("| ", "").split()
    if name == "fwd":
        assert len(SCHEMAS[name].split("|")[0].split()) == 34
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        assert defaults["num_splits"] == 0 and defaults["is_rotary_interleaved"] is False and defaults["window_size_left"] == -1
        assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["k_new", "v_new", "out"]
    if name == "bwd":
        assert len(schema.returns) == 8
        assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["dq", "dk", "dv"]


def test_modules():
    import flash_attn_3
    import flash_attn_3.flash_attn_config
    import flash_attn_3.flash_attn_interface
    assert flash_attn_3.flash_attn_interface is fa and flash_attn_3.flash_attn_config is flash_attn_config
    from flash_attn_3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward  # noqa: F401
    assert flash_attn_3.__version__ and flash_attn_3._C and fa.flash_attn_3_gpu is OPS
    flags = flash_attn_config.CONFIG["build_flags"]
    assert all(name.startswith("FLASHATTENTION_DISABLE_") for name in flags)
    assert flags["FLASHATTENTION_DISABLE_HDIM192"] is False and flags["FLASHATTENTION_DISABLE_PAGEDKV"] is False and \
        flags["FLASHATTENTION_DISABLE_SM8x"] is True
    assert [fa.round_up_headdim(d) for d in (1, 64, 65, 128, 129, 192, 193)] == [64, 64, 96, 128, 192, 192, 256]
    assert fa.round_multiple(5, 4) == 8


def test_func_is_flash3s_attention(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    sink = torch.randn(4, device=device, requires_grad=True)
    for options, ours in (({}, {}), ({"causal": True}, {"causal": True}),
                          ({"window_size": (5, 0), "softcap": 3.0}, {"window": (5, 0), "softcap": 3.0}),
                          ({"window_size": torch.tensor([7, -1]), "causal": True}, {"window": (7, None), "causal": True}),
                          ({"attention_chunk": 8, "softmax_scale": 0.2}, {"chunk": 8, "softmax_scale": 0.2}),
                          ({"s_aux": sink, "pack_gqa": True, "num_splits": 0}, {"sink": sink})):
        out, lse = fa.flash_attn_func(q, k, v, **options, deterministic=True, return_attn_probs=True)
        wanted, wanted_lse = flash3.attention(q, k, v, **ours, deterministic=True, return_lse=True)
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse) and lse.shape == (2, 4, 33)
        leaves = [q, k, v] + ([sink] if "s_aux" in options else [])
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        for a, b in zip(torch.autograd.grad([out, lse], leaves, [dout, dlse]),
                        torch.autograd.grad([wanted, wanted_lse], leaves, [dout, dlse])):
            assert torch.equal(a, b)
    assert torch.is_tensor(fa.flash_attn_func(q, k, v))
    # By position, as upstream's own tests call it.
    assert torch.equal(fa.flash_attn_func(q, k, v, None, True), flash3.attention(q, k, v, causal=True))
    assert torch.equal(fa.FlashAttnFunc.apply(q, k, v, None, True), flash3.attention(q, k, v, causal=True))


def test_varlen_is_flash3s_attention(device):
    q, k, v, cu_q, cu_k = pack(device, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    wanted, wanted_lse = flash3.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=64,
                                          max_seqlen_k=100, deterministic=True, return_lse=True)
    for longest in ((64, 100), (torch.tensor(64), torch.tensor(100))):  # some callers pass tensors
        out, lse = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, causal=True, deterministic=True,
                                             return_attn_probs=True)
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, [q, k, v], dout), torch.autograd.grad(wanted, [q, k, v], dout)):
        assert torch.equal(a, b)
    used = torch.tensor([3, 0, 60, 1, 10, 17], dtype=torch.int32, device=device)
    torch.testing.assert_close(
        fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 64, 100, seqused_q=used),
        flash3.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=64, max_seqlen_k=100, seqused_q=used))


def test_qkvpacked(device):
    q, k, v = make(device, torch.bfloat16, seq_k=33, heads_k=4)
    wanted = flash3.attention(q, k, v, causal=True)
    assert torch.equal(fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True), wanted)
    grouped = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    assert torch.equal(fa.flash_attn_qkvpacked_func(grouped, causal=True, num_heads_q=4),
                       flash3.attention(q, k[:, :, :2], v[:, :, :2], causal=True))
    for wrong in (grouped, grouped[..., None, None], torch.stack([q, k], 2)):
        with pytest.raises(AssertionError):
            fa.flash_attn_qkvpacked_func(wrong)
    with pytest.raises(AssertionError, match="even number of heads"):
        fa.flash_attn_qkvpacked_func(grouped, num_heads_q=3)


def test_kvcache(device):
    q, k, v = make(device, torch.bfloat16, seq_q=1, seq_k=64)
    lengths = torch.tensor([10, 64], dtype=torch.int32, device=device)
    for given in (lengths, 40):
        used = lengths if given is lengths else torch.full_like(lengths, 40)
        out = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=given, causal=True)
        assert torch.equal(out, flash3.attention(q, k, v, causal=True, seqused_k=used))
    results = fa.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    assert len(results) == 4 and torch.equal(results[1], flash3.attention(q, k, v, return_lse=True)[1])
    metadata = fa.get_scheduler_metadata(2, 1, 64, 4, 2, 32, lengths, num_splits=0)
    assert metadata.dtype == torch.int32
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, scheduler_metadata=metadata),
                       flash3.attention(q, k, v, seqused_k=lengths))
    packed_q = torch.randn(5, 4, 32, device=device).bfloat16()
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    assert torch.equal(fa.flash_attn_with_kvcache(packed_q, k, v, cache_seqlens=lengths, cu_seqlens_q=cu, max_seqlen_q=3,
                                                  causal=True),
                       flash3.attention(packed_q, k, v, causal=True, seqused_k=lengths, cu_seqlens_q=cu, max_seqlen_q=3))
    with pytest.raises(AssertionError, match="k_cache must have contiguous last dimension"):
        fa.flash_attn_with_kvcache(q, k.transpose(1, 3).contiguous().transpose(1, 3), v)


REFUSED = {
    "softmax_scale": (fa.flash_attn_func, {"softmax_scale": 0}),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("compiled", [False, True])
def test_refused_by_name(name, compiled):
    q, k, v = make("cpu", torch.bfloat16)
    function, options = REFUSED[name]
    name = name.partition(" ")[0]
    if compiled:
        call = torch.compile(lambda q, k, v: function(q, k, v, **options), backend="aot_eager")
        with pytest.raises(Exception, match=rf"{name} (=|is given)"):
            call(q, k, v)
        return
    with pytest.raises(NotImplementedError, match=rf"^{name} (=|is given)"):
        function(q, k, v, **options)


def test_operators_are_seen_by_who_looks():
    q, k, v = make("cpu", torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fa.flash_attn_func(q, k, v)
    assert "flash_attn_3::_flash_attn_forward" in {event.key for event in profile.key_averages()}


def test_errors_have_flash3s_types():
    q, k, v = make("cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="same head_dim"):
        fa.flash_attn_func(q, k[..., :8], v)
    with pytest.raises(TypeError, match="same dtype"):
        fa.flash_attn_func(q, k.half(), v)


def test_forward_spellings(device):
    q, k, v = make(device, torch.bfloat16)
    wanted = fa._flash_attn_forward(q, k, v, causal=True, window_size_left=5, window_size_right=0)
    assert len(wanted) == 4 and wanted[2].numel() == wanted[3].numel() == 0
    for spelling in ({"is_causal": True, "window_size": (5, 0)}, {"causal": True, "window_size": (5, -1)}):
        got = fa._flash_attn_forward(q, k, v, **spelling)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    given = torch.empty(2, 4, 33, 32, device=device, dtype=torch.bfloat16).transpose(1, 2)
    got = fa._flash_attn_forward(q, k, v, out_=given, causal=True, window_size_left=5)
    assert got[0].data_ptr() == given.data_ptr() and torch.equal(given, wanted[0]) and torch.equal(got[1], wanted[1])
    # The spellings of 2.8: out, and window_size, a pair, by position, with what follows it.
    nothing = (None,) * 16
    got = fa._flash_attn_forward(q, k, v, None, None, None, given.zero_(), *nothing, None, True, (5, 0), 0, 2.0, False, None, 2, True,
                                 8)
    wanted = fa._flash_attn_forward(q, k, v, causal=True, window_size_left=5, softcap=2.0)
    assert torch.equal(given, wanted[0]) and torch.equal(got[1], wanted[1])
    got = fa._flash_attn_forward(q, k, v, None, None, None, None, *nothing, None, True, [5, 0], softcap=2.0, out=given.zero_())
    assert got[0].data_ptr() == given.data_ptr() and torch.equal(given, wanted[0]) and torch.equal(got[1], wanted[1])
    with pytest.raises(TypeError, match="out and out_ are both given"):
        fa._flash_attn_forward(q, k, v, out_=given, out=given)


def test_backward_spellings(device):
    q, k, v = make(device, torch.bfloat16)
    out, lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    wanted = flash3.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)[:3]
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    given = [torch.empty_like(x) for x in (q, k, v)]
    softmax_d = fa._flash_attn_backward(dout, q, k, v, out, lse, None, None, None, None, None, None, *given, None, True, -1, -1,
                                        0.0, True)
    assert torch.equal(softmax_d, delta)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted))
    given = [torch.empty_like(x) for x in (q, k, v)]
    results = fa._flash_attn_backward(dout, q, k, v, out, lse, dq=given[0], dk=given[1], dv=given[2], window_size=(-1, -1),
                                      causal=True, deterministic=True)
    assert len(results) == 4 and all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(results, given))
    assert all(torch.equal(a, b) for a, b in zip(given, wanted))
    eight = OPS.bwd(dout, q, k, v, out, lse, is_causal=True, deterministic=True)
    assert len(eight) == 8 and all(torch.equal(a, b) for a, b in zip(eight, wanted))
    of_2_8 = [torch.empty_like(x) for x in (q, k, v)]  # window_size, a pair, by position
    results = fa._flash_attn_backward(dout, q, k, v, out, lse, None, None, None, None, None, None, *of_2_8, None, True, (-1, -1), 0.0,
                                      True, 8)
    assert len(results) == 4 and all(torch.equal(a, b) for a, b in zip(of_2_8, wanted)) and torch.equal(results[3], delta)
    with pytest.raises(ValueError, match="sm_margin = -1 but it must be at least 0"):
        fa._flash_attn_backward(dout, q, k, v, out, lse, sm_margin=-1)


def test_backward_of_used_lengths_without_packing(device):
    """Upstream ignores seqused here, and is silently wrong."""
    q, k, v = make(device, torch.bfloat16)
    used = torch.tensor([5, 50], dtype=torch.int32, device=device)
    out, lse = flash3.attention(q, k, v, seqused_k=used, return_lse=True)
    dout = torch.randn_like(out)
    dk = torch.empty_like(k)
    fa._flash_attn_backward(dout, q, k, v, out, lse, sequed_k=used, dk=dk, deterministic=True)
    wanted = flash3.attention_backward(dout, q, k, v, out, lse, seqused_k=used, deterministic=True)
    assert torch.equal(dk, wanted.dk) and not dk[0, 5:].any()


@pytest.mark.parametrize("dim", [20, 59, 111])
def test_head_dims_that_are_no_multiples_of_8(device, dim):
    q, k, v = make(device, torch.bfloat16, dim=dim, grad=True)
    out = fa.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, flash3.attention(q, k, v, causal=True))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.float().sum(), [q, k, v]))


def test_none_is_no_tensor():
    q, k, v = make("cpu", torch.bfloat16)
    for call in (lambda: fa.flash_attn_func(None, k, v), lambda: fa.flash_attn_func(q, None, v), lambda: fa.flash_attn_func(q, k, None),
                 lambda: fa.flash_attn_with_kvcache(q, None, v), lambda: fa.flash_attn_with_kvcache(q, k, None),
                 lambda: fa.flash_attn_qkvpacked_func(None), lambda: fa.flash_attn_combine(None, q), lambda: OPS.fwd(None, k, v),
                 lambda: fa._flash_attn_backward(None, q, k, v, q, q), lambda: OPS.bwd(q, q, k, v, q, None)):
        with pytest.raises(TypeError, match="is a NoneType but it must be a torch tensor"):
            call()


def test_opcheck(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    sink = torch.randn(4, device=device, requires_grad=True)
    for kwargs in ({"causal": True}, {"s_aux": sink, "deterministic": True, "window_size_left": 4}):
        torch.library.opcheck(OPS._flash_attn_forward.default, (q, k, v), kwargs)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse, *_ = OPS.fwd(q, k, v)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS._flash_attn_backward.default, (torch.randn_like(out), q, k, v, out, lse),
                          {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}, test_utils=checks)
    torch.library.opcheck(OPS.fwd.default, (q, k, v), test_utils=checks)


def test_compile(device):
    q, k, v = make(device, torch.bfloat16, grad=True)

    def loss(q, k, v):
        out, lse = fa.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), return_attn_probs=True)
        return out.float().square().sum() + lse.sum()

    wanted = torch.autograd.grad(loss(q, k, v), [q, k, v])
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), [q, k, v])
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_selective_checkpointing_finds_the_operator(device):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
    q, k, v = make(device, torch.bfloat16, grad=True)
    seen = []

    def policy(context, operator, *args, **kwargs):
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE if operator is OPS._flash_attn_forward.default else CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(lambda: fa.flash_attn_func(q, k, v) * 2, use_reentrant=False,
                     context_fn=lambda: create_selective_checkpoint_contexts(policy))
    out.float().sum().backward()
    assert OPS._flash_attn_forward.default in seen and q.grad is not None


def test_torchs_own_caller(device):
    """torch.nn.attention calls the operators by position, with memory for the result in another layout."""
    _fa3 = pytest.importorskip("torch.nn.attention._fa3")  # from torch 2.11 on
    _fa3._fa3_import_module("flash_attn_interface")
    q, k, v = make(device, torch.bfloat16, heads_k=4)
    given = torch.empty(2, 4, 33, 32, device=device, dtype=torch.bfloat16).transpose(1, 2)
    out, lse = _fa3._fa3_run_forward(q, k, v, None, None, 33, 50, None, True, None, None, None, given)
    wanted, wanted_lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(given, wanted) and torch.equal(lse, wanted_lse) and out.data_ptr() == given.data_ptr()
    dout = torch.randn_like(wanted)
    got = _fa3._fa3_run_backward(dout, q, k, v, out, lse, None, None, 33, 50, None, True, -1, -1, deterministic=True)
    for a, b in zip(got, flash3.attention_backward(dout, q, k, v, wanted, wanted_lse, causal=True, deterministic=True)):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_torchs_sdpa_runs_on_it():
    _fa3 = pytest.importorskip("torch.nn.attention._fa3")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in make("cuda", torch.bfloat16, seq_k=33, heads_k=4, dim=64))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    handle = _fa3.register_flash_attention_fa3()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            got.float().sum().backward()
    finally:
        handle.remove()
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_another_owner_of_the_namespace_is_noticed():
    code = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
try:
    import flash_attn_interface
except ImportError as error:
    assert "there already" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
