"""What a step knows before it updates: its norm, whether it is skipped, and the kernel's scalars.

A step is skipped for a total weight of zero, or by a guard of the optimizer (core/guards.py). A
step with a state of another layout is never skipped: its norm and its coefficients are NaN, and so
are new parameters, main parameters and moments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.guards import Facts
from jdistadam.core.hyperparameters import coefficient_rows
from jdistadam.distributed.accumulate import StepGrads
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.layout_text import differs
from jdistadam.distributed.state import DistributedState
from jdistadam.kernels.operands import Scalars


class Verdict(NamedTuple):
    """What a step knows before it updates.

    Attributes:
      facts: The norm, and what else the guards judge by.
      is_skipped: Whether the step is skipped; None if it cannot be.
      scalars: The scalars of the kernel calls.
    """

    facts: Facts
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
        is_other = differs(state.layout_digest, config.layout_digest(layout))
        norm, found_inf = poisoned(is_other, norm), found_inf & ~is_other
        facts = Facts(norm, found_inf, grads.is_empty, is_other)
        reasons = [] if facts.is_empty is None else [facts.is_empty]
        for guard, value in config.active_guards:
            reasons.append(guard.skips(value, getattr(state, guard.field), facts))
        is_skipped = functools.reduce(jnp.logical_or, reasons) & ~is_other if reasons else None
        scalars = _scalars(config, state, grads.mean_scale, facts, is_skipped)
        return cls(facts, is_skipped, scalars)

    def with_norm(self, norm: jax.Array) -> Verdict:
        """Returns it with a norm that became known with the update, on which it does not depend."""
        norm = poisoned(self.facts.is_other_layout, norm)
        return self._replace(facts=self.facts._replace(norm=norm))

    def next_guards(self, config: DistributedConfig, state: DistributedState) -> dict[str, Any]:
        """The states of the guards after the step, by field of the state."""
        return {
            guard.field: guard.next(value, getattr(state, guard.field), self.facts, self.is_skipped)
            for guard, value in config.active_guards
        }


def poisoned(is_other_layout: jax.Array, x: jax.Array) -> jax.Array:
    """A result of a step: NaN with a state of another layout."""
    return jnp.where(is_other_layout, jnp.nan, x)


def _scalars(
    config: DistributedConfig,
    state: DistributedState,
    mean_scale: jax.Array,
    facts: Facts,
    is_skipped: jax.Array | None,
) -> Scalars:
    """The scalars of the kernel calls; one factor combines loss scale, mean and clip."""
    rows = coefficient_rows(config.algorithm.groups.used, state.count)
    inv_scale = _clipped_scale(config.max_grad_norm, mean_scale, facts.norm)
    if config.norms is not None and is_skipped is not None:
        # So that norms of leaves are finite even if the total norm is not.
        inv_scale = jnp.where(is_skipped, mean_scale, inv_scale)
    if state.scaling is not None:
        inv_scale = inv_scale * (1 / state.scaling.loss_scale)
    skip = jnp.zeros((), jnp.bool_) if is_skipped is None else is_skipped
    return Scalars(poisoned(facts.is_other_layout, rows), inv_scale, skip)


def _clipped_scale(max_grad_norm: float | None, mean_scale: jax.Array, norm: Any) -> jax.Array:
    """The factor of every summed gradient: the mean, times the clip."""
    if max_grad_norm is None:
        return mean_scale
    max_norm = jnp.float32(max_grad_norm)
    # Written so that a NaN norm reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean_scale, mean_scale * (max_norm / norm))
