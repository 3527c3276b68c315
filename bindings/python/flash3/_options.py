# SPDX-License-Identifier: Apache-2.0
"""Options of calls as the C interface has them, checked where ctypes or torch would cut them off."""
import functools
import inspect
import math
import operator
import textwrap

from . import _library as _c
from ._fields import ABOUT, SIGNATURES

# Options whose default is None, or where it stands for none.
MAY_BE_NONE = {name for options in SIGNATURES.values() for name, default in options.items() if default is None} | {"chunk"}


def refuse_unknown(function, name):
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def given_options(function, options):
    """Those of a function's options that say more than their defaults."""
    defaults, given = SIGNATURES[function], {}
    for name, value in options.items():
        if name not in defaults:
            refuse_unknown(function, name)
        is_default = value is False or value is None and name in MAY_BE_NONE or \
            isinstance(value, (int, float, str)) and value == defaults[name]
        if not is_default:
            given[name] = value
    return given


# Why attention over several devices does not take an option, where more can be said.
NO_MASK = "a mask lists all queries and keys, of which a rank has some; documents go by cu_seqlens of flash3.distributed.plan(), and " \
          "bands by causal, window and chunk"
_WHY_LACKING = {"mask": f": {NO_MASK}"}


def options_lacking(of, function):
    """Those of flash3's function `of` that the function has no parameter for."""
    return frozenset(SIGNATURES[of]) - frozenset(inspect.signature(function).parameters)


def without_lacking(of, lacking, options):
    """options without the lacking ones, which must be their defaults: others raise NotImplementedError, which names them."""
    for name in given_options(of, {name: x for name, x in options.items() if name in lacking}):
        raise NotImplementedError(f"{name} is given but {of} over several devices does not take it{_WHY_LACKING.get(name, '')}")
    return {name: x for name, x in options.items() if name not in lacking}


def lacks_options(of):
    """For a function that takes some of the options of flash3's function `of` alone: others are refused by name."""
    def decorate(function):
        lacking = options_lacking(of, function)

        @functools.wraps(function)
        def checked(*args, **options):
            return function(*args, **without_lacking(of, lacking, options))
        return checked
    return decorate


def shows_options(function, defaults):
    """Gives a function of **options the signature that help() shows; defaults: of its options."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    function.__signature__ = inspect.Signature([*own, *(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in defaults.items())])
    return function


def takes_options(function):
    """The same of a function whose options are those of SIGNATURES."""
    return shows_options(function, SIGNATURES[function.__name__])


def describes_added(function):
    """Adds to a function's docstring, as the last of its arguments, the tensors that the C headers have gained."""
    lines = (function.__doc__ or "").split("\n")  # none under python -OO
    for end, line in enumerate(lines):
        if line.strip() == "Returns:":
            indent = line[:-len("Returns:")] + 4 * " "
            lines[end - 1:end - 1] = [textwrap.fill(f"{name}: {about}", 140, initial_indent=indent, subsequent_indent=indent + 4 * " ")
                                      for name, about in ABOUT.items()]
            function.__doc__ = "\n".join(lines)
            break
    return function


def int64_of(name, value):
    """value as an integer of 64 bits; name is the argument's, for messages."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__} but it must be an integer") from None
    if not -2**63 <= value < 2**63:  # ctypes would cut it off
        raise ValueError(f"{name} = {value} but it must fit into 64 bits")
    return value


def int32_of(name, value):
    value = int64_of(name, value)
    if not -2**31 <= value < 2**31:
        raise ValueError(f"{name} = {value} but it must fit into 32 bits")
    return value


def _check_no_gradient(name, value):
    """Refuses a torch tensor whose gradient, or tangent, would be lost with what float() makes of it."""
    import torch
    if not isinstance(value, torch.Tensor):
        return
    instead = f"; give {name}.item() where that is meant" if name == "softcap" else f"; multiply q by it, with {name}=1, or give {name}.item()"
    if value.requires_grad and torch.is_grad_enabled():
        raise TypeError(f"{name}.requires_grad = True but {name} is taken as a number, which has no gradient{instead}")
    if torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        raise TypeError(f"{name} has a tangent but {name} is taken as a number, which has none{instead}")


# The largest number that rounds to 0, half of the least that float32 has, and the least that rounds to infinity.
_ZERO_OF_FLOAT32, _INFINITY_OF_FLOAT32 = 2.0**-150, 2.0**128 - 2.0**103


def number_of(name, value):
    """value as a float that is one in 32 bits too, as the C interface has it: there 0 stands for something else. value is a number, or what
    float() takes of one element; not a tensor through which autograd would record the call."""
    if not isinstance(value, (int, float)) and hasattr(value, "requires_grad"):
        _check_no_gradient(name, value)
    try:
        if isinstance(value, (str, bytes, bytearray)):  # float() would read "1"
            raise TypeError
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} = {value} but it must fit into 64 bits") from None
    except (TypeError, ValueError, RuntimeError):  # of what has no one value, such as an array
        raise TypeError(f"{name} is a {type(value).__name__} but it must be a number") from None
    if 0.0 < abs(number) <= _ZERO_OF_FLOAT32 or _INFINITY_OF_FLOAT32 <= abs(number) < math.inf:
        kept = math.copysign(0.0 if abs(number) < 1.0 else math.inf, number)
        raise ValueError(f"{name} = {number} but it must be a number that float32 can hold, which makes {kept} of it")
    return number


def window_sides(window):
    """(left, right) of a window as the C interface has it; None: no window."""
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window = {window!r} but it must be a pair (left, right), or None") from None
    return tuple(-1 if side is None else int64_of(f"window[{i}]", side) for i, side in enumerate((left, right)))


def scale_or_default(softmax_scale):
    """softmax_scale as the C interface has it, where 0 asks for the default."""
    if softmax_scale is None:
        return 0.0
    scale = number_of("softmax_scale", softmax_scale)
    if scale == 0.0:
        raise ValueError("softmax_scale = 0 but it must be greater than 0 (None: 1/sqrt(head_dim))")
    return scale


def number_of_word(name, value):
    """The number by which the C interface knows a word, as "two" of fp8_sums."""
    words = _c.WORDS[name]
    if value is None and None in words or isinstance(value, str) and value in words:
        return words[value]
    *others, last = [repr(word) for word in sorted(words, key=lambda word: word is None)]
    raise ValueError(f"{name} = {value!r} but it must be {', '.join(others)} or {last}")


def computes_fp8(compute):
    return number_of_word("compute", compute) != 0


def seed_of(name, seed):
    """A seed as an unsigned integer of 64 bits; name is the argument's, for messages."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"{name} is a {type(seed).__name__} but it must be an integer") from None
    if not 0 <= seed < 2**64:
        raise ValueError(f"{name} = {seed} but it must be from 0 to 2**64 - 1")
    return seed


def _flag(name, value):
    return bool(value)


def _threads(name, value):
    return min(int64_of(name, value), 2**31 - 1)


# How the C interface has a value of each kind of field, and those of single fields.
_IN_C = {"flag": _flag, "number": number_of, "enumeration": number_of_word, "int32": int32_of, "int64": int64_of,
         "uint64": seed_of}
_IN_C_OF = {"softmax_scale": lambda name, value: scale_or_default(value), "num_threads": _threads}


def value_in_c(name, kind, value):
    """An option's value as the C interface has it; kind: that of its field (OPTIONS)."""
    return _IN_C_OF.get(name, _IN_C[kind])(name, value)


def scale_shape(shape, sequences, ndim, heads_k):
    """The shape of the scales with so many dimensions for a tensor of this shape; sequences: of a packed one."""
    *batch, rows, heads, _ = shape
    if ndim == 1:
        return (1,)
    if ndim == 2:
        return (batch[0] if batch else sequences or 0, heads_k)
    if batch:
        return (batch[0], heads, (rows + _c.FP8_BLOCK - 1) // _c.FP8_BLOCK)
    return (1, heads, rows // _c.FP8_BLOCK + (sequences or 0))
