# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks of keys of which not all are tokens: block_sizes of flash3.masks.blocks()."""
import dataclasses

import torch

from . import _mask_rows
from ._mask_rows import ALL_SEEN, BLOCK, HIDDEN
from ._mask_sources import Band, MaskSource, of_rows

_HALF = BLOCK // 2


def with_block_sizes(source, sizes):
    """A source of blocks, without the keys that are no tokens; sizes: int64, as masks.blocks() takes them."""
    if sizes.dim() not in (1, 2, 3):
        raise ValueError(f"block_sizes.ndim = {sizes.dim()} but it must be 1 or 2 or 3, [1 or batch, 1 or heads_q, blocks of keys]")
    sizes = sizes[None, None] if sizes.dim() == 1 else sizes[:, None] if sizes.dim() == 2 else sizes
    for d, (own, size) in enumerate(zip(sizes.shape, source.shape)):
        if own != size and 1 not in (own, size):
            raise ValueError(f"block_sizes.shape[{d}] = {own} but counts.shape[{d}] = {size}; they must be the same, or one of them 1")
    if sizes.device != source.device:
        raise ValueError(f"block_sizes.device = {sizes.device} but counts.device = {source.device}; they must be the same")
    seq_k = sizes.shape[2] * source.block_keys if source.seq_k is None else source.seq_k
    if sizes.shape[2] != (needed := -(-seq_k // source.block_keys)):
        raise ValueError(f"block_sizes.shape[-1] = {sizes.shape[2]} but ceil(seq_k / block_keys) = {needed}; they must be the same")
    seq_q = source.block_counts.shape[2] * source.block_rows if source.seq_q is None else source.seq_q
    band, source = source.band, dataclasses.replace(source.sized(seq_q, seq_k), band=Band())
    within = torch.arange(source.block_keys, device=sizes.device) < sizes[..., None]
    tokens = within.flatten(2)[..., :seq_k]  # [1 or batch, 1 or heads, seq_k]
    if source.block_rows % _HALF == 0 and source.block_keys % _HALF == 0:
        return dataclasses.replace(_of_quarters(source, tokens), band=band)

    def rows(b, h, i):
        of_part = (slice(0, 1) if size == 1 else part for size, part in zip(tokens.shape, (b, h)))
        return source._rows(b, h, i) & tokens[(*of_part, None)]

    shape = torch.broadcast_shapes(source.shape, tokens.shape[:2])
    return dataclasses.replace(of_rows(rows, *shape, seq_q, seq_k, sizes.device), band=band)


def _of_quarters(source, tokens):
    """The mask as blocks of bits, of which each 128 keys have one for each choice of quarters: nothing is read from the device."""
    columns, rows = -(-source.seq_k // BLOCK), -(-source.seq_q // BLOCK)
    quarter_rows, quarter_keys = (torch.arange(2 * n, device=tokens.device) * _HALF for n in (rows, columns))
    matrix = source._block_matrix(slice(None), slice(None))
    places = [(at // size).clamp(max=n - 1) for at, size, n in
              zip((quarter_rows, quarter_keys), (source.block_rows, source.block_keys), matrix.shape[2:])]
    listed = matrix[:, :, places[0]][..., places[1]] if matrix.numel() else matrix.new_zeros(*matrix.shape[:2], 2 * rows, 2 * columns)
    # Which of the four quarters are listed, as a number below 16. Those after the last query or key are as their neighbours are.
    listed = listed.unflatten(3, (columns, 2)).unflatten(2, (rows, 2)).to(torch.int32)
    choice = listed[:, :, :, 0, :, 0] + 2 * listed[:, :, :, 0, :, 1] + 4 * listed[:, :, :, 1, :, 0] + 8 * listed[:, :, :, 1, :, 1]

    padded = torch.nn.functional.pad(tokens, (0, columns * BLOCK - source.seq_k), value=True).unflatten(2, (columns, BLOCK))
    packed = _mask_rows.packed(padded).view(-1, 1, 1, 2, BLOCK // 16)
    chosen = (torch.arange(16, device=tokens.device)[:, None] >> torch.arange(4, device=tokens.device) & 1).to(torch.uint8)
    bits = packed * chosen.view(16, 2, 2, 1)  # [batch * heads * columns, 16, halves of queries, halves of keys, bytes]
    bits = bits.flatten(3).repeat_interleave(_HALF, 2).view(-1, BLOCK, BLOCK // 8)
    first = torch.arange(padded[..., 0].numel(), device=tokens.device, dtype=torch.int32).view(*tokens.shape[:2], 1, columns) * 16
    whole = padded.all(3)[:, :, None] & (choice == 15)
    bit_blocks = (first + choice).masked_fill(whole, ALL_SEEN).masked_fill(choice == 0, HIDDEN)
    bits = bits if len(bits) else bits.new_zeros(1, BLOCK, BLOCK // 8)  # one to point at where there is none
    return MaskSource("bits", bits=bits.contiguous(), bit_blocks=bit_blocks.contiguous(), seq_q=source.seq_q, seq_k=source.seq_k)
