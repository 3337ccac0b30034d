"""What a step knows before it updates: its norm, whether it is skipped, and the kernel's scalars.

A step is skipped for a non-finite gradient, with a loss scale; for its norm, with a guard; for a
total weight of zero. A step with a state of another layout is never skipped: its norm and its
coefficients are NaN, and so are new parameters, main parameters and moments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.core.guards import (
    LossScaleState,
    NormGuardState,
    exceeds,
    next_loss_scale,
    next_norm_guard,
)
from jdistadam.core.hyperparameters import coefficient_rows
from jdistadam.distributed.accumulate import StepGrads
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.state import DistributedState, differs
from jdistadam.kernels.operands import Scalars


class Verdict(NamedTuple):
    """What a step knows before it updates.

    Attributes:
      norm: The global norm of the mean gradient.
      found_inf: Whether a gradient is non-finite; only with a loss scale.
      is_empty: Whether the total weight is zero; None if it cannot be.
      is_other_layout: Whether the state has another layout.
      is_skipped: Whether the step is skipped; None if it cannot be.
      scalars: The scalars of the kernel calls.
    """

    norm: jax.Array
    found_inf: jax.Array
    is_empty: jax.Array | None
    is_other_layout: jax.Array
    is_skipped: jax.Array | None
    scalars: Scalars

    @classmethod
    def of(
        cls,
        config: DistributedConfig,
        layout: Layout,
        state: DistributedState,
        grads: StepGrads,
        norm: jax.Array,
        found_inf: jax.Array,
    ) -> Verdict:
        """Makes it from the norm of the mean gradient.

        Args:
          config: The configuration.
          layout: The layout of the params.
          state: The state before the step.
          grads: The gradients: the factor that makes sums the mean, and whether weights are zero.
          norm: The norm; zero if it becomes known with the update: then see ``with_norm``.
          found_inf: Whether a gradient is non-finite; only with a loss scale.
        """
        is_other_layout = differs(state.layout_digest, config.layout_digest(layout))
        norm, found_inf = jnp.where(is_other_layout, jnp.nan, norm), found_inf & ~is_other_layout
        is_skipped = _skipped(config, state, norm, found_inf, grads.is_empty, is_other_layout)
        scalars = _scalars(config, state, grads.mean_scale, norm, is_skipped, is_other_layout)
        return cls(norm, found_inf, grads.is_empty, is_other_layout, is_skipped, scalars)

    def with_norm(self, norm: jax.Array) -> Verdict:
        """Returns it with a norm that became known with the update, on which it does not depend."""
        return self._replace(norm=jnp.where(self.is_other_layout, jnp.nan, norm))

    def next_scaling(
        self, config: DistributedConfig, scaling: LossScaleState | None
    ) -> LossScaleState | None:
        """The loss scale of the next step. A step of total weight zero does not change it."""
        if scaling is None:
            return None
        assert config.loss_scale is not None
        new = next_loss_scale(config.loss_scale, scaling, self.found_inf)
        kept: LossScaleState = trees.keep_if(self.is_empty, scaling, new)
        return kept

    def next_guard(
        self, config: DistributedConfig, guard: NormGuardState | None
    ) -> NormGuardState | None:
        """The state of the guard after a step. Steps skipped for another reason do not count."""
        if config.norm_guard is None or guard is None:
            return None
        is_void = self.found_inf | self.is_other_layout
        if self.is_empty is not None:
            is_void |= self.is_empty
        assert self.is_skipped is not None
        return next_norm_guard(config.norm_guard, guard, self.norm, self.is_skipped, ~is_void)


def _skipped(
    config: DistributedConfig,
    state: DistributedState,
    norm: jax.Array,
    found_inf: jax.Array,
    is_empty: jax.Array | None,
    is_other_layout: jax.Array,
) -> jax.Array | None:
    """Whether a step is skipped; None if no reason is possible."""
    flags = [is_empty] if is_empty is not None else []
    if state.scaling is not None:
        flags.append(found_inf)
    if config.norm_guard is not None and state.guard is not None:
        flags.append(exceeds(config.norm_guard, state.guard, norm))
    return functools.reduce(jnp.logical_or, flags) & ~is_other_layout if flags else None


def _scalars(
    config: DistributedConfig,
    state: DistributedState,
    mean_scale: jax.Array,
    norm: jax.Array,
    is_skipped: jax.Array | None,
    is_other_layout: jax.Array,
) -> Scalars:
    """The scalars of the kernel calls; one factor combines loss scale, mean and clip."""
    rows = coefficient_rows(config.algorithm.groups.used, state.count)
    inv_scale = _clipped_scale(config.max_grad_norm, mean_scale, norm)
    if config.norms is not None and is_skipped is not None:
        # So that norms of leaves are finite even if the total norm is not.
        inv_scale = jnp.where(is_skipped, mean_scale, inv_scale)
    if state.scaling is not None:
        inv_scale = inv_scale * (1 / state.scaling.loss_scale)
    skip = jnp.zeros((), jnp.bool_) if is_skipped is None else is_skipped
    return Scalars(jnp.where(is_other_layout, jnp.nan, rows), inv_scale, skip)


def _clipped_scale(max_grad_norm: float | None, mean_scale: jax.Array, norm: Any) -> jax.Array:
    """The factor of every summed gradient: the mean, times the clip."""
    if max_grad_norm is None:
        return mean_scale
    max_norm = jnp.float32(max_grad_norm)
    # Written so that a NaN norm reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean_scale, mean_scale * (max_norm / norm))
