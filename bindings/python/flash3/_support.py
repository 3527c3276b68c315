# SPDX-License-Identifier: Apache-2.0
"""The answers of functions that ask whether a call would run, and the largest head dims of calls."""
import ctypes
from typing import NamedTuple

from . import _library as _c


class Support(NamedTuple):
    """Whether a call would run here, and if not, why. True or false like `supported`."""
    supported: bool  #: whether it would run
    reason: str  #: why not, in the words of the exception that the call raises; empty if it would

    def __bool__(self):
        return self.supported


class UnexpectedArgument(TypeError):
    """An argument of a name that no such call has: a mistake in the program."""


def support_of(check):
    """A Support of a call: true if check() returns, and false if it refuses the call as the call itself would."""
    try:
        check()
    except UnexpectedArgument:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        return Support(False, str(error))
    return Support(True, "")


# The largest head dims, as the library tells them for each backend (flash3/limits.h).

_CALLS = {"forward": 0, "fp8": 1, "backward": 2}


def _ask(backend, calls):
    """(head_dim, head_dim_v), each the most; None if the backend is not built in."""
    most = ctypes.c_int32(), ctypes.c_int32()
    status = _c.lib.flash3_backend_head_dims(_c.BACKENDS[backend], _CALLS[calls], *map(ctypes.byref, most))
    if status == _c.UNSUPPORTED:
        return None
    _c.check(status)
    return tuple(x.value for x in most)


def _limits(backend):
    return {calls: _ask(backend, calls) for calls in _CALLS}


#: {"cpu" or "cuda": {"forward", "fp8" or "backward": (head_dim, head_dim_v)}}, by torch's kinds of devices; None where the backend is not built in.
MOST = {"cpu": _limits("cpu"), "cuda": _limits("hopper")}
#: What every call may have with its gradients, wherever it runs.
WITH_GRADIENTS = min(min(limits["backward"]) for limits in MOST.values() if limits["backward"])
