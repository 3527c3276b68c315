# SPDX-License-Identifier: Apache-2.0
"""Options of flash3's functions as the arguments of torch's operators."""
import torch
from torch.autograd import forward_ad

from ._fields import ADDED, GRADIENTS, OPTIONS, SIGNATURES
from ._mask import check_mask
from ._options import MAY_BE_NONE, number_of, number_of_word, refuse_unknown, scale_or_default, seed_of, window_sides
from .arrays import check_schedule


def signed(seed):
    """A seed as the operators take it: torch's integers are signed."""
    return seed - 2**64 if seed >= 2**63 else seed


def schedule_parts(schedule):
    """(data, key) of a Schedule as the operators take them."""
    data, key = check_schedule(schedule)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"schedule.data is a {type(data).__name__} but it must be a torch tensor, as q is")
    return data, key


def _window(named, name, value):
    named["window_left"], named["window_right"] = window_sides(value)


def _softmax_scale(named, name, value):
    named[name] = scale_or_default(value)


def _schedule(named, name, value):
    named["schedule"], named["schedule_key"] = schedule_parts(value)


def _mask(named, name, value):
    check_mask(value, "a flash3.Mask, or what flash3.masks returns")
    if not isinstance(value.data, torch.Tensor):
        raise TypeError(f"mask.data is a {type(value.data).__name__} but it must be a torch tensor, as q is")
    named["mask"], named["mask_fields"] = value.data, value.fields


def _out_dtype(named, name, value):
    if not isinstance(value, torch.dtype):
        raise TypeError(f"out_dtype is a {type(value).__name__} but it must be a torch.dtype")
    named[name] = value


def _compute(named, name, value):
    named["compute_fp8"] = number_of_word(name, value) != 0


_SEEDS = {"seed": "dropout_seed", "offset": "dropout_offset"}


def _seed(named, name, value):
    if seed := signed(seed_of(name, value)):
        named[_SEEDS.get(name, name)] = seed


def _number(named, name, value):
    if number := number_of(name, value):
        named[name] = number


def _word(named, name, value):
    if number := number_of_word(name, value):
        named[name] = number


def _integer(named, name, value):
    if not isinstance(value, int) or value:
        named[name] = value


# How an option is handed on that is not as it is; of each function, None for those that are. What is the default is left out: each
# argument that is given costs time.
_BY_KIND = {"number": _number, "enumeration": _word, "uint64": _seed, "int32": _integer, "int64": _integer}
_HANDED_ON = {**{name: _BY_KIND[kind] for name, kind in OPTIONS["forward"].items() if kind in _BY_KIND},
              **dict.fromkeys(_SEEDS, _seed), "window": _window, "softmax_scale": _softmax_scale, "schedule": _schedule, "mask": _mask, "out_dtype": _out_dtype, "compute": _compute}
_OF_FUNCTION = {function: {name: _HANDED_ON.get(name) for name in names} for function, names in SIGNATURES.items()}


def arguments_of(function, options):
    """{the operator's argument: value} of the options of a function of Python's that say more than their defaults."""
    named, known = {}, _OF_FUNCTION[function]
    for name, value in options.items():
        if name not in known:
            refuse_unknown(function, name)
        if value is False or value is None and name in MAY_BE_NONE:
            continue
        hand_on = known[name]
        if hand_on is None:
            named[name] = value
        else:
            hand_on(named, name, value)
    return named


def with_defaults(operator, named, first=0):
    """The values of an operator's arguments from the first of these on, by position: for what takes no names."""
    return [named.get(a.name, a.default_value) for a in operator._schema.arguments[first:]]


_ADDED = frozenset(ADDED["forward"])


def refuse_added_gradients(arguments):
    """Of tensors that the C headers have gained: tangents, and gradients of those that have none."""
    if _ADDED.isdisjoint(arguments):
        return
    for name in _ADDED.intersection(arguments):
        x = arguments[name]
        if not isinstance(x, torch.Tensor):
            continue  # the operator says so
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent but flash3 has no forward-mode derivatives")
        if name not in GRADIENTS and torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{name}.requires_grad = True but flash3 has no gradient of it; give it {name}.detach()")


_NUMBERS, _SIDES = (int, float), ("window_left", "window_right")


def given(**arguments):
    """What of an operator's arguments says more than its default: None, False, 0, and -1 of a window's sides, do not."""
    return {name: x for name, x in arguments.items()
            if x is not None and x is not False and not (x.__class__ in _NUMBERS and x == (-1 if name in _SIDES else 0))}
