# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's interface with FP8 tensors and descales, over flash3."""
import pytest
import torch

import flash3
import flash_attn_interface as fa
from test_attention import make, pack

OPS = torch.ops.flash_attn_3


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
