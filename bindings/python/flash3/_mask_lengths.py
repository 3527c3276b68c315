# SPDX-License-Identifier: Apache-2.0
"""Lengths of sequences that a mask is made with, and what they do to a source of flash3.masks."""
import dataclasses
from typing import NamedTuple

import torch

from ._mask_sources import MaskSource
from ._options import int64_of


class Lengths(NamedTuple):
    """As attention() has them; all None where sequences have one length."""
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    seqused_q: object = None
    seqused_k: object = None
    max_seqlen_q: object = None
    max_seqlen_k: object = None

    @classmethod
    def of(cls, options):
        return cls(*(options.get(name) for name in cls._fields))

    def given(self):
        """{name: tensor} of the lengths that there are."""
        for name in self._fields[:4]:
            x = getattr(self, name)
            if x is not None and (not isinstance(x, torch.Tensor) or x.dtype != torch.int32 or x.dim() != 1):
                raise TypeError(f"{name} must be an int32 tensor of 1 dimension")
        return {name: x for name, x in zip(self._fields[:4], self) if x is not None}

    def key(self):
        return tuple(self.given()), self.max_seqlen_q, self.max_seqlen_k

    def tensors(self, device):
        for name, x in self.given().items():
            if x.device != device:
                raise ValueError(f"{name}.device = {x.device} but the mask is made on {device}; they must be on one device")
        return self.given()

    @property
    def batch(self):
        """The number of sequences; None where no length says it."""
        numbers = {name: x.shape[0] - name.startswith("cu_") for name, x in self.given().items()}
        for name, batch in numbers.items():
            if batch != (first := next(iter(numbers.values()))):
                raise ValueError(f"{name} has {batch} sequences but {next(iter(numbers))} has {first}; they must have as many")
        return next(iter(numbers.values()), None)

    def longest(self, rows_q, rows_k):
        """(seq_q, seq_k): no sequence is longer."""
        def of(rows, cu_seqlens, name, most):
            if cu_seqlens is None or most is None or int64_of(name, most) <= 0:
                return rows
            return min(rows, most)
        return (of(rows_q, self.cu_seqlens_q, "max_seqlen_q", self.max_seqlen_q),
                of(rows_k, self.cu_seqlens_k, "max_seqlen_k", self.max_seqlen_k))

    def fitted(self, source, rows_q, rows_k):
        """The source as the mask takes it. Ranges and documents of packed tensors are packed too; one table for all sequences becomes
        that."""
        seq_q, seq_k = self.longest(rows_q, rows_k)
        if source.kind == "ranges" and self.cu_seqlens_q is not None:
            ranges = _packed("ranges", source.ranges, 3, self.cu_seqlens_q, seq_q, rows_q, "q")
            return dataclasses.replace(source, ranges=ranges, seq_q=None, seq_k=None)
        if source.kind == "documents" and self.cu_seqlens_k is not None:
            documents = _packed("documents", source.documents, 1, self.cu_seqlens_k, seq_k, rows_k, "k")
            return dataclasses.replace(source, documents=documents, seq_q=None, seq_k=None)
        return source.sized(seq_q, seq_k)


NO_LENGTHS = Lengths()


def _packed(name, x, dim, cu_seqlens, longest, total, side):
    """x with a place for each packed token in its last dimension; where it has one for each token of a sequence, it is the same for all."""
    columns = x.shape[dim]
    if x.shape[0] != 1:
        raise ValueError(f"{name}.shape[0] = {x.shape[0]} but cu_seqlens_{side} is given; of packed sequences it must be 1")
    if columns == total:
        return x
    if columns != longest:
        raise ValueError(f"{name}.shape[{dim}] = {columns} but it must be total_{side} = {total} or the most tokens of a sequence, {longest}")
    x = x.to(cu_seqlens.device)
    if columns == 0:  # no sequence has a token
        return x.new_zeros(*x.shape[:dim], total)
    tokens, first = torch.arange(total, device=x.device), cu_seqlens.long()
    sequence = (torch.searchsorted(first, tokens, right=True) - 1).clamp(min=0)
    return x.index_select(dim, (tokens - first[sequence]).clamp(0, columns - 1)).contiguous()


def with_band(source, band, rows_q, rows_k, lengths):
    """The source with the call's band too."""
    band_alone = MaskSource("band", band=band)
    if not lengths.given():
        return source.sized(rows_q, rows_k) & band_alone
    if (both := source.band.both(band)) is None:
        raise NotImplementedError("the source and the call have bands that are no band together, and sequences differ in length; give the "
                                  "band to one of them")
    return dataclasses.replace(source, band=both)
