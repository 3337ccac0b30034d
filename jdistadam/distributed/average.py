"""The moving average of the exact parameters, in the flat state next to the moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam import compat
from jdistadam.core import collectives, trees
from jdistadam.core.codecs import FLOAT32
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed import calls, flat_arrays, host_memory, packing
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.state import DistributedState, map_state
from jdistadam.distributed.store import Store


def new_ema(
    config: DistributedConfig, buckets: Sequence[Bucket], params: Sequence[Any], main: Any
) -> Any:
    """This device's average, initialized to the values of params; None without ``ema_decay``.

    Args:
      config: The configuration.
      buckets: All buckets, or consecutive ones.
      params: Leaves of the params, as this device holds them.
      main: This device's main parameters of the buckets, the exact values of params; None: there
        are none.
    """
    if config.ema_decay is None:
        return None
    parallel = config.parallel
    shards = [
        packing.state_shard(parallel, b, params, jnp.float32 if main is None else b.dtype)
        for b in buckets
    ]
    flat = jnp.array(_exact_values(config, buckets, shards, main))  # main is another array
    return collectives.to_varying(flat, parallel.cut_axes)


def with_new_ema(
    config: DistributedConfig,
    layout: Layout,
    specs: Any,
    opt_state: OptState,
    params: Params,
    main: Any = None,
) -> Any:
    """Returns the state with its average set to global params; unchanged if it has none.

    Args:
      config: The configuration.
      layout: The layout of the params.
      specs: PartitionSpecs of the params.
      opt_state: The state, or that of a chain.
      params: Tree of global params, or of float32 arrays like them.
      main: The main parameters of a state, the exact values of params; None: there are none.
    """
    if config.ema_decay is None:
        return opt_state
    flat = config.parallel.state_spec

    if "ema" in config.on_host:
        filled = compat.shard_map(
            lambda tree, *given: _new_in_windows(config, layout, jax.tree.leaves(tree), *given),
            mesh=config.mesh,
            in_specs=(specs, flat, flat),
            out_specs=flat,
        )
        zeros = flat_arrays.zeros(config, layout, "ema")
        ema = jax.jit(filled, donate_argnums=2)(params, main, zeros)
    else:
        new = compat.shard_map(
            lambda tree, main: new_ema(config, layout.buckets, jax.tree.leaves(tree), main),
            mesh=config.mesh,
            in_specs=(specs, flat),
            out_specs=flat,
        )
        ema = jax.jit(new)(params, main)
    return map_state(lambda state: state._replace(ema=ema), opt_state)


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
        before, main = taken.arrays["ema"], taken.part("main_params")
        new = [piece.of(shards[piece.bucket_index]) for piece in call.pieces]
        values = _exact_values(config, call.buckets, new, main)
        # Not d * old + (1 - d) * new: in float32 its weights do not add up to 1, and the average
        # of a constant would drift.
        moved = before + jnp.float32(1 - config.ema_decay) * (values - before)
        store.put(call, {"ema": trees.keep_if(is_skipped, before, moved)})
    return store.state()


def _new_in_windows(
    config: DistributedConfig, layout: Layout, params: Sequence[Any], main: Any, flat: Any
) -> Any:
    """``new_ema`` written into a flat array on the host."""
    for window in calls.windows(layout, splits=False):
        of_main = calls.slots_of(config, "main_params", window)
        kept = host_memory.cut(main, of_main) if of_main and main is not None else None
        new = new_ema(config, [piece.bucket for piece in window], params, kept)
        flat = host_memory.put(flat, new, calls.slots_of(config, "ema", window))
    return flat


def _exact_values(
    config: DistributedConfig, buckets: Sequence[Bucket], shards: Sequence[Any], main: Any
) -> jax.Array:
    """The exact parameters of consecutive buckets in float32, at the positions of their moments.

    ``main``: their main parameters, from the first bucket on; None: there are none.
    """
    kind = config.policy.main_params
    if main is not None and kind == FLOAT32 and all(bucket.has_main for bucket in buckets):
        return main
    parts = []
    for bucket, shard in zip(buckets, shards, strict=True):
        if main is not None and bucket.has_main:
            start = bucket.offset - buckets[0].offset
            kept = main[start : start + bucket.shard_size].reshape(bucket.shard_shape)
            shard = kind.join(shard, kept, jnp)
        parts.append(shard.astype(jnp.float32))
    return packing.flat_of(buckets, parts, jnp.float32)


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
