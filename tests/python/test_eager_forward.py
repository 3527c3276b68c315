# SPDX-License-Identifier: Apache-2.0
"""flash3._eager.forward, which does torch.ops.flash3.forward's work around torch's dispatcher: which calls take it, and that no bit, stride or
error differs."""
import pytest
import torch

pytest.importorskip("flash3._eager", reason="built without Python's headers, or this torch has no table of DLPack functions")

import flash3
import flash_attn_interface as fa
from flash3 import _eager, _sdpa, _torch, _torch_kv_cache
from test_attention import make

HALF = torch.bfloat16
OPERATOR = torch.ops.flash3.forward


@pytest.fixture
def taken(monkeypatch):
    """A list that gets, for each call of either short way, its name and whether it was taken."""
    answers = []

    def watch(module, attribute, function):
        def watched(*call):
            result = function(*call)
            answers.append((function.__name__, result is not None))
            return result
        monkeypatch.setattr(module, attribute, watched)

    watch(_torch, "_eager_forward", _eager.forward)
    watch(_torch_kv_cache, "eager", _eager.attention_with_kv_cache)
    return answers


@pytest.fixture
def no_operator(monkeypatch):
    """Operators without which a call must do."""
    def refuse(*args, **named):
        raise AssertionError("an operator was called")
    for name in ("_forward", "_inference", "_forward_now", "_inference_now"):
        monkeypatch.setattr(_torch, name, refuse)


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]



ARGUMENTS = [{}, {"causal": True}, {"softmax_scale": 0.2, "softcap": 3.0}, {"window_left": 5, "window_right": 2}, {"window_right": 3},
             {"window_left": -1, "window_right": 3}, {"window_left": 2, "window_right": -1}, {"chunk": 8}, {"sm_margin": 3},
             {"deterministic": True}, {"causal": True, "mask_alignment": 0}]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("is_heads_first", [False, True], ids=["rows first", "heads first"])
def test_arguments_have_the_operators_bits(device, arguments, is_heads_first):
    q, k, v = make(device, HALF, seq_q=33, seq_k=50, heads_q=4, heads_k=2)
    if is_heads_first:
        q, k, v = heads_first(q, k, v)
    arguments = {**arguments, "heads_first": is_heads_first}
    if arguments.get("mask_alignment") == 0:  # a word is Python's, and a number the operator's
        assert _eager.forward(q, k, v, arguments, True) is None
        return
    out, lse = _eager.forward(q, k, v, arguments, True)
    wanted, wanted_lse = OPERATOR(q, k, v, **arguments)
    assert torch.equal(out, wanted) and out.stride() == wanted.stride() and torch.equal(lse, wanted_lse) and lse.shape == wanted_lse.shape
    alone, none = _eager.forward(q, k, v, arguments, False)
    assert torch.equal(alone, wanted) and none is None


# [batch, heads, seq, dim] over memory of other orders; the operator gives all of them one.
LAYOUTS = {"rows before heads": lambda x: x.transpose(1, 2), "heads before rows": lambda x: x.transpose(1, 2).contiguous(),
           "every second row": lambda x: x[:, ::2].transpose(1, 2), "expanded": lambda x: x[:1].expand(2, -1, -1, -1).transpose(1, 2)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", [{}, {"dim": 48, "dim_v": 72}, {"seq_q": 1}, {"batch": 2, "heads_q": 2, "heads_k": 1}], ids=str)
def test_heads_first_has_the_operators_strides(device, layout, shape):
    q, k, v = map(layout, make(device, HALF, **shape))
    out, _ = _eager.forward(q, k, v, {"heads_first": True}, False)
    wanted = OPERATOR(q, k, v, heads_first=True)[0]
    assert torch.equal(out, wanted) and out.stride() == wanted.stride() and out.untyped_storage().resizable()


def test_tensors_have_the_operators_bits(device):
    q, k, v = make(device, HALF, heads_q=4, heads_k=2)
    given = {"sink": torch.arange(4.0, device=device), "seqused_k": torch.tensor([3, 4], dtype=torch.int32, device=device)}
    qv = torch.randn(*q.shape[:3], v.shape[-1], device=device).to(HALF)
    calls = [((q, k, v), given)]
    if device == "cpu":
        calls += [((q, k, v), {"qv": qv}), (heads_first(q, k, v), {"qv": qv.transpose(1, 2), "heads_first": True})]
    for tensors, arguments in calls:
        got, wanted = _eager.forward(*tensors, arguments, True), OPERATOR(*tensors, **arguments)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_what_is_the_operators():
    q, k, v = make("cpu", HALF)
    leaf, sink = q.clone().requires_grad_(), torch.zeros(q.shape[2], requires_grad=True)
    calls = [((leaf, k, v), {}), ((q, k, v), {"sink": sink}), ((q, k, v), {"out_dtype": torch.float32}), ((q, k, v), {"unknown": 1}),
             ((q, k, v), {"window": (1, 1)}), ((q, k, v), {"heads_first": 1}), ((q, k, v), {"window_left": 0.5}),
             ((q[0], k[0], v[0]), {"heads_first": True}), ((q, k, v), {"window_left": 2**64}), ((q, k, None), {})]
    for tensors, arguments in calls:
        assert _eager.forward(*tensors, arguments, True) is None
    with pytest.raises(TypeError, match="takes 5 arguments but 4 are given"):
        _eager.forward(q, k, v, {})
    with torch.no_grad():
        assert _eager.forward(leaf, k, v, {"sink": sink}, True) is not None


def step_of(q, k):
    """A step of decoding in which every key counts."""
    return q[:, :1], {"cache_seqlens": torch.full((len(k),), k.shape[1], dtype=torch.int32, device=k.device)}


def test_who_takes_it(device, taken, no_operator):
    q, k, v = make(device, HALF, seq_q=16, seq_k=16, heads_q=4, heads_k=4)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    t, t_leaves = heads_first(q, k, v), heads_first(*leaves)
    step, lengths = step_of(q, k)
    calls = {
        "forward": [lambda: flash3.sdpa(*t, is_causal=True), lambda: flash3.sdpa(*t_leaves), lambda: flash3.attention(*leaves),
                    lambda: flash3.sdpa(t[0][:, :, :8], *t[1:], is_causal=True), lambda: flash3.sdpa(*t, scale=0.5),
                    lambda: fa.flash_attn_func(*leaves, causal=True), lambda: fa.flash_attn_func(q, k, v, return_attn_probs=True)],
        "attention_with_kv_cache": [
            lambda: fa.flash_attn_with_kvcache(step, k, v, **lengths), lambda: fa.flash_attn_with_kvcache(
                step, k, v, **lengths, causal=True, window_size=(4, 0), softmax_scale=0.3, softcap=2.0, return_softmax_lse=True)]}
    for name, each in calls.items():
        for call in each:
            del taken[:]
            call()
            assert taken == [(name, True)]


def test_the_step_builds_no_forward(device, monkeypatch):
    q, k, v = make(device, HALF)
    step, lengths = step_of(q, k)
    wanted = fa.flash_attn_with_kvcache(step, k, v, **lengths, causal=True, return_softmax_lse=True, sm_margin=1, attention_chunk=7)
    built = []
    monkeypatch.setattr(fa, "Forward", lambda *args: built.append(args))
    got = fa.flash_attn_with_kvcache(step, k, v, **lengths, causal=True, return_softmax_lse=True, sm_margin=1, attention_chunk=7)
    assert not built and len(got) == 4 and all(torch.equal(a, b) for a, b in zip(got, wanted))
    monkeypatch.undo()
    monkeypatch.setattr(_torch_kv_cache, "eager", None)
    long = fa.flash_attn_with_kvcache(step, k, v, **lengths, causal=True, return_softmax_lse=True, sm_margin=1, attention_chunk=7)
    assert all(torch.equal(a, b) for a, b in zip(got, long))


def results(q, k, v, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = flash3.sdpa(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 2.0}], ids=str)
@pytest.mark.parametrize("lengths", [(16, 16), (16, 33), (33, 16)], ids=str)
def test_sdpa_is_the_same_without_it(device, monkeypatch, options, lengths):
    q, k, v = heads_first(*make(device, HALF, seq_q=lengths[0], seq_k=lengths[1], heads_q=4, heads_k=4))
    got = (flash3.sdpa(q, k, v, **options), *results(q, k, v, **options))
    monkeypatch.setattr(_torch, "_eager_forward", None)
    wanted = (flash3.sdpa(q, k, v, **options), *results(q, k, v, **options))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, wanted))


def test_transforms_and_compilers_see_the_operator(taken):
    q, k, v = heads_first(*make("cpu", torch.float32, heads_q=4, heads_k=4))
    wanted = flash3.sdpa(q, k, v)
    del taken[:]
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    assert torch.equal(torch.compile(lambda q, k, v: flash3.sdpa(q, k, v), backend=keep, fullgraph=True)(q, k, v), wanted)
    assert len(graphs) == 1 and "torch.ops.flash3" in graphs[0] and "_eager" not in graphs[0]
    mapped = torch.func.vmap(lambda x: flash3.sdpa(x[None], k[:1], v[:1])[0])(q)
    assert torch.allclose(mapped[0], wanted[0], atol=1e-6)
    with torch.profiler.profile() as profile:
        flash3.sdpa(q, k, v)
    assert any("flash3::" in event.key for event in profile.key_averages())
    assert ("forward", True) not in taken
