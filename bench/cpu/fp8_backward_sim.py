# SPDX-License-Identifier: Apache-2.0
"""The backward of attention as a kernel on e4m3 operands would compute it, in torch on a CPU: which operand is rounded to what is a Recipe.

bench/cpu/fp8_backward_study.py asks it for errors and trains with it. Tensors are [batch, heads, seq, head_dim], of equal lengths and heads.
"""
import dataclasses
import math

import torch

import flash3

BLOCK = 128  # tokens that share a scale of q, k, v and dOut: those of flash3.quantize(scales="blocks")
TILE = (64, 128)  # queries and keys of a tile: those of the bf16 kernel of head dim 128
ROWS = 512  # queries that are computed at once
WEIGHT_FACTOR = 256.0  # of weights in e4m3: docs/fp8.md
FORMATS = {"bf16": (torch.bfloat16, math.inf), "e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
FOLD = 32  # products that a tensor core adds at once, and
FRACTION_BITS = 13  # what stays of their sum's fraction: src/oracle/yardsticks/attention_naive.cpp


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is rounded; None: not at all."""
    qkv: str | None = None  #: q, k and v: "e4m3" with scales for blocks, or "bf16"
    dout: str | None = None  #: dOut: "e4m3" or "e5m2" with scales for blocks, or "bf16"
    rotate: bool = True  #: q and k are rotated before they become e4m3
    weights: str | None = None  #: P in dV = P'.dOut, and the forward's weights
    ds: str | None = None  #: dS in dQ and dK
    ds_scale: tuple | str = TILE  #: what shares a scale of dS: a tile, or "head"
    own_forward: bool = True  #: LSE and out come from a forward of the same rounding; False: from an exact one
    outer: str | None = None  #: q, k and dOut in dV, dK and dQ, where they differ from those of S and dP
    sums: str = "float32"  #: or as Hopper makes them of FP8 products: "tile", one for each tile; "one", dK's and dV's over all queries


def rotation(dim, seed=0):
    """D.H/sqrt(n), which flash3.quantize multiplies q and k by; dim a power of two."""
    if dim & (dim - 1):
        raise ValueError(f"dim = {dim} but it must be a power of two")
    signs = []
    for _ in range(-(-dim // 64)):  # SplitMix64
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        signs += [-1.0 if z >> bit & 1 else 1.0 for bit in range(64)]
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (torch.tensor(signs[:dim], dtype=torch.float64)[:, None] * h / math.sqrt(dim)).float()


def rounded(x, form):
    """x to the format and back, saturating."""
    if form is None:
        return x
    dtype, largest = FORMATS[form]
    return x.clamp(-largest, largest).to(dtype).to(x.dtype) if math.isfinite(largest) else x.to(dtype).to(x.dtype)


def power_of_two(amax, largest):
    """The smallest power of two for which nothing is above the format's largest; of zeros 1."""
    return torch.where(amax == 0, 1.0, torch.exp2(torch.ceil(torch.log2(amax.double() / largest)))).to(amax.dtype)


def scaled(x, form, group):
    """x [.., rows, columns] through a format with a power of two for each group of (rows, columns)."""
    if form is None or form == "bf16":
        return rounded(x, form)
    rows, columns = (min(size, length) for size, length in zip(group, x.shape[-2:]))
    tiles = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scale = power_of_two(tiles.abs().amax((-3, -1), keepdim=True), FORMATS[form][1])
    return (rounded(tiles / scale, form) * scale).flatten(-4, -3).flatten(-2, -1)


def quantised(x, form, rotate=False):
    """An input as a kernel reads it, times its scales: e4m3 by flash3.quantize itself."""
    if form is None:
        return x
    if form != "e4m3":
        return scaled(x, form, (BLOCK, x.shape[-1]))
    made = flash3.quantize(q=x.transpose(1, 2).contiguous(), rotate=rotate)
    scale = made.q_scale.repeat_interleave(BLOCK, 2)[..., :x.shape[2], None]
    return made.q.transpose(1, 2).to(x.dtype) * scale


def tensor_core_product(a, b, start=None):
    """a [M, K] . b [K, N] + start as Hopper's tensor cores sum FP8 products: 32 at a time are brought to the exponent of the largest, and cut
    off 13 bits below it."""
    total = torch.zeros(a.shape[0], b.shape[1]) if start is None else start
    for k in range(0, a.shape[1], FOLD):
        terms = a[:, k:k + FOLD, None] * b[None, k:k + FOLD]
        largest = torch.maximum(terms.abs().amax(1), total.abs())
        step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(min=-100) - 1 - FRACTION_BITS)
        total = (terms.div_(step[:, None]).trunc_().sum(1) + (total / step).trunc()) * step
    return total


def short_product(a, b, piece=None):
    """The same of batches; with `piece` the reduction is cut into sums of so many products, which are added in float32."""
    piece = piece or a.shape[-1]
    out = [sum(tensor_core_product(x[:, k:k + piece], y[k:k + piece]) for k in range(0, x.shape[1], piece))
           for x, y in zip(a.flatten(0, -3), b.flatten(0, -3))]
    return torch.stack(out).unflatten(0, a.shape[:-2])


class Sums:
    """dK and dV: sums over all blocks of queries."""

    def __init__(self, recipe):
        self.recipe, self.total = recipe, None

    def add(self, left, right):
        """left' . right, which has the keys that the block sees."""
        left = left.transpose(-1, -2)
        if self.recipe.sums == "one":
            keys, shape = left.shape[-2], left.shape[:-2]
            before = self.total.flatten(0, -3) if self.total is not None else [None] * math.prod(shape)
            made = []
            for x, y, old in zip(left.flatten(0, -3), right.flatten(0, -3), before):
                old = torch.zeros(0, right.shape[-1]) if old is None else old
                start = torch.nn.functional.pad(old, (0, 0, 0, max(0, keys - old.shape[0])))
                made.append(torch.cat([tensor_core_product(x, y, start[:keys]), start[keys:]]))
            self.total = torch.stack(made).unflatten(0, shape)
            return
        share = left @ right if self.recipe.sums == "float32" else short_product(left, right, TILE[0])
        if self.total is None:
            self.total = share
        else:
            grow = share.shape[-2] - self.total.shape[-2]
            self.total = torch.nn.functional.pad(self.total, (0, 0, 0, grow)) if grow > 0 else self.total
            self.total[..., :share.shape[-2], :] += share


def scores(q, k, first, causal, recipe):
    """Scores of the queries from `first` on, in natural units, with the mask."""
    product = short_product if recipe.sums != "float32" else torch.matmul
    s = product(q, k.transpose(-1, -2)).mul_(1 / math.sqrt(q.shape[-1]))
    if causal:
        hidden = torch.arange(k.shape[-2]) > torch.arange(first, first + q.shape[-2])[:, None]
        s.masked_fill_(hidden, -math.inf)
    return s


def forward(s, v, recipe):
    """(LSE, out) of whole rows of scores: the online softmax' result, with the weights that it rounds."""
    largest = s.amax(-1, keepdim=True)
    e = (s - largest).exp_()
    total = e.sum(-1, keepdim=True)
    e = rounded(e * WEIGHT_FACTOR, recipe.weights) / WEIGHT_FACTOR if recipe.weights == "e4m3" else rounded(e, recipe.weights)
    out = e @ v / total
    return largest + total.log(), out if recipe.qkv is None else rounded(out, "bf16")


def backward(q, k, v, dout, causal, recipe, exact=None):
    """(dq, dk, dv, out, lse), in the dtype of q: float64 for an exact one. exact: (out, lse) for own_forward = False."""
    turned = recipe.rotate and recipe.qkv == "e4m3"
    q8, k8 = (quantised(x, recipe.qkv, turned) for x in (q, k))
    v8, dout8 = quantised(v, recipe.qkv), quantised(dout, recipe.dout)
    outer = (q, k, dout) if recipe.outer else (q8, k8, dout8)
    outer = [rounded(x, recipe.outer) for x in outer]
    dk, dv, dq, outs, lses = Sums(recipe), Sums(recipe), [], [], []
    product = short_product if recipe.sums != "float32" else lambda a, b, piece=None: a @ b
    ds_scale = None
    if recipe.ds_scale == "head" and recipe.ds == "e4m3":
        ds_scale = head_scale(q8, k8, v8, dout8, causal, recipe)
    for first in range(0, q.shape[-2], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[-2]))
        keys = slice(0, rows.stop if causal else k.shape[-2])
        p, ds, out, lse = tile_row(q8, k8, v8, dout8, rows, keys, causal, recipe, exact)
        outs.append(out)
        lses.append(lse)
        p = rounded(p * WEIGHT_FACTOR, recipe.weights) / WEIGHT_FACTOR if recipe.weights == "e4m3" else rounded(p, recipe.weights)
        ds = rounded(ds / ds_scale, "e4m3") * ds_scale if ds_scale is not None else scaled(ds, recipe.ds, recipe.ds_scale)
        dv.add(p, outer[2][..., rows, :])
        dk.add(ds, outer[0][..., rows, :])
        dq.append(product(ds, outer[1][..., keys, :], TILE[1]))
    dq, dk = (x * (1 / math.sqrt(q.shape[-1])) for x in (torch.cat(dq, -2), dk.total))
    if turned and not recipe.outer:
        back = rotation(q.shape[-1]).T.to(q.dtype)
        dq, dk = dq @ back, dk @ back
    return dq, dk, dv.total, torch.cat(outs, -2), torch.cat(lses, -2)


def tile_row(q, k, v, dout, rows, keys, causal, recipe, exact):
    """P and dS of some queries, before they are rounded, and their out and LSE."""
    s = scores(q[..., rows, :], k[..., keys, :], rows.start, causal, recipe)
    lse, out = forward(s, v[..., keys, :], recipe) if recipe.own_forward else (x[..., rows, :] for x in reversed(exact))
    p = s.sub_(lse).exp_()
    product = short_product if recipe.sums != "float32" else torch.matmul
    delta = (dout[..., rows, :] * out).sum(-1, keepdim=True)
    ds = product(dout[..., rows, :], v[..., keys, :].transpose(-1, -2)).sub_(delta).mul_(p)
    return p, ds, out, lse


def head_scale(q, k, v, dout, causal, recipe):
    """One scale of dS for each head: what a kernel could only know beforehand, from a step before."""
    largest = 0
    for first in range(0, q.shape[-2], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[-2]))
        ds = tile_row(q, k, v, dout, rows, slice(0, rows.stop if causal else k.shape[-2]), causal, recipe, None)[1]
        largest = torch.maximum(ds.abs().amax((-2, -1), keepdim=True), torch.as_tensor(largest, dtype=q.dtype))
    return power_of_two(largest, FORMATS["e4m3"][1])


class Attention(torch.autograd.Function):
    """flash3's FP8 forward, with the simulated backward; tensors [batch, seq, heads, dim] as of flash3.attention, causal."""

    @staticmethod
    def forward(ctx, q, k, v, recipe):
        ctx.save_for_backward(q, k, v)
        ctx.recipe = recipe
        return flash3.attention(q.detach(), k.detach(), v.detach(), causal=True, compute="fp8")

    @staticmethod
    def backward(ctx, dout):
        dtype = ctx.saved_tensors[0].dtype
        inputs = [x.transpose(1, 2).float() for x in (*ctx.saved_tensors, dout)]
        grads = backward(*inputs, True, ctx.recipe)[:3]
        return *(x.transpose(1, 2).to(dtype) for x in grads), None


class Dequantised(torch.autograd.Function):
    """flash3's FP8 forward, and flash3's bfloat16 backward on what q, k and v became, which bfloat16 holds as it is; tensors as above."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        made = flash3.quantize(q.detach(), k.detach(), v.detach(), rotate=True)
        out, lse = flash3.attention(**made._asdict(), causal=causal, out_dtype=torch.bfloat16, return_lse=True)
        expand = lambda codes, scale: (codes.float() * scale.repeat_interleave(BLOCK, 2)[..., :codes.shape[1]].transpose(1, 2)[..., None]).bfloat16()
        ctx.save_for_backward(*(expand(codes, scale) for codes, scale in zip(made[:3], made[3:])), out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = flash3.attention_backward(dout.contiguous(), q, k, v, out, lse, causal=ctx.causal)[:3]
        back = rotation(q.shape[-1]).T
        return *((x.float() @ back).to(x.dtype) for x in (dq, dk)), dv, None
