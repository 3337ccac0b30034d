"""The hyperparameters of Adam: frozen values, checked once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.arguments import check_flag, out_of_range, warn_caller
from jdistadam.errors import HyperparameterError

FLAGS = ("nesterov", "cautious_weight_decay")
"""Variants of the formula, in the order of their bits in cuda/adam_math.h."""

ScalarOrSchedule = float | jax.Array | Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of Adam as given: Python numbers, arrays, tracers or schedules.

    Attributes:
      learning_rate: Step size, or a schedule that maps the step count to it.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Added to the square root of the second moment, >= 0.
      eps_root: Added to the second moment under the square root, >= 0.
      weight_decay: Decoupled weight decay, >= 0, or a schedule that maps the step count to it.
      nesterov: Whether to use Nesterov momentum.
      l2: L2 regularisation, >= 0: ``l2 * params`` is added to the gradient.
      bias_correction: Whether to divide the moments by 1 - b^t.
      cautious_weight_decay: Whether decay applies only to elements whose update has its sign.
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-8
    eps_root: Any = 0.0
    weight_decay: Any = 0.0
    nesterov: bool = False
    l2: Any = 0.0
    bias_correction: bool = True
    cautious_weight_decay: bool = False

    def __post_init__(self) -> None:
        """Checks every number known before tracing."""
        if isinstance(self.learning_rate, int | float | np.number) and self.learning_rate < 0:
            warn_caller(
                f"learning_rate: below zero, as optax allows: got {self.learning_rate!r}, expected "
                "a number >= 0. Every step climbs the loss; maximise a negated loss instead."
            )
        for name in ("bias_correction", *FLAGS):
            check_flag(name, getattr(self, name))
        _check("learning_rate", self.learning_rate, math.isfinite, "a finite number or a schedule")
        for name in ("b1", "b2"):
            _check(name, getattr(self, name), lambda x: 0.0 <= x < 1.0, "a number in [0, 1)")
        for name in ("eps", "eps_root", "weight_decay", "l2"):
            _check(name, getattr(self, name), lambda x: 0.0 <= x < math.inf, "a finite number >= 0")

    @property
    def flags(self) -> frozenset[str]:
        """The names in ``FLAGS`` that are set."""
        return frozenset(name for name in FLAGS if getattr(self, name))

    def known_and_operands(self) -> tuple[tuple[tuple[str, Any], ...], dict[str, Any]]:
        """Returns hashable values that the compiler knows, and operands of the program.

        ``Hyperparameters(**dict(known), **operands)`` is equal to this.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        operands = {k: v for k, v in values.items() if isinstance(v, jax.Array | np.ndarray)}
        return tuple((k, _hashable(v)) for k, v in values.items() if k not in operands), operands


def _hashable(value: Any) -> Any:
    """The value, or a hashable stand-in: a schedule may be an object without a hash."""
    return value if getattr(value, "__hash__", None) else functools.partial(value)


def _check(name: str, value: Any, is_valid: Callable[[float], bool], expected: str) -> None:
    if callable(value) and name in ("learning_rate", "weight_decay"):
        return _check_schedule(name, value)
    if isinstance(value, jax.Array | np.ndarray):
        if name == "b2" and value.dtype in (jnp.bfloat16, jnp.float16):
            raise HyperparameterError(
                f"{name}: rounded to 16 bits, which turns 0.999 into 1: "
                f"got {value.dtype}, expected float32, or a Python number. "
                "optax.inject_hyperparams casts to the dtype of params: use jda.inject_hyperparams."
            )
        # It may be traced, and reading it would block: only the shape is checked.
        real = not jnp.issubdtype(value.dtype, np.complexfloating)
        valid = value.shape == () and real
        expected = "a scalar" if real else "a real number"
    else:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        valid = number and is_valid(float(value))
    if not valid:
        raise out_of_range(name, value, expected)


def _check_schedule(name: str, schedule: Callable[[Any], Any]) -> None:
    """Raises HyperparameterError if a schedule needs more than the step count."""
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # builtins have no signature
        return
    try:
        signature.bind(0)
    except TypeError as error:
        raise HyperparameterError(
            f"{name}: not a schedule of the step count: {error}: got a function of {signature}, "
            f"expected a function of one number. Change {name}."
        ) from None
