"""The guards of a step, which may skip it, and their state, which stays on the device.

``GUARDS`` has a loss scale, which is updated after each step, and a guard against spikes of the
gradient norm, which has limits and a running mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import trees
from jdistadam.core.arguments import check_count, is_real, out_of_range
from jdistadam.errors import HyperparameterError

_LARGEST = 2.0**64
"""Loss scales are smaller. Kernels multiply by one over the scale, times the mean and the clip. If
this factor were subnormal, XLA would take it for zero on CPUs, and gradients would be zero."""


class Facts(NamedTuple):
    """What guards know of a step before it updates."""

    norm: jax.Array  # of the mean gradient; NaN with a state of another layout
    found_inf: Any = False  # whether a gradient is non-finite; only with a loss scale
    is_empty: Any = None  # whether the total weight is zero; None if it cannot be
    is_other_layout: Any = False  # whether the state has another layout: never skipped


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    r"""A loss scale that grows while gradients are finite and shrinks otherwise.

    After ``growth_interval`` consecutive finite steps the scale is multiplied by ``growth_factor``.
    A step with a non-finite gradient is skipped. From the ``hysteresis``-th skipped step since the
    last growth on, the scale is multiplied by ``backoff_factor``. It stays below :math:`2^{64}`.

    Attributes:
      init_scale: The first scale.
      growth_factor: Greater than 1.
      backoff_factor: Between 0 and 1.
      growth_interval: Consecutive finite steps before the scale grows.
      hysteresis: Skipped steps before the scale shrinks.
      min_scale: The smallest scale.

    A scale that is a power of two changes no bit of a gradient that stays in range.

    Raises:
      HyperparameterError: A number is out of range.

    Example:
      >>> scale = DynamicLossScale(init_scale=8.0, hysteresis=2)
      >>> state = new_loss_scale(scale)
      >>> for found_inf in (True, True):
      ...     state = next_loss_scale(scale, state, jnp.bool_(found_inf))
      >>> float(state.loss_scale), int(state.skipped)
      (4.0, 2)

    References:
      Micikevicius et al., `Mixed precision training <https://arxiv.org/abs/1710.03740>`_, 2018;
      Megatron-LM, ``DynamicGradScaler``.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks every number."""
        _check("init_scale", self.init_scale, 0, _LARGEST)
        _check("growth_factor", self.growth_factor, 1, math.inf)
        _check("backoff_factor", self.backoff_factor, 0, 1)
        _check("min_scale", self.min_scale, 0, math.inf)
        check_count("growth_interval", self.growth_interval)
        check_count("hysteresis", self.hysteresis)
        if self.min_scale > self.init_scale:
            raise HyperparameterError(
                "min_scale: above init_scale, so the scale would grow where it should shrink: "
                f"got min_scale={self.min_scale}, init_scale={self.init_scale}, "
                "expected min_scale <= init_scale. Change one of them."
            )


class LossScaleState(NamedTuple):
    """The device state of a loss scale; all of shape ().

    Attributes:
      loss_scale: float32: the factor of the next loss.
      growth_count: int32: finite steps since the scale last changed or a step was skipped.
      hysteresis_count: int32: skipped steps left before the scale shrinks.
      skipped: int32: skipped steps so far.
    """

    loss_scale: jax.Array
    growth_count: jax.Array
    hysteresis_count: jax.Array
    skipped: jax.Array


def norm_scale(scaling: LossScaleState | None) -> Any:
    """The factor of a summed gradient in the norm; None: 1."""
    return None if scaling is None else 1 / scaling.loss_scale


def check_loss_scale(value: Any) -> None:
    """Raises HyperparameterError unless ``value`` is None, a number or a DynamicLossScale."""
    if value is not None and not isinstance(value, DynamicLossScale):
        _check("loss_scale", value, 0, _LARGEST)


def _check(name: str, value: Any, above: float, below: float) -> None:
    if not (is_real(value) and above < _rounded(value) < below):
        raise out_of_range(name, value, f"a number between {above} and {below} in float32")


def _rounded(value: Any) -> float:
    """The value as a float32: infinite or zero out of its range."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def new_loss_scale(config: float | DynamicLossScale) -> LossScaleState:
    """Returns the state before the first step."""
    scale = config.init_scale if isinstance(config, DynamicLossScale) else config
    hysteresis = config.hysteresis if isinstance(config, DynamicLossScale) else 0
    zero = jnp.zeros((), jnp.int32)
    return LossScaleState(
        jnp.asarray(scale, jnp.float32), zero, jnp.asarray(hysteresis, jnp.int32), zero
    )


def next_loss_scale(
    config: float | DynamicLossScale, state: LossScaleState, found_inf: jax.Array
) -> LossScaleState:
    """Returns the state after a step, given whether its gradients were non-finite."""
    skipped = state.skipped + found_inf.astype(jnp.int32)
    if not isinstance(config, DynamicLossScale):
        return state._replace(skipped=skipped)
    hysteresis = jnp.maximum(state.hysteresis_count - found_inf.astype(jnp.int32), 0)
    growth = jnp.where(found_inf, 0, state.growth_count + 1)
    shrinks = found_inf & (hysteresis == 0)
    grows = growth >= config.growth_interval
    grown = state.loss_scale * jnp.float32(config.growth_factor)
    grown = jnp.where(grown < _LARGEST, grown, state.loss_scale)
    shrunk = jnp.maximum(
        state.loss_scale * jnp.float32(config.backoff_factor), jnp.float32(config.min_scale)
    )
    scale = jnp.where(shrinks, shrunk, jnp.where(grows, grown, state.loss_scale))
    return LossScaleState(
        scale,
        jnp.where(grows, 0, growth),
        jnp.where(grows, jnp.int32(config.hysteresis), hysteresis),
        skipped,
    )


def saved_loss_scale(config: Any, state: Any) -> Any:
    """Returns the state of a loss scale as it is saved: the counts of a constant one are None.

    They mean nothing, and cannot be told from those of a dynamic one, which may be zero, too.
    """
    if state is None or isinstance(config, DynamicLossScale):
        return state
    return state._replace(growth_count=None, hysteresis_count=None)


def _continued_loss_scale(config: float | DynamicLossScale, new: Any, saved: Any) -> Any:
    """Continues a dynamic scale and its counts within the new limits; a constant one, its skips."""
    new = new._replace(skipped=np.int32(saved.skipped))
    if not isinstance(config, DynamicLossScale) or saved.growth_count is None:
        return new
    return new._replace(
        loss_scale=np.maximum(np.float32(saved.loss_scale), np.float32(config.min_scale)),
        growth_count=np.int32(saved.growth_count),
        hysteresis_count=np.minimum(np.int32(saved.hysteresis_count), np.int32(config.hysteresis)),
    )


@dataclasses.dataclass(frozen=True)
class NormGuard:
    r"""Skips steps whose global gradient norm is above a limit, as ``norm_guard`` of an optimizer.

    The norm :math:`n` is the norm of the mean gradient, unscaled and before clipping
    (``metrics["grad_norm"]``). A step is skipped if

    .. math::

      n > \text{max\_norm} \qquad\text{or}\qquad n > \text{max\_ratio} \cdot \mu_k

    with the running mean :math:`\mu_k` of the norms of the :math:`k` applied steps so far, once
    :math:`k` reaches ``warmup_steps``:

    .. math::

      \mu_k = \mu_{k-1} + \frac{n_k - \mu_{k-1}}{\min(k, \text{window})}

    The first ``window`` steps have the plain mean, later ones an exponential mean with the rate 1 /
    ``window``. It leaves out skipped norms. If the norm rises for good, every step is skipped until
    ``SkipLimit`` raises. Non-finite norms are skipped too, even without a ``loss_scale``.

    Attributes:
      max_norm: The largest norm of an applied step; above 0. None: no limit.
      max_ratio: The largest norm as a multiple of the running mean; above 1. None: no limit.
      window: The number of applied steps in the mean.
      warmup_steps: Applied steps before ``max_ratio`` takes effect.

    Raises:
      HyperparameterError: A number is out of range, or has no effect.

    Example:
      >>> guard = NormGuard(max_ratio=3.0, warmup_steps=2)
      >>> state = new_norm_guard(guard)
      >>> for norm in (1.0, 2.0, 5.0, 4.0):  # the third is above 3 x 1.5
      ...     step = Facts(jnp.float32(norm))
      ...     state = next_norm_guard(guard, state, step, exceeds(guard, state, step))
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
            if value is not None and not (is_real(value) and above < _rounded(value) < math.inf):
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


def new_norm_guard(guard: NormGuard) -> NormGuardState:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return NormGuardState(jnp.zeros((), jnp.float32), zero, zero, zero)


def exceeds(guard: NormGuard, state: NormGuardState, step: Facts) -> jax.Array:
    """Whether a step is skipped for its norm: above a limit, or non-finite."""
    limit = jnp.float32(math.inf if guard.max_norm is None else guard.max_norm)
    if guard.max_ratio is not None:
        of_mean = jnp.float32(guard.max_ratio) * state.mean
        limit = jnp.where(state.steps < guard.warmup_steps, limit, jnp.minimum(limit, of_mean))
    return ~(jnp.isfinite(step.norm) & (step.norm <= limit))


def next_norm_guard(
    guard: NormGuard, state: NormGuardState, step: Facts, is_skipped: jax.Array
) -> NormGuardState:
    """Returns the state after a step. Steps skipped for another reason do not count."""
    is_void = jnp.logical_or(step.found_inf, step.is_other_layout)
    if step.is_empty is not None:
        is_void |= step.is_empty
    by_norm, is_finite = exceeds(guard, state, step) & ~is_void, jnp.isfinite(step.norm)
    is_applied = ~is_skipped & ~is_void
    steps = jnp.where(state.steps == np.iinfo(np.int32).max, state.steps, state.steps + 1)
    rate = 1 / jnp.minimum(steps, guard.window).astype(jnp.float32)
    return NormGuardState(
        jnp.where(is_applied, state.mean + (step.norm - state.mean) * rate, state.mean),
        jnp.where(is_applied, steps, state.steps),
        state.spikes + (by_norm & is_finite).astype(jnp.int32),
        state.nonfinite + (by_norm & ~is_finite).astype(jnp.int32),
    )


class Guard(NamedTuple):
    """A reason to skip a step. Its functions take the value of its option first."""

    option: str  # of ``distributed``
    field: str  # of ``DistributedState``, for its state
    kind: type[Any]  # of its state
    new: Callable[[Any], Any]  # the state before the first step
    skips: Callable[[Any, Any, Facts], jax.Array]  # whether it skips a step; takes its state
    # The state after a step; takes whether the step was skipped.
    next: Callable[[Any, Any, Facts, Any], Any]
    continued: Callable[[Any, Any, Any], Any]  # takes the new state and the saved one


GUARDS = (
    Guard(
        "loss_scale",
        "scaling",
        LossScaleState,
        new_loss_scale,
        lambda scale, state, step: step.found_inf,
        lambda scale, state, step, is_skipped: trees.keep_if(
            step.is_empty, state, next_loss_scale(scale, state, step.found_inf)
        ),
        _continued_loss_scale,
    ),
    Guard(
        "norm_guard",
        "guard",
        NormGuardState,
        new_norm_guard,
        exceeds,
        next_norm_guard,
        lambda guard, new, saved: jax.tree.map(lambda x, y: np.asarray(x, y.dtype), saved, new),
    ),
)


def continued(guard: Guard, value: Any, saved: Any) -> Any:
    """Returns the state with which a new optimizer continues from a saved one, on the host.

    Measurements are continued: a dynamic scale, the mean of norms and all counts. Settings are the
    new optimizer's: a constant scale, the first dynamic scale and the limits. ``saved`` is None
    without this guard; a constant loss scale has counts None.
    """
    new: Any = jax.tree.map(np.asarray, guard.new(value))
    return new if saved is None else guard.continued(value, new, saved)
