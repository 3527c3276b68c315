# SPDX-License-Identifier: Apache-2.0
"""Masks of torch's FlexAttention: of a mask_mod, and of a BlockMask."""
import math

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask, noop_mask

from . import _mask_rows
from ._mask_kinds import blocks, check_block, size_of
from ._mask_sources import of_rows


def _rows_of_mod(fn, seq_k, device):
    """A function of three slices (_mask_rows) that evaluates a mask_mod as torch does."""
    def rows(b, h, i):
        # torch counts batch, heads and queries from 0
        moved = lambda batch, head, query, key: fn(batch + b.start, head + h.start, query + i.start, key)
        return _checked(create_mask(moved, b.stop - b.start, h.stop - h.start, i.stop - i.start, seq_k, device))
    return rows


def _checked(seen):
    """What a mask_mod gives, if that is bool."""
    if seen.dtype != torch.bool:
        raise TypeError(f"the mask_mod returns {str(seen.dtype).removeprefix('torch.')} but it must return bool")
    return seen


def _pairs_of_blocks(fn, batch, heads, queries, keys):
    """[n, rows, keys] bool: fn of batch [n], heads [n], queries [n, rows] and keys [n, keys]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    of_keys = torch.vmap(fn, in_dims=(None, None, None, 0))
    with TransformGetItemToIndex():
        return _checked(torch.vmap(torch.vmap(of_keys, in_dims=(None, None, 0, None)))(batch, heads, queries, keys))


def _rows_of_blocks(fn, partial, full):
    """A function of three slices (_mask_rows): what fn lets see in the partial blocks, and all pairs of the full ones (None: there are
    none). fn is evaluated in the partial blocks alone, which are cut so that a part of the rows has whole ones."""
    unit_q, unit_k, device = *(math.gcd(size, _mask_rows.BLOCK) for size in (partial.block_rows, partial.block_keys)), partial.device

    def listed(source, b, h, i):
        """[1 or batch, 1 or heads, units of rows, units of keys] bool"""
        matrix = source._block_matrix(*(slice(0, 1) if size == 1 else part for size, part in zip(source.shape, (b, h))))
        rows = torch.arange(i.start, i.stop, unit_q, device=device) // source.block_rows
        return matrix[:, :, rows][..., torch.arange(0, source.seq_k, unit_k, device=device) // source.block_keys]

    def rows(b, h, i):
        some = listed(partial, b, h, i)
        all_seen = torch.zeros(b.stop - b.start, h.stop - h.start, *some.shape[2:], dtype=torch.bool, device=device)
        if full is not None:
            all_seen |= listed(full, b, h, i)
        seen = all_seen[..., None, None].repeat(1, 1, 1, 1, unit_q, unit_k)
        for own in (some & ~all_seen).nonzero().split(max(1, _mask_rows.AT_ONCE // (unit_q * unit_k))):
            if len(own) == 0:
                continue
            # where a block reaches past an end, the last query or key again and again
            queries = (own[:, 2, None] * unit_q + torch.arange(i.start, i.start + unit_q, device=device)).clamp(max=partial.seq_q - 1)
            keys = (own[:, 3, None] * unit_k + torch.arange(unit_k, device=device)).clamp(max=partial.seq_k - 1)
            seen[tuple(own.unbind(1))] = _pairs_of_blocks(fn, own[:, 0] + b.start, own[:, 1] + h.start, queries, keys)
        return seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :i.stop - i.start, :partial.seq_k]
    return rows


def from_mask_mod(fn, batch, heads, seq_q, seq_k, device=None):
    """The mask of a mask_mod of torch's FlexAttention.

    Args:
        fn: fn(batch, head, query, key) -> bool, of scalar tensors of integers; as torch.nn.attention.flex_attention.create_block_mask
            takes it, which evaluates it for every pair as well.
        batch, heads: for how many it is evaluated; None: once, for a mask that is the same for all.
        seq_q, seq_k: queries and keys.
        device: where it is evaluated; None: torch's current accelerator, or the CPU.

    Returns:
        A mask of ranges if no query sees more than 8 of them, otherwise of blocks of bits. The results of fn are in memory in parts of
        32 Mi pairs, or of the rows of one block of 128 queries; numbers are read from the device for each part. fn runs a second
        time if the first pass finds too many ranges.

    Raises:
        TypeError: fn is not callable, or does not return bool.
        ValueError: a size is negative.
    """
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__} but it must be a function of batch, head, query and key")
    batch, heads = (1 if size is None else size_of(name, size) for name, size in (("batch", batch), ("heads", heads)))
    seq_q, seq_k = size_of("seq_q", seq_q), size_of("seq_k", seq_k)
    device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    return of_rows(_rows_of_mod(fn, seq_k, device), batch, heads, seq_q, seq_k, device)


def _depends_on(fn, which, device):
    """Whether what a mask_mod gives depends on its argument number `which`, the batch or the head."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    found = []

    def watched(*arguments):
        seen = fn(*arguments)
        found.append(torch._C._functorch.is_batchedtensor(seen))
        return seen

    zero = torch.zeros((), dtype=torch.int64, device=device)
    arguments = [zero] * 4
    arguments[which] = zero[None]
    with TransformGetItemToIndex():
        torch.vmap(watched, in_dims=tuple(0 if n == which else None for n in range(4)))(*arguments)
    return found[0]


def _lists(counts, indices, block_rows, block_keys, seq_q, seq_k):
    """Lists of a BlockMask as a mask; batch and heads of 1 where there are fewer dimensions."""
    shape = (1,) * (4 - indices.dim()) + tuple(indices.shape)
    return blocks(counts.reshape(shape[:3]), indices.reshape(shape), block_rows, block_keys, seq_q=seq_q, seq_k=seq_k)


def _all_listed(partial, full):
    """One list of both kinds of blocks: where a place of a list does not count there is a number that is no block."""
    listed = [torch.where(torch.arange(x.block_indices.shape[3], device=x.device) < x.block_counts[..., None], x.block_indices, -1)
              for x in (partial, full)]
    indices = torch.cat(listed, 3)
    counts = torch.full(indices.shape[:3], indices.shape[3], device=indices.device)
    return blocks(counts, indices, partial.block_rows, partial.block_keys, seq_q=partial.seq_q, seq_k=partial.seq_k)


def from_block_mask(block_mask, batch=None, heads=None):
    """The mask of a BlockMask of torch's FlexAttention: its full blocks, and in the others the pairs for which its mask_mod is true.

    Args:
        block_mask: a torch.nn.attention.flex_attention.BlockMask, with block sizes that are multiples of 8.
        batch, heads: of the calls; where the BlockMask has one list for all and its mask_mod tells sequences or heads apart, the mask is
            made for so many. None: as many as the BlockMask has.

    Returns:
        A mask of seq_lengths queries and keys. Without a mask_mod it is block lists, and nothing is read from the device; otherwise
        the mask_mod is evaluated in the blocks that are not full, and the mask is made as from_mask_mod() makes it.

    Raises:
        TypeError: block_mask is not a BlockMask.
        ValueError: its block sizes are not multiples of 8; or it is a slice of queries, and its seq_lengths are still those of all.
        RuntimeError: it is a slice, and torch requires its mask_mod to be set.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is a {type(block_mask).__name__} but it must be a BlockMask of torch.nn.attention.flex_attention")
    (seq_q, seq_k), fn = (int(n) for n in block_mask.seq_lengths), block_mask.mask_mod
    sizes = (*block_mask.BLOCK_SIZE, seq_q, seq_k)
    for n, size in enumerate(block_mask.BLOCK_SIZE):
        check_block(f"block_mask.BLOCK_SIZE[{n}]", size)
    listed, needed = block_mask.kv_num_blocks.shape[-1], -(-seq_q // sizes[0])
    if listed != needed:
        raise ValueError(f"block_mask.kv_num_blocks.shape[-1] = {listed} but ceil(seq_lengths[0] / BLOCK_SIZE[0]) = {needed}; they must be "
                         "the same (torch leaves seq_lengths of a slice as they are)")
    partial = _lists(block_mask.kv_num_blocks, block_mask.kv_indices, *sizes)
    full = None if block_mask.full_kv_num_blocks is None else _lists(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, *sizes)
    if fn is noop_mask:
        return partial if full is None else _all_listed(partial, full)
    shape = [partial.shape[n] if size is None or partial.shape[n] != 1 or not _depends_on(fn, n, partial.device) else size_of(name, size)
             for n, (name, size) in enumerate((("batch", batch), ("heads", heads)))]
    return of_rows(_rows_of_blocks(fn, partial, full), *shape, seq_q, seq_k, partial.device)
