# SPDX-License-Identifier: Apache-2.0
"""score_mods in flash3.flex_attention: which run here and as what, against torch's FlexAttention and their meaning in float64."""
import functools
import gc
import math
import re
import warnings
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from flash3 import flex_attention, _attention, _flex, _flex_trace, _mask_kinds as kinds, _sdpa

BATCH, HEADS, HEADS_K, DIM, LONGEST = 2, 4, 2, 16, 90
SIZES = [(70, 70), (40, 90), (90, 40)]
INF = math.inf


def captured(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17)).to(dtype).requires_grad_()


SLOPES, SLOPES_OF_SEQUENCES = captured(HEADS), captured(BATCH, HEADS)
TABLE = torch.nn.Parameter(captured(HEADS, 11))
FULL, OF_HEADS, PAIRS = captured(BATCH, HEADS, LONGEST, LONGEST), captured(HEADS, LONGEST, LONGEST, dtype=torch.bfloat16), captured(LONGEST, LONGEST)
OF_KEYS, ONE = captured(BATCH, LONGEST), captured()
TENSORS = [SLOPES, SLOPES_OF_SEQUENCES, TABLE, FULL, OF_HEADS, PAIRS, OF_KEYS, ONE]
DOCUMENTS = torch.arange(LONGEST) // 25
RELATIVE = (torch.arange(LONGEST)[:, None] * 5 + torch.arange(LONGEST) * 3) % 11


def alibi_of_attention_gym(heads):
    def alibi_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        bias = (kv_idx - q_idx) * scale
        return score + bias
    return alibi_mod


def t5(score, b, h, q_idx, kv_idx):
    relative = kv_idx - q_idx
    n = torch.abs(relative)
    large = 2 + (torch.log(n.float() / 2) / math.log(20 / 2) * 3).to(torch.long)
    large = torch.min(large, torch.full_like(large, 4))
    return score + TABLE[h, (relative > 0).to(torch.long) * 5 + torch.where(n < 2, n, large)]


def embedded(score, b, h, q_idx, kv_idx):
    return score + torch.nn.functional.embedding((q_idx - kv_idx).clamp(-5, 5) + 5, TABLE.T)[h]


# name: (score_mod, what it becomes, and what if no query sees a later key)
MODS = {
    "scaled": (lambda s, b, h, i, j: s * 1.5, ()),
    "negated": (lambda s, b, h, i, j: -(-s - 1) / 2, ("bias_table",)),
    "softcap": (lambda s, b, h, i, j: 5 * torch.tanh(s / 5), ()),
    "softcap of tensors": (lambda s, b, h, i, j: torch.tanh(s * torch.tensor(0.25) * 0.5).neg() * torch.tensor(-3.0) * 2, ()),
    "alibi": (alibi_of_attention_gym(HEADS), ("bias_table",), ("alibi_slopes",)),
    "slopes": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), ("bias_table",), ("alibi_slopes",)),
    "slopes, both sides": (lambda s, b, h, i, j: s - SLOPES[h] * (j - i).abs(), ("alibi_slopes",)),
    "slopes of sequences": (lambda s, b, h, i, j: s - 2 * (SLOPES_OF_SEQUENCES[b, h] * torch.abs(i - j).float()), ("alibi_slopes",)),
    "relative": (lambda s, b, h, i, j: s + (i - j) * 0.01, ("bias_table",), ("alibi_slopes",)),
    "truncated": (lambda s, b, h, i, j: s + ((j - i) / 3).to(torch.int64), ("bias_table",)),
    "table": (lambda s, b, h, i, j: s + TABLE[h, (j - i).clamp(-5, 5) + 5], ("bias_table",)),
    "t5": (t5, ("bias_table",)),
    "embedding": (embedded, ("bias_table",)),
    "softcap and slopes": (lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - SLOPES[h] * (j - i).abs(), ("alibi_slopes",)),
    "full": (lambda s, b, h, i, j: s + FULL[b, h, i, j], ("bias",)),
    "transposed": (lambda s, b, h, i, j: s + FULL[b, h, j, i], ("bias",)),
    "of heads": (lambda s, b, h, i, j: s + OF_HEADS[h, i, j], ("bias",)),
    "one after the other": (lambda s, b, h, i, j: s + OF_HEADS[h][i][j] * 2, ("bias",)),
    "two of heads": (lambda s, b, h, i, j: s + OF_HEADS[h, i, j] - OF_HEADS[h, j, i].float() * 3, ("bias",)),
    "products": (lambda s, b, h, i, j: s + torch.mm(PAIRS[i].unsqueeze(0), PAIRS[j].unsqueeze(1)).squeeze() / 9, ("bias",)),
    "pairs": (lambda s, b, h, i, j: s + PAIRS[i, j] - PAIRS[0, j], ("bias",)),
    "of keys": (lambda s, b, h, i, j: s + OF_KEYS[b, j], ("bias",)),
    "of rows": (lambda s, b, h, i, j: s + PAIRS[i, 3] + OF_KEYS[b, 0] + SLOPES[h] + ONE, ("bias", "bias_table")),
    "sum": (lambda s, b, h, i, j: (s * 0.7 + OF_HEADS[h, i, j]) + (PAIRS[i, j] - SLOPES[h] * (i - j).abs() + OF_KEYS[b, j]) +
            TABLE[h, (j - i).clamp(-5, 5) + 5], ("alibi_slopes", "bias", "bias_table")),
    "causal": (lambda s, b, h, i, j: torch.where(i >= j, s, -INF), ("bias_table",)),
    "near": (lambda s, b, h, i, j: s.masked_fill((i - j).abs() > 9, -INF), ("bias_table",)),
    "documents": (lambda s, b, h, i, j: torch.where(DOCUMENTS[i] == DOCUMENTS[j], s + TABLE[h, 0], -INF), ("bias", "bias_table")),
    "either": (lambda s, b, h, i, j: torch.where(i >= j, s + OF_KEYS[b, j], s - 1), ("bias",)),
    "places": (lambda s, b, h, i, j: s + TABLE[h, RELATIVE[i, j]], ("bias",)),
}
MASKS = {"all": None, "causal": lambda b, h, i, j: i >= j, "document": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)}


def tensors(seq_q, seq_k, dtype=torch.float32, dim=DIM, requires_grad=True):
    g = torch.Generator().manual_seed(seq_q)
    return [torch.randn(BATCH, h, s, dim, generator=g, dtype=dtype, requires_grad=requires_grad)
            for h, s in ((HEADS, seq_q), (HEADS_K, seq_k), (HEADS_K, seq_k))]


def block_mask_of(mask, seq_q, seq_k):
    return None if MASKS[mask] is None else create_block_mask(MASKS[mask], None, None, seq_q, seq_k, "cpu", BLOCK_SIZE=32)


class _Indexed(TorchFunctionMode):
    """x[i] with tensors i, as torch's FlexAttention means it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], [torch.as_tensor(x) for x in indices])
        return function(*args, **(kwargs or {}))


def meant(q, k, v, score_mod, seen):
    """(out, lse) in float64, with autograd."""
    scores = torch.einsum("bhid,bhjd->bhij", *(x.double() for x in (q, k.repeat_interleave(HEADS // HEADS_K, 1)))) / math.sqrt(q.shape[-1])
    for n in reversed(range(4)):
        score_mod = torch.vmap(score_mod, in_dims=(0, *(0 if n == other else None for other in range(4))))
    with _Indexed():
        scores = score_mod(scores, *map(torch.arange, scores.shape))
    scores = scores if seen is None else scores.masked_fill(~seen, -INF)
    lse = torch.logsumexp(scores, -1)
    hidden = scores.detach().amax(-1, keepdim=True) == -INF
    weights = torch.softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0)
    return weights @ v.double().repeat_interleave(HEADS // HEADS_K, 1), lse


@pytest.fixture
def given(monkeypatch):
    """Options of the calls that reach flash3.attention; one that is left to torch fails."""
    calls = []
    original = _attention.attention

    def recorded(*arguments, **options):
        calls.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr(_attention, "attention", recorded)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*leaves this call to torch")
        monkeypatch.setattr(_sdpa, "_said", set())
        yield calls


def added(options):
    return tuple(sorted({"alibi_slopes", "bias", "bias_table"} & set(options)))


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

class Own:
    """A score_mod with a state of its own."""

    def __init__(self):
        self.factor = 2.0
        self.bias = torch.arange(90.0)

    def __call__(self, score, b, h, i, j):
        return score * self.factor + self.bias[j]


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


# ---- traces and results that are kept ----

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
