# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache and merge, for torch tensors and for arrays, against attention() on gathered keys."""
import math
import re

import numpy as np
import pytest
import torch

import flash3
from flash3 import arrays
from conftest import DLPackOnly, assert_hopper_refuses

LENGTHS, NEW, PAGE = (37, 0, 16), 2, 16


def rotate(x, positions, cos, sin, interleaved):
    """x [seq, heads, dim] at these positions."""
    pairs = cos.shape[1]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    c, s = cos[positions][:, None], sin[positions][:, None]
    made = x.copy()
    made[..., first], made[..., second] = x[..., first] * c - x[..., second] * s, x[..., first] * s + x[..., second] * c
    return made


def make(seed=0, heads_q=4, heads_k=2, dim=32, dim_v=24, seq_q=NEW):
    g = np.random.default_rng(seed)
    batch, pages = len(LENGTHS), 12

    def random(*shape):
        return g.standard_normal(shape, dtype=np.float32)

    table = np.full((batch, 4), 10**9, np.int32)
    order = iter(g.permutation(pages))
    for b, length in enumerate(LENGTHS):
        for i in range(math.ceil((length + NEW) / PAGE)):
            table[b, i] = next(order)
    angles = np.arange(64)[:, None] / 10 ** np.arange(6)[None, :]
    return dict(q=random(batch, seq_q, heads_q, dim), k_cache=random(pages, PAGE, heads_k, dim),
                v_cache=random(pages, PAGE, heads_k, dim_v), page_table=table, seqused_k=np.array(LENGTHS, np.int32),
                k_new=random(batch, NEW, heads_k, dim), v_new=random(batch, NEW, heads_k, dim_v),
                rotary_cos=np.cos(angles).astype(np.float32), rotary_sin=np.sin(angles).astype(np.float32))


def gathered(call, interleaved=False, causal=True):
    """(out, lse, k, v) of each sequence, by attention() on its own keys."""
    for b, length in enumerate(LENGTHS):
        at = [(call["page_table"][b, j // PAGE], j % PAGE) for j in range(length)]
        keys = [np.stack([call[name][place] for place in at]) if at else call[name][0, :0] for name in ("k_cache", "v_cache")]
        positions = length + np.arange(NEW)
        new = rotate(call["k_new"][b], positions, call["rotary_cos"], call["rotary_sin"], interleaved)
        k, v = np.concatenate([keys[0], new]), np.concatenate([keys[1], call["v_new"][b]])
        q = rotate(call["q"][b], positions if causal else np.full(NEW, length), call["rotary_cos"], call["rotary_sin"], interleaved)
        out, lse = flash3.attention(q[None], k[None], v[None], causal=causal, return_lse=True)
        yield out[0], lse[0], k, v


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("interleaved", (True, False))
def test_pages_append_and_rotary(interleaved, causal):
    call = make()
    wanted = list(gathered(call, interleaved, causal))
    out, lse = flash3.attention_with_kv_cache(**call, rotary_interleaved=interleaved, causal=causal, return_lse=True)
    for b, (length, (out_b, lse_b, k, v)) in enumerate(zip(LENGTHS, wanted)):
        np.testing.assert_allclose(out[b], out_b, atol=2e-6)
        np.testing.assert_allclose(lse[b], lse_b, atol=2e-6)
        for n in range(length, length + NEW):  # what was appended lies in the cache
            place = call["page_table"][b, n // PAGE], n % PAGE
            np.testing.assert_allclose(call["k_cache"][place], k[n], atol=1e-6)
            np.testing.assert_array_equal(call["v_cache"][place], v[n])
    assert tuple(call["seqused_k"]) == LENGTHS


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_torch(dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("Hopper takes 16 bits")
    call = {name: torch.from_numpy(x) for name, x in make().items()}
    call = {name: (x.to(dtype) if x.dtype == torch.float32 and "rotary" not in name else x).to(device) for name, x in call.items()}
    cpu = {name: x.cpu().clone() for name, x in call.items()}
    wanted = flash3.attention_with_kv_cache(**{name: x.float().clone() if x.dtype == dtype and "rotary" not in name else x
                                               for name, x in cpu.items()}, causal=True)
    out, lse = flash3.attention_with_kv_cache(**call, causal=True, return_lse=True)
    assert out.dtype == dtype and out.device == call["q"].device and lse.dtype == torch.float32
    torch.testing.assert_close(out.cpu().float(), wanted, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=0)
    assert not torch.equal(call["k_cache"].cpu(), cpu["k_cache"])


def test_elements_and_padding():
    g = np.random.default_rng(3)
    q, k, v = (g.standard_normal((2 if n == 0 else 5, 1 if n == 0 else 20, 2, 16), dtype=np.float32) for n in range(3))
    used, padding, elements = (np.array(x, np.int32) for x in ((20, 7), (3, 0), (4, 1)))
    out = flash3.attention_with_kv_cache(q, k, v, seqused_k=used, leftpad_k=padding, cache_batch_idx=elements)
    for b in range(2):
        own = slice(padding[b], used[b])
        wanted = flash3.attention(q[b:b + 1], k[elements[b], own][None], v[elements[b], own][None])
        np.testing.assert_allclose(out[b], wanted[0], atol=2e-6)
    packed = flash3.attention_with_kv_cache(q[:, 0], DLPackOnly(k), v, seqused_k=used, leftpad_k=padding, cache_batch_idx=elements,
                                            cu_seqlens_q=np.array([0, 1, 2], np.int32), max_seqlen_q=1)
    np.testing.assert_array_equal(packed, out[:, 0])


def test_packed_new_tokens():
    call = make()
    for name in ("rotary_cos", "rotary_sin"):
        del call[name]
    dense = {name: x.copy() for name, x in call.items()}
    wanted = flash3.attention_with_kv_cache(**dense)
    for name in ("k_new", "v_new"):
        call[name] = call[name].reshape(-1, *call[name].shape[2:])
    out = flash3.attention_with_kv_cache(**call, cu_seqlens_k_new=np.arange(0, 2 * NEW + 3, NEW, np.int32))
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(call["k_cache"], dense["k_cache"])


def test_a_plan_of_decoding():
    call = make()
    q, k, v = (call.pop(name) for name in ("q", "k_cache", "v_cache"))
    out = np.zeros((3, NEW, 4, 24), np.float32)
    plan = arrays.forward_plan(q, k, v, out, causal=True, **call)
    wanted = flash3.attention_with_kv_cache(q, k.copy(), v.copy(), causal=True, **call)
    plan.run(q, k, v, out)
    np.testing.assert_array_equal(out, wanted)
    frozen = k.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="k is read-only memory"):
        plan.run(q, frozen, v, out)
    assert_hopper_refuses(lambda: arrays.forward_supported(q, k, v, out, backend="hopper", **call))


@pytest.mark.parametrize("change,error,message", (
    (dict(page_table=np.zeros((3, 4), np.int64)), TypeError, "page_table.dtype = int64 but it must be int32"),
    (dict(seqused_k=None), ValueError, "k_new is given but seqused_k is not"),
    (dict(k_new=None, v_new=None), ValueError, "rotary_cos is given but k_new is not"),
    (dict(page_table=np.zeros((2, 4), np.int32)), ValueError, "page_table.shape[0] = 2 but q.shape[0] = 3"),
    (dict(page_table=np.full((3, 4), 12, np.int32)), ValueError, "page_table[0][0] = 12 but it must be from 0 to 11"),
    (dict(sm_margin=-1), ValueError, "sm_margin = -1 but it must be at least 0"),
    (dict(sm_margin=2**40), ValueError, "sm_margin = 1099511627776 but it must fit into 32 bits"),
    (dict(q=np.zeros((3, 2), np.float32)), ValueError, "q.ndim = 2 but it must be 4"),
    (dict(v_cache=np.zeros((3, 2), np.float32)), ValueError, "v_cache.ndim = 2 but it must be 4"),
), ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_errors(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        flash3.attention_with_kv_cache(**{**make(), **change})


def test_a_part_is_not_rounded():
    """out_dtype: the float32 result that would be rounded to q's dtype."""
    q, k, v = (torch.randn(2, rows, 2, 32).bfloat16() for rows in (1, 20, 20))
    used = torch.tensor([20, 3], dtype=torch.int32)
    rounded, wide = (flash3.attention_with_kv_cache(q, k, v, seqused_k=used, out_dtype=dtype) for dtype in (None, torch.float32))
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), rounded) and not torch.equal(wide, rounded.float())


def test_no_gradients():
    call = {name: torch.from_numpy(x) for name, x in make().items()}
    call["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="q.requires_grad is True but there are no gradients"):
        flash3.attention_with_kv_cache(**call)
    with torch.no_grad():
        flash3.attention_with_kv_cache(**call)
    with pytest.raises(NotImplementedError, match="out_parts.requires_grad is True"):
        flash3.merge(torch.zeros(2, 3, 4, 5, requires_grad=True), torch.zeros(2, 4, 3))


def test_merge_of_parts_is_the_whole():
    g = np.random.default_rng(5)
    q, k, v = (g.standard_normal((1, n, 2, 16), dtype=np.float32) for n in (9, 40, 40))
    sink = np.array([0.5, -1], np.float32)
    wanted, wanted_lse = flash3.attention(q, k, v, sink=sink, return_lse=True)
    outs, lses = zip(*(flash3.attention(q, k[:, part], v[:, part], return_lse=True)
                       for part in (slice(0, 13), slice(13, 13), slice(13, 40))))
    outs = np.concatenate(outs)
    outs[1] = np.nan  # saw no key
    lses = np.concatenate(lses)
    out, lse = flash3.merge(outs, lses, sink=sink, return_lse=True)
    np.testing.assert_allclose(out, wanted[0], atol=2e-6)
    np.testing.assert_allclose(lse, wanted_lse[0], atol=2e-6)
    of_torch = flash3.merge(torch.from_numpy(outs), torch.from_numpy(lses), sink=torch.from_numpy(sink), out_dtype=torch.bfloat16)
    assert of_torch.dtype == torch.bfloat16
    np.testing.assert_allclose(of_torch.float().numpy(), wanted[0], atol=1e-2)
    assert "cpu_merge_fp32" in arrays.merge_explain(outs, lses, out) and arrays.merge_supported(outs, lses, out)
    plan = arrays.merge_plan(outs, lses, out)
    plan.run(outs[::-1].copy(), lses[::-1].copy(), out)
    np.testing.assert_allclose(out, flash3.attention(q, k, v)[0], atol=2e-6)
    with pytest.raises(ValueError, match="out_parts.ndim = 3 but it must be 4"):
        flash3.merge(outs[0], lses)
    with pytest.raises(TypeError, match="unexpected argument 'causal'"):
        arrays.merge(outs, lses, out, causal=True)
