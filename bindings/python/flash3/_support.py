# SPDX-License-Identifier: Apache-2.0
"""The answers of functions that ask whether a call would run."""
from typing import NamedTuple


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
