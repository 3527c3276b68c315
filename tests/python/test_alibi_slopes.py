# SPDX-License-Identifier: Apache-2.0
"""alibi_slopes: slope * |i' - j| is subtracted from the scaled and capped scores."""
import math

import numpy as np
import pytest
import torch

import flash3
from conftest import DEVICES
from oracle import assert_close, slacks_of_scores

HEADS, HEADS_K, DIM, DIM_V = 6, 2, 40, 24


def reference(q, k, v, slopes, *, softmax_scale=None, softcap=0.0, sink=None, causal=False, window=None, mask_alignment="bottom_right"):
    """(out, lse) of dense tensors in q's dtype, by operations that autograd knows."""
    seq_q, seq_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(groups, 2)) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seq_q, device=q.device)[:, None] + (seq_k - seq_q if mask_alignment == "bottom_right" else 0)
    distance = torch.arange(seq_k, device=q.device)[None] - i
    scores = scores - (slopes.double()[..., None, None] * distance.abs()).to(scores.dtype)
    left, right = window or (None, None)
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
    seen &= (distance <= 0) | (not causal)
    if left is not None:
        seen &= (distance >= -left) & (distance <= right)
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), -1)
    p = torch.exp(scores - lse.to(scores.dtype)[..., None])[..., :seq_k]
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(groups, 2)), lse


def make(dtype, batch, seq_q, seq_k, seed=0, dims=(DIM, DIM_V), device="cpu"):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, seq_q, HEADS, dims[0]), (batch, seq_k, HEADS_K, dims[0]), (batch, seq_k, HEADS_K, dims[1]))
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def make_slopes(*batch, device="cpu"):
    """Of all sizes, some negative: a query may prefer keys that are far away."""
    return _make_slopes(*batch).to(device)


def _make_slopes(*batch):
    slopes = 2.0**-torch.arange(1, HEADS + 1) * torch.tensor([1, -1, 1, 1, -1, 1])
    return (slopes * torch.arange(1, 1 + math.prod(batch))[:, None]).reshape(*batch, HEADS) if batch else slopes


OPTIONS = [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 3.0, "causal": True}, {"softmax_scale": 0.7},
           {"causal": True, "mask_alignment": "top_left"}, {"softcap": 20.0, "mask_alignment": "top_left"}]


def check_results_and_gradients(device, dtype, sizes, dims, per_sequence, options):
    if sizes[1] > sizes[2] and options.get("mask_alignment") != "top_left" and ("causal" in options or "window" in options):
        sizes = sizes[0], sizes[2], sizes[1]  # every row sees something
    slopes = make_slopes(*[sizes[0]] * per_sequence, device=device)
    sink = torch.linspace(-1, 2, HEADS, device=device) if per_sequence else None
    q, k, v = (x.requires_grad_() for x in make(dtype, *sizes, dims=dims, device=device))
    out, lse = flash3.attention(q, k, v, alibi_slopes=slopes, sink=sink, return_lse=True, **options)
    torch.manual_seed(1)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    wanted = {}
    for kind, of in (("exact", torch.float64), ("naive", dtype)):
        inputs = [x.detach().to(of).requires_grad_() for x in (q, k, v)]
        results = reference(*inputs, slopes, sink=sink, **options)
        wanted[kind] = *results, *torch.autograd.grad(results, inputs, (dout.to(of), dlse.to(results[1].dtype)))
    # A score is rounded in float32 as its parts are, of which the naive values round none: slopes are whole multiples of powers of two.
    rounding = 2**-21 * (slopes.abs().max() * max(sizes[1:])).item()
    slacks = slacks_of_scores(lambda q, k, v: reference(q, k, v, slopes, sink=sink, **options)[0], q, k, v, out, dout, rounding,
                              dlse=dlse, softmax_scale=options.get("softmax_scale"))
    for name, x, exact, naive in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *got), wanted["exact"], wanted["naive"]):
        assert_close(x.detach(), exact.detach(), naive.detach(), name, relative=rounding, slack=slacks.get(name, 0.0))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("sizes", [(2, 100, 130), (1, 257, 90), (2, 30, 500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients(dtype, sizes, per_sequence, options):
    check_results_and_gradients("cpu", dtype, sizes, (DIM, DIM_V), per_sequence, options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [(DIM, DIM_V), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 100, 130), (1, 257, 90), (2, 30, 500), (1, 700, 1000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_on_a_gpu(dtype, sizes, dims, options):
    check_results_and_gradients("cuda", dtype, sizes, dims, sizes[0] > 1, options)


def test_zero_is_none():
    q, k, v = make(torch.float32, 1, 70, 90)
    torch.testing.assert_close(flash3.attention(q, k, v, causal=True, alibi_slopes=torch.zeros(HEADS)), flash3.attention(q, k, v, causal=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["packed", "used"])
def test_sequences_count_from_their_own_diagonal(form, device):
    lengths_q, lengths_k = [30, 1, 64], [50, 200, 64]
    slopes = make_slopes(3, device=device)
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 2e-2)
    parts = [make(dtype, 1, a, b, seed, device=device) for seed, (a, b) in enumerate(zip(lengths_q, lengths_k))]
    if form == "packed":
        q, k, v = (torch.cat([part[n][0] for part in parts]) for n in range(3))
        cu_q, cu_k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k))
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 64, "max_seqlen_k": 200}
    else:
        q, k, v = (part.new_zeros(3, 200, *part.shape[2:]) for part in parts[0])
        for b, part in enumerate(parts):
            for whole, own in zip((q, k, v), part):
                whole[b, :own.shape[1]] = own[0]
        lengths = {name: torch.tensor(n, dtype=torch.int32, device=device) for name, n in (("seqused_q", lengths_q), ("seqused_k", lengths_k))}
    for x in (q, k, v):
        x.requires_grad_()
    out = flash3.attention(q, k, v, causal=True, alibi_slopes=slopes, **lengths)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))

    def rows(x, b, lengths):
        return x[sum(lengths[:b]):sum(lengths[:b + 1])] if form == "packed" else x[b, :lengths[b]]
    for b, part in enumerate(parts):
        inputs = [x.double().requires_grad_() for x in part]
        wanted, _ = reference(*inputs, slopes[b], causal=True)
        torch.testing.assert_close(rows(out, b, lengths_q).double(), wanted[0], atol=tolerance, rtol=tolerance)
        for got, x, n in zip(grads, torch.autograd.grad(wanted.square().sum(), inputs), (lengths_q, lengths_k, lengths_k)):
            torch.testing.assert_close(rows(got, b, n).double(), x[0], atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 5, 20])
def test_a_cache_that_grows(queries, device):
    """The newest key is at the last query, wherever in the cache it lies."""
    slopes, page = make_slopes(2, device=device), 16
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 1e-2)
    q, k, v = make(dtype, 2, queries, 90, device=device)
    used = torch.tensor([70, 33], dtype=torch.int32, device=device)
    table = torch.randperm(12, device=device).reshape(2, 6).int()
    caches = [x.new_zeros(12, page, *x.shape[2:]) for x in (k, v)]
    for b in range(2):
        for cache, x in zip(caches, (k, v)):
            for j in range(int(used[b])):
                cache[table[b, j // page], j % page] = x[b, j]
    new = [torch.stack([x[b, used[b]:used[b] + queries] for b in range(2)]) for x in (k, v)]
    out = flash3.attention_with_kv_cache(q, *caches, seqused_k=used, page_table=table, k_new=new[0], v_new=new[1], causal=True,
                                         alibi_slopes=slopes)
    for b in range(2):
        seen = int(used[b]) + queries
        wanted, _ = reference(q[b:b + 1].double(), k[b:b + 1, :seen].double(), v[b:b + 1, :seen].double(), slopes[b], causal=True)
        torch.testing.assert_close(out[b].double(), wanted[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(DIM, DIM_V), (128, 128), (256, 256)], ids=str)
def test_with_masks_and_largest_scores(device, dims):
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 1e-2)
    q, k, v = (x.requires_grad_() for x in make(dtype, 2, 150, 150, dims=dims, device=device))
    slopes = make_slopes(device=device)
    dense = torch.rand(150, 150, device=device) < 0.5
    dense.fill_diagonal_(True)
    largest = torch.full((HEADS,), torch.nan, device=device)
    out = flash3.attention(q, k, v, alibi_slopes=slopes, max_logits=largest, mask=flash3.masks.dense(dense))
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", inputs[0], inputs[1].repeat_interleave(3, 2)) / math.sqrt(dims[0])
    distance = (torch.arange(150, device=device)[:, None] - torch.arange(150, device=device)[None]).abs()
    scores = (scores - slopes.double()[:, None, None] * distance).masked_fill(~dense, -math.inf)
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), inputs[2].repeat_interleave(3, 2))
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(largest.double(), scores.amax((0, 2, 3)), atol=1e-4, rtol=1e-5)
    for x, exact in zip(got, torch.autograd.grad(wanted.square().sum(), inputs)):
        torch.testing.assert_close(x.double(), exact, atol=5 * tolerance, rtol=5 * tolerance)


def test_fp8():
    q, k, v = make(torch.float32, 2, 150, 150)
    slopes = make_slopes()
    fp8 = flash3.attention(*(x.bfloat16() for x in (q, k, v)), compute="fp8", causal=True, alibi_slopes=slopes)
    close, _ = reference(q, k, v, slopes, causal=True)
    assert (fp8.float() - close).norm() < 0.08 * close.norm()


def test_arrays_and_the_explicit_backward():
    q, k, v = make(torch.float32, 2, 20, 33)
    slopes = make_slopes(2)
    out, lse = flash3.attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)
    arrays = [x.numpy() for x in (q, k, v)]
    same = flash3.attention(*arrays, causal=True, alibi_slopes=slopes.numpy(), return_lse=True)
    np.testing.assert_array_equal(same[0], out.numpy())
    np.testing.assert_array_equal(same[1], lse.numpy())
    wanted = flash3.attention_backward(out, q, k, v, out, lse, causal=True, alibi_slopes=slopes, deterministic=True)
    got = flash3.attention_backward(*(x.numpy() for x in (out, q, k, v, out, lse)), causal=True, alibi_slopes=slopes.numpy(),
                                    deterministic=True)
    for a, b in zip(got[:3], wanted[:3]):
        np.testing.assert_array_equal(a, b.numpy())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fullgraph):
    q, k, v = (x.requires_grad_() for x in make(torch.float32, 1, 50, 60))
    slopes = make_slopes()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: flash3.attention(q, k, v, causal=True, alibi_slopes=slopes), backend="aot_eager", fullgraph=fullgraph)
    got, wanted = compiled(q), flash3.attention(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), q), torch.autograd.grad(wanted.sum(), q))


def test_vmap():
    q, k, v = make(torch.float32, 3, 9, 12)
    slopes = make_slopes(3)
    got = torch.vmap(lambda q, k, v, slopes: flash3.attention(q[None], k[None], v[None], alibi_slopes=slopes)[0])(q, k, v, slopes)
    torch.testing.assert_close(got, flash3.attention(q, k, v, alibi_slopes=slopes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_its_gradient(per_sequence, device):
    slopes = make_slopes(*[2] * per_sequence, device=device).requires_grad_()
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 1e-2)
    q, k, v = make(dtype, 2, 150, 200, device=device)
    got, = torch.autograd.grad(flash3.attention(q, k, v, alibi_slopes=slopes, causal=True, softcap=5.0).square().sum(), slopes)
    exact = slopes.detach().double().requires_grad_()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(3, 2)) / math.sqrt(DIM)
    distance = torch.arange(200, device=device)[None] - torch.arange(150, device=device)[:, None] - 50
    scores = (5 * torch.tanh(scores / 5) - exact[..., None, None] * distance.abs()).masked_fill(distance > 0, -math.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double().repeat_interleave(3, 2))
    wanted, = torch.autograd.grad(out.square().sum(), exact)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance * wanted.abs().max().item(), rtol=tolerance)


def test_what_has_no_gradient():
    q, k, v = make(torch.float32, 1, 9, 12)
    slopes = make_slopes().requires_grad_()
    with pytest.raises(NotImplementedError, match="alibi_slopes.requires_grad"):
        flash3.attention_with_kv_cache(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        flash3.attention(q, k, v, alibi_slopes=slopes)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(slopes.detach(), torch.ones(HEADS))
        with pytest.raises(NotImplementedError, match="alibi_slopes has a tangent"):
            flash3.attention(q, k, v, alibi_slopes=dual)


def test_what_is_refused():
    q, k, v = make(torch.float32, 2, 9, 12)
    for wrong, message in ((torch.ones(5), r"alibi_slopes.shape\[0\] = 5 but q.shape\[2\] = 6"),
                           (torch.ones(3, 6), r"alibi_slopes.shape\[0\] = 3 but q.shape\[0\] = 2"),
                           (torch.ones(2, 6, 9), "alibi_slopes.ndim = 3 but it must be 1, .* or 2, "),
                           (torch.ones(6).half(), "alibi_slopes.dtype = float16 but it must be float32")):
        with pytest.raises((ValueError, TypeError), match=message):
            flash3.attention(q, k, v, alibi_slopes=wrong)
    tree = torch.full((2, 9), 2**9 - 1)
    with pytest.raises(ValueError, match="alibi_slopes is given and tree_mask is given"):
        flash3.attention_with_kv_cache(q, k, v, tree_mask=tree, alibi_slopes=make_slopes())
    distributed = pytest.importorskip("flash3.distributed")
    with pytest.raises(NotImplementedError, match="alibi_slopes is given but attention over several devices does not take it"):
        distributed.attention(q, k, v, alibi_slopes=make_slopes())


@pytest.mark.gpu
def test_what_a_gpu_refuses():
    q, k, v = make(torch.bfloat16, 1, 90, 120, device="cuda")
    with pytest.raises(NotImplementedError, match="alibi_slopes is given and q.dtype = bfloat16 but k and v are float8_e4m3"):
        flash3.attention_with_kv_cache(q, *(x.to(torch.float8_e4m3fn) for x in (k, v)), alibi_slopes=make_slopes(device="cuda"))


def test_it_is_documented():
    assert "alibi_slopes: [heads_q] or [batch, heads_q] float32: " in flash3.attention.__doc__
