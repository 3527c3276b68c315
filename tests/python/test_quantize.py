# SPDX-License-Identifier: Apache-2.0
"""flash3.quantize, from torch and from arrays, and attention on FP8 arrays."""
import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import flash3
from flash3 import arrays
from conftest import DLPackOnly
from test_attention import make, pack
from test_fp8 import BLOCK, FP8, fp8_inputs, values


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
        rotated = wanted[..., a] * c - wanted[..., b] * s, wanted[..., a] * s + wanted[..., b] * c
        wanted = wanted.clone()
        wanted[..., a], wanted[..., b] = rotated
        torch.testing.assert_close(values(codes, scale), wanted, rtol=0.07, atol=float(scale.max()) / 256)
    torch.testing.assert_close(values(made.v, made.v_scale), v.double(), rtol=0.07, atol=float(made.v_scale.max()) / 256)


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
            ({"q": q, "rotary_cos": cos}, ValueError, "rotary_sin is None"),
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
            (lambda: arrays.forward(q, k, v, out, seed=1), TypeError, "unexpected argument 'seed'"),
            (lambda: arrays.quantize(q, causal=True), TypeError, "unexpected argument 'causal'"),
            (lambda: arrays.quantize(q), ValueError, "q_out is None; it must be a tensor"),
            (lambda: arrays.quantize(q, q_out=arrays.E4M3(read_only)), ValueError, "q_out is read-only memory"),
            (lambda: flash3.quantize(q.astype(np.float64)), TypeError, "q.dtype = float64 but"),
            (lambda: flash3.quantize(q, k.tolist()), TypeError, "k is a list but it must be a torch tensor, a numpy array")):
        with pytest.raises(error, match=re.escape(message)):
            call()
