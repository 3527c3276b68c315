# SPDX-License-Identifier: Apache-2.0
"""Masks that are kept for as long as what they were made of lives, and all that they depend on stays as it is."""
import functools
import inspect
import types
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_PACKAGES = {"torch", "math", "builtins", "operator", "functools"}  # whose modules, classes and functions stay as they are
_MOST = 8  # masks of one owner, as for calls of other sizes; the one that was used longest ago goes first
_made = WeakIdKeyDictionary()  # owner: (what its masks depended on, {what tells them apart: mask})


class Unknown(Exception):
    """Something may change without being seen."""


class _Same:
    """Equal to that of the same object alone, while it lives."""

    def __init__(self, x):
        self.of = weakref.ref(x)

    def __eq__(self, other):
        return self.of() is not None and self.of() is other.of()


def _is_fixed(x):
    """Whether x is a module, a class or a function of C that stays as it is."""
    if isinstance(x, types.BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, (types.ModuleType, type))
    name = x.__name__ if isinstance(x, types.ModuleType) else x.__module__ if isinstance(x, type) else ""
    return name.partition(".")[0] in _PACKAGES or isinstance(x, types.MethodDescriptorType)


def _names_in(code):
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names_in(constant)


def _function(fn, *rest):
    cells = tuple(cell.cell_contents for cell in fn.__closure__ or ())
    named = {name: fn.__globals__[name] for name in _names_in(fn.__code__) if name in fn.__globals__}
    return fn.__code__, *(_state(x, *rest) for x in (cells, fn.__defaults__, fn.__kwdefaults__, vars(fn), named))


def _same_values(x):
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_inference():
        raise Unknown
    return _Same(x), x._version, x.data_ptr()  # x.data = y leaves the version as it is


def _state(x, seen, of_tensor):
    """What to compare to see whether anything has changed that x reaches."""
    if isinstance(x, torch.Tensor):
        return of_tensor(x)
    if isinstance(x, _CONSTANTS):
        return type(x), x
    if _is_fixed(x):
        return id(x)
    if id(x) in seen:
        return id(x)
    rest = {*seen, id(x)}, of_tensor
    if isinstance(x, types.FunctionType):
        of_package = (x.__module__ or "").partition(".")[0] in _PACKAGES and x.__closure__ is None
        return id(x) if of_package else _function(x, *rest)
    if isinstance(x, functools.partial):
        return tuple(_state(part, *rest) for part in (x.func, x.args, x.keywords))
    if type(x) in (tuple, list):
        return type(x), *(_state(part, *rest) for part in x)
    if type(x) is dict:
        return tuple((key, _state(part, *rest)) for key, part in x.items())
    raise Unknown


def state_of(parts, of_tensor=_same_values):
    """A state to compare; None: there is none, as they reach what may change unseen, such as an object of one's own.

    of_tensor: what to compare of a tensor, by default that it is the same one and has not changed.
    """
    try:
        return _state(parts, set(), of_tensor)
    except (Unknown, ValueError):  # a cell without a value is a ValueError
        return None


def parts_of(block_mask):
    """What the mask of a BlockMask depends on."""
    tensors = tuple(getattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"))
    return tensors, tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE), block_mask.mask_mod


def kept(owner, parts, key, make):
    """make(), or what it gave for the same owner and key, as long as nothing has changed in parts, a tuple of what it depends on."""
    state = state_of(parts)
    if state is None:
        return make()
    if (found := _made.get(owner)) is None or found[0] != state:
        _made[owner] = found = state, {}
    masks = found[1]
    made = masks.pop(key, None)  # another thread may do all of this too
    masks[key] = made = make() if made is None else made  # the newest is the last one
    if len(masks) > _MOST:
        masks.pop(next(iter(masks)), None)
    return made
