# SPDX-License-Identifier: Apache-2.0
"""What flash3.flex_attention keeps of score_mods: traces, for functions that do the same, and what these add to the scores."""
import functools
import gc
import weakref

import pytest
import torch

from flash3 import flex_attention, _flex, _flex_trace
from flex_cases import HEADS, PAIRS, captured, given, meant, tensors


@pytest.fixture
def traced(monkeypatch):
    """How often a function is traced."""
    calls = []
    original = _flex_trace._trace

    def counting(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(_flex_trace, "_trace", counting)
    monkeypatch.setattr(_flex_trace, "_kept", {})
    return calls


def with_slopes(slopes, factor=1.0):
    return lambda score, b, h, i, j: score - factor * slopes[h] * (i - j).abs()


def test_functions_that_do_the_same_are_traced_once(traced, given):
    q, k, v = tensors(70, 70)
    for seed in range(3):
        slopes = captured(HEADS, seed=seed).detach()
        flex_attention(q, k, v, with_slopes(slopes), enable_gqa=True)
        assert torch.equal(given[-1]["alibi_slopes"], slopes)
    assert len(traced) == 1
    flex_attention(q, k, v, with_slopes(slopes, 2.0), enable_gqa=True)
    assert torch.equal(given[-1]["alibi_slopes"], 2 * slopes) and len(traced) == 2
    flex_attention(q, k, v, with_slopes(slopes.double()), enable_gqa=True)
    flex_attention(q, k, v, with_slopes(slopes[None].expand(2, -1)[0]), enable_gqa=True)  # of the same strides
    flex_attention(q, k, v, with_slopes(torch.cat((slopes, slopes))), enable_gqa=True)
    assert len(traced) == 4
    for seed in range(2):
        flex_attention(q, k, v, functools.partial(with_slopes(captured(HEADS, seed=seed))), enable_gqa=True)
    assert len(traced) == 5  # which has a gradient


def test_no_tensor_is_kept_with_a_trace(traced, given):
    slopes = captured(HEADS)
    gone = weakref.ref(slopes)
    out = flex_attention(*tensors(70, 70), with_slopes(slopes), enable_gqa=True)
    given.clear(), traced.clear()
    del slopes, out
    gc.collect()
    assert gone() is None and len(_flex_trace._kept) == 1


def test_what_is_added_is_kept_while_nothing_changes(traced, given):
    q, k, v = (x.detach() for x in tensors(70, 70))
    slopes = captured(HEADS).detach()
    score_mod = with_slopes(slopes)
    score_mod.factor = 1
    for _ in range(2):
        flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert given[0]["alibi_slopes"] is given[1]["alibi_slopes"]
    slopes.mul_(3)
    flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert torch.equal(given[2]["alibi_slopes"], slopes) and len(traced) == 1
    slopes.requires_grad_()
    flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert given[3]["alibi_slopes"].requires_grad
    with torch.no_grad():
        flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert not given[4]["alibi_slopes"].requires_grad


def test_while_a_graph_is_captured(traced, given, monkeypatch):
    """No function is traced, which may wait for the device, and nothing is kept that belongs to the graph's memory."""
    q, k, v = (x.detach() for x in tensors(70, 70))
    slopes = captured(HEADS).detach()
    flex_attention(q, k, v, with_slopes(slopes), enable_gqa=True)
    for module in (_flex, _flex_trace):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    score_mod = with_slopes(slopes)
    for _ in range(2):
        flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert given[1]["alibi_slopes"] is not given[2]["alibi_slopes"] and len(traced) == 1
    with pytest.raises(UserWarning, match="score_mod was not seen before"):
        flex_attention(q, k, v, with_slopes(slopes, 2.0), enable_gqa=True)


def test_large_biases_are_not_kept(given, monkeypatch):
    q, k, v = (x.detach() for x in tensors(70, 70))
    bias = PAIRS.detach()

    def evaluated(score, b, h, i, j):
        return score + bias[i // 2, j]

    def viewed(score, b, h, i, j):
        return score + bias[i, j]

    def called_twice(score_mod):
        outs = [flex_attention(q, k, v, score_mod, enable_gqa=True) for _ in range(2)]
        assert torch.equal(*outs)
        return given[-1]["bias"] is given[-2]["bias"]

    assert called_twice(evaluated)
    monkeypatch.setattr(_flex, "_MOST_KEPT", 4 * 70 * 70 - 1)
    assert not called_twice(lambda *arguments: evaluated(*arguments)) and called_twice(viewed)


class Own:
    """A score_mod with a state of its own."""

    def __init__(self):
        self.factor = 2.0
        self.bias = torch.arange(90.0)

    def __call__(self, score, b, h, i, j):
        return score * self.factor + self.bias[j]


def test_what_cannot_be_seen_is_traced_at_each_call(traced, given):
    q, k, v = tensors(70, 70)
    own = Own()
    for factor in (2.0, 3.0):
        own.factor = factor
        for score_mod in (own, lambda *arguments: own(*arguments)):
            out = flex_attention(q, k, v, score_mod, enable_gqa=True)
            torch.testing.assert_close(out.double(), meant(q, k, v, own, None)[0], rtol=1e-5, atol=1e-5)
    assert len(traced) == 4


def test_attributes_of_a_function_are_seen(traced, given):
    def score_mod(score, b, h, i, j):
        return score * score_mod.factor

    for factor in (2.0, 3.0, 3.0):
        score_mod.factor = factor
        flex_attention(*tensors(70, 70), score_mod, scale=1.0, enable_gqa=True)
    assert [options["softmax_scale"] for options in given] == [2.0, 3.0, 3.0] and len(traced) == 2


def test_what_a_function_asks_of_its_tensors_is_seen(traced, given):
    slopes = captured(HEADS).detach()

    def score_mod(score, b, h, i, j):
        return score * (2 if slopes.requires_grad else 3) + slopes[h] * (1 + slopes.requires_grad)

    for needed in (False, True, False):
        slopes.requires_grad_(needed)
        flex_attention(*tensors(70, 70), score_mod, scale=1.0, enable_gqa=True)
    assert [options["softmax_scale"] for options in given] == [3.0, 2.0, 3.0] and len(traced) == 2
    assert "mask" not in given[0] and given[0]["bias_table"] is given[2]["bias_table"]
    with torch.no_grad():
        slopes.requires_grad_()
        flex_attention(*tensors(70, 70), score_mod, enable_gqa=True)
    assert torch.equal(given[3]["bias_table"][:, 0], 2 * slopes)
