# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks of keys of which not all are tokens: block_sizes of flash3.masks.blocks()."""
import dataclasses

import torch

from . import _mask_rows
from ._mask_rows import ALL_SEEN, BLOCK, HIDDEN
from ._mask_sources import Band, MaskSource, of_rows

_HALF = BLOCK // 2


def with_block_sizes(source, sizes):
    """A source of blocks, without the keys that are no tokens; sizes: [blocks of keys] or [1 or batch, blocks of keys] int64."""
    if sizes.dim() not in (1, 2):
        raise ValueError(f"block_sizes.ndim = {sizes.dim()} but it must be 1 or 2, [blocks of keys] or [1 or batch, blocks of keys]")
    sizes, (batch, heads) = torch.atleast_2d(sizes), source.shape
    if 1 not in (len(sizes), batch) and len(sizes) != batch:
        raise ValueError(f"block_sizes.shape[0] = {len(sizes)} but counts.shape[0] = {batch}; they must be the same, or one of them 1")
    if sizes.device != source.device:
        raise ValueError(f"block_sizes.device = {sizes.device} but counts.device = {source.device}; they must be the same")
    seq_k = sizes.shape[1] * source.block_keys if source.seq_k is None else source.seq_k
    if sizes.shape[1] != (needed := -(-seq_k // source.block_keys)):
        raise ValueError(f"block_sizes.shape[-1] = {sizes.shape[1]} but ceil(seq_k / block_keys) = {needed}; they must be the same")
    seq_q = source.block_counts.shape[2] * source.block_rows if source.seq_q is None else source.seq_q
    band, source = source.band, dataclasses.replace(source.sized(seq_q, seq_k), band=Band())
    within = torch.arange(source.block_keys, device=sizes.device) < sizes[:, :, None]
    tokens = within.flatten(1)[:, :seq_k]  # [1 or batch, seq_k]
    if source.block_rows % _HALF or source.block_keys % _HALF:
        made = of_rows(lambda b, h, i: source._rows(b, h, i) & tokens[b if len(tokens) > 1 else slice(0, 1), None, None],
                       max(batch, len(tokens)), heads, seq_q, seq_k, sizes.device)
    else:
        made = _of_quarters(source, tokens)
    return dataclasses.replace(made, band=band)


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

    padded = torch.nn.functional.pad(tokens, (0, columns * BLOCK - source.seq_k), value=True).unflatten(1, (columns, BLOCK))
    packed = _mask_rows.packed(padded).view(-1, columns, 1, 1, 2, BLOCK // 16)
    chosen = (torch.arange(16, device=tokens.device)[:, None] >> torch.arange(4, device=tokens.device) & 1).to(torch.uint8)
    bits = packed * chosen.view(16, 2, 2, 1)  # [1 or batch, columns, 16, halves of queries, halves of keys, bytes]
    bits = bits.flatten(4).repeat_interleave(_HALF, 3).view(-1, BLOCK, BLOCK // 8)
    number = (torch.arange(len(padded), device=tokens.device)[:, None] * columns + torch.arange(columns, device=tokens.device)) * 16
    number = number[:, None, None].int() + choice
    whole = padded.all(2)[:, None, None] & (choice == 15)
    bit_blocks = number.masked_fill(whole, ALL_SEEN).masked_fill(choice == 0, HIDDEN)
    bits = bits if len(bits) else bits.new_zeros(1, BLOCK, BLOCK // 8)  # one to point at where there is none
    return MaskSource("bits", bits=bits.contiguous(), bit_blocks=bit_blocks.contiguous(), seq_q=source.seq_q, seq_k=source.seq_k)
