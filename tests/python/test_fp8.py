"""FP8 from Python: attention on float8_e4m3fn tensors, compute="fp8", and quantize.

Results are compared with float64 on the values that the tensors stand for. The yardstick is a plain implementation that rounds the
weights to e4m3 times 256: a single element may be off by a weight's rounding more, the RMSE by half of the yardstick's.
"""
import io
import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch
import torch._dynamo

import flash3
from flash3 import arrays
from conftest import assert_hopper_refuses
from oracle import visible
from test_attention import LENGTHS, OPTIONS, make, pack
from test_torch_features import OPCHECKS

FP8, BLOCK = torch.float8_e4m3fn, 128
SCALES = ["none", "tensor", "heads", "blocks"]


def fp8_inputs(device, scales, seed=0, **sizes):
    """FP8 q, k and v, and scales that are no powers of two, by the names of attention's arguments."""
    q, k, v = make("cpu", torch.float32, seed=seed, **sizes)
    g = torch.Generator().manual_seed(seed + 1)
    found = {name: x.to(FP8).to(device) for name, x in zip("qkv", (q, k, v))}
    for name, x in zip("qkv", (q, k, v)):
        shape = {"tensor": (1,), "heads": (x.shape[0], k.shape[2]),
                 "blocks": (x.shape[0], x.shape[2], -(-x.shape[1] // BLOCK))}.get(scales)
        if shape:
            found[f"{name}_scale"] = (torch.rand(shape, generator=g) + 0.5).to(device)
    return found


def values(x, scale, group=1):
    """What dense [batch, seq, heads, dim] codes stand for, in float64."""
    x = x.double()
    if scale is None:
        return x
    scale = scale.double()
    if scale.dim() == 1:
        return x * scale
    if scale.dim() == 2:  # of KV heads
        return x * scale.repeat_interleave(group, 1)[:, None, :, None]
    return x * scale.repeat_interleave(BLOCK, 2)[:, :, :x.shape[1]].transpose(1, 2)[..., None]


def standing_for(t):
    group = t["q"].shape[2] // t["k"].shape[2]
    return [values(t[name], t.get(f"{name}_scale"), group if name == "q" else 1) for name in "qkv"]


def references(q, k, v, *, softmax_scale=None, softcap=0.0, sink=None, **mask):
    """(exact out, out with weights rounded to e4m3 times 256, exact lse), all in float64."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if not scores.shape[-1]:
        return (v.new_zeros(*q.shape[:-1], v.shape[-1]),) * 2 + (torch.full_like(scores.sum(-1), -math.inf),)
    scores = scores.masked_fill(~visible(q.shape[1], k.shape[1], device=q.device, **mask), -math.inf)
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.double()[None, :, None, None] - top)
    rounded = (256 * weights).float().to(FP8).double() / 256
    sums = total.masked_fill(total == 0, 1)
    exact, plain = (torch.einsum("bhij,bjhd->bihd", w / sums, v) for w in (weights, rounded))
    return exact, plain, (top + torch.log(total))[..., 0]


def check(out, lse, exact, plain, exact_lse):
    assert out.shape == exact.shape and lse.shape == exact_lse.shape
    error, allowed = out.double() - exact, plain.to(out.dtype).double() - exact
    assert error.abs().max() <= 2 * allowed.abs().max() + exact.abs().max() / 16 + 1e-6
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt() + 1e-6
    finite = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    # On a GPU tensor cores cut products at about 13 bits of fraction.
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], atol=1e-2 if out.is_cuda else 2e-5, rtol=1e-5)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_forward(device, scales, options):
    t = fp8_inputs(device, scales, seq_q=140, seq_k=270, dim=64, dim_v=48)
    out, lse = flash3.attention(**t, **options, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    check(out, lse, *references(*standing_for(t), **options))


@pytest.mark.parametrize("heads_q,heads_k,dim,dim_v", [(1, 1, 16, 16), (6, 2, 96, 96), (4, 1, 59, 111), (3, 3, 256, 128)])
@pytest.mark.parametrize("scales", ["heads", "blocks"])
def test_heads_and_head_dims(device, heads_q, heads_k, dim, dim_v, scales):
    t = fp8_inputs(device, scales, seq_q=70, seq_k=130, heads_q=heads_q, heads_k=heads_k, dim=dim, dim_v=dim_v)
    sink = torch.randn(heads_q, device=device)
    out, lse = flash3.attention(**t, causal=True, sink=sink, return_lse=True)
    check(out, lse, *references(*standing_for(t), causal=True, sink=sink))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_out_dtype(device, dtype):
    t = fp8_inputs(device, "tensor")
    if device == "cuda" and dtype == torch.float32:
        with pytest.raises(NotImplementedError, match="float32"):
            flash3.attention(**t, out_dtype=dtype)
        return
    out, lse = flash3.attention(**t, out_dtype=dtype, return_lse=True)
    assert out.dtype == dtype
    check(out, lse, *references(*standing_for(t)))


def test_strides(device):
    t = fp8_inputs(device, "blocks", dim=64)
    wanted = flash3.attention(**t)
    changed = {"q": t["q"].transpose(1, 2).contiguous().transpose(1, 2),
               "k": torch.stack([t["k"].view(torch.uint8)] * 2, -1)[..., 0].view(FP8),
               "v": torch.cat([t["v"].view(torch.uint8)] * 2, -1).view(FP8)[..., :64]}
    assert torch.equal(flash3.attention(**{**t, **changed}), wanted)
    given = torch.empty_like(wanted)
    torch.ops.flash3.forward_out(t["q"], t["k"], t["v"], given, None, q_scale=t["q_scale"], k_scale=t["k_scale"],
                                 v_scale=t["v_scale"])
    assert torch.equal(given, wanted)


@pytest.mark.parametrize("scales", ["tensor", "heads", "blocks"])
def test_packed_sequences_are_as_if_alone(device, scales):
    q, k, v, cu_q, cu_k = pack(device, torch.bfloat16, lengths=[*LENGTHS, (150, 300)], dim=64)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    made = flash3.quantize(q, k, v, scales=scales, **lengths)
    assert made.k_scale.shape == {"tensor": (1,), "heads": (7, 2), "blocks": (1, 2, k.shape[0] // BLOCK + 7)}[scales]
    assert all(torch.isfinite(x).all() and (x > 0).all() for x in made[3:])
    out, lse = flash3.attention(**made._asdict(), **lengths, causal=True, max_seqlen_q=150, max_seqlen_k=300, return_lse=True)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if rows.start == rows.stop:
            continue
        one = {"q": made.q[rows][None], "k": made.k[keys][None], "v": made.v[keys][None]}
        for name, scale, cu in zip("qkv", made[3:], (cu_q, cu_k, cu_k)):
            if scales == "blocks":
                first, count = int(cu[b]) // BLOCK + b, -(-one[name].shape[1] // BLOCK)
                scale = scale[:, :, first:first + count]
            one[f"{name}_scale"] = scale[b:b + 1] if scales == "heads" else scale
        check(out[rows][None], lse[:, rows][None], *references(*standing_for(one), causal=True))
        if scales == "blocks":  # then a sequence does not depend on its neighbours
            alone = flash3.quantize(q[rows][None], k[keys][None], v[keys][None])
            assert all(torch.equal(alone[i].view(torch.uint8), one[name].view(torch.uint8)) for i, name in enumerate("qkv"))


def power_of_two(amax):
    """The smallest power of two by which nothing is above 448; of zeros 1."""
    return torch.where(amax == 0, 1.0, torch.exp2(torch.ceil(torch.log2(amax.double() / 448))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantize_bit_for_bit(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 runs on the CPU alone")
    q, k, v = (x * 50 for x in make(device, dtype, seq_q=200, seq_k=300, dim=40))
    v[:, 128:256, 1] = 0
    for scales in ("tensor", "heads", "blocks"):
        made = flash3.quantize(q, k, v, scales=scales)
        for x, codes, scale, group in zip((q, k, v), made[:3], made[3:], (2, 1, 1)):
            size = x.abs().double()
            if scales == "tensor":
                wanted = power_of_two(size.amax())[None]
            elif scales == "heads":
                wanted = power_of_two(size.amax((1, 3)).unflatten(1, (-1, group)).amax(2))
            else:
                padded = torch.nn.functional.pad(size.amax(3), (0, 0, 0, -x.shape[1] % BLOCK))
                wanted = power_of_two(padded.unflatten(1, (-1, BLOCK)).amax(2).transpose(1, 2))
            assert codes.dtype == FP8 and torch.equal(scale.double(), wanted)
            ones = values(torch.ones_like(x), scale, group)
            assert torch.equal(codes.view(torch.uint8), (x.double() / ones).float().to(FP8).view(torch.uint8))


def rotation(dim, seed):
    """D·H/√n as flash3.h has it."""
    state, signs = seed, []
    for _ in range(-(-dim // 64)):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        signs += [-1.0 if z >> bit & 1 else 1.0 for bit in range(64)]
    parts = [2**bit for bit in range(8, -1, -1) if dim >> bit & 1]
    blocks = []
    for n in parts:
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < n:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        blocks.append(h / n**0.5)
    return torch.diag(torch.tensor(signs[:dim], dtype=torch.float64)) @ torch.block_diag(*blocks)


@pytest.mark.parametrize("dim,seed", [(64, 0), (96, 5), (7, 2**64 - 1), (256, 2**63)])
def test_rotation(device, dim, seed):
    q, k, _ = make(device, torch.bfloat16, dim=dim)
    made = flash3.quantize(q, k, rotate=True, rotation_seed=seed)
    assert made.v is None and made.v_scale is None
    for x, codes, scale in ((q, made.q, made.q_scale), (k, made.k, made.k_scale)):
        wanted = x.double() @ rotation(dim, seed).to(device)
        torch.testing.assert_close(values(codes, scale), wanted, rtol=0.07, atol=float(scale.max()) / 256)  # half a step: 2**-4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(device, interleaved):
    q, k, v = make(device, torch.bfloat16, dim=32)
    angle = torch.arange(80)[:, None] / 10000 ** (torch.arange(12) / 12)
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    made = flash3.quantize(q, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, rotary_offset_q=17)
    for x, offset, codes, scale in ((q, 17, made.q, made.q_scale), (k, 0, made.k, made.k_scale)):
        c, s = (t[offset:offset + x.shape[1], None].double() for t in (cos, sin))
        wanted = x.double()
        a, b = (slice(0, 24, 2), slice(1, 24, 2)) if interleaved else (slice(0, 12), slice(12, 24))
        turned = wanted[..., a] * c - wanted[..., b] * s, wanted[..., a] * s + wanted[..., b] * c
        wanted = wanted.clone()
        wanted[..., a], wanted[..., b] = turned
        torch.testing.assert_close(values(codes, scale), wanted, rtol=0.07, atol=float(scale.max()) / 256)
    torch.testing.assert_close(values(made.v, made.v_scale), v.double(), rtol=0.07, atol=float(made.v_scale.max()) / 256)


def test_compute_is_quantize_and_attention(device):
    q, k, v = make(device, torch.float16, seq_q=200, seq_k=300, dim=96)
    out, lse = flash3.attention(q, k, v, causal=True, compute="fp8", rotation_seed=2**63 + 3, return_lse=True)
    made = flash3.quantize(q, k, v, rotate=True, rotation_seed=2**63 + 3)
    wanted, wanted_lse = flash3.attention(**made._asdict(), causal=True, out_dtype=torch.float16, return_lse=True)
    assert out.dtype == torch.float16 and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    other = flash3.attention(q, k, v, causal=True, compute="fp8", rotation_seed=1)
    exact = flash3.attention(q, k, v, causal=True)
    assert not torch.equal(other, out)
    for x in (out, other):
        assert (x - exact).float().square().mean() < 0.08**2 * exact.float().square().mean()
    assert flash3.attention(q, k, v, compute="fp8", out_dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("out_dtype", [None, torch.float16])
def test_compute_has_the_gradients_of_its_inputs(device, out_dtype):
    q, k, v = make(device, torch.bfloat16, seq_q=100, seq_k=150, dim=64, grad=True)
    sink = torch.linspace(-1, 1, 4, device=device).requires_grad_()
    how = {"causal": True, "sink": sink, "deterministic": True}
    out, lse = flash3.attention(q, k, v, **how, compute="fp8", out_dtype=out_dtype, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(device, out.dtype)
    got = torch.autograd.grad(out, [q, k, v, sink], dout)
    with torch.no_grad():
        backward = flash3.attention_backward(dout.bfloat16(), q, k, v, out.bfloat16(), lse, **how)
    for name, a, b in zip(backward._fields, got, backward):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    true = torch.autograd.grad(flash3.attention(q, k, v, **how), [q, k, v], dout.bfloat16())
    for name, a, b in zip(("dq", "dk", "dv"), got, true):
        assert (a - b).float().norm() < 0.1 * b.float().norm(), name


def test_quantize_in_given_memory(device):
    q, k, v = make(device, torch.bfloat16, seq_k=200)
    wanted = flash3.quantize(k=k, v=v, scales="heads")
    assert wanted.q is None and wanted.q_scale is None
    given = [torch.empty_like(x) for x in (wanted.k, wanted.v, wanted.k_scale, wanted.v_scale)]
    torch.ops.flash3.quantize_out(None, k, v, None, *given[:2], None, *given[2:])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(given, (*wanted[1:3], *wanted[4:])))
    alone = flash3.quantize(q, scales="heads", heads_k=2)
    assert alone.q_scale.shape == (2, 2) and flash3.quantize(q, scales="heads").q_scale.shape == (2, 4)
    assert torch.equal(alone.q.view(torch.uint8), flash3.quantize(q, k, scales="heads").q.view(torch.uint8))


def test_tokens_that_do_not_count(device):
    q, k, v = make(device, torch.bfloat16, seq_k=300)
    used = torch.tensor([300, 40], dtype=torch.int32, device=device)
    k[1, 40:] = math.nan
    made = flash3.quantize(k=k, v=v, seqused_k=used)
    assert not made.k[1, 40:].view(torch.uint8).any() and (made.k_scale[1, :, 1:] == 1).all()
    assert torch.isfinite(made.k_scale).all()
    empty = flash3.quantize(q[:, :0], scales="tensor")
    assert empty.q.shape == (2, 0, 4, 32) and empty.q_scale.tolist() == [1.0]


def bad(device="cpu", **changes):
    t = fp8_inputs(device, "none")
    return {**t, **{name: change(t) if callable(change) else change for name, change in changes.items()}}


WRONG = {
    "k bfloat16": (bad(k=lambda t: t["k"].bfloat16()), TypeError, "k.dtype = bfloat16 but q.dtype = float8_e4m3"),
    "e5m2": (bad(q=lambda t: t["q"].view(torch.float8_e5m2)), TypeError, "q.dtype = float8_e5m2 but it must be"),
    "scale float16": (bad(q_scale=torch.ones(1).half()), TypeError, "q_scale.dtype = "),
    "scale float64": (bad(v_scale=torch.ones(1).double()), TypeError, "v_scale.dtype = float64 but it must be"),
    "scale [3]": (bad(k_scale=torch.ones(3)), ValueError, "k_scale.shape[0] = 3 but scales of one dimension must be [1]"),
    "scale 0-d": (bad(k_scale=torch.ones(())), ValueError, "k_scale.ndim = 0 but it must be 1, [1]"),
    "scale of heads": (bad(q_scale=torch.ones(2, 4)), ValueError, "q_scale.shape[1] = 4 but k.shape[2] = 2"),
    "scale of batch": (bad(v_scale=torch.ones(3, 2)), ValueError, "v_scale.shape[0] = 3 but q.shape[0] = 2"),
    "scale of blocks": (bad(v_scale=torch.ones(2, 2, 2)), ValueError, "v_scale.shape[2] = 2 but v.shape[1] = 50; blocks must be 1"),
    "scale numpy": (bad(v_scale=np.ones(1, np.float32)), TypeError, "v_scale is a ndarray but it must be of type"),
    "scale without FP8": (bad(**{n: lambda t, n=n: t[n].float() for n in "qkv"}, k_scale=torch.ones(1)), ValueError,
                          "k_scale is given but k.dtype = float32; only FP8 tensors have scales"),
    "compute": (bad(compute="fp8"), ValueError, "compute = 1 (fp8) but q.dtype = float8_e4m3"),
    "compute int8": (bad(compute="int8"), ValueError, "compute = 'int8' but it must be 'fp8' or None"),
    "seed": (bad(rotation_seed=-1), ValueError, "rotation_seed = -1 but it must be from 0 to 2**64 - 1"),
    "seed float": (bad(rotation_seed=0.5), TypeError, "rotation_seed is a float but it must be an integer"),
    "out float64": (bad(out_dtype=torch.float64), TypeError, "out.dtype = float64 but it must be"),
    "out FP8": (bad(out_dtype=FP8), TypeError, "out.dtype = "),
    "out name": (bad(out_dtype="float16"), TypeError, "out_dtype is a str but it must be a torch.dtype"),
    "out of 16 bits": (bad(**{n: lambda t, n=n: t[n].half() for n in "qkv"}, out_dtype=torch.bfloat16), TypeError,
                       "out.dtype = bfloat16 but q.dtype = float16"),
    "gradient of q": (bad(q=lambda t: t["q"].clone().requires_grad_()), NotImplementedError,
                      "q.requires_grad = True but q.dtype = float8_e4m3fn; FP8 has no gradients"),
    "gradient of a sink": (bad(sink=torch.zeros(4, requires_grad=True)), NotImplementedError, "sink.requires_grad = True but"),
    "gradient of a scale": (bad(v_scale=torch.ones(1, requires_grad=True)), NotImplementedError, "v_scale.requires_grad = True but"),
}


@pytest.mark.parametrize("arguments,error,message", WRONG.values(), ids=WRONG.keys())
def test_wrong_call(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        flash3.attention(**arguments)
    assert caught.type is error


def test_wrong_calls_of_quantize():
    q, k, v = make("cpu", torch.bfloat16)
    cos = torch.ones(40, 16)
    for arguments, error, message in (
            ({}, ValueError, "q, k and v are None; at least one of them must be given"),
            ({"q": q, "scales": "rows"}, ValueError, "scales = 'rows' but it must be one of 'tensor', 'heads', 'blocks'"),
            ({"q": q, "heads_k": 0}, ValueError, "heads_k = 0 but it must be at least 1"),
            ({"q": q, "scales": "heads", "heads_k": 3}, ValueError, "q.shape[2] = 4 but q_scale.shape[1] = 3"),
            ({"q": q.double()}, TypeError, "q.dtype = float64 but it must be"),
            ({"k": k.to(FP8)}, TypeError, "k.dtype = "),
            ({"q": q, "k": k.half()}, TypeError, "k.dtype = float16 but q.dtype = bfloat16"),
            ({"q": q[0, 0]}, ValueError, "q.ndim = 2 but it must be 4"),
            ({"k": k, "v": v[:, :3]}, ValueError, "v.shape[1] = 3 but k.shape[1] = 50"),
            ({"k": k, "v": v.float().numpy()}, TypeError, "v is a ndarray but it must be a torch tensor, as k is"),
            ({"k": k, "v": v.to("meta")}, ValueError, "v.device = meta but k.device = cpu"),
            ({"v": v.clone().requires_grad_()}, NotImplementedError, "v.requires_grad = True but flash3.quantize has no gradients"),
            ({"q": q, "rotary_cos": cos}, ValueError, "rotary_sin is all zero"),
            ({"q": q, "rotary_cos": cos, "rotary_sin": cos, "rotary_offset_q": 8}, ValueError,
             "rotary_cos.shape[0] = 40 but rotary_offset_q = 8"),
            ({"q": q, "rotation_seed": 2**64}, ValueError, f"rotation_seed = {2**64} but it must be from 0"),
            ({"q": q, "rotate": "yes"}, TypeError, "rotate is a str but it must be of type bool")):
        with pytest.raises(error, match=re.escape(message)) as caught:
            flash3.quantize(**arguments)
        assert caught.type is error
    with pytest.raises(RuntimeError, match=re.escape("flash3: invalid argument: scale_ndim = 4 but it must be 1, [1]")):
        torch.ops.flash3.quantize(q, scale_ndim=4)
    with pytest.raises(NotImplementedError, match="no FP8 backward; it takes the float16"):
        out, lse = flash3.attention(**fp8_inputs("cpu", "none"), return_lse=True)
        flash3.attention_backward(out, *fp8_inputs("cpu", "none").values(), out, lse)


@pytest.mark.gpu
def test_scales_on_another_device():
    with pytest.raises(ValueError, match="k_scale.device = cpu but q.device = cuda:0"):
        flash3.attention(**bad("cuda", k_scale=torch.ones(1)))
    q, k, _ = make("cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="k.device = cpu but q.device = cuda:0"):
        flash3.quantize(q, k.cpu())
    with pytest.raises(ValueError, match="rotary_cos.device = cpu but k.device = cuda:0"):
        flash3.quantize(k=k, rotary_cos=torch.ones(60, 8), rotary_sin=torch.ones(60, 8))


# torch compares tensors before and after a call with an allclose that has no FP8.
FP8_INPUTS = [name for name in OPCHECKS if name != "test_schema"]
FP8_RESULTS = ["test_faketensor"]


def test_opcheck(device):
    t = fp8_inputs(device, "blocks")
    scales = {name: t[name] for name in ("q_scale", "k_scale", "v_scale")}
    forward, codes = torch.ops.flash3.forward.default, (t["q"], t["k"], t["v"])
    for options in ({}, {"out_dtype": torch.float16, "causal": True}, {"heads_first": True, "q_scale": None, "k_scale": None,
                                                                       "v_scale": None}):
        args = [x.transpose(1, 2) for x in codes] if "heads_first" in options else codes
        torch.library.opcheck(forward, tuple(args), {**scales, **options}, test_utils=FP8_INPUTS, atol=2e-2, rtol=2e-2)
    q, k, v = make(device, torch.bfloat16, grad=True)
    torch.library.opcheck(forward, (q, k, v), {"compute_fp8": True, "rotation_seed": 3}, test_utils=OPCHECKS, atol=2e-2, rtol=2e-2)
    heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, tuple(heads_first), {"heads_first": True}, test_utils=OPCHECKS, atol=2e-2, rtol=2e-2)
    q, k, v = (x.detach() for x in (q, k, v))
    pq, pk, pv, cu_q, cu_k = pack(device, torch.bfloat16)
    for args, options in (((q, k, v), {}), ((None, k, v, 2), {"rotate": True}), ((q, None, None, 2, 2), {}),
                          ((pq, pk, pv), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}), ((q, k, None, 1), {})):
        torch.library.opcheck(torch.ops.flash3.quantize.default, args, options, test_utils=FP8_RESULTS)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        made = flash3.quantize(q, k, v, rotate=True, rotation_seed=2**63)
        return flash3.attention(**made._asdict(), causal=True), flash3.attention(q, k, v, compute="fp8")


@torch._dynamo.config.patch(error_on_recompile=True)
def test_compile(device):
    torch._dynamo.reset()
    compiled = torch.compile(Attend(), fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (130, 200, 300):  # up to 128 tokens there is one block, and torch compiles sizes of 1 by themselves
        inputs = make(device, torch.bfloat16, seq_q=seq, seq_k=seq + 30)
        for a, b in zip(compiled(*inputs), Attend()(*inputs)):
            torch.testing.assert_close(a, b)


def test_compile_with_gradients(device):
    torch._dynamo.reset()
    q, k, v = make(device, torch.bfloat16, grad=True)
    call = lambda q, k, v: flash3.attention(q, k, v, causal=True, compute="fp8", out_dtype=torch.float16, deterministic=True)
    got, wanted = (torch.autograd.grad(f(q, k, v).float().square().sum(), [q, k, v]) for f in
                   (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    t = fp8_inputs(device, "none")
    sink = torch.zeros(4, device=device, requires_grad=True)
    with pytest.raises(Exception, match="FP8 has no gradients"):
        torch.compile(lambda: flash3.attention(**t, sink=sink), backend="aot_eager")()


def test_export(device):
    inputs = make(device, torch.bfloat16, seq_q=140, seq_k=150)
    seq_q, seq_k = torch.export.Dim("seq_q", min=129, max=1000), torch.export.Dim("seq_k", min=129, max=1000)
    program = torch.export.export(Attend(), tuple(inputs), dynamic_shapes=({1: seq_q}, {1: seq_k}, {1: seq_k}), strict=True)
    assert torch.ops.flash3.quantize.default in [node.target for node in program.graph.nodes]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for other in (inputs, make(device, torch.bfloat16, seq_q=270, seq_k=271)):
        for a, b in zip(torch.export.load(file).module()(*other), Attend()(*other)):
            torch.testing.assert_close(a, b)
        file.seek(0)


def test_autocast_leaves_fp8_alone(device):
    t = fp8_inputs(device, "heads")
    wanted = flash3.attention(**t)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(flash3.attention(**t), wanted)


def test_questions(device):
    t = fp8_inputs(device, "blocks", dim=64)
    assert flash3.supported(**t) and "float8_e4m3 to bfloat16" in flash3.explain(**t)
    assert "float8_e4m3 to float16" in flash3.explain(**t, out_dtype=torch.float16)
    q, k, v = make(device, torch.bfloat16, dim=64)
    assert "computed in float8_e4m3" in flash3.explain(q, k, v, compute="fp8")
    if device == "cpu":
        assert_hopper_refuses(lambda: flash3.supported(**t, backend="hopper"))
    else:
        no = flash3.supported(**t, out_dtype=torch.float32)
        assert not no and no.reason
    with pytest.raises(ValueError, match=re.escape("k_scale.shape[0] = 4 but")):
        flash3.supported(**{**t, "k_scale": torch.ones(4, device=device)})


@pytest.mark.gpu
def test_cuda_graph():
    q, k, v = make("cuda", torch.bfloat16, seq_q=200, seq_k=300, dim=64)
    call = lambda: (Attend()(q, k, v))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for seed in range(3):
        for old, new in zip((q, k, v), make("cuda", torch.bfloat16, seq_q=200, seq_k=300, dim=64, seed=seed)):
            old.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, call()))


# ---- without torch ----

def numpy_inputs():
    return [x.numpy() for x in make("cpu", torch.float32, seq_q=140, seq_k=200, dim=64)]


@pytest.mark.parametrize("scales", ["tensor", "heads", "blocks"])
def test_numpy_is_torch(scales):
    x = numpy_inputs()
    wanted = flash3.quantize(*map(torch.from_numpy, x), scales=scales, rotate=True, rotation_seed=9)
    made = flash3.quantize(*x, scales=scales, rotate=True, rotation_seed=9)
    for a, b in zip(made, wanted):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(torch.uint8).numpy())
    assert made.q.dtype == ml_dtypes.float8_e4m3fn
    out = flash3.attention(**made._asdict(), causal=True)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), flash3.attention(**wanted._asdict(), causal=True).float().numpy())
    for asked in ("float32", np.float32, np.dtype("float32")):
        assert flash3.attention(**made._asdict(), out_dtype=asked).dtype == np.float32
    # Bytes that are marked, with gaps in the rows too.
    codes = {name: arrays.E4M3(np.stack([made[i].view(np.uint8)] * 2, -1)[..., 0]) for i, name in enumerate("qkv")}
    np.testing.assert_array_equal(flash3.attention(**{**made._asdict(), **codes}, causal=True), out)
    np.testing.assert_array_equal(flash3.attention(*x, compute="fp8", rotation_seed=9),
                                  flash3.attention(*map(torch.from_numpy, x), compute="fp8", rotation_seed=9).numpy())


def test_numpy_packed_and_alone():
    q, k, v, cu_q, cu_k = (x.numpy() for x in pack("cpu", torch.float32))
    made = flash3.quantize(k=k, v=v, cu_seqlens_k=cu_k)
    wanted = flash3.quantize(k=torch.from_numpy(k), v=torch.from_numpy(v), cu_seqlens_k=torch.from_numpy(cu_k))
    assert made.q is None and made.q_scale is None
    again = flash3.quantize(k=DLPackOnly(k), v=DLPackOnly(v), cu_seqlens_k=DLPackOnly(cu_k))
    np.testing.assert_array_equal(again.k_scale, made.k_scale)
    for index in (1, 2, 4, 5):
        np.testing.assert_array_equal(made[index].view(np.uint8), wanted[index].view(torch.uint8).numpy())
    assert flash3.quantize(np.ones((1, 3, 4, 8), np.float32), scales="heads", heads_k=2).q_scale.shape == (1, 2)


class DLPackOnly:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_given_memory_bytes_and_dlpack():
    x = numpy_inputs()
    wanted = flash3.quantize(*x)
    codes = [arrays.E4M3(np.empty(t.shape, np.uint8)) for t in x]
    scales = [np.empty_like(s) for s in wanted[3:]]
    outputs = dict(zip(("q_out", "k_out", "v_out", "q_scale", "k_scale", "v_scale"), (*codes, *scales)))
    assert arrays.quantize_supported(*x, **outputs) and "cpu_quantize" in arrays.quantize_explain(*x, **outputs)
    assert arrays.quantize_workspace(*x, **outputs) >= 0
    arrays.quantize(*x, **outputs)
    for a, b in zip(codes, wanted[:3]):
        np.testing.assert_array_equal(a.codes, b.view(np.uint8))
    out = np.empty((2, 140, 4, 64), np.float32)
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    arrays.forward(*(arrays.E4M3(DLPackOnly(c.codes)) for c in codes), out, **given)
    np.testing.assert_array_equal(out, flash3.attention(**wanted._asdict(), out_dtype="float32"))
    again = np.empty_like(out)
    arrays.forward(*(torch.from_numpy(c.codes).view(FP8) for c in codes), again, **given)
    np.testing.assert_array_equal(again, out)


def test_errors_of_arrays():
    q, k, v = numpy_inputs()
    out = np.empty((2, 140, 4, 64), np.float32)
    read_only = np.empty(q.shape, np.uint8)
    read_only.flags.writeable = False
    for call, error, message in (
            (lambda: flash3.attention(arrays.E4M3(q), k, v), TypeError, "q.codes.dtype = float32 but what E4M3 marks must be uint8"),
            (lambda: flash3.attention(q.astype(np.uint8), k, v), TypeError, "q.dtype = uint8 but it must be one of float16"),
            (lambda: flash3.attention(q, k, v, out_dtype="float64"), TypeError, "out_dtype = float64 but it must be float16"),
            (lambda: flash3.attention(q, k, v, k_scale=np.ones(1, np.float32)), ValueError, "k_scale is given but k.dtype = float32"),
            (lambda: arrays.forward(q, k, v, out, compute="fp4"), ValueError, "compute = 'fp4' but it must be 'fp8' or None"),
            (lambda: arrays.forward(q, k, v, out, rotate=True), TypeError, "unexpected argument 'rotate'"),
            (lambda: arrays.quantize(q, causal=True), TypeError, "unexpected argument 'causal'"),
            (lambda: arrays.quantize(q), ValueError, "q_out is all zero; it must be a tensor"),
            (lambda: arrays.quantize(q, q_out=arrays.E4M3(read_only)), ValueError, "q_out is read-only memory"),
            (lambda: flash3.quantize(q.astype(np.float64)), TypeError, "q.dtype = float64 but"),
            (lambda: flash3.quantize(q, k.tolist()), TypeError, "k is a list but it must be a torch tensor, a numpy array")):
        with pytest.raises(error, match=re.escape(message)):
            call()
