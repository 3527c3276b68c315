# SPDX-License-Identifier: Apache-2.0
"""score_mods in flash3.flex_attention: which run here and as what, against torch's FlexAttention and their meaning in float64."""
import re
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention as torch_flex

from flash3 import flex_attention, _flex, _mask_kinds as kinds, _sdpa
from flex_cases import (BATCH, DIM, FULL, HEADS, INF, MASKS, MODS, OF_HEADS, OF_KEYS, ONE, PAIRS, SIZES, SLOPES, TABLE, TENSORS, added,
                        block_mask_of, captured, given, meant, tensors)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_results_and_gradients(given, name, sizes, mask):
    score_mod, *becomes = MODS[name]
    q, k, v = tensors(*sizes)
    out, lse = flex_attention(q, k, v, score_mod, block_mask_of(mask, *sizes), enable_gqa=True, return_lse=True)
    assert added(given[0]) == (becomes[0] if mask == "all" else becomes[-1])
    seen = None if MASKS[mask] is None else create_mask(MASKS[mask], None, None, *sizes, "cpu")
    wanted, wanted_lse = meant(q, k, v, score_mod, seen)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=2e-5)
    g = torch.Generator().manual_seed(1)
    dout, dlse = torch.randn(out.shape, generator=g), torch.randn(lse.shape, generator=g).masked_fill(lse == -INF, 0)
    inputs = [q, k, v, *TENSORS]
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse), materialize_grads=True)
    wanted = torch.autograd.grad((wanted, wanted_lse), inputs, (dout.double(), dlse.double()), materialize_grads=True)
    for x, a, b in zip(inputs, got, wanted):
        size = max(1, b.abs().max().item()) * (2**-7 if x.dtype == torch.bfloat16 else 1e-4)
        torch.testing.assert_close(a, b, rtol=0, atol=size)


@pytest.mark.parametrize("name", MODS)
def test_against_torch(given, name):
    sizes, mask = SIZES[list(MODS).index(name) % 3], list(MASKS)[list(MODS).index(name) % 2]
    q, k, v = tensors(*sizes, requires_grad=False)
    arguments = q, k, v, MODS[name][0], block_mask_of(mask, *sizes)
    with torch.no_grad(), warnings.catch_warnings():
        out, lse = flex_attention(*arguments, scale=0.4, enable_gqa=True, return_lse=True)
        warnings.simplefilter("ignore")
        wanted, wanted_lse = torch_flex(*arguments, scale=0.4, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=4e-5)


def test_a_bias_is_not_copied(given):
    q, k, v = tensors(70, 40)
    for score_mod, bias in ((lambda s, b, h, i, j: s + FULL[b, h, i, j], FULL[:, :, :70, :40]),
                            (lambda s, b, h, i, j: OF_HEADS[h, j, i].float() + s, OF_HEADS[None, :, :40, :70].mT),
                            (lambda s, b, h, i, j: s + PAIRS[i][j], PAIRS[None, None, :70, :40]),
                            (lambda s, b, h, i, j: s + FULL[1, h, 2, j], FULL[1:2, :, 2:3, :40]),
                            (lambda s, b, h, i, j: s + OF_KEYS[b, j], OF_KEYS[:, None, None, :40]),
                            (lambda s, b, h, i, j: s + OF_KEYS[b, 3], OF_KEYS[:, None, None, 3:4].expand(-1, -1, -1, 40))):
        flex_attention(q, k, v, score_mod, enable_gqa=True)
        own = given[-1]["bias"]
        assert own.shape == bias.shape and own.dtype == bias.dtype and own.data_ptr() == bias.data_ptr()
        assert [n for n, size in zip(own.stride(), own.shape) if size > 1] == [n for n, size in zip(bias.stride(), bias.shape) if size > 1]


def test_sizes_of_a_table_and_slopes(given):
    q, k, v = tensors(40, 90)
    flex_attention(q, k, v, MODS["table"][0], enable_gqa=True)
    flex_attention(q, k, v, lambda s, b, h, i, j: s + (i - j).abs().sqrt(), enable_gqa=True)
    flex_attention(q, k, v, lambda s, b, h, i, j: s + ONE, enable_gqa=True)
    assert [tuple(options["bias_table"].shape) for options in given] == [(HEADS, 179), (1, 179), (1, 1)]
    flex_attention(q, k, v, MODS["slopes, both sides"][0], enable_gqa=True)
    flex_attention(q, k, v, MODS["slopes of sequences"][0], enable_gqa=True)
    flex_attention(q, k, v, lambda s, b, h, i, j: s - (i - j).abs() / 8, enable_gqa=True)
    assert torch.equal(given[-1]["alibi_slopes"], torch.full((HEADS,), 1 / 8))
    assert [tuple(options["alibi_slopes"].shape) for options in given[3:]] == [(HEADS,), (BATCH, HEADS), (HEADS,)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_table_of_the_distances_that_there_are(given, sizes):
    q, k, v = tensors(*sizes)
    table = captured(HEADS, sum(sizes) - 1)

    def score_mod(score, b, h, i, j):
        return score + table[h, j - i + (sizes[0] - 1)]

    out = flex_attention(q, k, v, score_mod, enable_gqa=True)
    wanted, _ = meant(q, k, v, score_mod, None)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, table)) for x in (out, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", (False, True), ids=("source", "made"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("alignment", ("bottom_right", "top_left"))
def test_masks_of_flash3(given, sizes, alignment, made):
    """Distances are those of places also where the mask aligns its band to the other corner."""
    q, k, v = tensors(*sizes, requires_grad=False)
    source = kinds.band(causal=True, mask_alignment=alignment)
    mask = source.make(*sizes, device="cpu") if made else source
    aligned = alignment == "top_left" or sizes[0] == sizes[1]
    for name in ("slopes", "slopes, both sides", "table"):
        out = flex_attention(q, k, v, MODS[name][0], mask, enable_gqa=True)
        assert added(given[-1]) == (("alibi_slopes",) if aligned and name != "table" else ("bias_table",))
        wanted, _ = meant(q, k, v, MODS[name][0], source.sized(*sizes).to_dense())
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_block_mask_that_shows_later_keys(given):
    q, k, v = tensors(70, 70)
    for mask_mod, becomes in ((lambda b, h, i, j: (i >= j) & (j % 2 == 0) & (i - j < 20), "bias_table"),  # bits, which are not looked at
                              (lambda b, h, i, j: (i >= j) & (i - j < 20), "alibi_slopes"), (lambda b, h, i, j: i + 1 >= j, "bias_table"),
                              (lambda b, h, i, j: (i >= j) | (j < 1), "alibi_slopes"), (lambda b, h, i, j: (i >= j) | (j < 2), "bias_table")):
        flex_attention(q, k, v, MODS["slopes"][0], create_block_mask(mask_mod, None, None, 70, 70, "cpu"), enable_gqa=True)
        assert added(given[-1]) == (becomes,)


def test_dtypes_and_autocast(given):
    q, k, v = (x.detach() for x in tensors(70, 70))
    for name in ("sum", "products"):
        score_mod = MODS[name][0]
        with torch.autocast("cpu", torch.bfloat16):  # first, when it is traced
            out = flex_attention(q, k, v, lambda *arguments: score_mod(*arguments), enable_gqa=True)
        assert out.dtype == torch.bfloat16
        assert torch.equal(flex_attention(*(x.bfloat16() for x in (q, k, v)), score_mod, enable_gqa=True), out)
        wanted, _ = meant(q, k, v, score_mod, None)
        torch.testing.assert_close(out.double(), wanted, rtol=0.05, atol=0.05)
        with torch.inference_mode():
            of_inference = flex_attention(q, k, v, score_mod, enable_gqa=True)
        torch.testing.assert_close(of_inference.double(), wanted, rtol=1e-5, atol=1e-5)


def test_no_sequence_or_key():
    for sizes in ((0, 30), (30, 0)):
        q, k, v = tensors(*sizes)
        assert torch.equal(flex_attention(q, k, v, MODS["sum"][0], enable_gqa=True), torch.zeros(BATCH, HEADS, sizes[0], DIM))


# ---- what torch does ----

class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def without_gradients(score, b, h, i, j):
    with torch.no_grad():
        bias = SLOPES[h] * 2
    return score + bias


COUNTER = torch.zeros(3)


def counts(score, b, h, i, j):
    COUNTER.add_(1)
    return score


UNKNOWN = {
    "multiplies the score by what is no number": lambda s, b, h, i, j: s * SLOPES[h],
    "divides the score by what is no number": lambda s, b, h, i, j: s / (1 + j),
    "divides by the score": lambda s, b, h, i, j: SLOPES[h] / s,
    "divides the score by 0": lambda s, b, h, i, j: s / 0,
    "rounds the score": lambda s, b, h, i, j: torch.div(s, 2, rounding_mode="floor"),
    "multiplies the score by -2": lambda s, b, h, i, j: s * -2,
    "adds inf to the score": lambda s, b, h, i, j: s + INF,
    "rounds the score to bfloat16": lambda s, b, h, i, j: s.bfloat16().float(),
    "computes aten.relu.default of the score": lambda s, b, h, i, j: torch.relu(s),
    "adds to the score before the softcap": lambda s, b, h, i, j: 5 * torch.tanh((s + SLOPES[h]) / 5),
    "takes the tanh of a tanh": lambda s, b, h, i, j: s.tanh().tanh(),
    "adds scores that are capped in different ways": lambda s, b, h, i, j: s + s.tanh(),
    "multiplies or caps some scores in another way": lambda s, b, h, i, j: torch.where(i > j, s, 2 * s),
    "puts something else in place of some scores": lambda s, b, h, i, j: torch.where(i > j, s, -1e9),
    "returns what does not depend on the score": lambda s, b, h, i, j: SLOPES[h] + 0 * j,
    "returns something other than a tensor of no dimensions": lambda s, b, h, i, j: s + SLOPES,
    "reads the value of a tensor, for a condition": lambda s, b, h, i, j: s if i > j else 2 * s,
    "reads the value of a tensor, for a condition or a number": lambda s, b, h, i, j: s * SLOPES[0].item(),
    "calls tolist() of a tensor": lambda s, b, h, i, j: s * SLOPES.tolist()[0],
    "draws random numbers": lambda s, b, h, i, j: s + torch.rand(()),
    "changes a tensor, by add_": counts,
    "sets whether gradients are recorded": without_gradients,
    "has gradients of its own": lambda s, b, h, i, j: s + _Straight.apply(SLOPES[h]),
    "has gradients of its own, by an autograd.Function": lambda s, b, h, i, j: _Straight.apply(s),
    "cannot be traced: KeyError: 'no'": lambda s, b, h, i, j: s + {}["no"],
    "reads 70 places of a tensor's dimension 1, which has 11": lambda s, b, h, i, j: s + TABLE[h, j],
}


@pytest.fixture
def asked(monkeypatch):
    """Calls of torch's function."""
    calls = []

    def recorded(*arguments, **others):
        calls.append(arguments)
        return "torch's"

    monkeypatch.setattr(_flex._torch_flex, "flex_attention", recorded)
    monkeypatch.setattr(_sdpa, "_said", set())
    return calls


@pytest.mark.parametrize("reason", UNKNOWN)
def test_others_are_torchs(asked, reason):
    q, k, v = tensors(70, 70)
    state = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match=re.escape("leaves this call to torch: score_mod " + reason)):
        assert flex_attention(q, k, v, UNKNOWN[reason], enable_gqa=True) == "torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert flex_attention(q, k, v, UNKNOWN[reason], enable_gqa=True) == "torch's"
    assert [x[3] for x in asked] == [UNKNOWN[reason]] * 2
    assert torch.equal(torch.random.get_rng_state(), state) and not COUNTER.any()
    with pytest.raises(NotImplementedError, match="block_mask is a MaskSource, which torch does not take"):
        flex_attention(q, k, v, UNKNOWN[reason], kinds.band(causal=True), enable_gqa=True)


def test_torch_gets_a_block_mask_that_flash3_does_not_take(asked):
    block_mask = create_block_mask(MASKS["causal"], None, None, 70, 70, "cpu", BLOCK_SIZE=20)
    with pytest.warns(UserWarning, match="is no number"):
        assert flex_attention(*tensors(70, 70), lambda s, b, h, i, j: s * SLOPES[h], block_mask, enable_gqa=True) == "torch's"


def test_calls_that_flash3_has_no_kernel_for_are_torchs(asked):
    score_mod = MODS["slopes"][0]
    for change, reason in ((lambda x: x.double(), "float64"), (lambda x: x.detach().repeat(1, 1, 1, 40), "head_dim"),
                           (lambda x: x.repeat(1, 1, 1, 20), "head_dim")):
        with pytest.warns(UserWarning, match=reason):
            assert flex_attention(*map(change, tensors(70, 70)), score_mod, enable_gqa=True) == "torch's"
    wide = [x.detach().repeat(1, 1, 1, 20) for x in tensors(70, 70)]  # without gradients
    with torch.no_grad():
        assert flex_attention(*wide, score_mod, enable_gqa=True).shape == (BATCH, HEADS, 70, 320)
    with pytest.warns(UserWarning, match="transforms the call"):
        torch.func.grad(lambda q: (flex_attention(q, *tensors(70, 70)[1:], score_mod, enable_gqa=True), q.sum())[1])(tensors(70, 70)[0])


def test_compiled():
    q, k, v = (x.detach() for x in tensors(70, 70))
    slopes = SLOPES.detach()

    def score_mod(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod, enable_gqa=True), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), flex_attention(q, k, v, score_mod, enable_gqa=True), rtol=1e-5, atol=1e-5)
