# SPDX-License-Identifier: Apache-2.0
"""Attention that must find one key among many: the data of bench/gpu/needle.py, exact results for it, and how an out is compared with them.

Tensors are [1, tokens, heads, dim]; each query row of each head has a needle, a key of its own. Everything runs on the device of the tensors.
"""
import math
from dataclasses import dataclass

import torch

from bench.flash3_torch import FP8_BLOCK

# What a needle weighs in the exact softmax; "noise": twice the root of the sum of the other weights' squares, so that of its row's
# out the needle is four fifths of the energy on random values.
LEVELS = ("noise", "0.5", "0.9", "0.99")
DATA = ("normal", "model")
FLAT = ("equal", "near equal")
CHUNK = 1 << 25  # scores in float64 at a time


@dataclass
class Haystack:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    places: torch.Tensor = None      # [heads, rows]: the key that a query is meant to find; None: there is none
    v_mean: torch.Tensor = None      # [heads, dim], of the distribution that V is drawn from,
    v_deviation: torch.Tensor = None  # and its deviation, outliers aside


@dataclass
class Channels:
    """A distribution for each channel, [heads, dim]."""
    mean: torch.Tensor
    deviation: torch.Tensor

    def draw(self, tokens, outliers=0.0):
        """[tokens, heads, dim], N(mean, deviation²); a share `outliers` of the elements gets 10 deviations' noise more, as in the
        FlashAttention-3 paper's test."""
        z = torch.randn(tokens, *self.mean.shape, device=self.mean.device)
        if outliers:
            z += 10 * torch.randn_like(z) * (torch.rand_like(z) < outliers)
        return self.mean + self.deviation * z


def channels(data, heads, dim, device, mean):
    """"normal" data are N(0, 1), and so are "outliers" but for a share of their keys' elements. In "model" data deviations are log-normal, and one channel of 32 is an outlier: six times as wide, and
    `mean` deviations from zero, on a side of its own."""
    plain = Channels(torch.zeros(heads, dim, device=device), torch.ones(heads, dim, device=device))
    if data != "model":
        return plain
    plain.deviation = torch.exp(0.5 * torch.randn(heads, dim, device=device))
    chosen = torch.rand(heads, dim, device=device).argsort(-1)[:, :max(1, dim // 32)]
    plain.deviation.scatter_(-1, chosen, 6 * plain.deviation.gather(-1, chosen))
    sides = torch.randint(0, 2, chosen.shape, device=device) * 2.0 - 1
    plain.mean.scatter_(-1, chosen, mean * sides * plain.deviation.gather(-1, chosen))
    return plain


def spread(data, keys, rows, heads, dim, device):
    """(a Haystack without queries, their directions [heads, rows, dim]): a query looks along its key, each channel in units of that channel's
    deviation, so that the needle stands out as far in data with wide channels."""
    of_k, of_v = channels(data, heads, dim, device, mean=3), channels(data, heads, dim, device, mean=1)
    k = of_k.draw(keys, outliers=0.001 if data == "outliers" else 0).bfloat16()[None]
    v = of_v.draw(keys, outliers=0.001).bfloat16()[None]
    places = torch.stack([torch.randperm(keys, device=device)[:rows] for _ in range(heads)])
    needles = at_places(k, places)
    directions = (needles - of_k.mean[:, None]) / of_k.deviation[:, None].square()
    return Haystack(None, k, v, places, of_v.mean, of_v.deviation), directions


def at_places(x, places):
    """[heads, rows, dim] float32: of [1, tokens, heads, dim] the tokens of these places."""
    return torch.stack([x[0, place, head] for head, place in enumerate(places)]).float()


def aimed(stack, directions, level):
    """The Haystack with queries along the directions, as long as the level asks for."""
    scale = 1 / math.sqrt(directions.shape[-1])
    rows = []
    for head, place in enumerate(stack.places):
        scores = directions[head] @ stack.k[0, :, head].float().T * scale
        own = scores.gather(-1, place[:, None])
        rows.append(directions[head] * length_of(own, scores.scatter(-1, place[:, None], -math.inf), level))
    q = torch.stack(rows, 1).bfloat16()[None]
    return Haystack(q, stack.k, stack.v, stack.places, stack.v_mean, stack.v_deviation)


def length_of(own, others, level):
    """By what scores, `own` [rows, 1] of the needle and `others` [rows, keys], are multiplied for this level. Longer is sharper: bisection."""
    def reached(length):
        if level == "noise":
            return length * own - torch.logsumexp(2 * length * others, -1, keepdim=True) / 2 > math.log(2)
        weight = float(level)
        return length * own - torch.logsumexp(length * others, -1, keepdim=True) > math.log(weight / (1 - weight))

    low, high = torch.full_like(own, 1e-4), torch.full_like(own, 100.0)
    for _ in range(30):
        middle = (low + high) / 2
        yes = reached(middle)
        low, high = torch.where(yes, low, middle), torch.where(yes, middle, high)
    return high


def flat(kind, keys, rows, heads, dim, device):
    """A Haystack without needles, of values of one sign: every key weighs the same, or with "near equal" about so. The longest sums that
    there are, and nothing in them cancels."""
    q = torch.zeros(1, rows, heads, dim, device=device)
    if kind == "near equal":
        q.normal_().mul_(0.5)
    k, v = torch.randn(2, 1, keys, heads, dim, device=device).bfloat16()
    return Haystack(q.bfloat16(), k, v.abs())


def standing_for(made):
    """(q, k, v) float64: what FP8 tensors with scales for blocks of tokens, [1, heads, blocks], or for heads, [1, heads], stand for."""
    values = []
    for name in "qkv":
        x, scale = made[name].double(), made[f"{name}_scale"].double()
        if scale.dim() == 3:
            scale = scale.repeat_interleave(FP8_BLOCK, 2)[:, :, :x.shape[1]].transpose(1, 2)
        else:
            scale = scale[:, None]
        values.append(x * scale[..., None])
    return values


def exact(q, k, v, rounded=False):
    """(out [1, rows, heads, dim], weights' largest [heads, rows]) in float64, chunk by chunk of rows.

    rounded: weights are brought to e4m3 times 256 before the product with V, as docs/fp8.md defines, and only the sums are exact.
    """
    rows, heads, dim = q.shape[1:]
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64, device=q.device)
    largest = torch.empty(heads, rows, dtype=torch.float64, device=q.device)
    step = max(1, CHUNK // k.shape[1])
    for head in range(heads):
        keys, values = k[0, :, head].double(), v[0, :, head].double()
        for first in range(0, rows, step):
            part = slice(first, first + step)
            scores = q[0, part, head].double() @ keys.T / math.sqrt(dim)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            total = weights.sum(-1, keepdim=True)
            largest[head, part] = (weights.amax(-1, keepdim=True) / total)[:, 0]
            if rounded:
                weights = (256 * weights).float().to(torch.float8_e4m3fn).double() / 256
            out[0, part, head] = weights @ values / total
    return out, largest


def error_of(out, reference):
    """RMS of the difference, of the reference's own RMS."""
    return ((out - reference).square().mean() / reference.square().mean()).sqrt().item()


def share_within(limit, out, reference):
    """The share of rows whose out differs from the reference's by at most this share of its length."""
    return ((out - reference).norm(dim=-1) <= limit * reference.norm(dim=-1)).double().mean().item()


def gain(out, reference):
    """What out is of the reference, on average: below 1 where sums have lost something."""
    return ((out * reference).sum() / reference.square().sum()).item()


def share_retrieved(out, stack):
    """The share of rows whose out points to the value of their own needle, rather than to that of another row's: the largest cosine,
    with each channel less V's mean and in units of its deviation."""
    got = (out[0].transpose(0, 1).float() - stack.v_mean[:, None]) / stack.v_deviation[:, None]
    wanted = (at_places(stack.v, stack.places) - stack.v_mean[:, None]) / stack.v_deviation[:, None]
    cosines = got @ torch.nn.functional.normalize(wanted, dim=-1).transpose(1, 2)
    rows = torch.arange(got.shape[1], device=got.device)
    return (cosines.argmax(-1) == rows).double().mean().item()


def agreement(out, own, unquantised, stack):
    """How an out compares: with the exact result of the tensors that its library was given, and of those before they became FP8. Near
    those is what lies within 10 %: V's own rounding to e4m3 is 2.6 %, so that hardly a row in FP8 stays within 1 %."""
    rows = (~torch.isfinite(out)).any(-1).sum().item()
    if rows:
        raise ArithmeticError(f"out is not finite in {rows} rows")
    record = {"found": share_within(0.01, out, own), "found_unquantised": share_within(0.01, out, unquantised),
              "near_unquantised": share_within(0.1, out, unquantised), "error": error_of(out, own),
              "error_unquantised": error_of(out, unquantised), "gain": gain(out, own)}
    if stack.places is not None:
        record["retrieved"] = share_retrieved(out, stack)
    return {name: float(f"{value:.6g}") for name, value in record.items()}
