"""Loss scaling: the scale as device state and its update after each step."""

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
class DynamicLossScale:
    r"""A loss scale that grows while gradients are finite and shrinks otherwise.

    After ``growth_interval`` consecutive finite steps the scale is multiplied by ``growth_factor``.
    A step with a non-finite gradient is skipped. From the ``hysteresis``-th skipped step since the
    last growth on, the scale is multiplied by ``backoff_factor``.

    Attributes:
      init_scale: The first scale.
      growth_factor: Greater than 1.
      backoff_factor: Between 0 and 1.
      growth_interval: Consecutive finite steps before the scale grows.
      hysteresis: Skipped steps before the scale shrinks.
      min_scale: The smallest scale.

    Powers of two change no bit of a gradient that stays in range.

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
        _check("init_scale", self.init_scale, 0, math.inf)
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


def check_loss_scale(value: Any) -> None:
    """Raises HyperparameterError unless ``value`` is None, a number or a DynamicLossScale."""
    if value is not None and not isinstance(value, DynamicLossScale):
        _check("loss_scale", value, 0, math.inf)


def _check(name: str, value: Any, above: float, below: float) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (is_number and above < _rounded(value) < below):
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
    grown = jnp.where(jnp.isfinite(grown), grown, state.loss_scale)
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


def continued_loss_scale(
    config: float | DynamicLossScale | None, saved: LossScaleState | None
) -> Any:
    """Returns the state with which a new optimizer continues from a saved one, on the host.

    Measurements move: a dynamic scale with its counts, and the number of skipped steps. Choices are
    the new optimizer's: a constant scale, the first dynamic one, the limits.

    Args:
      config: The ``loss_scale`` of the new optimizer.
      saved: The old state, None without loss scaling; a constant scale has counts None.
    """
    if config is None:
        return None
    new: Any = jax.tree.map(np.asarray, new_loss_scale(config))
    if saved is None:
        return new
    new = new._replace(skipped=np.int32(saved.skipped))
    if not isinstance(config, DynamicLossScale) or saved.growth_count is None:
        return new
    return new._replace(
        loss_scale=np.maximum(np.float32(saved.loss_scale), np.float32(config.min_scale)),
        growth_count=np.int32(saved.growth_count),
        hysteresis_count=np.minimum(np.int32(saved.hysteresis_count), np.int32(config.hysteresis)),
    )
