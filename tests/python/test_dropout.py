# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention's weights: results and gradients by the mask that flash3.dropout_mask writes, on each device."""
import itertools
import math

import numpy as np
import pytest
import torch

import flash3
from conftest import DEVICES
from flash3 import masks
from dropout_cases import DIM, DIM_V, HEADS, keeps, make, precision, reference
from oracle import assert_close, slacks_of_scores, visible


def on_device(options, device):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


DIMS = [(DIM, DIM_V), (64, 64), (128, 128), (256, 256)]  # a GPU has kernels of their own for each
OPTIONS = [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 3.0, "causal": True}, {"sink": torch.linspace(-1, 2, HEADS)},
           {"alibi_slopes": 2.0**-torch.arange(1, HEADS + 1), "causal": True}, {"mask": "dense", "softcap": 5.0}]


# ---- results and gradients ----

def check_results_and_gradients(device, dtype, sizes, dims, p, options):
    options, chosen = on_device(options, device), {"seed": 2**64 - 5, "offset": 3}
    seen = None
    if "mask" in options:
        seen = (torch.rand(sizes[1:], generator=torch.Generator().manual_seed(2)) < 0.7).to(device)
        options["mask"] = masks.dense(seen)
    q, k, v = (x.requires_grad_() for x in make(dtype, *sizes, dims=dims, device=device))
    out, lse = flash3.attention(q, k, v, dropout_p=p, return_lse=True, **chosen, **options)
    torch.manual_seed(1)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    if device == "cpu":  # a GPU has other kernels for calls without
        assert torch.equal(lse, flash3.attention(q, k, v, return_lse=True, **options)[1])  # of all weights
    kept, wanted = keeps(sizes, p, **chosen), {}
    for kind, of in (("exact", torch.float64), ("naive", dtype)):
        inputs = [x.detach().to(of).requires_grad_() for x in (q, k, v)]
        results = reference(*inputs, kept, p, seen=seen, **options)
        wanted[kind] = *results, *torch.autograd.grad(results, inputs, (dout.to(of), dlse.to(results[1].dtype)))
    rounding = 2**-20 * max(sizes[1:]) if "alibi_slopes" in options else 0.0
    everything = torch.ones_like(torch.as_tensor(kept))
    slacks = slacks_of_scores(lambda q, k, v: reference(q, k, v, everything, 0.0, seen=seen, **options)[0], q, k, v, out, dout, rounding,
                              dlse=dlse, largest_weight=1 / (1 - p))
    for name, x, exact, naive in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *got), wanted["exact"], wanted["naive"]):
        assert_close(x.detach(), exact.detach(), naive.detach(), name, relative=rounding, slack=slacks.get(name, 0.0))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("sizes", [(2, 100, 130), (1, 257, 270), (2, 30, 500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_are_those_of_the_mask(dtype, sizes, p, options):
    check_results_and_gradients("cpu", dtype, sizes, (DIM, DIM_V), p, options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("dims", [*DIMS, (192, 128)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 100, 130), (2, 30, 500), (1, 700, 1000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_on_a_gpu(dtype, sizes, dims, p, options):
    check_results_and_gradients("cuda", dtype, sizes, dims, p, options)


BIASES = {"alibi_slopes": 2.0**-torch.arange(1, HEADS + 1), "bias": torch.linspace(-3, 2, HEADS * 130).reshape(1, HEADS, 1, 130),
          "bias_table": torch.sin(torch.arange(61.0))[None]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("names", [("alibi_slopes",), ("bias",), ("bias_table",), tuple(BIASES)], ids=str)
def test_with_biases_and_their_gradients(names, dims, options, device):
    dtype, tolerance = precision(device)
    sizes, p = (2, 100, 130), 0.3
    leaves = [*make(dtype, *sizes, dims=dims, device=device), *(BIASES[name].to(device) for name in names)]
    dout = torch.randn(2, 100, HEADS, dims[1], generator=torch.Generator().manual_seed(4)).to(device, dtype)

    def run(call, kind):
        inputs = [x.detach().to(kind or x.dtype).requires_grad_() for x in leaves]
        out = call(*inputs[:3], dict(zip(names, inputs[3:])))
        return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))
    got = run(lambda q, k, v, added: flash3.attention(q, k, v, dropout_p=p, seed=9, **added, **options), None)
    kept = keeps(sizes, p, seed=9)
    wanted = run(lambda q, k, v, added: reference(q, k, v, kept, p, **added, **options)[0], torch.float64)
    for name, x, y in zip(("out", "dq", "dk", "dv", *names), got, wanted, strict=True):
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("names", [(), tuple(BIASES)], ids=str)
def test_the_same_bits_each_time_on_a_gpu(dims, names):
    q, k, v = make(torch.bfloat16, 3, 300, 130, dims=dims, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v, *(BIASES[name].to("cuda") for name in names))]

    def run():
        out = flash3.attention(q, k, v, dropout_p=0.3, seed=9, deterministic=True, **dict(zip(names, leaves[3:])))
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)
    first = run()
    for _ in range(5):
        assert all(map(torch.equal, run(), first))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_without_autograd_and_of_the_sink(device):
    dtype, tolerance = precision(device)
    sizes, p, sink = (2, 70, 90), 0.4, torch.linspace(-1, 2, HEADS, device=device)
    q, k, v = make(dtype, *sizes, device=device)
    state = torch.tensor([-7, 2**40], device=device)
    out, lse = flash3.attention(q, k, v, sink=sink, dropout_p=p, dropout_state=state, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    got = flash3.attention_backward(dout, q, k, v, out, lse, sink=sink, dropout_p=p, dropout_state=state)
    inputs = [x.double().requires_grad_() for x in (q, k, v, sink)]
    wanted, _ = reference(*inputs[:3], keeps(sizes, p, dropout_state=state.cpu()), p, sink=inputs[3])
    for x, y in zip(got, torch.autograd.grad(wanted, inputs, dout.double())):
        torch.testing.assert_close(x.double(), y, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["packed", "used"])
def test_sequences_have_masks_of_their_own(form, device):
    dtype, tolerance = precision(device, 2e-2)
    p, chosen, lengths_q, lengths_k = 0.3, {"seed": 1, "offset": 2}, [30, 1, 64], [50, 200, 64]
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
    out = flash3.attention(q, k, v, causal=True, dropout_p=p, **chosen, **lengths)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    kept = keeps((3, 64, 200), p, **chosen)

    def rows(x, b, lengths):
        return x[sum(lengths[:b]):sum(lengths[:b + 1])] if form == "packed" else x[b, :lengths[b]]
    for b, part in enumerate(parts):
        inputs = [x.double().requires_grad_() for x in part]
        wanted, _ = reference(*inputs, kept[b:b + 1, :, :lengths_q[b], :lengths_k[b]], p, causal=True)
        torch.testing.assert_close(rows(out, b, lengths_q).double(), wanted[0], atol=tolerance, rtol=tolerance)
        for got, x, n in zip(grads, torch.autograd.grad(wanted.square().sum(), inputs), (lengths_q, lengths_k, lengths_k)):
            torch.testing.assert_close(rows(got, b, n).double(), x[0], atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_counts_keys_as_its_mask_does(device):
    dtype, tolerance = precision(device)
    p, (q, k, v) = 0.3, make(dtype, 2, 20, 100, device=device)
    leftpad, used = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([7, 0], [90, 55]))
    out, _ = flash3.arrays.forward(q, k, v, like=q, causal=True, leftpad_k=leftpad, seqused_k=used, dropout_p=p, dropout_seed=4)
    kept = keeps((2, 20, 100), p, seed=4)
    for b in range(2):
        n = (used - leftpad)[b].item()
        wanted, _ = reference(q[b:b + 1].double(), k[b:b + 1, leftpad[b]:used[b]].double(), v[b:b + 1, leftpad[b]:used[b]].double(),
                              kept[b:b + 1, :, :, :n], p, causal=True)
        torch.testing.assert_close(out[b].double(), wanted[0], atol=tolerance, rtol=tolerance)


def identity(rows, first, dim, device, dtype):
    """[1, rows, 1, dim]: row first + c is the unit vector c."""
    made = torch.zeros(1, rows, 1, dim, device=device, dtype=dtype)
    n = torch.arange(min(dim, rows - first), device=device)
    made[0, first + n, 0, n] = 1
    return made


def kept_by_attention(batch, seq_q, seq_k, p, heads=2, dims=(8, 128), device="cpu", **options):
    """What a call and its gradients keep, two of [batch, heads, seq_q, seq_k] bool: v, and then dout, are parts of the identity, so that
    out and dv hold the weights, 0 where they are dropped."""
    dtype, _ = precision(device)
    q, k = (torch.zeros(batch, seq, heads, dims[0], device=device, dtype=dtype) for seq in (seq_q, seq_k))

    def parts(rows):
        for first in range(0, rows, dims[1]):
            yield rows - first, identity(rows, first, dims[1], device, dtype).repeat(batch, 1, heads, 1)
    columns = []
    for n, v in parts(seq_k):
        out, lse = flash3.attention(q, k, v, dropout_p=p, return_lse=True, **options)
        columns.append((out != 0)[..., :n])
    rows = [(flash3.attention_backward(dout, q, k, v, out, lse, dropout_p=p, **options)[2] != 0)[..., :n] for n, dout in parts(seq_q)]
    return torch.cat(columns, -1).transpose(1, 2).cpu().numpy(), torch.cat(rows, -1).permute(0, 2, 3, 1).cpu().numpy()


@pytest.mark.parametrize("sizes", list(itertools.product((1, 3), (1, 7, 8, 9, 16, 40, 257), (1, 15, 64, 65, 256))), ids=str)
def test_a_call_keeps_what_the_mask_says(sizes):
    wanted = flash3.dropout_mask(sizes[0], 2, *sizes[1:], 0.5, seed=9, offset=1)
    for kept in kept_by_attention(*sizes, 0.5, seed=9, offset=1):
        assert (kept == wanted).all()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"causal": True}, {"mask": "dense"}], ids=str)  # all have kernels of their own
@pytest.mark.parametrize("dims", [*DIMS, (192, 128)], ids=str)
@pytest.mark.parametrize("sizes", [(3, 1, 1), (2, 9, 65), (2, 300, 700), (1, 700, 1000)], ids=str)
def test_a_gpu_keeps_what_the_mask_says(sizes, dims, options):
    wanted = torch.from_numpy(flash3.dropout_mask(sizes[0], 2, *sizes[1:], 0.5, seed=9, offset=1)).bool()
    seen = visible(*sizes[1:], causal="causal" in options)
    if "mask" in options:
        seen = torch.rand(sizes[1:], generator=torch.Generator().manual_seed(2)) < 0.7
        options = {"mask": masks.dense(seen.cuda()).make(*sizes[1:])}
    for kept in kept_by_attention(*sizes, 0.5, dims=dims, device="cuda", seed=9, offset=1, **options):
        assert (kept == (wanted & seen).numpy()).all()


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_no_dropout_has_the_bits_of_none(dtype, device):
    q, k, v = (x.requires_grad_() for x in make(dtype or precision(device)[0], 2, 100, 90, device=device))
    plain = flash3.attention(q, k, v, deterministic=True)
    wanted = torch.autograd.grad(plain.sum(), (q, k, v))
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0, "seed": 5, "offset": 6}, {"dropout_state": torch.tensor([1, 2], device=device)},
                    {"dropout_p": 2.0**-18, "seed": 1}):
        out = flash3.attention(q, k, v, deterministic=True, **options)
        assert torch.equal(out, plain)
        for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), wanted):
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
    (dict(dropout_p=0.1, compute="fp8"), ValueError, r"^dropout_p = 0\.1 and compute = .*fp8.*; dropout excludes FP8"),
]


@pytest.mark.parametrize("options, kind, message", BAD, ids=[str(bad[0]) for bad in BAD])
def test_refused_by_name(options, kind, message):
    q, k, v = make(torch.float32, 1, 10, 12)
    with pytest.raises(kind, match=message):
        flash3.attention(q, k, v, **options)


def test_refused_with_qv_and_without_a_seed():
    q, k, v = make(torch.float32, 1, 10, 12)
    qv = torch.zeros(1, 10, HEADS, DIM_V)
    with pytest.raises(ValueError, match=r"^dropout_p = 0\.1 and qv is given; dropout excludes"):
        flash3.attention(q, k, v, qv=qv, dropout_p=0.1, seed=1)
    lacks = r"^dropout_p = 0\.1 but neither seed nor dropout_state is given"
    with pytest.raises(ValueError, match=lacks):
        flash3.attention(q.numpy(), k.numpy(), v.numpy(), dropout_p=0.1)
    out, lse = flash3.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=lacks):
        flash3.attention_backward(out, q, k, v, out, lse, dropout_p=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        flash3.attention_with_kv_cache(q, k, v, dropout_p=0.1)
