# SPDX-License-Identifier: Apache-2.0
"""Masks as data: which keys each query sees, from tensors, made once for any number of attention() calls.

    mask = flash3.masks.documents(documents, causal=True)
    for layer in layers:
        out = flash3.attention(q, k, v, mask=mask)

Each function takes torch tensors of the device of the calls, and makes a Mask there. A query sees a key if the source says so and the
band does: causal, window, chunk and mask_alignment mean what they mean in attention(). A dimension that is left out in front, or of
size 1, stands for all sequences or all query heads.

The lists are of blocks of 128 queries by 128 keys: 16 bytes for each block of which something is seen, and 2 KiB for each whose pairs
neither all are seen nor follow one range of keys for each query. How many there are is known only when they are made: each function
makes the lists twice, the first time to count, and waits for the count. With max_blocks and max_partial_blocks it waits for nothing; a
mask that needs more than that is then empty, and no query sees any key (needs() says what it takes).
"""
import torch

from . import _torch
from ._mask import Mask, check_mask
from ._options import number_of_word, window_sides

_make = _torch.operators.mask_make.default
_used = _torch.operators.mask_used.default

__all__ = ["ranges", "documents", "dense", "blocks", "needs"]


def _run(operator, *arguments, **named):
    try:
        return operator(*arguments, **named)
    except RuntimeError as error:
        raise _torch.translated(error) from None


def _tensor(name, x, ndim):
    """x with dimensions of size 1 in front, so that it has ndim."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor")
    if x.dim() > ndim:
        raise ValueError(f"{name}.ndim = {x.dim()} but it must be at most {ndim}")
    return x[(None,) * (ndim - x.dim())]


def _made(like, sources, sizes, causal=False, window=None, chunk=0, mask_alignment="bottom_right", max_blocks=None,
          max_partial_blocks=None):
    named = {"causal": bool(causal), "chunk": chunk, "mask_alignment": number_of_word("mask_alignment", mask_alignment), **sizes}
    if (sides := window_sides(window)) is not None:
        named["window_left"], named["window_right"] = sides
    tensors = [sources.get(name) for name in ("ranges", "documents", "dense", "block_counts", "block_indices")]

    def make(blocks, partial_blocks):
        data, fields = _run(_make, like, *tensors, **named, max_blocks=blocks, max_partial_blocks=partial_blocks)
        return Mask(data, *fields)
    if max_blocks is not None:
        return make(max_blocks, 0 if max_partial_blocks is None else max_partial_blocks)
    if max_partial_blocks is not None:
        raise ValueError(f"max_partial_blocks = {max_partial_blocks} but max_blocks = None; it is a part of that")
    needed = needs(make(1, 1))  # 0 stands for the most that there can be
    return make(max(needed[0], 1), max(needed[1], 1))


def ranges(ranges, seq_k, **options):
    """Query i sees the keys of up to 8 ranges of its own.

    Args:
        ranges: int32 [1 or batch, 1 or heads_q, 2 * n, seq_q], n from 1 to 8: keys from ranges[..., 2 * r, i] to just before
            ranges[..., 2 * r + 1, i]. Any integers may be there: what lies outside of the sequence is cut, and a range that ends
            before it begins is empty.
        seq_k: keys of a sequence.
        options: causal, window, chunk, mask_alignment, as in attention(); max_blocks, max_partial_blocks, as above.

    Returns:
        A Mask. Raises what attention() raises.
    """
    ranges = _tensor("ranges", ranges, 4)
    batch, heads, _, seq_q = ranges.shape
    return _made(ranges, {"ranges": ranges}, {"batch": batch, "heads_q": heads, "seq_q": seq_q, "seq_k": seq_k}, **options)


def documents(documents, seq_q=None, **options):
    """Query i sees the keys of its own document: of the run of equal numbers that holds key i' = i + seq_k - seq_q.

    Args:
        documents: int32 [1 or batch, seq_k]: a number for each key.
        seq_q: queries of a sequence; None: seq_k.
        options: as of ranges().
    """
    documents = _tensor("documents", documents, 2)
    batch, seq_k = documents.shape
    return _made(documents, {"documents": documents},
                 {"batch": batch, "heads_q": 1, "seq_q": seq_k if seq_q is None else seq_q, "seq_k": seq_k}, **options)


def dense(dense, **options):
    """Query i sees key j if dense[..., i, j] is not 0.

    Args:
        dense: bool or uint8 [1 or batch, 1 or heads_q, seq_q, seq_k]; read once.
        options: as of ranges().
    """
    dense = _tensor("dense", dense, 4)
    batch, heads, seq_q, seq_k = dense.shape
    return _made(dense, {"dense": dense}, {"batch": batch, "heads_q": heads, "seq_q": seq_q, "seq_k": seq_k}, **options)


def blocks(block_counts, block_indices, seq_q, seq_k, block_rows=128, block_keys=128, **options):
    """Queries see blocks of keys as a whole, as torch's BlockMask lists them: kv_num_blocks and kv_indices.

    Args:
        block_counts: int32 [1 or batch, 1 or heads_q, ceil(seq_q / block_rows)]: how many blocks of keys each block of queries sees.
        block_indices: int32, the same with a fourth dimension: which; what comes after the count is not read, and a number that is no block
            is passed over.
        seq_q, seq_k: queries and keys of a sequence.
        block_rows, block_keys: queries and keys of a block, positive multiples of 8.
        options: as of ranges().
    """
    block_counts, block_indices = _tensor("block_counts", block_counts, 3), _tensor("block_indices", block_indices, 4)
    batch, heads = block_counts.shape[:2]
    return _made(block_counts, {"block_counts": block_counts, "block_indices": block_indices},
                 {"batch": batch, "heads_q": heads, "seq_q": seq_q, "seq_k": seq_k, "block_rows": block_rows, "block_keys": block_keys},
                 **options)


def needs(mask):
    """(blocks, partial blocks) that a Mask needs, after waiting for the stream: with less room than that it is empty."""
    check_mask(mask)
    return _run(_used, mask.data, mask.fields)
