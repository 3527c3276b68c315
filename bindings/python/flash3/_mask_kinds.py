# SPDX-License-Identifier: Apache-2.0
"""Masks of tensors: documents, prefixes, ranges, blocks, booleans, and windows with sinks."""
import torch

from . import _mask_ranges
from ._mask_block_sizes import with_block_sizes
from ._mask_sources import Band, MaskSource
from ._options import int64_of

_INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)


def size_of(name, value, least=0):
    """value as a size, at least `least` and below 2^31; name is the argument's, for messages."""
    value = int64_of(name, value)
    if not least <= value < 2**31:
        raise ValueError(f"{name} = {value} but it must be from {least} to {2**31 - 1}")
    return value


def check_dims(name, tensor, what, *dims):
    if tensor.dim() not in dims:
        raise ValueError(f"{name}.ndim = {tensor.dim()} but it must be {' or '.join(map(str, dims))}, {what}")


def _leading(name, tensor, what, most):
    """tensor with dimensions of size 1 before those that are given, for all sequences or all heads."""
    check_dims(name, tensor, what, *range(most - 2, most + 1))
    return tensor[(None,) * (most - tensor.dim())]


def integers(name, x, device=None):
    """x, a tensor of integers or what torch.tensor takes, as a tensor of int64."""
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x, device=device, dtype=None if len(x) else torch.int64)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{name}.dtype = {str(x.dtype).removeprefix('torch.')} but it must be an integer type")
    return x.long()


def int32(x):
    """Integers in 32 bits, those that do not fit as the nearest that does: no place of a query or key is as large."""
    return x.clamp(-2**31, 2**31 - 1).to(torch.int32)


def band(*, causal=False, window=None, chunk=0, mask_alignment="bottom_right"):
    """The options of flash3.attention as a mask, for combinations with other sources.

    Args:
        causal, window, chunk, mask_alignment: as in flash3.attention.

    Raises:
        ValueError: one of them breaks a rule.
    """
    return MaskSource("band", band=Band.of(causal, window, chunk, mask_alignment))


def _ids_of_lengths(lengths, seq, device):
    """[batch, seq] int64: which of the lengths, one after the other, each place is in; what is left has the number after the last one."""
    given, lengths = lengths, integers("lengths", lengths, device)
    check_dims("lengths", lengths, "[documents] or [batch, documents]", 1, 2)
    lengths = torch.atleast_2d(lengths)
    ends = lengths.cumsum(1)
    if seq is None and isinstance(given, (list, tuple)):  # a compiler cannot read it from the tensor
        seq = max([sum(own) for own in (given if given and isinstance(given[0], (list, tuple)) else [given])])
    if seq is None:
        seq = int(ends[:, -1].max()) if ends.numel() else 0
    places = torch.arange(size_of("seq_k", seq), device=ends.device)
    return torch.searchsorted(ends, places.repeat(len(ends), 1), right=True)


def _count(lengths):
    """How many documents lengths, as documents() takes it, has at most in a sequence."""
    if isinstance(lengths, torch.Tensor):
        return lengths.shape[-1]
    return len(lengths[0] if lengths and isinstance(lengths[0], (list, tuple)) else lengths)


def _ids(ids, lengths, seq, device):
    if (ids is None) == (lengths is None):
        raise TypeError("documents() takes ids or lengths, and one of them")
    if ids is None:
        return _ids_of_lengths(lengths, seq, device)
    ids = integers("ids", ids, device)
    check_dims("ids", ids, "[seq_k] or [1 or batch, seq_k]", 1, 2)
    ids = torch.atleast_2d(ids)
    if seq is not None and ids.shape[1] != seq:
        raise ValueError(f"ids.shape[-1] = {ids.shape[1]} but seq_k = {seq}; they must be the same")
    return ids


def documents(ids=None, *, lengths=None, seq_q=None, seq_k=None, causal=False, window=None, chunk=0,
              mask_alignment="bottom_right", device=None):
    """Packed documents: a query sees the keys of its own document.

    Args:
        ids: [seq_k] or [1 or batch, seq_k] integers: a number for each key. A document is a run of equal numbers; the same
            number in a later run is another document. Query i belongs to the document of key i + seq_k - seq_q, and sees
            nothing if there is no such key.
        lengths: instead of ids: [documents] or [batch, documents] integers, the lengths of consecutive documents. Keys after the
            last document form another one.
        seq_q: queries; None: as many as keys.
        seq_k: keys; None: as many as ids has, or the largest sum of lengths, which is then read from their device.
        causal, window, chunk, mask_alignment: as in flash3.attention, within a document. Chunks are those of the sequence.
        device: for lengths or ids that are not tensors; None: torch's default.

    Raises:
        TypeError: both or neither of ids and lengths are given, or one is not of integers.
        ValueError: a shape breaks a rule.
    """
    given = ids if isinstance(ids, torch.Tensor) else None
    ids, most = _ids(ids, lengths, seq_k, device), 0 if lengths is None else _count(lengths) + 1  # one of the keys that are left
    seq_k = ids.shape[1]
    if given is None or given.dtype == torch.int64:  # numbers of 64 bits: those of the runs mean the same
        ids = _mask_ranges.runs(ids)[2]
    return MaskSource("documents", documents=ids.to(torch.int32).contiguous(), most_documents=most, band=Band.of(causal, window, chunk, mask_alignment),
                      seq_q=seq_k if seq_q is None else size_of("seq_q", seq_q), seq_k=seq_k)


def prefix(lengths, seq_q=None, seq_k=None, *, ids=None, device=None):
    """A prefix that all queries see, and a causal mask after it (prefix LM, arXiv:1910.10683): query i sees key j if j < length
    or j <= i' = i + seq_k - seq_q.

    Args:
        lengths: the length of each sequence's prefix: an integer, or [batch] integers as a tensor or a list. With ids,
            [1 or batch, documents]: the length of each document's prefix, at most the document's; documents after the
            last column have none.
        seq_q: queries; None: as many as keys.
        seq_k: keys; not needed with ids.
        ids: [seq_k] or [1 or batch, seq_k] integers: documents, as in documents(); a query sees only keys of its own document.
        device: for arguments that are not tensors; None: torch's default.

    Raises:
        TypeError: lengths or ids are not integers.
        ValueError: a shape breaks a rule, or seq_k is not given.
    """
    if ids is None:
        if seq_k is None:
            raise ValueError("seq_k = None but without ids it must be given: the number of keys")
        seq_k = size_of("seq_k", seq_k)
        lengths = integers("lengths", lengths if isinstance(lengths, (torch.Tensor, list, tuple)) else [int64_of("lengths", lengths)], device)
        lengths = torch.atleast_1d(lengths)
        check_dims("lengths", lengths, "[batch]", 1)
        begins = torch.zeros(len(lengths), seq_k, dtype=torch.int64, device=lengths.device)
        own_prefix, ends = lengths[:, None].expand(-1, seq_k), torch.full_like(begins, seq_k)
    else:
        ids = _ids(ids, None, seq_k, device)
        seq_k = ids.shape[1]
        lengths = integers("lengths", lengths, ids.device)
        check_dims("lengths", lengths, "[1 or batch, documents]", 2)
        if 1 not in (len(lengths), len(ids)) and len(lengths) != len(ids):
            raise ValueError(f"lengths.shape[0] = {len(lengths)} but ids.shape[0] = {len(ids)}; they must be the same, or one of them 1")
        begins, ends, which = _mask_ranges.runs(ids)
        batch = max(len(lengths), len(ids))
        begins, ends, which = (x.expand(batch, -1) for x in (begins, ends, which))
        lengths = torch.nn.functional.pad(lengths, (0, 1)).expand(batch, -1)
        own_prefix = lengths.gather(1, which.clamp(max=lengths.shape[1] - 1))
    seen = torch.maximum(begins + own_prefix.clamp(0, seq_k), torch.arange(seq_k, device=begins.device) + 1)
    seq_q = seq_k if seq_q is None else size_of("seq_q", seq_q)
    made = _mask_ranges.of_places(begins, torch.minimum(seen, ends), seq_q)
    if ids is None and seq_q > seq_k:  # queries before the first key's see the prefix
        own = torch.arange(seq_q, device=made.device) + (seq_k - seq_q)
        made[:, 0, 1] = torch.where(own < 0, int32(lengths.clamp(0, seq_k))[:, None], made[:, 0, 1])
    return MaskSource("ranges", ranges=made, seq_q=seq_q, seq_k=seq_k)


def ranges(tensor, *, seq_k=None, causal=False, window=None, chunk=0, mask_alignment="bottom_right"):
    """Ranges of keys, of which a query sees the union.

    Args:
        tensor: [1 or batch, 1 or heads_q, 2 * n, seq_q] integers, n from 1 to 8; batch and heads may be left out. Query i sees
            key j if, for any r, tensor[..., 2 * r, i] <= j < tensor[..., 2 * r + 1, i]. All integers are valid; bounds outside
            of the sequence are clamped.
        seq_k: keys; None: those of the call.
        causal, window, chunk, mask_alignment: as in flash3.attention, and with the ranges.

    Raises:
        TypeError: the tensor is not one of integers.
        ValueError: a shape breaks a rule.
    """
    tensor = _leading("ranges", integers("ranges", tensor), "[1 or batch, 1 or heads_q, 2 * n, seq_q]", 4)
    if tensor.shape[2] < 2 or tensor.shape[2] % 2 or tensor.shape[2] > 2 * _mask_ranges.MOST:
        raise ValueError(f"ranges.shape[2] = {tensor.shape[2]} but it must be 2 * n, with n from 1 to {_mask_ranges.MOST}")
    return MaskSource("ranges", ranges=int32(tensor).contiguous(), band=Band.of(causal, window, chunk, mask_alignment), seq_q=tensor.shape[3],
                      seq_k=None if seq_k is None else size_of("seq_k", seq_k))


def check_block(name, size):
    if size_of(name, size) == 0 or size % 8:
        raise ValueError(f"{name} = {size} but it must be a positive multiple of 8")
    return int(size)


def blocks(counts, indices=None, block_rows=128, block_keys=128, *, block_sizes=None, seq_q=None, seq_k=None, causal=False, window=None,
           chunk=0, mask_alignment="bottom_right"):
    """Whole blocks of block_rows queries by block_keys keys, as block-sparse attention for video and long contexts selects them.

    Args:
        counts: [1 or batch, 1 or heads_q, ceil(seq_q / block_rows)] integers: how many blocks of keys each block of queries sees; batch and
            heads may be left out, of both tensors alike. Without indices: a bool tensor with a fourth dimension, ceil(seq_k / block_keys),
            that is true for blocks that are seen.
        indices: the dimensions of counts and a fourth: the numbers of the blocks, in any order. Entries after the count are not read. A
            number that is no block is skipped, a count above the dimension is clamped to it, and a negative count means 0.
        block_rows, block_keys: positive multiples of 8.
        block_sizes: [1 or batch, 1 or heads_q, blocks of keys] integers, where heads, and batch too, may be left out: how many of each block's
            keys are tokens. These come first; no query sees the others. Clamped to 0 and block_keys. None: all. Video sparse attention
            calls them variable_block_sizes, and cuDNN's frontend block_sizes. If block_rows and block_keys are multiples of 64, this takes
            32 KiB for each 128 keys, and another 4 bytes for each 128 queries by 128 keys; otherwise the blocks are evaluated pair by
            pair, in parts.
        seq_q, seq_k: queries and keys; None: those of the call, or with block_sizes of all blocks.
        causal, window, chunk, mask_alignment: as in flash3.attention, and with the blocks.

    Raises:
        TypeError: a dtype breaks a rule.
        ValueError: a size breaks a rule.
    """
    block_rows, block_keys = check_block("block_rows", block_rows), check_block("block_keys", block_keys)
    if indices is None:
        if not isinstance(counts, torch.Tensor) or counts.dtype != torch.bool:
            raise TypeError("indices is None, and then counts must be a bool tensor of the blocks that are seen")
        counts = _leading("counts", counts, "[1 or batch, 1 or heads_q, blocks of queries, blocks of keys]", 4)
        if seq_k is not None and counts.shape[3] != -(-seq_k // block_keys):
            raise ValueError(f"counts.shape[3] = {counts.shape[3]} but ceil(seq_k / block_keys) = {-(-seq_k // block_keys)}; they must be the same")
        counts, indices = counts.sum(-1), (~counts).to(torch.uint8).argsort(dim=-1, stable=True)
    counts = _leading("counts", integers("counts", counts), "[1 or batch, 1 or heads_q, blocks of queries]", 3)
    indices = _leading("indices", integers("indices", indices), "[1 or batch, 1 or heads_q, blocks of queries, most]", 4)
    for d in range(3):
        if counts.shape[d] != indices.shape[d]:
            raise ValueError(f"indices.shape[{d}] = {indices.shape[d]} but counts.shape[{d}] = {counts.shape[d]}; they must be the same")
    made = MaskSource("blocks", block_counts=int32(counts).contiguous(), block_indices=int32(indices).contiguous(), block_rows=block_rows,
                      block_keys=block_keys, band=Band.of(causal, window, chunk, mask_alignment),
                      seq_q=None if seq_q is None else size_of("seq_q", seq_q), seq_k=None if seq_k is None else size_of("seq_k", seq_k))
    made.check_blocks()
    return made if block_sizes is None else with_block_sizes(made, integers("block_sizes", block_sizes, made.device))


def dense(mask, *, causal=False, window=None, chunk=0, mask_alignment="bottom_right"):
    """Any mask, one element for each pair. The tensor is not copied; it is read when the mask is made.

    Args:
        mask: [1 or batch, 1 or heads_q, seq_q, seq_k], bool or uint8; batch and heads may be left out. A pair is seen if
            its element is true, or not 0.
        causal, window, chunk, mask_alignment: as in flash3.attention, and with the mask.

    Raises:
        TypeError: mask is not a tensor of bool or uint8.
        ValueError: it has another number of dimensions.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        what = str(mask.dtype).removeprefix("torch.") if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"mask is of {what} but it must be a tensor of bool or uint8")
    mask = _leading("mask", mask, "[1 or batch, 1 or heads_q, seq_q, seq_k]", 4)
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    return MaskSource("dense", dense=mask.view(torch.uint8), band=Band.of(causal, window, chunk, mask_alignment),
                      seq_q=mask.shape[2], seq_k=mask.shape[3])


def bits(packed, seq_k, *, causal=False, window=None, chunk=0, mask_alignment="bottom_right"):
    """Any mask, one bit for each pair, as numpy.packbits(mask, axis=-1, bitorder="little") packs booleans. The tensor is not copied: it is
    read when the mask is made.

    Args:
        packed: [1 or batch, 1 or heads_q, seq_q, ceil(seq_k / 8)] uint8; batch and heads may be left out. Query i sees key j if bit j % 8
            of byte j // 8 of its row is 1; bit 0 has the value 1. Bits after the last key do not count.
        seq_k: keys.
        causal, window, chunk, mask_alignment: as in flash3.attention, and with the bits.

    Raises:
        TypeError: packed is not a tensor of uint8.
        ValueError: a shape breaks a rule.
    """
    if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8:
        what = str(packed.dtype).removeprefix("torch.") if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise TypeError(f"packed is of {what} but it must be a tensor of uint8")
    packed = _leading("packed", packed, "[1 or batch, 1 or heads_q, seq_q, ceil(seq_k / 8)]", 4)
    if packed.shape[3] != (needed := -(-size_of("seq_k", seq_k) // 8)):
        raise ValueError(f"packed.shape[-1] = {packed.shape[3]} but ceil(seq_k / 8) = {needed}; they must be the same")
    packed = packed if packed.stride(3) == 1 else packed.contiguous()
    return MaskSource("bits", bits=packed, band=Band.of(causal, window, chunk, mask_alignment), seq_q=packed.shape[2], seq_k=int(seq_k))


def window_with_sinks(window, sinks, seq_q, seq_k=None, *, device=None):
    """The newest keys and the first ones (StreamingLLM, arXiv:2309.17453): query i sees key j if i' - window < j <= i', or if j < sinks and
    j <= i', with i' = i + seq_k - seq_q.

    Args:
        window: how many of the newest keys, including the query's own.
        sinks: how many of the first keys.
        seq_q: queries.
        seq_k: keys; None: as many as queries.
        device: of the mask; None: torch's default.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is negative.
    """
    window, sinks, seq_q = size_of("window", window), size_of("sinks", sinks), size_of("seq_q", seq_q)
    seq_k = seq_q if seq_k is None else size_of("seq_k", seq_k)
    end = torch.arange(seq_q, device=device) + (seq_k - seq_q + 1)
    first, newest = torch.zeros_like(end), (end - window).clamp(min=0)
    begins, ends = torch.stack((first, newest)), torch.stack((end.clamp(max=sinks), end))
    made = _mask_ranges.normalised(_mask_ranges.pack(begins[None, None], ends[None, None]), seq_k)
    return MaskSource("ranges", ranges=made, seq_q=seq_q, seq_k=seq_k)
