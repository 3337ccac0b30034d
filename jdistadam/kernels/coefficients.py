"""The kernel's float32 coefficients, computed on the device with optax's expressions.

[Note: coefficients in optax's own expressions]
Updates equal optax's only if every coefficient does, bit for bit. So the expressions are literally
optax's: ``1 - b2`` of a Python float is rounded once, from double precision, and ``b2**t`` is the
compiler's power function. Computed in the kernel from a float32 ``b2``, ``1 - b2`` is 111 units in
the last place off for 0.999. They must run inside ``jax.jit``, even for eager calls of an
optimizer, because the compiler contracts them: one operation at a time gives other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.core import trees
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.errors import DtypeError, HyperparameterError, ShapeError

NAMES = (
    "learning_rate",
    "b1",
    "one_minus_b1",
    "b2",
    "one_minus_b2",
    "eps",
    "eps_root",
    "weight_decay",
    "c1",
    "c1_next",
    "c2",
    "l2",
)
"""The columns of the kernel's coefficients, in the order of ``Coefficients`` in adam_math.h."""


def at_count(value: Any, count: jax.Array) -> Any:
    """Returns a schedule's value at a step count, or the constant itself."""
    return value(count) if callable(value) else value


def coefficient_row(hyper: Hyperparameters, count: jax.Array, *, decay: bool = True) -> jax.Array:
    r"""Returns the coefficients of the step after ``count`` steps.

    With :math:`t` = ``count`` + 1: ``c1`` is :math:`1 - b_1^t`, ``c1_next`` :math:`1 - b_1^{t+1}`,
    ``c2`` :math:`1 - b_2^t`. Without bias correction each is 1, and dividing by it is exact.
    Schedules are evaluated at ``count``, before the increment.

    Call it inside ``jax.jit``: [Note: coefficients in optax's own expressions].

    Args:
      hyper: The hyperparameters. Arrays and tracers are allowed.
      count: Number of steps taken so far, shape (), int32.
      decay: Whether decay applies. Otherwise ``weight_decay`` and ``l2`` are zero.

    Returns:
      Shape ``(len(NAMES),)``, float32.

    Example:
      >>> row = jax.jit(lambda t: coefficient_row(Hyperparameters(1e-3, b1=0.5), t))(jnp.int32(1))
      >>> dict(zip(NAMES, row.tolist()))["c1"]
      0.75
    """
    check_step_count("opt_state's count", count)
    count_inc = optax.safe_increment(count)
    b1, b2 = hyper.b1, hyper.b2
    corrections: tuple[Any, ...] = (1.0, 1.0, 1.0)
    if hyper.bias_correction:
        next_inc = optax.safe_increment(count_inc)
        corrections = (1 - b1**count_inc, 1 - b1**next_inc, 1 - b2**count_inc)
    values = (
        at_count(hyper.learning_rate, count),
        b1,
        1 - b1,
        b2,
        1 - b2,
        hyper.eps,
        hyper.eps_root,
        at_count(hyper.weight_decay, count) if decay else 0.0,
        *corrections,
        hyper.l2 if decay else 0.0,
    )
    return jnp.stack([_scalar(*pair) for pair in zip(NAMES, values, strict=True)])


def check_step_count(name: str, count: Any) -> None:
    """Raises ShapeError or DtypeError unless a state's count is one integer."""
    dtype = jnp.result_type(count)
    if np.shape(count) != () or not jnp.issubdtype(dtype, np.integer):
        kind = DtypeError if np.shape(count) == () else ShapeError
        raise kind(
            f"{name}: not a number of steps: got {dtype}, shape {np.shape(count)}, "
            "expected int32, shape (). Pass opt_state as init, update or step returned it."
        )


def _scalar(name: str, value: Any) -> jax.Array:
    """A coefficient as a float32 scalar; a schedule may have returned something else."""
    is_real = trees.is_number(value) and not jnp.iscomplexobj(value)
    if not is_real or np.shape(value) != ():
        got = f"shape {np.shape(value)}" if is_real else repr(value)
        raise HyperparameterError(
            f"{name}: not one number: got {got}, expected a scalar, also from a schedule. Return a "
            "number; for several rates use param_labels and groups, or optax.multi_transform."
        )
    return jnp.asarray(value).astype(jnp.float32)


def coefficient_rows(hypers: Sequence[Hyperparameters], count: jax.Array) -> jax.Array:
    """Returns two rows per group of leaves, with decay and without it.

    Shape ``(2 * len(hypers), len(NAMES))``, float32.
    """
    pairs = [(hyper, decay) for hyper in hypers for decay in (True, False)]
    return jnp.stack([coefficient_row(hyper, count, decay=decay) for hyper, decay in pairs])
