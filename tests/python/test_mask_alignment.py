# SPDX-License-Identifier: Apache-2.0
"""mask_alignment: masks from the top left corner."""
import pytest
import torch

import flash3
from oracle import exact
from test_attention import OPTIONS, make


def seen_from_top_left(seq_q, seq_k, causal=False, window=None, chunk=0):
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    left, right = (None if side is None or side < 0 else side for side in window or (None, None))
    seen = (j <= i) if causal else torch.ones(seq_q, seq_k, dtype=torch.bool)
    seen = seen if left is None else seen & (j >= i - left)
    seen = seen if right is None else seen & (j <= i + right)
    return seen & (j // chunk == i // chunk) if chunk else seen


MASKS = {name: OPTIONS[name] for name in ("full", "causal", "window", "left", "causal window", "chunk")}
MASKS["chunk and window"] = {"chunk": 11, "window": (None, 0)}
TOP_LEFT = {"mask_alignment": "top_left"}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("seq_q, seq_k", [(33, 50), (50, 33), (20, 20), (1, 40)])
def test_masks_from_the_top_left(device, options, seq_q, seq_k):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = make(device, dtype, seq_q=seq_q, seq_k=seq_k, grad=True)
    out, lse = flash3.attention(q, k, v, **options, **TOP_LEFT, return_lse=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, [q, k, v], dout)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = exact(*leaves, seen=seen_from_top_left(seq_q, seq_k, **options).to(device))
    gradients = (torch.nan_to_num(g) for g in torch.autograd.grad(wanted, leaves, dout.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # of masks, and not of sums
    for a, b in zip((out, lse, *got), (wanted, wanted_lse, *gradients)):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)
    with torch.no_grad():  # by the short way, and for arrays
        assert torch.equal(flash3.attention(q, k, v, **options, **TOP_LEFT), out)
        assert flash3.supported(q, k, v, **options, **TOP_LEFT) and flash3.supported(q, k, v, backward=True, **options, **TOP_LEFT)
        if device == "cpu":
            made = flash3.attention(*(x.detach().numpy() for x in (q, k, v)), **options, **TOP_LEFT)
            assert torch.equal(torch.from_numpy(made), out)
    if options == {"causal": True}:
        wanted = torch.nn.functional.scaled_dot_product_attention(*(x.detach().float().transpose(1, 2) for x in (q, k, v)), is_causal=True,
                                                                  enable_gqa=True)
        torch.testing.assert_close(out.float(), wanted.transpose(1, 2), atol=2e-2, rtol=2e-2)


def test_sequences_are_masked_from_their_own_top_left(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lengths = [(5, 9), (12, 3), (0, 4), (7, 0), (16, 16)]
    q, k, v = (x[0] for x in make(device, dtype, batch=1, seq_q=40, seq_k=32))
    cu_q, cu_k = (torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0).to(device, torch.int32) for side in (0, 1))
    options = dict(causal=True, window=(6, None), **TOP_LEFT)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash3.attention(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for b in range(len(lengths)):
        of_q, of_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = [x[rows][None].clone().requires_grad_() for x, rows in ((q, of_q), (k, of_k), (v, of_k))]
        wanted = flash3.attention(*alone, **options)
        torch.testing.assert_close(out[of_q], wanted[0])
        for a, b in zip((got[0][of_q], got[1][of_k], got[2][of_k]), torch.autograd.grad(wanted, alone, torch.ones_like(wanted))):
            torch.testing.assert_close(a, b[0])


def test_a_cache_is_masked_from_the_top_left(device):
    """Query i sees keys up to i, however many there are, with what is appended."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = make(device, dtype, seq_q=4, seq_k=40)
    used = torch.tensor([30, 2], dtype=torch.int32, device=device)
    call = dict(seqused_k=used, causal=True, **TOP_LEFT)
    out = flash3.attention_with_kv_cache(q, k, v, **call)
    for b, n in enumerate((4, 2)):
        torch.testing.assert_close(out[b:b + 1], flash3.attention(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n], causal=True, **TOP_LEFT))
    new = k[:, 30:32].clone()
    grown, k_cache = flash3.attention_with_kv_cache(q, k.clone(), v.clone(), k_new=new, v_new=new, **call), k.clone()
    assert torch.equal(grown[0], out[0]) and not torch.equal(grown[1], out[1])
    schedule = flash3.kv_cache_schedule(q, k, v, **call)
    assert torch.equal(flash3.attention_with_kv_cache(q, k_cache, v, **call, schedule=schedule), out)
    with pytest.raises(ValueError, match="schedule.key = "):
        flash3.attention_with_kv_cache(q, k, v, seqused_k=used, causal=True, schedule=schedule)
    tree = torch.ones(2, 4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="mask_alignment = 'top_left' and tree_mask is given; a tree's queries are those of the last keys"):
        flash3.attention_with_kv_cache(q, k, v, seqused_k=used, tree_mask=tree, **TOP_LEFT)


def test_fp8_is_masked_from_the_top_left(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = make(device, dtype, seq_q=60, seq_k=90)
    out = flash3.attention(q, k, v, compute="fp8", causal=True, **TOP_LEFT)
    torch.testing.assert_close(out[:, :40], flash3.attention(q[:, :40], k[:, :40], v[:, :40], compute="fp8", causal=True), atol=0.1, rtol=0.1)


def test_a_compiler_sees_the_alignment(device):
    q, k, v = make(device, torch.bfloat16)
    compiled = torch.compile(lambda q, k, v: flash3.attention(q, k, v, causal=True, **TOP_LEFT), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), flash3.attention(q, k, v, causal=True, **TOP_LEFT))


def test_alignments_that_are_none():
    q, k, v = make("cpu", torch.float32)
    for wrong in ("top", 1, None):
        with pytest.raises(ValueError, match=f"mask_alignment = {wrong!r} but it must be 'bottom_right' or 'top_left'"):
            flash3.attention(q, k, v, mask_alignment=wrong)
    assert "with i' = i" in flash3.explain(q, k, v, causal=True, **TOP_LEFT, seqused_k=torch.ones(2, dtype=torch.int32))
    assert "j <= i + 0" in flash3.explain(q, k, v, causal=True, **TOP_LEFT)
    k.data[:, 33:], v.data[:, 33:] = torch.nan, torch.nan  # keys that no query sees
    assert torch.isfinite(flash3.attention(q, k, v, causal=True, **TOP_LEFT)).all()
