# SPDX-License-Identifier: Apache-2.0
"""Masks of any shape, from rows of booleans that are made and read in parts, so that never more than one part is in memory.

A mask is rows(b, h, i), a function of three slices with bounds: [len(b), len(h), len(i), seq_k] bool. What a part leaves is ranges of keys,
or, where a query has more of these than a mask takes, blocks of bits, as flash3/mask.h has them: bit_blocks, [batch, heads,
ceil(seq_q / BLOCK), ceil(seq_k / BLOCK)] int32, is HIDDEN, ALL_SEEN or which of bits, [blocks, BLOCK, BLOCK / 8] uint8."""
import torch

from . import _mask_ranges
from ._library import MASK_ALL_SEEN as ALL_SEEN
from ._library import MASK_BLOCK as BLOCK  # queries, and keys, of a block

AT_ONCE = 1 << 25  # pairs of a part, unless the rows of one block have more
HIDDEN = -2  # any number that is neither ALL_SEEN nor a block of bits


def rows_of_blocks(bits, bit_blocks, b, h, i, seq_k):
    """[…, seq_k] bool of these queries."""
    queries = torch.arange(i.start, i.stop, device=bit_blocks.device)
    numbers = bit_blocks[b, h][:, :, queries // BLOCK]
    found = bits[numbers.clamp(min=0), (queries % BLOCK)[:, None]]
    found = torch.where((numbers == ALL_SEEN)[..., None], 255, found).masked_fill((numbers == HIDDEN)[..., None], 0)
    return unpacked(found).flatten(-2)[..., :seq_k]


def packed(booleans):
    """Eight booleans of the last dimension to a byte, the first one lowest."""
    # As an int64 they are a bit in each byte, which the product moves into the highest one: that of byte i to bit 56 + i.
    return ((booleans.contiguous().view(torch.int64) * 0x0102040810204080) >> 56 & 255).to(torch.uint8)


def unpacked(bits):
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)


def parts(batch, heads, seq_q, seq_k):
    """(b, h, i) of which each has at most AT_ONCE pairs, or the rows of one block of one head; rows of whole blocks."""
    per_block = max(1, seq_k * min(seq_q, BLOCK))
    heads_each = max(1, min(heads, AT_ONCE // per_block))
    batch_each = max(1, min(batch, AT_ONCE // (per_block * heads_each))) if heads_each == heads else 1
    rows_each = max(1, AT_ONCE // (per_block * heads_each * batch_each)) * BLOCK
    for b in range(0, batch, batch_each):
        for h in range(0, heads, heads_each):
            for i in range(0, seq_q, rows_each):
                yield slice(b, min(b + batch_each, batch)), slice(h, min(h + heads_each, heads)), slice(i, min(i + rows_each, seq_q))


def ranges_of(rows, batch, heads, seq_q, seq_k, device):
    """The mask as ranges, normalised; None where a query has more than _mask_ranges.MOST. Reads two numbers from the device for each part."""
    made = torch.zeros(batch, heads, 2 * _mask_ranges.MOST, seq_q, dtype=torch.int32, device=device)
    most, middle = 1, seq_q // 2 // BLOCK * BLOCK
    # The rows of one block in the middle come first: where they need more ranges the others need not be made.
    one_block = [(slice(0, 1), slice(0, 1), slice(middle, min(middle + BLOCK, seq_q)))] if batch and heads and seq_q else []
    for b, h, i in (*one_block, *parts(batch, heads, seq_q, seq_k)):
        found = _mask_ranges.of_rows(rows(b, h, i))
        if found is None:
            return None
        made[b, h, :, i], most = found[0], max(most, found[1])
    return _mask_ranges.normalised(_mask_ranges.cut(made, most))


def bits_of_pairs(rows, batch, heads, seq_q, seq_k, device):
    """The mask as a bit for each pair, [batch, heads, seq_q, ceil(seq_k / 8)]. Nothing is read from the device."""
    made = torch.zeros(batch, heads, seq_q, -(-seq_k // 8), dtype=torch.uint8, device=device)
    for b, h, i in parts(batch, heads, seq_q, seq_k):
        made[b, h, i] = packed(torch.nn.functional.pad(rows(b, h, i), (0, -seq_k % 8)))
    return made


def _blocks_of(visible):
    """[batch, heads, blocks of queries, blocks of keys, BLOCK, BLOCK] of rows of whole blocks; pairs past the end are as their neighbours
    are, so that they make no full block a partial one."""
    rows, keys = (-(-size // BLOCK) for size in visible.shape[2:])
    places = [torch.arange(n * BLOCK, device=visible.device).clamp(max=size - 1) for n, size in zip((rows, keys), visible.shape[2:])]
    visible = visible[:, :, places[0]] if visible.shape[2] % BLOCK else visible
    visible = visible[..., places[1]] if visible.shape[3] % BLOCK else visible
    return visible.unflatten(3, (keys, BLOCK)).unflatten(2, (rows, BLOCK)).transpose(3, 4)


def bits_of(rows, batch, heads, seq_q, seq_k, device):
    """The mask as (bits, bit_blocks), of which bits has at least one block. Reads a number from the device for each part."""
    bit_blocks = torch.full((batch, heads, -(-seq_q // BLOCK), -(-seq_k // BLOCK)), HIDDEN, dtype=torch.int32, device=device)
    bits, count = [], 0
    for b, h, i in parts(batch, heads, seq_q, seq_k):
        blocks = _blocks_of(rows(b, h, i))
        seen = blocks.sum(-1, dtype=torch.uint8).sum(-1, dtype=torch.int32)
        partial = (seen > 0) & (seen < BLOCK * BLOCK)
        bits.append(packed(blocks[partial]))
        numbers = partial.flatten().cumsum(0).view_as(partial) - 1 + count
        count += len(bits[-1])
        bit_blocks[b, h, i.start // BLOCK:-(-i.stop // BLOCK)] = torch.where(partial, numbers, torch.where(seen > 0, ALL_SEEN, HIDDEN)).int()
    bits.append(torch.zeros(1, BLOCK, BLOCK // 8, dtype=torch.uint8, device=device))  # one to point at where there is none
    return torch.cat(bits), bit_blocks
