"""Which parameters had a non-finite gradient, and on how many devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, trees, varying
from jdistadam.core.types import Grads, Params
from jdistadam.distributed.checks import check_inside
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import DtypeError, ShapeError


def leaves_not_finite(grads: Grads) -> jax.Array:
    """Whether each leaf holds a non-finite value; shape (leaves,), bool."""
    found = [~jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grads)]
    return jnp.stack(found) if found else jnp.zeros((0,), jnp.bool_)


def count_nonfinite(grads: Grads, tx: DistributedTransformation) -> jax.Array:
    """Counts, for each leaf, the devices whose own gradient is non-finite; inside shard_map.

    One more read of the gradients, and one all-reduce of four bytes per leaf. ``train_step`` does
    it with ``report_nonfinite=True``.

    Args:
      grads: Tree of local gradients, before they are reduced.
      tx: A distributed optimizer.

    Returns:
      Shape (leaves,), int32, the same on all devices; see ``nonfinite_paths``.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "count_nonfinite", over_data_alone=True)
    trees.check_arrays(grads, name="grads")
    return sum_over_devices(leaves_not_finite(grads), tx)


def sum_over_devices(found: jax.Array, tx: DistributedTransformation) -> jax.Array:
    """Counts devices; those that hold parts of the same tensor-parallel leaf count each.

    Unless the model is partitioned by XLA: then their parts are one gradient, and count once.
    """
    parallel = tx.config.parallel
    everyone = parallel.data_axes + parallel.tensor_axes
    left_to_xla = varying.unbound(parallel.tensor_axes)
    everyone = tuple(axis for axis in everyone if axis not in left_to_xla)
    count = varying.to_varying(found.astype(jnp.int32), everyone)
    return collectives.all_reduce(count, everyone)


def nonfinite_paths(counts: Any, params: Params) -> dict[str, int]:
    """Names the parameters whose gradient was non-finite somewhere.

    Args:
      counts: What ``count_nonfinite`` returned, or ``metrics["nonfinite"]``.
      params: The params, or a tree of their shapes.

    Returns:
      The number of devices by path, of those that had any.

    Raises:
      ShapeError, DtypeError: ``counts`` is something else, or cannot be read inside of jit.

    Example:
      >>> nonfinite_paths(np.array([0, 2]), {"b": jnp.ones(3), "w": jnp.ones((2, 3))})
      {"params['w']": 2}
    """
    paths = trees.paths(params, "params")
    array = counts if hasattr(counts, "dtype") else np.asarray(counts, object)
    if array.shape != (len(paths),):
        raise ShapeError(
            "counts: not one number for each leaf of params: "
            f"got {array.shape or type(counts).__name__}, expected {(len(paths),)}. "
            'Pass metrics["nonfinite"] of train_step(..., report_nonfinite=True).'
        )
    can_be_read = not isinstance(counts, jax.core.Tracer)
    if not can_be_read or not all(map(trees.is_number, np.asarray(array).tolist())):
        got = type(counts).__name__ if array.dtype == object else array.dtype
        raise DtypeError(
            f"counts: not numbers that can be read: got {got}, expected an array of whole numbers, "
            'outside of jit. Return metrics["nonfinite"] from the program, and look then.'
        )
    found = zip(paths, np.asarray(array).tolist(), strict=True)
    return {path: count for path, count in found if count}
