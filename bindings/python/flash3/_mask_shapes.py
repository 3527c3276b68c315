# SPDX-License-Identifier: Apache-2.0
"""Masks of tokens that lie on a line, in a picture or in a video: neighborhoods and tiles."""
import math
from collections.abc import Sequence

import torch

from . import _mask_ranges
from ._mask_kinds import blocks, size_of
from ._mask_sources import MaskSource, of_rows


def _each(name, value, dims, least=1):
    """A size for each dimension, of one for all or of as many."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    if len(values) != dims:
        raise ValueError(f"len({name}) = {len(values)} but len(shape) = {dims}; it must be one number, or one for each dimension")
    return tuple(size_of(f"{name}[{d}]", x, least) for d, x in enumerate(values))


def _shape(shape):
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"len(shape) = {len(shape)} but it must be 1, 2 or 3")
    return tuple(size_of(f"shape[{d}]", x) for d, x in enumerate(shape))


class _Axis:
    """The neighborhoods along one dimension: place x sees keys first(x) + t * dilation, t from 0 to just before counts(x)."""

    def __init__(self, length, kernel, stride, dilation, causal, device):
        self.length, self.kernel, self.dilation = length, kernel, dilation
        places = torch.arange(length, device=device)
        # Places whose numbers differ by multiples of the dilation are a line of their own, which knows of no others.
        line, own = places % dilation, places // dilation
        last = (length - line + dilation - 1) // dilation - 1
        group = own // stride * stride
        if causal:
            leader = torch.minimum(group + stride - 1, last)
            begin = (leader - kernel + 1).clamp(min=0)
            self.counts = own + 1 - begin
        else:
            leader = torch.minimum(group + stride // 2, last)
            begin = torch.minimum((leader - kernel // 2).clamp(min=0), last + 1 - kernel)
            self.counts = torch.full_like(own, kernel)
        self.first = begin * dilation + line
        self.is_whole = not causal and kernel == length

    def table(self):
        """[length, length] bool."""
        steps = torch.arange(self.length, device=self.first.device) - self.first[:, None]
        return (steps >= 0) & (steps % self.dilation == 0) & (steps // self.dilation < self.counts[:, None])


def _places(axes):
    """The place of each token along each dimension, the last dimension fastest."""
    tokens = torch.arange(math.prod([a.length for a in axes]), device=axes[0].first.device)
    places = []
    for axis in reversed(axes):
        places.append(tokens % max(axis.length, 1))
        tokens = tokens // max(axis.length, 1)
    return places[::-1]


def _ranges(axes):
    """Ranges of all tokens: one for each line of keys that a neighborhood crosses, or for each key where the last dimension is dilated."""
    axes, unit = list(axes), 1
    while len(axes) > 1 and axes[-1].is_whole:  # then lines follow each other without gaps
        unit *= axes.pop().length
    places = _places(axes)
    base, width = torch.zeros_like(places[0])[None], 1
    seen = torch.ones_like(base, dtype=torch.bool)
    for axis, place in zip(axes, places):
        first, counts = axis.first[place], axis.counts[place]
        if axis is axes[-1] and axis.dilation == 1:
            base, width = base * axis.length + first, counts
            break
        steps = torch.arange(axis.kernel, device=base.device)[:, None]
        base = (base[:, None] * axis.length + first + steps * axis.dilation).flatten(0, 1)
        seen = (seen[:, None] & (steps < counts)).flatten(0, 1)
    begins = (base * unit).masked_fill(~seen, 0)
    ends = ((base + width) * unit).masked_fill(~seen, 0)
    made = _mask_ranges.pack(begins[None, None], ends[None, None])
    return made.repeat_interleave(unit, 3)


def _ranges_needed(axes):
    last = max([0, *(d for d, axis in enumerate(axes) if not axis.is_whole)])
    return math.prod([a.kernel for a in axes[:last]]) * (axes[last].kernel if axes[last].dilation > 1 else 1)


def neighborhood(shape, kernel, stride=1, dilation=1, is_causal=False, *, device=None):
    """Neighborhood attention in 1, 2 or 3 dimensions, as NATTEN defines it (arXiv:2204.07143, 2209.15001, 2403.04690, 2504.16922).

    Along each dimension a query sees `kernel` keys: kernel // 2 before itself and (kernel - 1) // 2 after; near a border the window is
    shifted inwards and keeps its size. Queries are in groups of `stride`, which share the window of the one in the middle, number
    stride // 2 of the group, or the last one there is. With a dilation, only places that differ by multiples of it see each other, and all
    of this is among those. Along a causal dimension the window ends with the query itself, and begins kernel - 1 keys before
    the last query of its group, or with the first key. Over all dimensions a query sees what it sees along each.

    Args:
        shape: the tokens' sizes, one to three; or one number. Tokens are in row-major order: the last dimension is the fastest.
        kernel: keys of the window along each dimension; or one number for all.
        stride: likewise, from 1 to kernel.
        dilation: likewise, from 1; kernel * dilation is at most the size.
        is_causal: whether a dimension is causal; one value for all, or one for each.
        device: where the mask is; None: torch's default.

    Returns:
        A mask of prod(shape) queries and keys. It is ranges if a neighborhood is at most 8 lines of keys; otherwise every pair is
        evaluated once, in parts (MaskSource gives the cost).

    Raises:
        TypeError: a size is not an integer.
        ValueError: a rule above is broken.
    """
    shape = _shape(shape)
    kernel, stride, dilation = (_each(name, x, len(shape)) for name, x in (("kernel", kernel), ("stride", stride), ("dilation", dilation)))
    causal = tuple(is_causal) if isinstance(is_causal, Sequence) else (is_causal,) * len(shape)
    if len(causal) != len(shape):
        raise ValueError(f"len(is_causal) = {len(causal)} but len(shape) = {len(shape)}; it must be one value, or one for each dimension")
    for d, (n, k, s, step) in enumerate(zip(shape, kernel, stride, dilation)):
        if s > k:
            raise ValueError(f"stride[{d}] = {s} but kernel[{d}] = {k}; a stride is at most the kernel")
        if k * step > n:
            raise ValueError(f"kernel[{d}] * dilation[{d}] = {k * step} but shape[{d}] = {n}; it must be at most that")
    axes = [_Axis(*sizes, device) for sizes in zip(shape, kernel, stride, dilation, causal)]
    tokens = math.prod(shape)
    if _ranges_needed(axes) <= _mask_ranges.MOST:
        return MaskSource("ranges", ranges=_mask_ranges.normalised(_ranges(axes), tokens), seq_q=tokens, seq_k=tokens)
    return of_rows(_rows_of_tables([a.table() for a in axes], _places(axes)), 1, 1, tokens, tokens, axes[0].first.device)


def _rows_of_tables(tables, places):
    """A function of three slices (_mask_rows): pairs that are seen along all dimensions."""
    def rows(b, h, i):
        seen = None
        for table, place in zip(tables, places):
            along = table[place[i]][:, place]
            seen = along if seen is None else seen & along
        return seen[None, None]
    return rows


def _tiles_of(shape, tile):
    shape = _shape(shape)
    tile = _each("tile", tile, len(shape))
    for d, (n, t) in enumerate(zip(shape, tile)):
        if n % t:
            raise ValueError(f"shape[{d}] = {n} but tile[{d}] = {t}; a shape is a multiple of its tile")
    return shape, tile


def tile_order(shape, tile, *, device=None):
    """The order of tokens for tiles(): tile after tile, each in row-major order.

    Args:
        shape, tile: as in tiles().
        device: where the result is; None: torch's default.

    Returns:
        An int64 tensor with a number for each token. Indexing row-major tokens with it gives the order of tiles, and indexing with its
        argsort() reverses that.

    Raises:
        TypeError, ValueError: as tiles().
    """
    shape, tile = _tiles_of(shape, tile)
    split = [size for n, t in zip(shape, tile) for size in (n // t, t)]
    tokens = torch.arange(math.prod(shape), device=device).view(split)
    return tokens.permute(*range(0, len(split), 2), *range(1, len(split), 2)).flatten()


def tiles(shape, tile, window, *, text=0, device=None):
    """Sliding tile attention of videos and pictures (arXiv:2502.04507): the queries of a tile see the tiles around their own.

    Along each dimension a tile sees `window` tiles: window // 2 before itself and (window - 1) // 2 after, shifted inwards at the borders. Text
    that follows the tokens sees all, and all see it.

    Args:
        shape: the video's sizes in tokens, one to three. Tokens are in tile_order(): those of a tile follow each other.
        tile: a tile's sizes; or one number. Each size of shape is a multiple of its own.
        window: how many tiles a query sees along each dimension, from 1 to all; or one number.
        text: how many tokens of text follow.
        device: where the mask is; None: torch's default.

    Returns:
        A mask of prod(shape) + text queries and keys. It is blocks of a tile's tokens if their number is a multiple of 8; otherwise
        every pair is evaluated once.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a rule above is broken.
    """
    shape, tile = _tiles_of(shape, tile)
    window, text = _each("window", window, len(shape)), size_of("text", text)
    counts = [n // t for n, t in zip(shape, tile)]
    for d, (w, n) in enumerate(zip(window, counts)):
        if w > n and n:
            raise ValueError(f"window[{d}] = {w} but there are {n} tiles; it is at most as many")
    axes = [_Axis(n, min(w, n), 1, 1, False, device) for n, w in zip(counts, window)]
    number, size, total = math.prod(counts), math.prod(tile), math.prod(shape) + text
    seen = torch.ones(number + -(-text // size), number + -(-text // size), dtype=torch.bool, device=axes[0].first.device)
    seen[:number, :number] = _rows_of_tables([a.table() for a in axes], _places(axes))(None, None, slice(0, number))[0, 0]
    if size % 8 == 0:
        return blocks(seen[None, None], None, size, size, seq_q=total, seq_k=total)
    own = torch.arange(total, device=seen.device) // size
    return of_rows(_rows_of_tables([seen], [own]), 1, 1, total, total, seen.device)
