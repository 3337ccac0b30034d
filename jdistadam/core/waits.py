"""How long this process waits on the host for devices and for other processes.

Kernels that wait ask the compiled modules, which ``kernels/native.py`` tells.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from jdistadam.errors import HyperparameterError

VARIABLE = "JDISTADAM_WAIT_LIMIT_SECONDS"
"""The environment variable with the limit of a process that sets none itself."""

LATER = 6
"""Before a later evaluation or save, processes wait so many times as long."""

_MOST = 7 * 24 * 3600  # far from the overflow of a clock
_FOLLOWERS = list[Callable[[float], None]]()


def set_wait_limit(seconds: float) -> None:
    """Sets how long this process waits for a device or another process before it raises.

    It holds for copies between devices, also in compiled programs and under way, for processes that
    connect, and for calls that all processes make (six times as long before evaluations and saves).
    Raise it for a debugger, or where one process compiles longer. It does not end a GPU's own wait
    for the GPU of another process, nor waits inside JAX.

    Args:
      seconds: More than 0, at most a week. At first the environment variable
        ``JDISTADAM_WAIT_LIMIT_SECONDS``, or 300.

    Raises:
      HyperparameterError: It is none of these.

    Example:
      >>> import jdistadam as jda
      >>> jda.set_wait_limit(600)
      >>> jda.set_wait_limit(300)
    """
    global _limit
    _limit = _checked(seconds, "seconds")
    for follow in _FOLLOWERS:
        follow(_limit)


def wait_limit() -> float:
    """Returns the limit, in seconds."""
    return _limit


def follow(tell: Callable[[float], None]) -> None:
    """Calls a function with the limit, now and whenever it changes."""
    _FOLLOWERS.append(tell)
    tell(_limit)


def _checked(given: float | str, name: str) -> float:
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= _MOST:
        raise HyperparameterError(
            f"{name}: is no time to wait: got {given!r}, expected seconds, more than 0 and at most "
            f"{_MOST}. Pass such a number."
        )
    return seconds


_limit = _checked(os.environ.get(VARIABLE, "300"), VARIABLE)
