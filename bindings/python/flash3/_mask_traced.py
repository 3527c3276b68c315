# SPDX-License-Identifier: Apache-2.0
"""Masks that are made inside of a graph, where torch.compile or torch.export traces a call: the graph's values are tensors, and what else a
Mask has is known when it is traced."""
import contextlib
import operator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import _torch
from ._fields import MaskParams
from ._library import BACKENDS, DTYPES, Tensor
from ._mask import Mask, described

_data = _torch.operators.mask_data.default
_POSITIONAL = ("ranges", "documents", "dense", "block_counts", "block_indices")  # after `like`


def is_traced(like):
    """Whether nothing can be read from tensors such as this one, which have no values, or none yet."""
    return torch.compiler.is_compiling() or like.is_meta or isinstance(like, (FakeTensor, FunctionalTensor))


def _answer(device_type, device_index, tensors, numbers):
    """(bytes, fields) of a mask; tensors: (name, dtype, shape) each, numbers: (name, value)."""
    params = MaskParams(backend=BACKENDS["hopper" if device_type == "cuda" else "cpu"], window=1, window_left=-1, window_right=-1)
    for name, value in numbers:
        setattr(params, name, value)
    for name, dtype, shape in tensors:
        strides = [1] * len(shape)
        for d in reversed(range(len(shape) - 1)):
            strides[d] = strides[d + 1] * max(shape[d + 1], 1)
        pad = (0,) * (4 - len(shape))
        t = getattr(params, name)
        t.dtype, t.ndim, t.shape[:], t.stride[:] = DTYPES[dtype], len(shape), (*shape, *pad), (*strides, *pad)
    with torch.cuda.device(device_index) if device_type == "cuda" else contextlib.nullcontext():
        mask = described(params)
    return mask.size, tuple(getattr(mask, name) for name in Mask._fields[1:])


_answer._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result does, which would import all of the compiler


def _describe(like, named):
    tensors = tuple((name, str(x.dtype).removeprefix("torch."), tuple(operator.index(n) for n in x.shape))
                    for name, x in named.items() if isinstance(x, torch.Tensor))
    numbers = tuple((name, operator.index(x)) for name, x in named.items() if x is not None and not isinstance(x, torch.Tensor))
    return _answer(like.device.type, like.device.index, tensors, numbers)


def traced(like, *tensors, **named):
    """The Mask that torch.ops.flash3.mask_make gives for these arguments."""
    size, fields = _describe(like, {**dict(zip(_POSITIONAL, tensors)), **named})
    return Mask(_data(like, *tensors, **named), *fields)


@_torch.register_fake("mask_make")
def _fake_mask(like, **named):
    size, fields = _describe(like, named)
    return like.new_empty((size,), dtype=torch.uint8), list(fields)


@_torch.register_fake("mask_data")
def _fake_data(**named):
    return _fake_mask(**named)[0]
