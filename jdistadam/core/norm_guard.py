"""A guard against spikes of the gradient norm: limits, and a running mean as device state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.arguments import check_count, out_of_range
from jdistadam.errors import HyperparameterError


@dataclasses.dataclass(frozen=True)
class NormGuard:
    r"""Skips steps whose global gradient norm is above a limit, as ``norm_guard`` of an optimizer.

    The norm :math:`n` is that of the mean gradient, unscaled and before clipping:
    ``metrics["grad_norm"]``. A step is skipped if

    .. math::

      n > \text{max\_norm} \qquad\text{or}\qquad n > \text{max\_ratio} \cdot \mu_k

    with the running mean :math:`\mu_k` of the norms of the :math:`k` applied steps so far, once
    :math:`k` reaches ``warmup_steps``:

    .. math::

      \mu_k = \mu_{k-1} + \frac{n_k - \mu_{k-1}}{\min(k, \text{window})}

    First it is the plain mean, then an exponential one with the rate 1 / ``window``. Skipped norms
    do not enter it: if the norm rises for good, every step is skipped until ``SkipLimit`` raises. A
    non-finite norm is skipped too, even without a ``loss_scale``.

    Attributes:
      max_norm: The largest norm of an applied step; above 0. None: no limit.
      max_ratio: The largest norm as a multiple of the running mean; above 1. None: no limit.
      window: The number of applied steps in the mean.
      warmup_steps: Applied steps before ``max_ratio`` takes effect.

    Raises:
      HyperparameterError: A number is out of range, or has no effect.

    Example:
      >>> guard = NormGuard(max_ratio=3.0, warmup_steps=2)
      >>> state = new_norm_guard()
      >>> for norm in (1.0, 2.0, 5.0, 4.0):  # the third is above 3 x 1.5
      ...     is_skipped = exceeds(guard, state, jnp.float32(norm))
      ...     state = next_norm_guard(guard, state, jnp.float32(norm), is_skipped)
      >>> int(state.steps), int(state.spikes), round(float(state.mean), 4)
      (3, 1, 2.3333)
    """

    max_norm: float | None = None
    max_ratio: float | None = None
    window: int = 100
    warmup_steps: int = 100

    def __post_init__(self) -> None:
        """Checks every number."""
        for name, above in (("max_norm", 0), ("max_ratio", 1)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if value is not None and not (is_number and above < _rounded(value) < math.inf):
                raise out_of_range(name, value, f"a number above {above}, finite in float32")
        check_count("window", self.window)
        check_count("warmup_steps", self.warmup_steps)
        has_mean = (self.window, self.warmup_steps) != (100, 100)
        if self.max_ratio is None and (has_mean or self.max_norm is None):
            what = "window and warmup_steps have" if self.max_norm is not None else "it has"
            raise HyperparameterError(
                f"NormGuard: {what} no effect without a max_ratio: got {self}, "
                "expected max_ratio, or max_norm alone. Pass for example max_ratio=5.0."
            )


def _rounded(value: Any) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


class NormGuardState(NamedTuple):
    """The device state of a ``NormGuard``; all of shape ().

    Attributes:
      mean: float32: the running mean of the norms of applied steps.
      steps: int32: the number of applied steps.
      spikes: int32: steps skipped because their norm was finite and above a limit.
      nonfinite: int32: steps skipped because only their norm was non-finite. Steps with non-finite
        gradients are counted by the loss scale.
    """

    mean: jax.Array
    steps: jax.Array
    spikes: jax.Array
    nonfinite: jax.Array


def check_norm_guard(value: Any) -> None:
    """Raises HyperparameterError unless ``value`` is None or a NormGuard."""
    if value is not None and not isinstance(value, NormGuard):
        raise HyperparameterError(
            f"norm_guard: not a guard: got {value!r}, expected a NormGuard. "
            "Pass for example norm_guard=jdistadam.NormGuard(max_ratio=5.0)."
        )


def new_norm_guard() -> NormGuardState:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return NormGuardState(jnp.zeros((), jnp.float32), zero, zero, zero)


def exceeds(guard: NormGuard, state: NormGuardState, norm: jax.Array) -> jax.Array:
    """Whether a step with this norm is skipped: above a limit, or non-finite."""
    limit = jnp.float32(math.inf if guard.max_norm is None else guard.max_norm)
    if guard.max_ratio is not None:
        of_mean = jnp.float32(guard.max_ratio) * state.mean
        limit = jnp.where(state.steps < guard.warmup_steps, limit, jnp.minimum(limit, of_mean))
    return ~(jnp.isfinite(norm) & (norm <= limit))


def next_norm_guard(
    guard: NormGuard,
    state: NormGuardState,
    norm: jax.Array,
    is_skipped: jax.Array,
    is_counted: Any = True,
) -> NormGuardState:
    """Returns the state after a step.

    Args:
      guard: The limits.
      state: The state before the step.
      norm: Its norm.
      is_skipped: Whether it was skipped for any reason.
      is_counted: Whether the norm was the only reason; False also if the step is void.
    """
    by_norm, is_finite = exceeds(guard, state, norm) & is_counted, jnp.isfinite(norm)
    is_applied = ~is_skipped & is_counted
    steps = jnp.where(state.steps == np.iinfo(np.int32).max, state.steps, state.steps + 1)
    rate = 1 / jnp.minimum(steps, guard.window).astype(jnp.float32)
    return NormGuardState(
        jnp.where(is_applied, state.mean + (norm - state.mean) * rate, state.mean),
        jnp.where(is_applied, steps, state.steps),
        state.spikes + (by_norm & is_finite).astype(jnp.int32),
        state.nonfinite + (by_norm & ~is_finite).astype(jnp.int32),
    )


def continued_norm_guard(guard: NormGuard | None, saved: NormGuardState | None) -> Any:
    """Returns the state with which a new optimizer continues from a saved one, on the host.

    The mean and the counts move, or start anew if there were none; limits are the new optimizer's.
    """
    if guard is None:
        return None
    new: Any = jax.tree.map(np.asarray, new_norm_guard())
    if saved is None:
        return new
    return jax.tree.map(lambda x, like: np.asarray(x).astype(like.dtype), saved, new)
