# SPDX-License-Identifier: Apache-2.0
"""What a mask is made from (flash3/mask.h), as torch tensors, before it is made."""
import dataclasses
from typing import NamedTuple

import torch

from . import _fields, _mask_ranges, _mask_rows
from ._options import int64_of, number_of_word, window_sides

KINDS = ("ranges", "documents", "dense", "blocks", "bits", "band")
_SOURCES = tuple(name for name in _fields.TENSORS["mask"] if not name.startswith(("cu_seqlens_", "seqused_")))  # the others are lengths
_RANGES_ALONE = ("ranges", "documents", "band")  # kinds that are ranges of keys, whatever they hold


class Band(NamedTuple):
    """causal, window, chunk and mask_alignment of flash3.attention; without arguments no bound."""
    left: int = -1  #: keys before i', negative for all
    right: int = -1  #: keys after i', negative for all, 0 of a causal mask
    chunk: int = 0  #: 0 for none
    top_left: bool = False  #: i' = i, not i + seq_k - seq_q

    @classmethod
    def of(cls, causal=False, window=None, chunk=0, mask_alignment="bottom_right"):
        left, right = (max(side, -1) for side in window_sides(window) or (-1, -1))
        chunk = int64_of("chunk", 0 if chunk is None else chunk)
        if chunk < 0:
            raise ValueError(f"chunk = {chunk} but it must be at least 0")
        return cls(left, 0 if causal else right, chunk, number_of_word("mask_alignment", mask_alignment) != 0)

    def is_none(self):
        return self[:3] == (-1, -1, 0)

    def both(self, other):
        """The band that lets a query see what both let it see; None where that is no band."""
        if self.is_none() or other.is_none():
            return self if other.is_none() else other
        chunks = {self.chunk, other.chunk} - {0}
        if self.top_left != other.top_left or len(chunks) > 1:
            return None
        narrower = lambda a, b: max(a, b) if min(a, b) < 0 else min(a, b)
        return Band(narrower(self.left, other.left), narrower(self.right, other.right), max({0, *chunks}), self.top_left)

    def ranges(self, seq_q, seq_k, device):
        """[1, 1, 2, seq_q] int32: the keys of each query."""
        own = torch.arange(seq_q, device=device) + (0 if self.top_left else seq_k - seq_q)
        begins, ends = torch.zeros_like(own), torch.full_like(own, seq_k)
        if self.left >= 0:
            begins = (own - min(self.left, 2**32)).clamp(min=0)
        if self.right >= 0:
            ends = (own + min(self.right, 2**32) + 1).clamp(0, seq_k)
        if self.chunk:
            chunk = min(self.chunk, 2**32)
            first = own.div(chunk, rounding_mode="floor") * chunk
            begins, ends = torch.maximum(begins, first), torch.minimum(ends, first + chunk)
        return _mask_ranges.pack(begins.clamp(0, seq_k)[None, None, None], ends.clamp(0, seq_k)[None, None, None])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskSource:
    """Which keys each query sees, as data. The functions of flash3.masks return sources, and mask= of flash3.attention takes them.

    A call makes the mask for its own sizes, device and stream, and keeps it with the source as long as the source's tensors are unchanged:
    at most 8 masks, which a CUDA graph must not use. If torch does not count the tensors' changes, as in torch.inference_mode(), each call
    makes the mask. make() returns a mask for the caller to keep.

    A query sees a key if both the source and the band allow it. Sources combine: ``a & b`` allows what both allow, ``a | b`` what either
    allows, ``~a`` what a hides. A result that at most 8 ranges of keys for each query can express stays ranges, of 8 bytes each. Any other
    result is computed in parts of 32 Mi pairs, and numbers are read from the device for each part. It becomes ranges if it can, otherwise
    blocks of 128 x 128 pairs with 2 KiB for each block that is neither hidden nor full: at most seq_q * seq_k / 8 bytes for each head.
    No array of seq_q * seq_k bytes is in memory at any time.
    """
    kind: str  #: "ranges", "documents", "dense", "blocks", "bits", or "band" for a band alone
    ranges: object = None  #: [1 or batch, 1 or heads_q, 2 * n, seq_q] int32
    documents: object = None  #: [1 or batch, seq_k] int32
    dense: object = None  #: [1 or batch, 1 or heads_q, seq_q, seq_k] uint8, 0 where hidden
    block_counts: object = None  #: [1 or batch, 1 or heads_q, blocks of queries] int32
    block_indices: object = None  #: the same and a fourth dimension, int32
    block_rows: int = 0  #: queries of a block
    block_keys: int = 0  #: keys of a block
    bits: object = None  #: [1 or batch, 1 or heads_q, seq_q, ceil(seq_k / 8)] uint8; with bit_blocks [blocks, 128, 16]
    bit_blocks: object = None  #: [1 or batch, 1 or heads_q, ceil(seq_q / 128), ceil(seq_k / 128)] int32, which of bits, -1 for all seen, -2 for none
    most_documents: int = 0  #: no more documents than these are in there, 0 where that is not known
    band: object = Band()  #: what else a query does not see
    seq_q: object = None  #: queries, None where not known
    seq_k: object = None  #: keys, None where not known

    def __repr__(self):
        batch, heads = self.shape
        return (f"MaskSource(kind={self.kind!r}, batch={batch}, heads={heads}, seq_q={self.seq_q}, seq_k={self.seq_k}, "
                f"band={tuple(self.band)})")

    @property
    def _tensor(self):
        of_bits = self.bits if self.bit_blocks is None else self.bit_blocks
        return {"blocks": self.block_counts, "bits": of_bits, "band": None}.get(self.kind, getattr(self, self.kind, None))

    @property
    def shape(self):
        """(batch, heads) of the source's tensor; 1 where all sequences or heads share it."""
        if self._tensor is None:
            return 1, 1
        return self._tensor.shape[0], 1 if self.kind == "documents" else self._tensor.shape[1]

    @property
    def device(self):
        """Where its tensors are; None of a band."""
        return None if self._tensor is None else self._tensor.device

    def sized(self, seq_q, seq_k):
        """This source for calls with seq_q queries and seq_k keys.

        Raises:
            ValueError: a size is negative, or the source already has another one.
        """
        for name, size in (("seq_q", seq_q), ("seq_k", seq_k)):
            own = getattr(self, name)
            if int64_of(name, size) < 0:
                raise ValueError(f"{name} = {size} but it must be at least 0")
            if own is not None and own != size:
                raise ValueError(f"{name} = {size} but the mask's {name} = {own}; a mask is for calls of one size")
        made = dataclasses.replace(self, seq_q=seq_q, seq_k=seq_k)
        made.check_blocks()
        return made

    def check_blocks(self):
        """Raises ValueError if the number of blocks of queries does not fit seq_q, where that is known."""
        if self.kind == "blocks" and self.seq_q is not None and self.block_counts.shape[2] != (needed := -(-self.seq_q // self.block_rows)):
            raise ValueError(f"counts.shape[2] = {self.block_counts.shape[2]} but ceil(seq_q / block_rows) = {needed}; they must be the same")

    def _known(self, *names):
        for name in names or ("seq_q", "seq_k"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} of the mask is not known; sized(seq_q, seq_k) says for which calls it is")
        return self

    def _on(self, device):
        return self.device or device or torch.empty(0).device

    # ---- what it lets a query see ----

    def as_ranges(self, device=None):
        """The mask as ranges, int32 [1 or batch, 1 or heads_q, 2 * n, seq_q], with its band; None if it is not ranges, or too many.

        device: for the ranges of a band; None: torch's default.
        """
        if self.kind not in _RANGES_ALONE:
            return None
        if self.kind != "ranges" or not self.band.is_none():
            self._known()
        band = None if self.kind != "band" and self.band.is_none() else self.band.ranges(self.seq_q, self.seq_k, self._on(device))
        if self.kind == "band":
            return band
        made = self.ranges
        if self.kind == "documents":
            begins, ends, _ = _mask_ranges.runs(self.documents)
            made = _mask_ranges.of_places(begins, ends, self.seq_q)
        return made if band is None else _mask_ranges.intersection(made, band, self.seq_k)

    def _rows(self, b, h, i):
        """[…, len(i), seq_k] bool of these slices of batch, heads and queries; 1 in place of a dimension that is the same for all."""
        b, h = (slice(0, 1) if size == 1 else s for s, size in zip((b, h), self.shape))
        keys = torch.arange(self.seq_k, device=self._on(None))
        if self.kind in _RANGES_ALONE:
            return _mask_ranges.sees(self._kept_ranges()[b, h, :, i], keys)
        if self.kind == "dense":
            seen = self.dense[b, h, i] != 0
        elif self.kind == "bits":
            seen = self._bit_rows(b, h, i)
        else:
            queries = torch.arange(i.start, i.stop, device=keys.device)
            seen = self._block_matrix(b, h)[:, :, queries // self.block_rows][..., keys // self.block_keys]
        if self.band.is_none():
            return seen
        return seen & _mask_ranges.sees(self.band.ranges(self.seq_q, self.seq_k, keys.device)[..., i], keys)

    def _bit_rows(self, b, h, i):
        if self.bit_blocks is None:
            return _mask_rows.unpacked(self.bits[b, h, i])[..., :self.seq_k]
        return _mask_rows.rows_of_blocks(self.bits, self.bit_blocks, b, h, i, self.seq_k)

    def _kept_ranges(self):
        if "_found" not in self.__dict__:
            object.__setattr__(self, "_found", self.as_ranges())
        return self._found

    def _block_matrix(self, b, h):
        """[batch, heads, blocks of queries, blocks of keys] bool."""
        counts, indices = self.block_counts[b, h, :, None], self.block_indices[b, h].long()
        columns = -(-self.seq_k // self.block_keys)
        listed = torch.arange(indices.shape[3], device=indices.device) < counts
        places = torch.where(listed & (indices >= 0) & (indices < columns), indices, columns)
        return torch.zeros(*places.shape[:3], columns + 1, dtype=torch.bool, device=indices.device).scatter(3, places, True)[..., :columns]

    def to_dense(self, batch=None, heads=None, seq_q=None, seq_k=None):
        """[batch, heads, seq_q, seq_k] bool, all at once: what the mask means, for tests and small sizes.

        Args:
            batch, heads: of the result; None: 1 if all sequences or heads share the mask.
            seq_q, seq_k: of the calls; None: those of the source.

        Raises:
            ValueError: the mask is for other sizes, or does not know them.
        """
        me = self.sized(self._known("seq_q").seq_q if seq_q is None else seq_q, self._known("seq_k").seq_k if seq_k is None else seq_k)
        shape = tuple(own if size is None else size for own, size in zip(self.shape, (batch, heads)))
        for name, size, own in zip(("batch", "heads"), shape, self.shape):
            if own not in (1, size):
                raise ValueError(f"{name} = {size} but the mask's {name} = {own}; it must be 1, for all, or {name}")
        out = torch.zeros(*self.shape, me.seq_q, me.seq_k, dtype=torch.bool, device=self._on(None))
        for b, h, i in _mask_rows.parts(*self.shape, me.seq_q, me.seq_k):
            out[b, h, i] = me._rows(b, h, i)
        return out.expand(*shape, me.seq_q, me.seq_k)

    def tensors(self):
        """What it holds, in the order of flash3/mask.h; None for what it does not."""
        return tuple(getattr(self, name) for name in _SOURCES)

    def to(self, device):
        """The source with its tensors on a device, by torch.Tensor.to()."""
        device = torch.device(device)
        if self.device in (None, device):
            return self
        return dataclasses.replace(self, **{name: x.to(device) for name, x in zip(_SOURCES, self.tensors()) if x is not None})

    def arguments(self):
        """What a mask is made from: the tensors that torch.ops.flash3.mask_make takes by position, None for those that are not given, and
        the others by their names."""
        named = {"window_left": self.band.left, "window_right": self.band.right, "chunk": self.band.chunk,
                 "mask_alignment": int(self.band.top_left)}
        if self.kind == "blocks":
            named |= {"block_rows": self.block_rows, "block_keys": self.block_keys}
        if self.kind == "bits":
            named |= {"bits": self.bits, "bit_blocks": self.bit_blocks}
        return (self.ranges, self.documents, self.dense, self.block_counts, self.block_indices), named

    def make(self, seq_q=None, seq_k=None, *, device=None, max_blocks=None, max_partial_blocks=None, max_documents=None, cu_seqlens_q=None,
             cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None):
        """The mask, for mask= of any number of calls.

        It lists blocks of 128 queries by 128 keys: 16 bytes for each block in which a pair is seen, and another 2 KiB for a block that
        is neither full nor one range of keys for each query. The number of blocks is known only after they are made. So the lists are
        made twice, and this waits for the first pass, which counts. With max_blocks it does not wait. A mask that needs more room
        than max_blocks is left empty: no query sees any key, and flash3.masks.needs returns what it needs. In a graph of torch.compile a mask
        without max_blocks has the largest possible room.

        Args:
            seq_q, seq_k: of the calls, or where their tensors are packed total_q and total_k; None: those of the source.
            device: of the calls; None: that of the source's tensors, or torch's default for a band.
            max_blocks: room for this many blocks; 0: for the largest possible number. None: for as many as there are.
            max_partial_blocks: with max_blocks, room for blocks of 2 KiB; None or 0: for the largest possible number.
            max_documents: with max_blocks, of documents(): room to note where so many begin, so that a GPU computes long ones as it does
                cu_seqlens; more of them leave the mask empty. None: for as many as lengths has; 0: none is noted.
            cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: of calls whose sequences differ in length, as in
                attention(). The calls must have the same.

        Returns:
            A flash3.Mask.

        Raises:
            ValueError: a size is unknown or not the source's; or other room is given without max_blocks.
            NotImplementedError: without max_blocks, while a CUDA graph is captured.
        """
        from ._mask_lengths import Lengths
        from ._mask_make import make
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        return make(self, self._known("seq_q").seq_q if seq_q is None else seq_q, self._known("seq_k").seq_k if seq_k is None else seq_k,
                    device, max_blocks, max_partial_blocks, lengths, max_documents)

    # ---- operators ----

    def _checked_with(self, other):
        """Both, each with the sizes that either knows."""
        sizes = {}
        for name in ("seq_q", "seq_k"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and a != b:
                raise ValueError(f"{name} = {a} but the other mask's {name} = {b}; masks that are combined must be of one size")
            sizes[name] = b if a is None else a
        for name, a, b in zip(("batch", "heads"), self.shape, other.shape):
            if a != b and 1 not in (a, b):
                raise ValueError(f"{name} = {a} but the other mask's {name} = {b}; they must be the same, or one of them 1")
        if self.device is not None and other.device is not None and self.device != other.device:
            raise ValueError(f"device = {self.device} but the other mask's device = {other.device}; masks that are combined must be on one")
        return dataclasses.replace(self, **sizes), dataclasses.replace(other, **sizes)

    def __and__(self, other):
        if not isinstance(other, MaskSource):
            return NotImplemented
        a, b = self._checked_with(other)
        if "band" in (a.kind, b.kind) and (band := a.band.both(b.band)) is not None:
            return dataclasses.replace(a if b.kind == "band" else b, band=band)
        return _combined(a, b, _mask_ranges.intersection, torch.logical_and)

    def __or__(self, other):
        if not isinstance(other, MaskSource):
            return NotImplemented
        return _combined(*self._checked_with(other), _mask_ranges.union, torch.logical_or)

    def __invert__(self):
        self._known()
        ranges = self.as_ranges()
        if ranges is not None and (made := _of_ranges(_mask_ranges.complement(ranges, self.seq_k), self.seq_q, self.seq_k)) is not None:
            return made
        me = dataclasses.replace(self)  # ranges that _rows() finds are kept for this time alone
        return of_rows(lambda b, h, i: ~me._rows(b, h, i), *self.shape, self.seq_q, self.seq_k, self._on(None))

    def draw(self, path=None, *, batch=0, head=0, block=None):
        """A picture of the mask in SVG: queries from top to bottom, keys from left to right, in blocks.

        Args:
            path: a file to which the picture is also written.
            batch, head: which sequence and head is drawn.
            block: queries and keys of a square; None: chosen for at most 64 squares a side.

        Returns:
            The SVG's text.

        Raises:
            ValueError: the mask does not know its sizes, or has no such head.
        """
        from ._mask_picture import picture
        text = picture(dataclasses.replace(self._known()), batch, head, block)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    def _repr_svg_(self):
        """What a notebook shows: the picture of the first sequence and head; nothing of a mask that does not know its sizes."""
        return None if self.seq_q is None or self.seq_k is None else self.draw()


def _of_ranges(ranges, seq_q, seq_k):
    """A mask of normalised ranges; None if there are too many of them, which is read from the device where it is not sure, or in a graph
    where there may be too many."""
    n = _mask_ranges.count(ranges)
    if n > _mask_ranges.MOST:
        if torch.compiler.is_compiling():
            return None
        begins, ends = _mask_ranges.unpack(ranges)
        counts = (begins < ends).sum(2)
        n = max(1, int(counts.max()) if counts.numel() else 0)
        if n > _mask_ranges.MOST:
            return None
    return MaskSource("ranges", ranges=_mask_ranges.cut(ranges, n).contiguous(), seq_q=seq_q, seq_k=seq_k)


def of_rows(rows, batch, heads, seq_q, seq_k, device):
    """A mask of ranges or of bits, from a function of three slices (_mask_rows)."""
    if torch.compiler.is_compiling():  # what would be read from the device is not known in a graph
        return MaskSource("bits", bits=_mask_rows.bits_of_pairs(rows, batch, heads, seq_q, seq_k, device), seq_q=seq_q, seq_k=seq_k)
    ranges = _mask_rows.ranges_of(rows, batch, heads, seq_q, seq_k, device)
    if ranges is not None:
        return MaskSource("ranges", ranges=ranges, seq_q=seq_q, seq_k=seq_k)
    bits, bit_blocks = _mask_rows.bits_of(rows, batch, heads, seq_q, seq_k, device)
    return MaskSource("bits", bits=bits, bit_blocks=bit_blocks, seq_q=seq_q, seq_k=seq_k)


def _combined(a, b, of_ranges, of_booleans):
    device = a._on(b.device)
    ranges = [x.as_ranges(device) for x in (a, b)] if {a.kind, b.kind} <= set(_RANGES_ALONE) else [None]
    if all(x is not None for x in ranges) and (made := _of_ranges(of_ranges(*ranges, a.seq_k), a.seq_q, a.seq_k)) is not None:
        return made
    a._known(), b._known()
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = (MaskSource("ranges", ranges=x.as_ranges(device), seq_q=x.seq_q, seq_k=x.seq_k) if x.kind in _RANGES_ALONE else x for x in (a, b))
    return of_rows(lambda *part: of_booleans(a._rows(*part), b._rows(*part)), *shape, a.seq_q, a.seq_k, device)
