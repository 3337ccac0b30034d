"""The global norm of the mean gradient, and the factor that clips it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import collectives, varying
from jdistadam.core.loss_scale import LossScaleState
from jdistadam.distributed.accumulate import SummedGrads
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.kernels import multi_tensor


def norm_and_finite(
    config: DistributedConfig, layout: Layout, grads: SummedGrads, scaling: LossScaleState | None
) -> tuple[jax.Array, jax.Array]:
    """The global norm of the mean gradient, and whether any gradient is non-finite.

    Every element counts once: devices that hold the same leaf beside tensor-parallel ones leave it
    to the first of them.
    """
    parallel = config.parallel
    unscale = None if scaling is None else 1 / scaling.loss_scale
    by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
    for bucket, shard in zip(layout.buckets, grads.shards, strict=True):
        by_axes.setdefault(bucket.tensor_axes, []).append(shard)
    squares, found = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    for axes, arrays in sorted(by_axes.items()):
        partial_squares, found_here = multi_tensor.sum_of_squares(arrays, unscale)
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in axes)
        if copies:
            partial_squares = jnp.where(collectives.axis_index(copies) == 0, partial_squares, 0)
        squares, found = squares + partial_squares, found | found_here
    return norm_of_squares(config, squares, found, grads.mean_scale, scaling)


def norm_of_squares(
    config: DistributedConfig,
    squares: jax.Array,
    found: jax.Array,
    mean_scale: jax.Array,
    scaling: LossScaleState | None,
) -> tuple[jax.Array, jax.Array]:
    """What ``norm_and_finite`` returns, of what one device found in its shards."""
    everyone = config.parallel.state_axes + config.parallel.tensor_axes
    if scaling is None:
        squares = collectives.all_reduce(squares, everyone)
        return jnp.sqrt(squares) * mean_scale, jnp.zeros((), jnp.bool_)
    both = jnp.stack([squares, found.astype(jnp.float32)])
    squares, count = collectives.all_reduce(varying.to_varying(both, everyone), everyone)
    return jnp.sqrt(squares) * mean_scale, count > 0


def clipped_scale(max_grad_norm: float | None, mean_scale: jax.Array, norm: Any) -> jax.Array:
    """What every summed gradient is multiplied by: the mean, and the clip on top of it."""
    if max_grad_norm is None:
        return mean_scale
    max_norm = jnp.float32(max_grad_norm)
    # Written so that a norm that is not a number reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean_scale, mean_scale * (max_norm / norm))
