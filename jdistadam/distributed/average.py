"""The moving average of the exact parameters, in the flat state next to the moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import collectives, trees
from jdistadam.distributed import calls, flat_arrays, packing
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.main_params import exact_values
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.store import Store


def with_next_ema(
    config: DistributedConfig,
    layout: Layout,
    state: DistributedState,
    shards: Sequence[Any],
    is_skipped: jax.Array | None,
) -> DistributedState:
    """Returns the state with its average moved towards the new parameters, if it has one.

    Args:
      config: The configuration.
      layout: The layout.
      state: The state with new main parameters and moments. Their windows leave the device before
        windows of the average arrive.
      shards: This device's new parameters of each bucket; not read if ``state`` has them in
        float32.
      is_skipped: Whether the step is skipped; None if it cannot be.
    """
    if config.ema_decay is None:
        return state
    moves = calls.average_calls(config, layout)
    updated = jax.tree.leaves([getattr(state, name) for name in flat_arrays.STEPPED])
    store = Store(config, state, moves, shards, after=updated)
    for call in moves:
        taken = store.take(call)
        before, main = taken.arrays["ema"], taken.window("main_params")
        new = [span.of(shards[span.bucket_index]) for span in call.spans]
        values = exact_values(config, call.buckets, new, main)
        # Not d * old + (1 - d) * new: in float32 its weights do not add up to 1, and the average
        # of a constant would drift.
        moved = before + jnp.float32(1 - config.ema_decay) * (values - before)
        store.put(call, {"ema": trees.keep_if(is_skipped, before, moved)})
    return store.state()


def averaged_leaves(
    parallel: DataParallel, layout: Layout, params: Sequence[Any], ema: jax.Array
) -> list[jax.Array]:
    """The average of every leaf in float32, in the form of this device's params; frozen ones as is.

    Inside of ``jax.shard_map``.
    """
    leaves = [jnp.asarray(x).astype(jnp.float32) for x in params]
    for bucket in layout.buckets:
        shard = flat_arrays.shard_in(ema, bucket)
        held = bucket.inner_shape if bucket.is_sharded_param else ()
        axes = packing.axes_left_to_cut(parallel, bucket, held)
        whole = collectives.all_gather(shard, axes, dim=bucket.cut_dim)
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
        whole = collectives.to_invariant(whole, copies)
        for i, leaf in packing.leaves_of_bucket(layout, bucket, whole):
            leaves[i] = leaf
    return leaves
