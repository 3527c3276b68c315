# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache and merge, for torch tensors and for arrays, against attention() on gathered keys."""
import math
import re

import numpy as np
import pytest
import torch

import flash3
from cache_cases import Case
from conftest import DLPackOnly, assert_hopper_refuses
from flash3 import _torch_kv_cache, arrays

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


# torch.ops.flash3's operators for a KV cache and for merging: what torch must know of them, and the way around them.

OPS = torch.ops.flash3
NAMES = {"k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k", "cache_leftpad": "leftpad_k", "rotary_seqlens": "rotary_offsets",
         "window_size": "window", "attention_chunk": "chunk", "s_aux": "sink"}
KV_CACHE_OPERATORS_NEW = ("k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_offsets", "rotary_interleaved")

CASES = {
    "dense": {}, "append": {"new": "dense"}, "pages": {"page_size": 16, "causal": True, "softcap": 2.0},
    "pages, append": {"page_size": 3, "new": "packed", "rotary": "halves", "rotary_offsets": True, "window_size": (5, 0)},
    "elements, padded": {"elements": True, "leftpad": True, "attention_chunk": 8, "softmax_scale": 0.2},
    "packed": {"packed_q": True, "new": "packed", "rotary": "interleaved", "causal": True},
}


def given(case):
    """A case's arguments with flash3's names."""
    return {NAMES.get(name, name): x for name, x in case.arguments.items()}


def as_operators(arguments):
    """(name, tensors, options) of the operator for these arguments of flash3.attention_with_kv_cache."""
    a = dict(arguments)
    tensors = tuple(a.pop(name) for name in ("q", "k_cache", "v_cache"))
    a["window_left"], a["window_right"] = a.pop("window", (-1, -1))
    if "k_new" not in a:
        return "attention_with_kv_cache", tensors, a
    return "attention_with_kv_cache_append", (*tensors, a.pop("k_new"), a.pop("v_new")), a


def kvcache(**arguments):
    return flash3.attention_with_kv_cache(**{NAMES.get(name, name): x for name, x in arguments.items()}, return_lse=True)


def written(name):
    return [a.name for a in getattr(OPS, name).default._schema.arguments if a.alias_info and a.alias_info.is_write]


def test_schemas_name_what_is_written():
    assert written("attention_with_kv_cache") == written("merge") == []
    assert written("attention_with_kv_cache_append") == ["k_cache", "v_cache"]
    assert written("attention_with_kv_cache_out") == ["k_cache", "v_cache", "out", "lse", "max_logits"]
    assert written("merge_out") == ["out", "lse"]
    names = [a.name for a in OPS.attention_with_kv_cache_append.default._schema.arguments]
    assert names[3:10] == list(KV_CACHE_OPERATORS_NEW)  # in this order _torch_kv_cache and _eager give them, and the other options after them
    assert names[10:] == [a.name for a in OPS.attention_with_kv_cache.default._schema.arguments][3:]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_the_definition(device, case):
    Case(device, torch.bfloat16, **case).check(kvcache)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck(device, case):
    name, tensors, options = as_operators(given(Case(device, torch.bfloat16, **case)))
    torch.library.opcheck(getattr(OPS, name).default, tensors, options)


def test_opcheck_of_given_memory(device):
    arguments = given(Case(device, torch.bfloat16, page_size=16, new="dense"))
    _, tensors, options = as_operators(arguments)
    results = torch.empty(4, 2, 4, 24, device=device, dtype=torch.bfloat16), torch.empty(4, 4, 2, device=device)
    arguments = (*tensors[:3], *results, *tensors[3:])
    torch.library.opcheck(OPS.attention_with_kv_cache_out.default, arguments, options)
    OPS.attention_with_kv_cache_out(*arguments, **options)
    wanted = OPS.attention_with_kv_cache_append(*tensors, **options)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted))


def test_opcheck_of_merging(device):
    outs, lses = torch.randn(3, 9, 2, 16, device=device), torch.randn(3, 2, 9, device=device)
    sink = torch.randn(2, device=device)
    for options in ({}, {"sink": sink}, {"out_dtype": torch.bfloat16}):
        torch.library.opcheck(OPS.merge.default, (outs, lses), options)
    out, lse = torch.empty(9, 2, 16, device=device), torch.empty(2, 9, device=device)
    torch.library.opcheck(OPS.merge_out.default, (outs, lses, out, lse))
    OPS.merge_out(outs, lses, out, lse, sink)
    wanted = flash3.merge(outs, lses, sink=sink, return_lse=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compile(device, case):
    Case(device, torch.bfloat16, **case).check(torch.compile(kvcache, fullgraph=True, backend="aot_eager"))
    torch._dynamo.reset()


def test_compile_of_merging(device):
    outs, lses = torch.randn(3, 9, 2, 16, device=device), torch.randn(3, 2, 9, device=device)

    def merged(*parts):
        return flash3.merge(*parts, out_dtype=torch.float16, return_lse=True)

    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(outs, lses), merged(outs, lses)))


@pytest.fixture
def taken(monkeypatch):
    """A list that gets, for each call that asks for the way around the operators, whether it was taken."""
    eager = pytest.importorskip("flash3._eager").attention_with_kv_cache
    answers = []

    def watched(*call):
        results = eager(*call)
        answers.append(results is not None)
        return results

    monkeypatch.setattr(_torch_kv_cache, "eager", watched)
    return answers


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_way_around_has_the_operators_bits(device, case, taken):
    made = [Case(device, torch.bfloat16, **case) for _ in range(3)]
    out, lse = kvcache(**made[0].arguments)
    without = flash3.attention_with_kv_cache(**given(made[1]))
    assert taken == [True, True]
    name, tensors, options = as_operators(given(made[2]))
    wanted = getattr(OPS, name)(*tensors, **options)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]) and torch.equal(without, out)
    assert out.stride() == wanted[0].stride() and lse.stride() == wanted[1].stride()
    assert torch.equal(made[0].arguments["k_cache"], made[2].arguments["k_cache"])


def test_who_looks_sees_the_operator(device, taken):
    for case, name in (({}, "attention_with_kv_cache"), ({"new": "dense"}, "attention_with_kv_cache_append")):
        arguments = given(Case(device, torch.bfloat16, **case))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            flash3.attention_with_kv_cache(**arguments)
        assert f"flash3::{name}" in {event.key for event in profile.key_averages()}
    assert taken == [False, False]


def test_rows_of_no_sequence():
    """They get what a query without keys gets."""
    case = Case(dtype=torch.bfloat16, packed_q=True).arguments
    rows = case["q"].shape[0]
    q = torch.cat([case["q"], case["q"][:3]])
    out, lse = kvcache(**{**case, "q": q})
    assert not out[rows:].any() and (lse[:, rows:] == -float("inf")).all() and out[:rows].any()
    out, lse = flash3.attention_with_kv_cache(q[:4].view(2, 2, 4, 32), case["k_cache"][:2], case["v_cache"][:2],
                                              seqused_q=torch.tensor([1, 2], dtype=torch.int32), return_lse=True)
    assert not out[0, 1].any() and (lse[0, :, 1] == -float("inf")).all()


def test_caches_are_never_copied():
    """Nor read as if they had no gaps."""
    arguments = given(Case(dtype=torch.bfloat16))
    gaps = torch.randn(4, 64, 2, 64).bfloat16()[..., ::2]
    with pytest.raises(ValueError, match=r"k_cache.stride\[3\] = 2 but it must be 1"):
        flash3.attention_with_kv_cache(**{**arguments, "k_cache": gaps})
    q = torch.randn(4, 2, 4, 64).bfloat16()[..., ::2]
    torch.testing.assert_close(flash3.attention_with_kv_cache(**{**arguments, "q": q}),
                               flash3.attention_with_kv_cache(**{**arguments, "q": q.contiguous()}))


def test_no_tensors_of_another_kind():
    arguments = given(Case(dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="k_cache is a ndarray but it must be a torch tensor, as q is"):
        flash3.attention_with_kv_cache(**{**arguments, "k_cache": arguments["k_cache"].float().numpy()})
    with pytest.raises(TypeError, match="sink is a bool but it must be"):
        flash3.merge(torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3), sink=True)
    with pytest.raises(TypeError, match="lse_parts is a list"):
        flash3.merge(torch.zeros(1, 2, 3, 4), [])
    with pytest.raises(TypeError, match="out_dtype is a str but it must be a torch.dtype"):
        flash3.merge(torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2), out_dtype="float16")
    with pytest.raises(ValueError, match="sm_margin = 4294967296 but it must fit into 32 bits"):
        flash3.attention_with_kv_cache(**arguments, sm_margin=2**32)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        flash3.attention_with_kv_cache(**{**arguments, "seqused_k": arguments["seqused_k"].to("meta")})


def test_gradients_of_the_operators():
    arguments = given(Case(dtype=torch.bfloat16))
    _, (q, k_cache, v_cache), options = as_operators(arguments)
    with pytest.raises(NotImplementedError, match="there are no gradients through this call"):
        OPS.attention_with_kv_cache(q.requires_grad_(), k_cache, v_cache, **options)[0].sum().backward()
    with pytest.raises(NotImplementedError, match="sink.requires_grad is True"):
        flash3.attention_with_kv_cache(q.detach(), k_cache, v_cache, sink=torch.zeros(4, requires_grad=True))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), q.detach())
        with pytest.raises(NotImplementedError, match="q has a tangent but flash3 has no forward-mode derivatives"):
            flash3.attention_with_kv_cache(dual, k_cache, v_cache)
