"""The moving average of the exact parameters, in the flat state next to the moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam import compat
from jdistadam.core import collectives, trees
from jdistadam.core.codecs import FLOAT32
from jdistadam.core.types import OptState, Params
from jdistadam.distributed import host_memory, packing
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import shard_in, zeros
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.state import map_state


def new_ema(config: DistributedConfig, layout: Layout, params: Sequence[Any], main: Any) -> Any:
    """This device's average, initialized to the values of params; None without ``ema_decay``.

    Args:
      config: The configuration.
      layout: The layout.
      params: Leaves of the params, as this device holds them.
      main: This device's main parameters, the exact values of params; None: there are none.
    """
    if config.ema_decay is None:
        return None
    parallel = config.parallel
    shards = [
        packing.state_shard(parallel, b, params, jnp.float32 if main is None else b.dtype)
        for b in layout.buckets
    ]
    flat = jnp.array(_exact_values(config, layout, shards, main))  # main is another array
    return collectives.to_varying(flat, parallel.state_axes + parallel.tensor_axes)


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
    if config.is_on_host:
        type_ = jax.ShapeDtypeStruct((layout.flat_size,), jnp.float32)
        filled = compat.shard_map(
            lambda tree, *given: _new_in_windows(config, layout, jax.tree.leaves(tree), *given),
            mesh=config.mesh,
            in_specs=(specs, flat, flat),
            out_specs=flat,
        )
        ema = jax.jit(filled, donate_argnums=2)(params, main, zeros(config, type_))
        return map_state(lambda state: state._replace(ema=ema), opt_state)
    new = compat.shard_map(
        lambda tree, main: new_ema(config, layout, jax.tree.leaves(tree), main),
        mesh=config.mesh,
        in_specs=(specs, flat),
        out_specs=flat,
    )
    ema = jax.jit(new)(params, main)
    return map_state(lambda state: state._replace(ema=ema), opt_state)


def next_ema(
    config: DistributedConfig,
    layout: Layout,
    old: Any,
    shards: Sequence[Any],
    main: Any,
    is_skipped: jax.Array | None,
) -> Any:
    """This device's average after a step; None without ``ema_decay``.

    Args:
      config: The configuration.
      layout: The layout.
      old: The average before the step.
      shards: This device's new parameters of each bucket; not read if main has them in float32.
      main: This device's new main parameters, or None.
      is_skipped: Whether the step is skipped; None if it cannot be.
    """
    if config.ema_decay is None:
        return None
    if config.is_on_host:
        return _next_in_windows(config, layout, old, shards, main, is_skipped)
    values = _exact_values(config, layout, shards, main)
    # Not d * old + (1 - d) * new: in float32 its weights do not add up to 1, and the average of a
    # constant would drift.
    new = old + jnp.float32(1 - config.ema_decay) * (values - old)
    return trees.keep_if(is_skipped, old, new)


def _next_in_windows(
    config: DistributedConfig,
    layout: Layout,
    old: Any,
    shards: Sequence[Any],
    main: Any,
    is_skipped: jax.Array | None,
) -> Any:
    """``next_ema`` for arrays in host memory: [Note: windows] in host_memory.py."""
    here = dataclasses.replace(config, state_memory="device")
    for part in host_memory.parts(layout):
        average, kept = host_memory.cut(old, part.buckets), _main_of(part, main)
        of_part = [shards[i] for i in part.indices]
        new = next_ema(here, part.layout, average, of_part, kept, is_skipped)
        old = host_memory.put(old, new, part.buckets)
    return old


def _new_in_windows(
    config: DistributedConfig, layout: Layout, params: Sequence[Any], main: Any, flat: Any
) -> Any:
    """``new_ema`` written into a flat array on the host."""
    for part in host_memory.parts(layout):
        new = new_ema(config, part.layout, params, _main_of(part, main))
        flat = host_memory.put(flat, new, part.buckets)
    return flat


def _main_of(part: host_memory.Part, main: Any) -> Any:
    is_there = main is not None and part.layout.main_size
    return host_memory.cut(main, part.buckets) if is_there else None


def _exact_values(
    config: DistributedConfig, layout: Layout, shards: Sequence[Any], main: Any
) -> jax.Array:
    """The exact parameters in float32, at the positions of the flat moments."""
    kind = config.policy.main_params
    is_kept = main is not None
    if is_kept and kind == FLOAT32 and layout.main_size == layout.flat_size:
        values: jax.Array = main
        return values
    parts = []
    for bucket, shard in zip(layout.buckets, shards, strict=True):
        if is_kept and bucket.has_main:
            end = bucket.offset + bucket.shard_size
            shard = kind.join(shard, main[bucket.offset : end].reshape(bucket.shard_shape), jnp)
        parts.append(shard.astype(jnp.float32))
    return packing.flat_of(layout, parts, jnp.float32)


def averaged_leaves(
    parallel: DataParallel, layout: Layout, params: Sequence[Any], ema: jax.Array
) -> list[jax.Array]:
    """The average of every leaf in float32, in the form of this device's params; else params.

    Inside of ``jax.shard_map``.
    """
    leaves = [jnp.asarray(x).astype(jnp.float32) for x in params]
    for bucket in layout.buckets:
        shard = shard_in(ema, bucket)
        held = bucket.inner_shape if bucket.is_sharded_param else ()
        axes = packing.axes_left_to_cut(parallel, bucket, held)
        whole = collectives.all_gather(shard, axes, dim=bucket.cut_dim)
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
        whole = collectives.to_invariant(whole, copies)
        for i, leaf in packing.leaves_of_bucket(layout, bucket, whole):
            leaves[i] = leaf
    return leaves
