# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache on FP8 caches, for torch tensors and for arrays: against a 16-bit cache of the same numbers."""
import math
import re

import numpy as np
import pytest
import torch

import flash3

FP8 = torch.float8_e4m3fn
BATCH, ROWS, HEADS_Q, HEADS_K, DIM, PAGE = 3, 300, 4, 2, 64, 160
LENGTHS = (280, 0, 129)


def blocks(rows):
    return math.ceil(rows / 128)


def make(device, dtype=torch.bfloat16, *, paged=False, scales="block", seq_q=1, seed=0):
    """(q, FP8 caches, the numbers that they hold, scales and the other arguments)."""
    g = torch.Generator().manual_seed(seed)
    elements, rows = (7, PAGE) if paged else (BATCH, ROWS)
    shapes = {"tensor": (1,), "head": (BATCH, HEADS_K), "block": (elements, HEADS_K, blocks(rows))}
    q = torch.randn(BATCH, seq_q, HEADS_Q, DIM, generator=g).to(dtype)
    caches, numbers, of = {}, {}, {}
    for name in "kv":
        codes = torch.randn(elements, rows, HEADS_K, DIM, generator=g).to(FP8)
        scale = torch.rand(shapes[scales], generator=g) + 0.5
        each = scale[:, :, torch.arange(rows) // 128].transpose(1, 2)[..., None] if scales == "block" else torch.ones(1)
        x = codes.float() * each
        caches[f"{name}_cache"], numbers[f"{name}_cache"], of[f"{name}_scale"] = codes, x, scale
    arguments = dict(seqused_k=torch.tensor(LENGTHS, dtype=torch.int32))
    if paged:
        arguments["page_table"] = torch.randperm(elements, generator=g)[:2 * BATCH].reshape(BATCH, 2).int()
    moved = [{name: x.to(device) for name, x in one.items()} for one in (caches, numbers, of, arguments)]
    return q.to(device), *moved


def as_numbers(numbers, of, scales):
    """What a cache holds, with scales that are not by block too."""
    if scales == "block":
        return numbers
    return {name: x * (of[f"{name[0]}_scale"] if scales == "tensor" else of[f"{name[0]}_scale"][:, None, :, None])
            for name, x in numbers.items()}


@pytest.mark.parametrize("scales", ("tensor", "head", "block"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, FP8), ids=str)
def test_against_a_wide_cache(device, dtype, scales):
    q, caches, numbers, of, arguments = make(device, dtype, scales=scales)
    out, lse = flash3.attention_with_kv_cache(q, **caches, **of, **arguments, return_lse=True)
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype)
    wide = {name: x.cpu() for name, x in as_numbers(numbers, of, scales).items()}
    wanted = flash3.attention_with_kv_cache(q.cpu().float(), **wide, **{n: x.cpu() for n, x in arguments.items()}, return_lse=True)
    rounding = 2**-3 if dtype == FP8 else 2**-8  # of weights to e4m3, as where there is no cache, and of out
    torch.testing.assert_close(out.cpu().float(), wanted[0], atol=2 * rounding, rtol=0)
    torch.testing.assert_close(lse.cpu(), wanted[1], atol=1e-4, rtol=1e-5)


def test_pages_with_scales_of_their_own(device):
    q, caches, numbers, of, arguments = make(device, paged=True, seq_q=3)
    out = flash3.attention_with_kv_cache(q, **caches, **of, **arguments, causal=True)
    wanted = flash3.attention_with_kv_cache(q.cpu().float(), **{n: x.cpu() for n, x in numbers.items()},
                                            **{n: x.cpu() for n, x in arguments.items()}, causal=True)
    torch.testing.assert_close(out.cpu().float(), wanted, atol=2**-7, rtol=0)


@pytest.mark.parametrize("paged", (False, True))
def test_append_quantizes(device, paged):
    """Keys with their embedding, divided by the scale of where they go and rounded once; values without."""
    q, caches, _, of, arguments = make(device, paged=paged, seq_q=2)
    g = torch.Generator().manual_seed(9)
    new = {name: torch.randn(BATCH, 2, HEADS_K, DIM, generator=g).bfloat16().to(device) for name in ("k_new", "v_new")}
    angles = torch.arange(400)[:, None] / 10 ** torch.arange(DIM // 2)[None, :]
    rotary = dict(rotary_cos=angles.cos().float().to(device), rotary_sin=angles.sin().float().to(device))
    before = {name: x.clone() for name, x in caches.items()}
    out = flash3.attention_with_kv_cache(q, **caches, **of, **arguments, **new, **rotary, causal=True)
    assert out.isfinite().all()
    for b, length in enumerate(LENGTHS):
        for n in range(2):
            place = length + n
            at = (int(arguments["page_table"][b, place // PAGE]), place % PAGE) if paged else (b, place)
            cos, sin = angles[place].cos().float(), angles[place].sin().float()
            k = new["k_new"][b, n].cpu().float()
            first, second = k[:, :DIM // 2], k[:, DIM // 2:]
            turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
            for name, x in (("k", turned), ("v", new["v_new"][b, n].cpu().float())):
                scale = of[f"{name}_scale"].cpu()[at[0], :, at[1] // 128, None]
                assert torch.equal(caches[f"{name}_cache"][at].cpu().float(), (x / scale).to(FP8).float())
                before[f"{name}_cache"][at] = caches[f"{name}_cache"][at]
    assert all(torch.equal(before[name].view(torch.uint8), caches[name].view(torch.uint8)) for name in caches)  # nothing else


def rotated_call(device, dtype=torch.bfloat16, *, paged, cache_dtype=FP8, seq=130, dim=DIM):
    """(an empty cache and its scales, the other arguments of a call that fills it, what flash3.quantize makes of the keys on a CPU)."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(BATCH, 3, HEADS_Q, dim, generator=g).to(dtype)
    k, v = (torch.randn(2, BATCH, seq, HEADS_K, dim, generator=g) * 10 ** (torch.rand(2, 1, 1, 1, dim, generator=g))).to(dtype)
    made = flash3.quantize(k=k, v=v, scales="heads", heads_k=HEADS_K, rotate=True, rotation_seed=2**64 - 3)
    shape = (7, PAGE, HEADS_K, dim) if paged else (BATCH, ROWS, HEADS_K, dim)
    caches = {name: torch.zeros(shape, dtype=cache_dtype, device=device) for name in ("k_cache", "v_cache")}
    call = dict(seqused_k=torch.zeros(BATCH, dtype=torch.int32), k_new=k, v_new=v, q=q)
    if cache_dtype == FP8:
        call |= dict(k_scale=made.k_scale, v_scale=made.v_scale)
    if paged:
        call["page_table"] = torch.randperm(7, generator=g)[:2 * BATCH].reshape(BATCH, 2).int()
    return caches, {name: x.to(device) for name, x in call.items()}, made


@pytest.mark.parametrize("dim", (DIM, 80, 256))
@pytest.mark.parametrize("paged", (False, True))
def test_rotation(device, paged, dim):
    """The append writes what quantize() makes, bit for bit; scores are those without, in that call and in one that appends nothing."""
    caches, call, made = rotated_call(device, paged=paged, dim=dim)
    rotation = dict(rotate=True, rotation_seed=2**64 - 3)
    out = flash3.attention_with_kv_cache(**caches, **call, **rotation, causal=True)
    for b in range(BATCH):
        rows = caches["k_cache"][call["page_table"][b].long()].flatten(0, 1) if paged else caches["k_cache"][b]
        assert torch.equal(rows[:130].cpu().view(torch.uint8), made.k[b].view(torch.uint8))
    plain = flash3.attention(*(call[name].cpu().float() for name in ("q", "k_new", "v_new")), causal=True)
    assert (out.cpu().float() - plain).norm() < 0.1 * plain.norm()
    later = {name: x for name, x in call.items() if name not in ("k_new", "v_new", "seqused_k")}
    later["seqused_k"] = call["seqused_k"] + 130
    assert torch.equal(flash3.attention_with_kv_cache(**caches, **later, **rotation, causal=True), out)
    schedule = flash3.kv_cache_schedule(**caches, **later, **rotation, causal=True)
    assert torch.equal(flash3.attention_with_kv_cache(**caches, **later, **rotation, causal=True, schedule=schedule), out)
    wrong = flash3.attention_with_kv_cache(**caches, **later, rotate=True, rotation_seed=4, causal=True)
    for other in (flash3.attention_with_kv_cache(**caches, **later, causal=True), wrong):  # q as it comes, or by another matrix
        assert (other.cpu().float() - plain).norm() > 0.5 * plain.norm()


def test_rotation_of_a_wide_cache_and_of_arrays(device):
    caches, call, _ = rotated_call(device, paged=False, cache_dtype=torch.bfloat16)
    plain_caches = {name: x.clone() for name, x in caches.items()}
    out, lse = flash3.attention_with_kv_cache(**caches, **call, rotate=True, return_lse=True)
    plain, plain_lse = flash3.attention_with_kv_cache(**plain_caches, **call, return_lse=True)
    assert torch.equal(caches["v_cache"], plain_caches["v_cache"]) and not torch.equal(caches["k_cache"], plain_caches["k_cache"])
    assert (out - plain).float().norm() < 0.05 * plain.float().norm()
    assert (lse - plain_lse).abs().max() < 0.05 * plain_lse.abs().max()
    if device == "cpu":
        host = {name: (x.float() if x.is_floating_point() else x).numpy() for name, x in {**caches, **call}.items()}
        wide = flash3.attention_with_kv_cache(**host, rotate=True)
        np.testing.assert_allclose(wide, plain.float(), atol=0.05 * plain.float().abs().max())


def test_rotation_compiles(device):
    caches, call, _ = rotated_call(device, paged=True)
    q = call.pop("q")
    wanted = flash3.attention_with_kv_cache(q, **caches, **call, rotate=True, rotation_seed=3)
    attend = torch.compile(lambda q: flash3.attention_with_kv_cache(q, **caches, **call, rotate=True, rotation_seed=3), backend="eager",
                           fullgraph=True)
    assert torch.equal(attend(q), wanted)


@pytest.mark.parametrize("q_dtype", (torch.float16, FP8))
def test_a_schedule_and_arrays(device, q_dtype):
    q, caches, _, of, arguments = make(device, q_dtype)
    wanted = flash3.attention_with_kv_cache(q, **caches, **of, **arguments)
    schedule = flash3.kv_cache_schedule(q, **caches, **of, **arguments)
    assert torch.equal(flash3.attention_with_kv_cache(q, **caches, **of, **arguments, schedule=schedule), wanted)
    if device == "cpu" and q_dtype == torch.float16:
        host = {name: flash3.arrays.E4M3(x.view(torch.uint8).numpy()) if x.dtype == FP8 else x.numpy()
                for name, x in {**caches, **of, **arguments}.items()}
        out = flash3.attention_with_kv_cache(q.half().numpy(), **host)
        np.testing.assert_allclose(out.astype(np.float32), wanted.float(), atol=2e-2)


def test_compile(device):
    q, caches, _, of, arguments = make(device, FP8)
    attend = torch.compile(lambda q: flash3.attention_with_kv_cache(q, **caches, **of, **arguments), backend="eager", fullgraph=True)
    assert torch.equal(attend(q), flash3.attention_with_kv_cache(q, **caches, **of, **arguments))


@pytest.mark.parametrize("change,error,message", (
    (dict(k_scale=torch.ones(BATCH, HEADS_K, 2)), ValueError, "k_scale.shape[2] = 2 but k_cache.shape[1] = 300"),
    (dict(k_scale=torch.ones(1, dtype=torch.float16)), TypeError, "k_scale.dtype = float16 but it must be float32"),
    (dict(q_scale=torch.ones(1)), ValueError, "q_scale is given but q.dtype = bfloat16"),
    (dict(k_new=torch.zeros(BATCH, 1, HEADS_K, DIM), v_new=torch.zeros(BATCH, 1, HEADS_K, DIM)), TypeError,
     "k_new.dtype = float32 but k_cache.dtype = float8_e4m3fn and q.dtype = bfloat16"),
    (dict(v_cache=torch.zeros(BATCH, ROWS, HEADS_K, DIM).bfloat16()), TypeError, "v_cache.dtype = bfloat16"),
    (dict(q=torch.zeros(BATCH, 1, HEADS_Q, DIM).to(FP8), rotate=True), NotImplementedError, "rotate = True but q.dtype = float8_e4m3fn"),
    (dict(k_new=torch.zeros(BATCH, 1, HEADS_K, DIM).to(FP8), v_new=torch.zeros(BATCH, 1, HEADS_K, DIM).to(FP8), rotate=True),
     NotImplementedError, "rotate = True but k_new.dtype = float8_e4m3fn; what is rotated must be of more than 8 bits"),
    (dict(rotate=True, rotation_seed=-1), ValueError, "rotation_seed = -1 but it must be from 0 to 2**64 - 1"),
), ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_errors(change, error, message):
    q, caches, _, of, arguments = make("cpu")
    with pytest.raises(error, match=re.escape(message)):
        flash3.attention_with_kv_cache(**{**dict(q=q), **caches, **of, **arguments, **change})
