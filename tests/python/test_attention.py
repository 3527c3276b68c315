# SPDX-License-Identifier: Apache-2.0
"""flash3.attention on torch tensors against float64: values, gradients, layouts."""
import itertools

import pytest
import torch

import flash3
from conftest import assert_hopper_refuses
from oracle import assert_close, exact, naive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(device, dtype, batch=2, seq_q=33, seq_k=50, heads_q=4, heads_k=2, dim=32, dim_v=None, seed=0, grad=False):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, seq_q, heads_q, dim), (batch, seq_k, heads_k, dim), (batch, seq_k, heads_k, dim_v or dim)
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_(grad) for s in shapes]


def skip_fp32_on_gpu(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 runs on the CPU alone")


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "left": {"window": (5, None)},
    "causal window": {"causal": True, "window": (9, -1)},
    "chunk": {"chunk": 16},
    "softcap": {"softcap": 2.5, "causal": True},
    "scale": {"softmax_scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_gradients(device, dtype, options):
    skip_fp32_on_gpu(device, dtype)
    torch.manual_seed(0)  # one gradient in thirty makes float32's yardstick happen to be the better one
    q, k, v = make(device, dtype, grad=True)
    out, lse = flash3.attention(q, k, v, **options, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])

    results = {}
    for name, reference, kind in (("exact", exact, torch.float64), ("naive", naive, dtype)):
        leaves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        r_out, r_lse = reference(*leaves, **options)
        # A row that sees nothing has lse = -inf, and no gradient.
        seen = torch.isfinite(r_lse)
        gradients = torch.autograd.grad([r_out, r_lse.masked_fill(~seen, 0)], leaves,
                                        [dout.to(r_out.dtype), dlse.to(r_lse.dtype)])
        results[name] = (r_out, r_lse, *(torch.nan_to_num(g) for g in gradients))
    for what, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *got), results["exact"], results["naive"]):
        assert_close(a.detach(), b.detach(), c.detach(), what)


@pytest.mark.parametrize("seq_q,seq_k", list(itertools.product([0, 1, 63, 65, 129], [0, 1, 64, 127, 130])))
def test_lengths(device, seq_q, seq_k):
    q, k, v = make(device, torch.bfloat16, seq_q=seq_q, seq_k=seq_k)
    for causal in (False, True):
        out, lse = flash3.attention(q, k, v, causal=causal, return_lse=True)
        for what, a, b, c in zip(("out", "lse"), (out, lse), exact(q, k, v, causal=causal), naive(q, k, v, causal=causal)):
            assert_close(a, b, c, what)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_of_16_bits(device, dtype):
    """out_dtype: what would be rounded otherwise, with the same gradients for the same dout; float16 for bfloat16 is refused."""
    results = []
    for out_dtype in (None, torch.float32):
        tensors = make(device, dtype, grad=True)
        out = flash3.attention(*tensors, causal=True, deterministic=True, out_dtype=out_dtype)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), [x.grad for x in tensors]))
    (rounded, gradients), (wide, same) = results
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), rounded) and not torch.equal(wide, rounded.float())
    assert all(torch.equal(a, b) for a, b in zip(gradients, same))
    other = DTYPES[3 - DTYPES.index(dtype)]
    with pytest.raises(TypeError, match="q, k, v and out must have the same dtype"):
        flash3.attention(*make(device, dtype), out_dtype=other)


def test_gaps_in_tensors_without_elements(device):
    """torch takes such a tensor for contiguous, whatever its strides are."""
    q, k, v = make(device, torch.bfloat16, batch=0, dim=64)
    out, lse = flash3.attention(q[..., ::2], k[..., ::2], v[..., ::2], return_lse=True)
    assert out.shape == (0, 33, 4, 32) and lse.shape == (0, 4, 33)


@pytest.mark.parametrize("dim,dim_v", [(1, 1), (7, 13), (59, 111), (64, 32), (128, 128), (192, 128), (256, 256)])
def test_head_dims(device, dim, dim_v):
    q, k, v = make(device, torch.bfloat16, dim=dim, dim_v=dim_v, grad=True)
    out = flash3.attention(q, k, v, causal=True)
    assert_close(out.detach(), exact(q, k, v, causal=True)[0].detach(), naive(q, k, v, causal=True)[0].detach())
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, [q, k, v], dout)
    for kind in (torch.float64, torch.bfloat16):
        leaves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        r = torch.autograd.grad(naive(*leaves, causal=True)[0], leaves, dout.to(kind))
        wanted = r if kind == torch.float64 else wanted
    for what, a, b, c in zip(("dq", "dk", "dv"), got, wanted, r):
        assert_close(a, b, c, what)


def test_sink_and_its_gradient(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    sink = torch.randn(4, device=device, requires_grad=True)
    out, lse = flash3.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, [q, k, v, sink], dout)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    e_out, e_lse = naive(*leaves[:3], sink=leaves[3], causal=True)
    wanted = torch.autograd.grad(e_out, leaves, dout.double())
    low = [x.detach().requires_grad_() for x in (q, k, v, sink)]
    n_out, n_lse = naive(*low[:3], sink=low[3], causal=True)
    close = torch.autograd.grad(n_out, low, dout)
    for what, a, b, c in zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *got), (e_out, e_lse, *wanted),
                             (n_out, n_lse, *close)):
        assert_close(a.detach(), b.detach(), c.detach(), what)
    bare = flash3.attention(q, k, v, causal=True, sink=torch.full((4,), -float("inf"), device=device))
    assert torch.equal(bare, flash3.attention(q, k, v, causal=True))


LENGTHS = [(5, 7), (0, 3), (64, 64), (1, 100), (33, 0), (17, 17)]


def pack(device, dtype, lengths=LENGTHS, heads_q=4, heads_k=2, dim=32):
    g = torch.Generator().manual_seed(3)
    total_q, total_k = sum(a for a, _ in lengths), sum(b for _, b in lengths)
    q = torch.randn(total_q, heads_q, dim, generator=g).to(device, dtype)
    k, v = (torch.randn(total_k, heads_k, dim, generator=g).to(device, dtype) for _ in range(2))
    cu = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in zip(*lengths)]
    return q, k, v, *cu


@pytest.mark.parametrize("known_max", [False, True])
def test_packed(device, known_max):
    q, k, v, cu_q, cu_k = pack(device, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    longest = {"max_seqlen_q": 64, "max_seqlen_k": 100} if known_max else {}
    out, lse = flash3.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **longest)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, [q, k, v], dout)
    for b in range(len(LENGTHS)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = [x.detach()[None] for x in (q[rows], k[keys], v[keys])]
        for what, a, e, n in zip(("out", "lse"), (out[rows], lse[:, rows]), exact(*one, causal=True), naive(*one, causal=True)):
            assert_close(a.detach(), e[0], n[0], f"{what} of sequence {b}")
        leaves = [x.requires_grad_() for x in one]
        alone = torch.autograd.grad(flash3.attention(*leaves, causal=True), leaves, dout[rows][None])
        for a, w in zip((got[0][rows], got[1][keys], got[2][keys]), alone):
            torch.testing.assert_close(a, w[0], atol=2e-2, rtol=2e-2)


def test_seqused_leaves_no_garbage(device):
    q, k, v = make(device, torch.bfloat16, batch=3, seq_q=20, seq_k=30, grad=True)
    used_q = torch.tensor([20, 5, 0], dtype=torch.int32, device=device)
    used_k = torch.tensor([11, 30, 4], dtype=torch.int32, device=device)
    out, lse = flash3.attention(q, k, v, causal=True, seqused_q=used_q, seqused_k=used_k, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    for b, (n_q, n_k) in enumerate(zip(used_q.tolist(), used_k.tolist())):
        assert not out[b, n_q:].any() and (lse[b, :, n_q:] == -float("inf")).all()
        assert not dq[b, n_q:].any() and not dk[b, n_k:].any() and not dv[b, n_k:].any()
        if n_q:
            one = [x.detach()[b:b + 1] for x in (q[:, :n_q], k[:, :n_k], v[:, :n_k])]
            assert_close(out[b:b + 1, :n_q].detach(), exact(*one, causal=True)[0], naive(*one, causal=True)[0])


def test_rows_of_no_sequence_are_zero_on_the_cpu():
    q, k, v = (torch.randn(12, 2, 16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([2, 5, 9], dtype=torch.int32)
    # Memory that was used before is not all zero.
    for _ in range(20):
        torch.full((12, 2, 16), float("nan"))
        out, lse = flash3.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
        outside = torch.tensor([0, 1, 9, 10, 11])
        assert not out[outside].any() and (lse[:, outside] == -float("inf")).all()
        for gradient in torch.autograd.grad(out, [q, k, v], torch.ones_like(out)):
            assert not gradient[outside].any()


def test_rows_of_no_sequence_reach_nothing(device):
    """Whatever lies before the first packed sequence and after the last: with NaN there all else has the same bits."""
    torch.manual_seed(0)
    rows, sequences = 12, slice(2, 9)
    cu = torch.tensor([2, 5, 9], dtype=torch.int32, device=device)
    used = torch.tensor([3, 2], dtype=torch.int32, device=device)
    tensors = [torch.randn(rows, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(4)]
    sink = torch.randn(2, device=device)
    for lengths in ({}, {"max_seqlen_q": 4, "max_seqlen_k": 4}, {"seqused_q": used, "seqused_k": used}):
        results = []
        for rest in (0.0, float("nan")):
            for x in tensors:
                x[:sequences.start] = x[sequences.stop:] = rest
            q, k, v, dout = (x.clone() for x in tensors)
            leaves = [x.requires_grad_() for x in (q, k, v, sink.clone())]
            out, lse = flash3.attention(q, k, v, causal=True, sink=leaves[3], cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True,
                                        deterministic=True, **lengths)
            dq, dk, dv, dsink = torch.autograd.grad(out, leaves, dout)
            results.append([out[sequences], lse[:, sequences], dq[sequences], dk[sequences], dv[sequences], dsink])
        for a, b in zip(*results):
            assert torch.equal(a, b) and not a.isnan().any()
        assert results[0][2].any() and results[0][5].all()
        if "seqused_q" in lengths:  # what seqused leaves out is 0 on a GPU too
            assert not results[0][0][5:].any() and (results[0][1][:, 5:] == -float("inf")).all()
            assert not any(gradient[5:].any() for gradient in results[0][2:5])


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps in the rows": lambda x: torch.cat([x, x], -1)[..., :x.shape[-1]],
    "gaps in the last dimension": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "columns first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_not_contiguous(device, layout):
    q, k, v = make(device, torch.bfloat16, grad=True)
    dout = torch.randn(2, 33, 4, 32, device=device, dtype=torch.bfloat16)
    wanted = flash3.attention(q, k, v, causal=True)
    got = flash3.attention(layout(q), layout(k), layout(v), causal=True)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(torch.autograd.grad(got, [q, k, v], layout(dout)), torch.autograd.grad(wanted, [q, k, v], dout)):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_expanded(device):
    q, k, v = make(device, torch.bfloat16, batch=1, heads_k=1, grad=True)
    wide = [x.expand(3, -1, h, -1) for x, h in ((q, 4), (k, 4), (v, 4))]
    out = flash3.attention(*wide)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, [q, k, v], dout)
    copies = [x.contiguous() for x in wide]
    again = flash3.attention(*copies)
    torch.testing.assert_close(out, again)
    for a, b in zip(got, torch.autograd.grad(again, [q, k, v], dout)):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_a_gradient_that_is_expanded(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    flash3.attention(q, k, v).sum().backward()  # dout has strides of 0
    wanted = torch.autograd.grad(flash3.attention(q, k, v), [q, k, v], torch.ones(2, 33, 4, 32, device=device).bfloat16())
    for x, w in zip((q, k, v), wanted):
        torch.testing.assert_close(x.grad, w)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_any_mix_of_strides(device, name):
    tensors = dict(zip("qkv", make(device, torch.bfloat16, heads_k=4, seq_q=50)))
    tensors["dout"] = torch.randn_like(tensors["q"])
    gapped = dict(tensors, **{name: LAYOUTS["gaps in the last dimension"](tensors[name])})
    results = []
    for t in (tensors, gapped):
        out, lse = flash3.attention(t["q"], t["k"], t["v"], return_lse=True)
        results.append((out, *flash3.attention_backward(t["dout"], t["q"], t["k"], t["v"], out, lse)[:3]))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_backward_without_autograd(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    sink = torch.randn(4, device=device, requires_grad=True)
    out, lse = flash3.attention(q, k, v, sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad([out, lse], [q, k, v, sink], [dout, dlse])
    with torch.no_grad():
        got = flash3.attention_backward(dout, q, k, v, out, lse, dlse=dlse, sink=sink)
    for field, a, b in zip(got._fields, got, wanted):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2, msg=field)
    assert flash3.attention_backward(dout, q, k, v, out, lse).dsink is None


def test_deterministic_gradients_repeat(device):
    q, k, v = make(device, torch.bfloat16, seq_q=300, seq_k=300, grad=True)
    runs = [torch.autograd.grad(flash3.attention(q, k, v, deterministic=True).float().square().sum(), [q, k, v])
            for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_results_in_given_memory(device):
    q, k, v = make(device, torch.bfloat16)
    out = torch.empty(2, 4, 33, 32, device=device, dtype=torch.bfloat16).transpose(1, 2)
    torch.ops.flash3.forward_out(q, k, v, out, None, causal=True)
    wanted, lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, wanted)
    dout = torch.randn_like(out)
    given = [torch.empty_like(x) for x in (q, k, v)]
    torch.ops.flash3.backward_out(dout, None, q, k, v, wanted, lse, *given, None, causal=True)
    for a, b in zip(given, flash3.attention_backward(dout, q, k, v, wanted, lse, causal=True)):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
    with pytest.raises(RuntimeError, match="elements of an output must not overlap"):
        torch.ops.flash3.forward_out(q, k, v, q[:, :1].expand(-1, 33, -1, -1), None)


def test_explain_and_supported(device):
    q, k, v = make(device, torch.bfloat16)
    text = flash3.explain(q, k, v, causal=True)
    assert ("hopper" if device == "cuda" else "cpu_fwd_bf16") in text
    assert flash3.supported(q, k, v) and flash3.supported(q, k, v).reason == ""
    with pytest.raises(TypeError, match="unexpected argument 'cusal'"):  # a mistake in the program is no answer
        flash3.supported(q, k, v, cusal=True)
    if device == "cpu":
        assert_hopper_refuses(lambda: flash3.supported(q, k, v, backend="hopper"))
    else:
        no = flash3.supported(q.float(), k.float(), v.float())
        assert not no and no.reason


# What attention() refuses, and what it says of it: the same that supported() gives as the reason.
REFUSED = {
    "heads": lambda q, k, v: dict(q=q[:, :, :3], k=k[:, :, :2], v=v[:, :, :2]),
    "head dim": lambda q, k, v: dict(q=q, k=k[..., :8], v=v),
    "float64": lambda q, k, v: dict(q=q.double(), k=k.double(), v=v.double()),
    "not packed": lambda q, k, v: dict(q=q[0], k=k[0], v=v[0]),
    "2 dimensions": lambda q, k, v: dict(q=q[0, 0], k=k, v=v),
    "no tensor": lambda q, k, v: dict(q=[1.0], k=k, v=v),
    "window": lambda q, k, v: dict(q=q, k=k, v=v, window=3),
    "compute": lambda q, k, v: dict(q=q, k=k, v=v, compute="int4"),
    "scales": lambda q, k, v: dict(q=q, k=k, v=v, q_scale=torch.ones(1, device=q.device)),
    "wide": lambda q, k, v: dict(q=torch.cat([q] * 20, -1), k=torch.cat([k] * 20, -1), v=v),
}


@pytest.mark.parametrize("why", REFUSED)
def test_supported_is_false_where_attention_refuses(device, why):
    call = REFUSED[why](*make(device, torch.float16, dim=32))
    with pytest.raises((TypeError, ValueError)) as refused:
        flash3.attention(**call)
    no = flash3.supported(**call)
    assert not no and isinstance(no, flash3.Support)
    # torch's operators have a list of dtypes of their own.
    assert no.reason == str(refused.value) or why == "float64" and no.reason.startswith("q.dtype = float64 but it must be")
    assert not flash3.supported(**call, backward=True)


def test_supported_asks_for_gradients_of_what_attention_takes(device):
    q, k, v = make(device, torch.float16, dim=32)
    assert flash3.supported(q, k, v, backward=True, compute="fp8", rotation_seed=3, sm_margin=1, deterministic=True, return_lse=True)
    qv = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=device)
    assert flash3.supported(q, k, v, qv=qv, backward=True) == (False, "qv is given, and a call with it has no gradients")


def test_three_dimensions_hint_at_packing(device):
    q, k, v = make(device, torch.float16)
    for three, by in ((dict(q=q[0], k=k, v=v), "cu_seqlens_q"), (dict(q=q, k=k[0], v=v[0]), "cu_seqlens_k")):
        with pytest.raises(ValueError, match=rf"ndim = 3 but it must be 4, \[batch, .*; packed sequences need {by}$"):
            flash3.attention(**three)


@pytest.mark.parametrize("make_tensor", [lambda x: x, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_questions_about_a_last_dimension_with_gaps(make_tensor):
    """attention() copies such tensors, and what is asked about them is asked about the copies."""
    q, k, v = (make_tensor(torch.randn(1, 5, 2, 32))[..., ::2] for _ in range(3))
    assert flash3.attention(q, k, v).shape == (1, 5, 2, 16)
    assert flash3.supported(q, k, v) and "kernel:" in flash3.explain(q, k, v)
    assert flash3.supported(q, k, v, backward=True)
