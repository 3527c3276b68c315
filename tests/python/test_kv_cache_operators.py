# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash3's operators for a KV cache and for merging: what torch must know of them, and the way around them."""
import pytest
import torch

import flash3
from cache_cases import Case
from flash3 import _torch_kv_cache

OPS = torch.ops.flash3
NAMES = {"k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k", "cache_leftpad": "leftpad_k", "rotary_seqlens": "rotary_offsets",
         "window_size": "window", "attention_chunk": "chunk", "s_aux": "sink"}
NEW = ("k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_offsets", "rotary_interleaved")

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
    assert names[3:10] == list(NEW)  # in this order _torch_kv_cache and _eager give them, and the other options after them
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
