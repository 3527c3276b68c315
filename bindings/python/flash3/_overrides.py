# SPDX-License-Identifier: Apache-2.0
"""Functions that stand for others: in the thread that asks for it, and in the threads in which autograd runs its backward calls."""
import ctypes
import itertools
import sys
import threading

import torch

users = 0  # overrides that are active, in all threads
lock = threading.Lock()
_functions = {}  # those of active overrides, by number

# What this thread has, a dict of names and numbers for each override, lies in torch's own thread-local state: a backward call takes
# that along to the threads of autograd that run it.
_KEY = "flash3.overrides"


def _stack():
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else ()


def _set_stack(stack):
    # An object left behind would be destroyed with its thread, for which torch waits for the interpreter; older ones cannot remove.
    if not stack and hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(_KEY)
        return
    count = sys.getrefcount(stack)
    torch._C._stash_obj_in_tls(_KEY, stack)
    if sys.getrefcount(stack) == count:  # torch 2.11 takes over the caller's reference instead of one of its own
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stack))


def push(**functions):
    """From now on these stand for what their names say."""
    global users
    with lock:
        users += 1
        # The smallest that are free: what torch.compile has traced in one override then holds in the next one like it.
        free = (number for number in itertools.count(1) if number not in _functions)
        numbers = {name: next(free) for name in functions}
        _functions.update((number, functions[name]) for name, number in numbers.items())
    _set_stack((*_stack(), numbers))


def pop():
    """Takes back the last push()."""
    global users
    *below, numbers = _stack()
    _set_stack(tuple(below))
    with lock:
        users -= 1
        for number in numbers.values():
            del _functions[number]


def _number(name):
    for numbers in reversed(_stack()):
        if name in numbers:
            return numbers[name]
    return 0


# The thread that traces a function is the one that calls it, and torch.compile's guards see a mode come and go.
_number._dynamo_marked_constant = True


def override(name):
    """What stands for a function in this thread; None: nothing."""
    number = _number(name)
    return _functions[number] if number else None
