# SPDX-License-Identifier: Apache-2.0
"""Mask: which keys each query sees, as lists that any number of calls read (flash3/mask.h)."""
import ctypes
from typing import NamedTuple

from . import _fields, _library


class Mask(NamedTuple):
    """A mask as data, for mask= of attention() and attention_backward(); make() of what flash3.masks returns gives it.

    It is a plain value: the memory, and what tells a call whether it is one for it. One of another device or other sizes is refused.
    The memory must stay as it is while calls read it.
    """
    data: object  #: uint8 [bytes], on the device of the calls
    key: int  #: says whether what follows belongs together
    batch: int  #: sequences that have their own, 1 where all share one
    heads: int  #: query heads that have their own, 1 where all share one
    seq_q: int  #: queries of a sequence
    seq_k: int  #: keys of a sequence
    window_left: int  #: keys before i' of the band that it was made with, -1 for all
    window_right: int  #: keys after i', -1 for all
    chunk: int  #: 0 for none
    mask_alignment: int  #: 0 for bottom right, 1 for top left
    ranges: int  #: ranges of keys that it holds of each query
    blocks: int  #: blocks of 128 x 128 that it has room for
    partial_blocks: int  #: those of them that it has room for a bit for each pair of
    granularity: int  #: 64 where it was made from blocks that 128 does not divide, else 128
    lengths: int = 0  #: 1 if it was made with cu_seqlens_q, plus 2 for cu_seqlens_k, 4 for seqused_q, 8 for seqused_k
    documents: int = 0  #: documents that it has room to note the beginnings of, 0 where it notes none

    @property
    def fields(self):
        """All but data, as torch.ops.flash3 takes them in mask_fields."""
        return list(self[1:])


def check_mask(mask, rule="a flash3.Mask, as make() of what flash3.masks returns gives it"):
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is a {type(mask).__name__} but it must be {rule}")
    return mask


def as_c(mask, memory_of):
    """A mask as the C interface has it; memory_of(name, data): (address, bytes)."""
    check_mask(mask)
    made = _fields.Mask(*memory_of("mask.data", mask.data), *mask.fields)
    for name, given in mask._asdict().items():
        if name != "data" and getattr(made, name) != given:  # ctypes cuts off what does not fit
            raise ValueError(f"mask.{name} = {given} but it must be as make() gives it, which fits its field")
    return made


def described(params):
    """The C interface's mask of these params, without memory."""
    params.struct_size = ctypes.sizeof(params)
    made = _fields.Mask()
    _library.check(_library.lib.flash3_mask_describe(ctypes.byref(params), ctypes.byref(made)))
    return made
