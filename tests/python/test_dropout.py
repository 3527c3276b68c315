# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention's weights: results and gradients by the mask that flash3.dropout_mask writes, on each device."""
import itertools
import math

import numpy as np
import pytest
import torch

import flash3
from flash3 import masks
from oracle import assert_close, visible

HEADS, HEADS_K, DIM, DIM_V = 6, 2, 40, 24


def share(p):
    """The part of the weights that is dropped: p as the library rounds it."""
    return min(round(p * 65536), 65535) / 65536


def reference(q, k, v, kept, p, *, seen=None, softmax_scale=None, softcap=0.0, sink=None, alibi_slopes=None, bias=None, mask=None,
              **band):
    """(out, lse) of dense tensors in q's dtype, by operations that autograd knows."""
    seq_q, seq_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(groups, 2)) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (torch.arange(seq_k)[None] - torch.arange(seq_q)[:, None] - (seq_k - seq_q)).abs()
        scores = scores - (alibi_slopes.double()[:, None, None] * distance).to(scores.dtype)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~(visible(seq_q, seq_k, **band) if seen is None else seen), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), -1)
    weights = torch.exp(scores - lse.to(scores.dtype).masked_fill(lse == -math.inf, 0)[..., None])[..., :seq_k]
    weights = weights * torch.as_tensor(kept).to(scores.dtype) / (1 - share(p))
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(groups, 2)), lse


def make(dtype, batch, seq_q, seq_k, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, seq_q, HEADS, DIM), (batch, seq_k, HEADS_K, DIM), (batch, seq_k, HEADS_K, DIM_V))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def keeps(sizes, p, **chosen):
    return flash3.dropout_mask(sizes[0], HEADS, *sizes[1:], p, **chosen)


OPTIONS = [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 3.0, "causal": True}, {"sink": torch.linspace(-1, 2, HEADS)},
           {"alibi_slopes": 2.0**-torch.arange(1, HEADS + 1), "causal": True}, {"mask": "dense", "softcap": 5.0}]


# ---- results and gradients ----

@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("sizes", [(2, 100, 130), (1, 257, 270), (2, 30, 500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_are_those_of_the_mask(dtype, sizes, p, options):
    options, chosen = dict(options), {"seed": 2**64 - 5, "offset": 3}
    seen = None
    if "mask" in options:
        seen = torch.rand(sizes[1:], generator=torch.Generator().manual_seed(2)) < 0.7
        options["mask"] = masks.dense(seen)
    q, k, v = (x.requires_grad_() for x in make(dtype, *sizes))
    out, lse = flash3.attention(q, k, v, dropout_p=p, return_lse=True, **chosen, **options)
    torch.manual_seed(1)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    without = flash3.attention(q, k, v, return_lse=True, **options)[1]
    assert torch.equal(lse, without)  # of all weights
    kept, wanted = keeps(sizes, p, **chosen), {}
    for kind, of in (("exact", torch.float64), ("naive", dtype)):
        inputs = [x.detach().to(of).requires_grad_() for x in (q, k, v)]
        results = reference(*inputs, kept, p, seen=seen, **options)
        wanted[kind] = *results, *torch.autograd.grad(results, inputs, (dout.to(of), dlse.to(results[1].dtype)))
    rounding = 2**-20 * max(sizes[1:]) if "alibi_slopes" in options else 0.0
    for name, x, exact, naive in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *got), wanted["exact"], wanted["naive"]):
        assert_close(x.detach(), exact.detach(), naive.detach(), name, relative=rounding)


def test_gradients_without_autograd_and_of_the_sink():
    sizes, p, sink = (2, 70, 90), 0.4, torch.linspace(-1, 2, HEADS)
    q, k, v = make(torch.float32, *sizes)
    state = torch.tensor([-7, 2**40])
    out, lse = flash3.attention(q, k, v, sink=sink, dropout_p=p, dropout_state=state, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    got = flash3.attention_backward(dout, q, k, v, out, lse, sink=sink, dropout_p=p, dropout_state=state)
    inputs = [x.double().requires_grad_() for x in (q, k, v, sink)]
    wanted, _ = reference(*inputs[:3], keeps(sizes, p, dropout_state=state), p, sink=inputs[3])
    for x, y in zip(got, torch.autograd.grad(wanted, inputs, dout.double())):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


def test_biases_have_gradients_beside_it():
    sizes, p, chosen = (2, 70, 90), 0.4, {"seed": 5, "offset": 6}
    q, k, v = make(torch.float32, *sizes)
    bias = torch.randn(1, HEADS, *sizes[1:], generator=torch.Generator().manual_seed(4))
    bias[:, :, :, ::7] = -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out = flash3.attention(q, k, v, bias=bias, softcap=3.0, dropout_p=p, **chosen)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad(out, leaves, dout)
    inputs = [x.detach().double().requires_grad_() for x in leaves]
    wanted, _ = reference(*inputs[:3], keeps(sizes, p, **chosen), p, bias=inputs[3], softcap=3.0)
    for x, y in zip((out, *got), (wanted, *torch.autograd.grad(wanted, inputs, dout.double()))):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    torch.manual_seed(3)
    drawn = flash3.attention(q, k, v, bias=bias, dropout_p=p)
    torch.manual_seed(3)
    by_sdpa = flash3.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), bias, p, enable_gqa=True)
    assert torch.equal(by_sdpa.transpose(1, 2), drawn)


@pytest.mark.parametrize("form", ["packed", "used"])
def test_sequences_have_masks_of_their_own(form):
    p, chosen, lengths_q, lengths_k = 0.3, {"seed": 1, "offset": 2}, [30, 1, 64], [50, 200, 64]
    parts = [make(torch.float32, 1, a, b, seed) for seed, (a, b) in enumerate(zip(lengths_q, lengths_k))]
    if form == "packed":
        q, k, v = (torch.cat([part[n][0] for part in parts]) for n in range(3))
        cu_q, cu_k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 64, "max_seqlen_k": 200}
    else:
        q, k, v = (torch.zeros(3, 200, *part.shape[2:]) for part in parts[0])
        for b, part in enumerate(parts):
            for whole, own in zip((q, k, v), part):
                whole[b, :own.shape[1]] = own[0]
        lengths = {"seqused_q": torch.tensor(lengths_q, dtype=torch.int32), "seqused_k": torch.tensor(lengths_k, dtype=torch.int32)}
    for x in (q, k, v):
        x.requires_grad_()
    out = flash3.attention(q, k, v, causal=True, dropout_p=p, **chosen, **lengths)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    kept = keeps((3, 64, 200), p, **chosen)

    def rows(x, b, lengths):
        return x[sum(lengths[:b]):sum(lengths[:b + 1])] if form == "packed" else x[b, :lengths[b]]
    for b, part in enumerate(parts):
        inputs = [x.double().requires_grad_() for x in part]
        wanted, _ = reference(*inputs, kept[b:b + 1, :, :lengths_q[b], :lengths_k[b]], p, causal=True)
        torch.testing.assert_close(rows(out, b, lengths_q).double(), wanted[0], atol=1e-5, rtol=1e-5)
        for got, x, n in zip(grads, torch.autograd.grad(wanted.square().sum(), inputs), (lengths_q, lengths_k, lengths_k)):
            torch.testing.assert_close(rows(got, b, n).double(), x[0], atol=1e-4, rtol=1e-4)


def test_a_cache_counts_keys_as_its_mask_does():
    p, (q, k, v) = 0.3, make(torch.float32, 2, 20, 100)
    leftpad, used = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([90, 55], dtype=torch.int32)
    out = np.zeros((2, 20, HEADS, DIM_V), np.float32)
    flash3.arrays.forward(q, k, v, out, causal=True, leftpad_k=leftpad, seqused_k=used, dropout_p=p, dropout_seed=4)
    kept = keeps((2, 20, 100), p, seed=4)
    for b in range(2):
        n = (used - leftpad)[b].item()
        wanted, _ = reference(q[b:b + 1].double(), k[b:b + 1, leftpad[b]:used[b]].double(), v[b:b + 1, leftpad[b]:used[b]].double(),
                              kept[b:b + 1, :, :, :n], p, causal=True)
        torch.testing.assert_close(torch.from_numpy(out[b]).double(), wanted[0], atol=1e-5, rtol=1e-5)


# What a call sees of its values: v is the identity, so that out holds the weights, 0 where they are dropped.
def kept_by_attention(batch, seq_q, seq_k, p, heads=2, **options):
    q, k = torch.zeros(batch, seq_q, heads, 8), torch.zeros(batch, seq_k, heads, 8)
    v = torch.eye(seq_k)[None, :, None].expand(batch, -1, heads, -1)
    return (flash3.attention(q, k, v, dropout_p=p, **options) != 0).transpose(1, 2).numpy()


@pytest.mark.parametrize("sizes", list(itertools.product((1, 3), (1, 7, 8, 9, 16, 40, 257), (1, 15, 64, 65, 256))), ids=str)
def test_a_call_keeps_what_the_mask_says(sizes):
    assert (kept_by_attention(*sizes, 0.5, seed=9, offset=1) == flash3.dropout_mask(sizes[0], 2, *sizes[1:], 0.5, seed=9, offset=1)).all()


def test_the_mask_depends_on_no_tile_split_or_thread():
    sizes, p, chosen = (1, 5, 9000), 0.2, {"seed": 3}
    q, k, v = (x.detach() for x in make(torch.float32, *sizes))
    kept = keeps(sizes, p, **chosen)
    wanted, _ = reference(q.double(), k.double(), v.double(), kept, p)
    for threads in (1, 2, 7):  # of many threads the keys of few rows are split
        out = np.zeros((*sizes[:2], HEADS, DIM_V), np.float32)
        flash3.arrays.forward(q, k, v, out, num_threads=threads, dropout_p=p, dropout_seed=3)
        torch.testing.assert_close(torch.from_numpy(out).double(), wanted, atol=1e-5, rtol=1e-5)
        assert (kept == keeps(sizes, p, num_threads=threads, **chosen)).all()
    assert (kept[:, :, :, 100:300] == keeps((1, 5, 300), p, **chosen)[..., 100:]).all()
    assert (kept[:, :, 3:] == keeps((1, 6, 9000), p, **chosen)[:, :, 3:5]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_dropout_has_the_bits_of_none(dtype):
    q, k, v = (x.requires_grad_() for x in make(dtype, 2, 100, 90))
    plain = flash3.attention(q, k, v)
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0, "seed": 5, "offset": 6}, {"dropout_state": torch.tensor([1, 2])},
                    {"dropout_p": 2.0**-18, "seed": 1}):
        out = flash3.attention(q, k, v, **options)
        assert torch.equal(out, plain)
        for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(flash3.attention(q, k, v).sum(), (q, k, v))):
            assert torch.equal(x, y)


def test_numpy_and_the_functions_of_c():
    q, k, v = (x.numpy() for x in make(torch.float32, 2, 60, 70))
    out, lse = flash3.attention(q, k, v, dropout_p=0.3, seed=7, offset=2**63, return_lse=True)
    wanted = flash3.attention(*map(torch.from_numpy, (q, k, v)), dropout_p=0.3, seed=7, offset=2**63)
    assert (out == wanted.numpy()).all()
    grads = flash3.attention_backward(out, q, k, v, out, lse, dropout_p=0.3, seed=7, offset=2**63)
    inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    again = flash3.attention(*inputs, dropout_p=0.3, seed=7, offset=2**63)
    for x, y in zip(grads, torch.autograd.grad(again, inputs, again.detach())):
        np.testing.assert_allclose(x, y.numpy(), atol=1e-5, rtol=1e-5)
    assert "dropout: 19661 of 65536 weights, as the seed says" in flash3.explain(q, k, v, dropout_p=0.3, seed=7)
    assert flash3.supported(q, k, v, dropout_p=0.3, seed=7) and not flash3.supported(q, k, v, dropout_p=1.0, seed=7)


# ---- seeds ----

def test_torchs_generator_seeds_a_call():
    q, k, v = (x.requires_grad_() for x in make(torch.float32, 1, 50, 60))

    def run(seed):
        torch.manual_seed(seed)
        out = flash3.attention(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))
    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(flash3.attention(q, k, v, dropout_p=0.5), flash3.attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(1)
    state = torch.randint(2**63 - 1, (2,))
    assert torch.equal(first[0], flash3.attention(q, k, v, dropout_p=0.5, dropout_state=state))
    seed, offset = state.tolist()
    assert torch.equal(first[0], flash3.attention(q, k, v, dropout_p=0.5, seed=seed, offset=offset))


def test_checkpointing_repeats_the_mask():
    inputs = [x.requires_grad_() for x in make(torch.float32, 1, 50, 60)]
    call = lambda q, k, v: flash3.attention(q, k, v, dropout_p=0.5).square().sum()  # noqa: E731
    grads = []
    for run in (call, lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(run(*inputs), inputs))
    assert all(torch.equal(x, y) for x, y in zip(*grads))


@pytest.mark.parametrize("options", [{}, {"seed": 5, "offset": 6}], ids=str)
def test_compiled_as_one_graph(options):
    q, k, v = (x.requires_grad_() for x in make(torch.float32, 1, 50, 60))
    call = lambda q, k, v: flash3.attention(q, k, v, causal=True, dropout_p=0.25, **options)  # noqa: E731
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(4)
        out = run(q, k, v)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


# ---- sdpa, and torch's own operators ----

def sdpa_reference(q, k, v, state, p, **band):
    kept = flash3.dropout_mask(q.shape[0], q.shape[1], q.shape[2], k.shape[2], p, dropout_state=state)
    return reference(*(x.transpose(1, 2).double() for x in (q, k, v)), kept, p, **band)[0].transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(is_causal):
    q, k, v = (torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    for call in (lambda: flash3.sdpa(q, k, v, dropout_p=0.3, is_causal=is_causal),
                 lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=is_causal)):
        with flash3.sdpa_override():
            torch.manual_seed(5)
            out = call()
        torch.manual_seed(5)
        wanted = sdpa_reference(q, k, v, torch.randint(2**63 - 1, (2,)), 0.3, causal=is_causal)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_sdpa_in_a_layer_that_trains():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True).train()
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))
    with flash3.sdpa_override():
        torch.manual_seed(6)
        first = layer(x)
        torch.manual_seed(6)
        assert torch.equal(first, layer(x))
        first.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_drop_in():
    interface = pytest.importorskip("flash_attn_interface")
    q, k, v = (x.requires_grad_() for x in make(torch.bfloat16, 1, 50, 60))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (50, 60))
    calls = (lambda: flash3.attention(q, k, v, causal=True, dropout_p=0.3), lambda: interface.flash_attn_func(q, k, v, causal=True, dropout_p=0.3),
             lambda: interface.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 50, 60, causal=True, dropout_p=0.3)[None])
    results = []
    for call in calls:
        torch.manual_seed(9)
        out = call()
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0]))
    with pytest.raises(NotImplementedError, match="dropout_p = 0.3"):
        interface.flash_attn_varlen_func(q[0], k, v, cu_q, None, 50, 60, seqused_k=torch.tensor([60], dtype=torch.int32),
                                         page_table=torch.zeros(1, 1, dtype=torch.int32), dropout_p=0.3)


# ---- errors ----

STATE = torch.tensor([1, 2])
BAD = [
    (dict(dropout_p=1.0), ValueError, r"^dropout_p = 1 but it must be from 0 \(none\) to below 1$"),
    (dict(dropout_p=-0.1), ValueError, r"^dropout_p = -0\.1 but"),
    (dict(dropout_p=math.nan), ValueError, r"^dropout_p = nan but"),
    (dict(dropout_p="a"), TypeError, "^dropout_p is a str but it must be a number"),
    (dict(dropout_p=0.1, seed=-1), ValueError, r"^seed = -1 but it must be from 0 to 2\*\*64 - 1"),
    (dict(dropout_p=0.1, seed=2**64), ValueError, f"^seed = {2**64} but"),
    (dict(dropout_p=0.1, seed=1.5), TypeError, "^seed is a float but it must be an integer"),
    (dict(dropout_p=0.1, seed=1, offset=-1), ValueError, "^offset = -1 but"),
    (dict(dropout_p=0.1, offset=1), ValueError, "^offset = 1 but seed is not given; seed and offset, or dropout_state, choose"),
    (dict(dropout_p=0.1, seed=1, dropout_state=STATE), ValueError, "^seed = 1 and dropout_state is given"),
    (dict(dropout_p=0.1, dropout_state=STATE.int()), TypeError, r"^dropout_state\.dtype = int32 but it must be int64"),
    (dict(dropout_p=0.1, dropout_state=torch.zeros(3, dtype=torch.int64)), ValueError,
     r"^dropout_state\.shape\[0\] = 3 but it must be 2: a seed and an offset"),
    (dict(dropout_p=0.1, dropout_state=torch.zeros(1, 2, dtype=torch.int64)), ValueError, r"^dropout_state\.ndim = 2 but it must be 1, \[2\]"),
    (dict(dropout_p=0.1, compute="fp8"), ValueError, r"^dropout_p = 0\.1 and compute = .*fp8.*; weights are dropped in calls with neither FP8"),
]


@pytest.mark.parametrize("options, kind, message", BAD, ids=[str(bad[0]) for bad in BAD])
def test_refused_by_name(options, kind, message):
    q, k, v = make(torch.float32, 1, 10, 12)
    with pytest.raises(kind, match=message):
        flash3.attention(q, k, v, **options)


def test_refused_with_qv_and_without_a_seed():
    q, k, v = make(torch.float32, 1, 10, 12)
    qv = torch.zeros(1, 10, HEADS, DIM_V)
    with pytest.raises(ValueError, match=r"^dropout_p = 0\.1 and qv is given; weights are dropped"):
        flash3.attention(q, k, v, qv=qv, dropout_p=0.1, seed=1)
    lacks = r"^dropout_p = 0\.1 but neither seed nor dropout_state is given"
    with pytest.raises(ValueError, match=lacks):
        flash3.attention(q.numpy(), k.numpy(), v.numpy(), dropout_p=0.1)
    out, lse = flash3.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=lacks):
        flash3.attention_backward(out, q, k, v, out, lse, dropout_p=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        flash3.attention_with_kv_cache(q, k, v, dropout_p=0.1)
