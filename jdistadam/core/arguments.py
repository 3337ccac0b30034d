"""Checks of arguments, and values as text for messages."""

from __future__ import annotations

import difflib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.errors import HyperparameterError, PolicyError

F = TypeVar("F", bound=Callable[..., Any])

FLOATS = ("float32", "bfloat16", "float16")
"""Names of the dtypes that the kernel reads and writes."""


def float_dtype(
    name: str, value: Any, known: tuple[str, ...] = FLOATS, also: tuple[str, ...] = ()
) -> jnp.dtype:
    """Returns a dtype in ``known``, or raises PolicyError, which names ``also`` too."""
    dtype = _dtype(value)
    if dtype is None or dtype.name not in known:
        raise PolicyError(
            f"{name}: not a dtype that can be used: "
            f"got {shown(value)}, expected {', '.join(known + also)}. "
            f"Pass one of these, e.g. jnp.bfloat16.{_of_an_array(name, value)}"
        )
    return dtype


def check_supported(name: str, value: Any, supported: tuple[str | None, ...]) -> None:
    """Raises PolicyError unless this version supports a dtype."""
    dtype = None if value is None else _dtype(value)
    got = dtype.name if dtype is not None else None if value is None else shown(value)
    if got not in supported:
        raise PolicyError(
            f"{name}: not supported in this version: got {got}, "
            f"expected {' or '.join(map(str, supported))}. "
            f"Leave {name.rsplit('.')[-1]} at its default.{_of_an_array(name, value)}"
        )


def _of_an_array(name: str, value: Any) -> str:
    """Advice for a dtype that ``optax.inject_hyperparams`` turned into an array."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        f" If optax.inject_hyperparams made the array, pass it static_args={name!r}, or use "
        "jda.inject_hyperparams."
    )


def _dtype(value: Any) -> jnp.dtype | None:
    """The dtype that ``value`` names; None if it names none, such as an array."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return None
    try:
        return jnp.dtype(value)
    except TypeError:
        return None


_PACKAGE = __name__.partition(".")[0]
_MAX_SHOWN = 200  # characters of a value in a message


def check_flag(name: str, value: Any, *, may_be_number: bool = False) -> None:
    """Raises HyperparameterError unless ``value`` is True or False: "no" would count as yes.

    0 and 1 count too if it ``may_be_number``, as arguments of optax may.
    """
    is_number = may_be_number and isinstance(value, int) and value in (0, 1)
    if not isinstance(value, bool | np.bool_) and not is_number:
        raise HyperparameterError(
            f"{name}: not a bool: got {shown(value)}, expected True or False. Change {name}."
        )


def shown(value: Any) -> str:
    """Returns a value as text for a message, shortened if it is long, such as all params."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def warn_caller(message: str) -> None:
    """Warns at the line of the caller's code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_effects(*options: tuple[bool, str]) -> None:
    """Raises PolicyError for the first option without an effect: whether it is so, the message."""
    for is_idle, message in options:
        if is_idle:
            raise PolicyError(message)


def out_of_range(name: str, value: Any, expected: str) -> HyperparameterError:
    """Returns the error for a number out of range."""
    return HyperparameterError(
        f"{name}: out of range: got {shown(value)}, expected {expected}. Change {name}."
    )


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like a given one, if any; None if nothing is known.

    Example:
      >>> nearest("weightdecay", ("learning_rate", "weight_decay"))
      'weight_decay'
    """
    return next(iter(difflib.get_close_matches(str(name), list(known), 1, 0.0)), None)


def hinted(**hints: str) -> Callable[[F], F]:
    """Adds a hint to Python's TypeError for a keyword argument that the function does not have.

    Args:
      **hints: What to write, by names that the function does not have.

    Returns:
      A decorator; signatures stay the same.

    Example:
      >>> @hinted(lr="Write learning_rate.")
      ... def optimizer(learning_rate): ...
      >>> optimizer(lr=1e-3)
      Traceback (most recent call last):
        ...
      TypeError: optimizer() got an unexpected keyword argument 'lr'
      Write learning_rate.
    """

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                for name in kwargs:
                    if name in hints:
                        error.add_note(hints[name])
                raise

        return cast(F, call)

    return decorated


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raises HyperparameterError unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise out_of_range(name, value, f"a whole number of at least {least}")


def is_real(value: Any) -> bool:
    """Whether ``value`` is a real number that is known here: of Python or numpy, and no bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
