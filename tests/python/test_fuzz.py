# SPDX-License-Identifier: Apache-2.0
"""Arguments of any kind through Python: a right result, or an exception that says what is wrong, and never a crash.

Hypothesis draws the calls, always the same ones: FLASH3_FUZZ_EXAMPLES=20000 draws so many of each, and others each time.
"""
import math
import os

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flash3
import flash_attn_interface as fa
from oracle import EPS, exact, naive

EXAMPLES = os.environ.get("FLASH3_FUZZ_EXAMPLES")
fuzzed = settings(max_examples=int(EXAMPLES or 60), derandomize=not EXAMPLES, database=None, deadline=None, print_blob=True,
                  suppress_health_check=list(HealthCheck))

# NotImplementedError is a RuntimeError; AssertionError is what FlashAttention-3 itself raises of a cache's or qkv's layout.
REFUSALS = (ValueError, TypeError, RuntimeError, AssertionError)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
torch.set_num_threads(1)  # small tensors


class Wrong(Exception):
    """What a drawn call must not give."""


class Draw:
    """One call's arguments; `is_wrong` once one of them breaks a rule, or may."""

    def __init__(self, data):
        self.data, self.is_wrong = data, False
        self.wrongness = data.draw(st.sampled_from([0, 0, 0.03, 0.15]), "wrongness")

    def of(self, *values):
        return self.data.draw(st.sampled_from(values))

    def size(self, least, most):
        return self.data.draw(st.integers(least, most))

    def misses(self):
        """Now and then: whether this argument becomes something else."""
        if not self.wrongness or self.data.draw(st.floats(0, 1)) >= self.wrongness:
            return False
        self.is_wrong = True
        return True

    def option(self, *values):
        """One of the values that a rule allows, or something else."""
        return self.anything() if self.misses() else self.of(*values)

    def anything(self):
        return self.of(None, True, 0, 1, -1, 3, -7, 2**31, 2**63 - 1, -2**63, 2**70, 0.5, -1.0, math.nan, math.inf, 1e300, "", "x",
                       b"x", (), (1,), (1, 2, 3), (None, None), ("a", 2), [0, 1], {}, object(), torch.float16,
                       torch.tensor(3), torch.tensor([1.5, 2.0]), torch.zeros(0), np.zeros((2, 3)), np.int32(3))

    def tensor(self, shape, dtype, positive=False):
        """A tensor of this shape in some layout, or something else."""
        if self.misses():
            how = self.of("anything", "shape", "dtype", "device", "kind", "gradient")
            if how == "anything":
                return self.anything()
            if how == "shape":
                shape = list(shape)
                at = self.size(0, len(shape))
                shape = shape[:at] + [self.size(0, 5)] + shape[at + self.size(0, 2):]
            if how == "dtype":
                dtype = self.of(torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn,
                                torch.float8_e5m2, *DTYPES)
            if how == "device":
                return torch.empty(shape, dtype=dtype, device="meta")
            x = self._filled(shape, dtype, positive)
            if how == "kind":
                return self.of(lambda: x.to_sparse(), lambda: x.float().numpy(), lambda: x.tolist(), lambda: [x],
                               lambda: torch.nn.Parameter(x.float()), lambda: x.unsqueeze(0))()
            return x.requires_grad_() if how == "gradient" and x.is_floating_point() else x
        return self._laid_out(self._filled(shape, dtype, positive))

    def _filled(self, shape, dtype, positive):
        g = torch.Generator().manual_seed(self.size(0, 3))
        x = torch.rand(*shape, generator=g) + 0.5 if positive else torch.randn(*shape, generator=g)
        return x.to(dtype)

    def _laid_out(self, x):
        how = self.of("dense", "dense", "heads first", "gaps", "strided last", "offset", "broadcast")
        if how == "heads first" and x.ndim == 4:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "gaps" and x.ndim > 1:
            wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
            wide[..., :-3] = x
            return wide[..., :-3]
        if how == "strided last":
            wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        if how == "offset":
            return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
        if how == "broadcast" and x.ndim > 1 and x.shape[0]:
            return x[:1].expand(x.shape)
        return x

    def lengths(self, values):
        return self.tensor_of(values, torch.int32)

    def tensor_of(self, values, dtype):
        if self.misses():
            values = list(values)
            if values and self.of(True, False):
                values[self.size(0, len(values) - 1)] = self.of(-1, 2**31 - 1, -2**31, 7, 10**6)
            else:
                values = values[:-1] if self.of(True, False) else values + [5]
            if self.of(True, False):
                dtype = self.of(torch.int64, torch.float32, torch.int32)
        return torch.tensor(values, dtype=dtype)


def outcome(draw, call):
    """What the call gives; None where it refuses, which a call without a fault must not."""
    try:
        return call()
    except REFUSALS as error:
        if not str(error).strip():
            raise Wrong(f"{type(error).__name__} without a message") from error
        if not draw.is_wrong:
            raise Wrong("a call that breaks no rule is refused") from error
        return None


def assert_right(draw, got, wanted, plain):
    """As oracle.assert_close has it; of a call that may be wrong, wherever both are finite."""
    if not isinstance(got, torch.Tensor) or got.device.type == "meta" or not draw.is_wrong and got.shape != wanted.shape:
        assert isinstance(got, torch.Tensor) and got.shape == wanted.shape
        return
    assert got.shape == wanted.shape
    finite = torch.isfinite(wanted)
    assert torch.equal(torch.isfinite(got), finite), "infinite elsewhere than the exact value"
    got, wanted, plain, dtype = got.double()[finite], wanted.double()[finite], plain.double()[finite], got.dtype
    if got.numel():
        error, allowed = (got - wanted).abs().max(), 2 * (plain - wanted).abs().max() + 2 * EPS[dtype]
        assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


def references(q, k, v, options):
    """(exact, naive) results of a dense call, or None where the options are none that these know."""
    try:
        window = options.get("window_size")
        if window is not None:
            window = tuple(None if side is None else int(side) for side in window)
        kwargs = {"causal": bool(options.get("causal")), "window": window, "chunk": int(options.get("attention_chunk") or 0),
                  "softcap": float(options.get("softcap") or 0),
                  "softmax_scale": options.get("softmax_scale"), "sink": options.get("s_aux")}
        if kwargs["softmax_scale"] is not None:
            kwargs["softmax_scale"] = float(kwargs["softmax_scale"])
        return exact(q, k, v, **kwargs), naive(q, k, v, **kwargs)
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError, NotImplementedError):
        return None


def sizes(draw):
    heads_k = draw.size(1, 3)
    dim = draw.of(1, 3, 8, 17, 32, 64)
    return {"batch": draw.size(0, 3), "seq_q": draw.size(0, 17), "seq_k": draw.size(0, 23), "heads_k": heads_k,
            "heads_q": heads_k * draw.size(1, 3), "dim": dim, "dim_v": draw.of(dim, dim, 5)}


def options_of(draw, heads_q, dtype):
    """Options that all of FlashAttention-3's functions take; mostly few."""
    options = {}
    for name, values in (("softmax_scale", (None, 0.3, 1, torch.tensor(0.25))), ("causal", (False, True)),
                         ("window_size", ((-1, -1), (3, 0), (0, 2), (None, 4), torch.tensor([2, -1]))), ("attention_chunk", (0, 5)),
                         ("softcap", (0.0, 2.5)), ("num_splits", (0, 1)), ("pack_gqa", (None, True, False)), ("sm_margin", (0,))):
        if draw.of(0, 0, 1):
            options[name] = draw.option(*values)
    if draw.of(0, 0, 1):
        options["s_aux"] = draw.tensor((heads_q,), draw.of(torch.float32, dtype))
    for name in ("qv", "q_descale", "k_descale"):
        if draw.misses():
            options[name] = draw.of(draw.anything(), torch.ones(1))
    return options


@fuzzed
@given(st.data())
def test_flash_attn_func(data):
    draw = Draw(data)
    s, dtype = sizes(draw), draw.of(*DTYPES)
    q = draw.tensor((s["batch"], s["seq_q"], s["heads_q"], s["dim"]), dtype)
    k = draw.tensor((s["batch"], s["seq_k"], s["heads_k"], s["dim"]), dtype)
    v = draw.tensor((s["batch"], s["seq_k"], s["heads_k"], s["dim_v"]), dtype)
    options = options_of(draw, s["heads_q"], dtype)
    result = outcome(draw, lambda: fa.flash_attn_func(q, k, v, **options, return_attn_probs=True))
    if result is None or "q_descale" in options or "k_descale" in options:
        return
    found = references(q, k, v, options)
    if found is None:
        assert draw.is_wrong
        return
    (out, lse), (plain, plain_lse) = found
    assert_right(draw, result[0].detach(), out.detach(), plain.detach())
    assert_right(draw, result[1].detach(), lse.detach(), plain_lse.detach())


@fuzzed
@given(st.data())
def test_flash_attn_varlen_func(data):
    draw = Draw(data)
    s, dtype = sizes(draw), draw.of(*DTYPES)
    lengths = [(draw.size(0, s["seq_q"]), draw.size(0, s["seq_k"])) for _ in range(s["batch"])]
    cu = [[sum(n[side] for n in lengths[:b]) for b in range(s["batch"] + 1)] for side in (0, 1)]
    q = draw.tensor((cu[0][-1], s["heads_q"], s["dim"]), dtype)
    k = draw.tensor((cu[1][-1], s["heads_k"], s["dim"]), dtype)
    v = draw.tensor((cu[1][-1], s["heads_k"], s["dim_v"]), dtype)
    cu_q, cu_k = draw.lengths(cu[0]), draw.lengths(cu[1])
    longest = [draw.option(max([n[side] for n in lengths], default=0), s[f"seq_{name}"], 1000) for side, name in enumerate("qk")]
    options = options_of(draw, s["heads_q"], dtype)
    result = outcome(draw, lambda: fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **options, return_attn_probs=True))
    if result is None or draw.is_wrong:
        return
    for b in range(s["batch"]):
        rows, keys = slice(cu[0][b], cu[0][b + 1]), slice(cu[1][b], cu[1][b + 1])
        (out, lse), (plain, plain_lse) = references(q[None, rows], k[None, keys], v[None, keys], options)
        assert_right(draw, result[0][None, rows], out, plain)
        assert_right(draw, result[1][None, :, rows], lse, plain_lse)


@fuzzed
@given(st.data())
def test_flash_attn_with_kvcache(data):
    draw = Draw(data)
    s, dtype = sizes(draw), draw.of(*DTYPES)
    used = [draw.size(0, s["seq_k"]) for _ in range(s["batch"])]
    q = draw.tensor((s["batch"], s["seq_q"], s["heads_q"], s["dim"]), dtype)
    k = draw._filled((s["batch"], s["seq_k"], s["heads_k"], s["dim"]), dtype, False) if not draw.wrongness else draw.tensor(
        (s["batch"], s["seq_k"], s["heads_k"], s["dim"]), dtype)
    v = draw._filled((s["batch"], s["seq_k"], s["heads_k"], s["dim_v"]), dtype, False) if not draw.wrongness else draw.tensor(
        (s["batch"], s["seq_k"], s["heads_k"], s["dim_v"]), dtype)
    draw.is_wrong |= bool(draw.wrongness)  # a cache with gaps in its last dimension is refused
    cache_seqlens = draw.lengths(used)
    options = options_of(draw, s["heads_q"], dtype)
    for name in ("k", "v", "rotary_cos", "cache_batch_idx", "cache_leftpad", "page_table", "block_table", "cu_seqlens_q", "max_seqlen_q",
                 "rotary_seqlens", "descale_q", "gqa_parallel", "scheduler_metadata"):
        if draw.misses():
            options[name] = draw.anything()
    result = outcome(draw, lambda: fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=cache_seqlens, **options))
    if result is None or draw.is_wrong:
        return
    for b, n in enumerate(used):
        (out, _), (plain, _) = references(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n], options)
        assert_right(draw, result[b:b + 1], out, plain)


@fuzzed
@given(st.data())
def test_gradients(data):
    """_flash_attn_backward, given results of a right forward and then tensors of any kind in their places."""
    draw = Draw(data)
    s, dtype = sizes(draw), draw.of(*DTYPES)
    shapes = {"q": ("seq_q", "heads_q", "dim"), "k": ("seq_k", "heads_k", "dim"), "v": ("seq_k", "heads_k", "dim_v")}
    good = {name: draw._filled([s["batch"], *(s[d] for d in dims)], dtype, False) for name, dims in shapes.items()}
    causal = draw.of(False, True)
    out, lse = fa.flash_attn_func(**good, causal=causal, return_attn_probs=True)
    good |= {"dout": draw._filled(out.shape, dtype, False), "out": out, "softmax_lse": lse}
    given = {name: draw.tensor(x.shape, x.dtype) if draw.misses() else x for name, x in good.items()}
    gradients = {f"d{name}": torch.full(good[name].shape, 7.0, dtype=dtype) for name in "qkv"}
    gradients = {name: draw.tensor(x.shape, x.dtype) if draw.misses() else x for name, x in gradients.items()}
    options = {"is_causal": causal, **({"softcap": draw.anything()} if draw.misses() else {}),
               **({"window_size_left": draw.anything()} if draw.misses() else {}),
               **({"softmax_scale": draw.anything()} if draw.misses() else {})}
    result = outcome(draw, lambda: fa._flash_attn_backward(**given, **gradients, **options))
    if result is None or draw.is_wrong:
        return
    wanted = {}
    for kind in (torch.float64, dtype):
        leaves = [good[name].to(kind).requires_grad_() for name in "qkv"]
        results = naive(*leaves, causal=causal)[0]
        wanted[kind] = [torch.nan_to_num(g) for g in torch.autograd.grad(results, leaves, good["dout"].to(kind), allow_unused=True)]
    for name, a, b in zip("qkv", wanted[torch.float64], wanted[dtype]):
        scale = 1 + a.abs().max() if a.numel() else 1  # a few terms of either sign may cancel in the plain one
        assert_right(draw, gradients[f"d{name}"] / scale.to(dtype) if a.numel() else gradients[f"d{name}"], a / scale, b / scale)


@fuzzed
@given(st.data())
def test_flash3_attention(data):
    """The package's own function, which takes numpy arrays too."""
    draw = Draw(data)
    s, dtype = sizes(draw), draw.of(*DTYPES)
    q = draw.tensor((s["batch"], s["seq_q"], s["heads_q"], s["dim"]), dtype)
    k = draw.tensor((s["batch"], s["seq_k"], s["heads_k"], s["dim"]), dtype)
    v = draw.tensor((s["batch"], s["seq_k"], s["heads_k"], s["dim_v"]), dtype)
    options = {}
    for name, values in (("softmax_scale", (None, 0.3)), ("causal", (False, True)), ("window", (None, (3, 0), (None, 2))),
                         ("chunk", (0, 5)), ("softcap", (0.0, 2.5)), ("deterministic", (False, True))):
        if draw.of(0, 1):
            options[name] = draw.option(*values)
    for name in ("sink", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "q_scale", "out_dtype", "compute", "rotation_seed"):
        if draw.misses():
            options[name] = draw.of(draw.anything(), draw.lengths([0, 1, 2]), torch.ones(1))
    tensors = [q, k, v]
    if dtype is torch.float32 and draw.of(False, False, True):
        tensors = [x.numpy() if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.device.type == "cpu" and
                   not x.requires_grad and x.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2) else x for x in tensors]
    for ask in (flash3.supported, flash3.explain):
        if all(isinstance(x, (torch.Tensor, np.ndarray)) for x in tensors):
            outcome(draw, lambda: ask(*tensors, **options))
    result = outcome(draw, lambda: flash3.attention(*tensors, **options, return_lse=True))
    if result is None or draw.is_wrong:
        return
    mask = {name: options.get(name) for name in ("causal", "chunk", "window", "softcap", "softmax_scale")}
    mask = {name: x for name, x in mask.items() if x is not None}
    for a, b, c in zip(result, exact(q, k, v, **mask), naive(q, k, v, **mask)):
        assert_right(draw, torch.as_tensor(a), b, c)


@fuzzed
@given(st.data())
def test_quantize(data):
    draw = Draw(data)
    s, dtype = sizes(draw), draw.of(*DTYPES)
    tensors = {name: draw.tensor((s["batch"], s["seq_q"], s["heads_k"], s["dim"]), dtype) for name in "qkv" if draw.of(True, True, False)}
    options = {}
    for name, values in (("scales", ("tensor", "heads", "blocks")), ("rotate", (False, True)), ("seed", (0, 1, 2**64 - 1))):
        if draw.misses():
            options[name] = draw.of(*values, draw.anything())
    draw.is_wrong |= not tensors or not all(isinstance(x, torch.Tensor) for x in tensors.values())
    result = outcome(draw, lambda: flash3.quantize(**tensors, **options))
    if result is None or draw.is_wrong:
        return
    for name, x in tensors.items():
        codes, scale = getattr(result, name), getattr(result, f"{name}_scale")
        assert codes.shape == x.shape and codes.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
