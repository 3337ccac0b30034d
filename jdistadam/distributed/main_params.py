"""The main parameters of a distributed state: made from parameters, and compared with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed import bucket_leaves, calls, flat_arrays, host_memory, packing
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import find_state, map_state


def main_shard(
    config: DistributedConfig, buckets: Sequence[Bucket], params: Sequence[Any]
) -> jax.Array:
    """This device's main parameters of consecutive buckets, with the values of ``params``."""
    buckets = [bucket for bucket in buckets if bucket.has_main]
    shards = [packing.state_shard(config.parallel, x, params, jnp.float32) for x in buckets]
    flat = packing.flat_of(buckets, shards, jnp.float32)
    # Varying, as shards are, for the type checker of shard_map.
    flat = collectives.to_varying(flat, config.parallel.cut_axes)
    _, stored = config.policy.main_params.split(flat, jnp.bfloat16, jnp)
    return stored


def with_main_params(
    config: DistributedConfig, layout: Layout, specs: Any, opt_state: OptState, main: Params
) -> Any:
    """Returns the state with main parameters set to ``main``; an average stays.

    Args:
      config: The configuration.
      layout: The layout of the params.
      specs: PartitionSpecs of the params.
      opt_state: The state, or that of a chain.
      main: Tree of global arrays like params, in float32 or a dtype that converts exactly to it.
    """
    if not config.policy.main_params.is_stored:
        return opt_state

    flat: Any = None
    if layout.main_size and "main_params" in config.on_host:
        flat = _new_on_host(config, layout, specs, main)
    elif layout.main_size and bucket_leaves.are_many(layout):
        flat = _new_by_buckets(config, layout, main)
    elif layout.main_size:
        shard = compat.shard_map(
            lambda tree: main_shard(config, layout.buckets, jax.tree.leaves(tree)),
            mesh=config.mesh,
            in_specs=(specs,),
            out_specs=config.parallel.state_spec,
        )
        flat = jax.jit(shard)(main)
    return map_state(lambda state: state._replace(main_params=flat), opt_state)


def _new_by_buckets(config: DistributedConfig, layout: Layout, main: Params) -> jax.Array:
    """Main parameters of global arrays, made by programs that other buckets share."""
    flat = flat_arrays.zeros(config, layout, "main_params")
    specs, leaves = jax.tree.leaves(config.tensor_specs(main)), jax.tree.leaves(main)
    for bucket in layout.buckets:
        if bucket.has_main:
            form = bucket_leaves.form_of(config, layout, bucket, specs)
            form = dataclasses.replace(form, main=config.policy.main_params)
            placed = jax.device_put([leaves[i] for i in bucket.leaves], form.places)
            flat = bucket_leaves.inserted(form, flat, bucket.offset, placed)
    return flat


def _new_on_host(config: DistributedConfig, layout: Layout, specs: Any, main: Params) -> jax.Array:
    """Main parameters of global arrays in host memory, made there window by window."""

    def local(tree: Params, flat: jax.Array) -> jax.Array:
        for window in calls.windows(layout, splits=False):
            if slots := calls.slots_of(config, "main_params", window):
                new = main_shard(config, [x.bucket for x in window], jax.tree.leaves(tree))
                flat = host_memory.put(flat, new, slots)
        return flat

    spec = config.parallel.state_spec
    filled = compat.shard_map(local, mesh=config.mesh, in_specs=(specs, spec), out_specs=spec)
    return jax.jit(filled, donate_argnums=1)(main, flat_arrays.zeros(config, layout, "main_params"))


def round_to_comm_dtype(schedule: Schedule, params: Params, *, before_forward: bool = False) -> Any:
    """Returns global params rounded to param_comm_dtype, as a step rounds them to send them.

    Rounds those sent after the update; with ``before_forward``, those gathered before the forward
    pass.
    """
    leaves: list[Any] = jax.tree.leaves(params)
    for entry in schedule.buckets:
        before = entry.gather if entry.bucket.is_sharded_param else ()
        for gather in before if before_forward else entry.after_update:
            for i in entry.bucket.leaves:
                sent = collectives.round_to(leaves[i], gather.dtype)
                leaves[i] = sent.astype(leaves[i].dtype)
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def sent_dtypes(schedule: Schedule) -> list[Any]:
    """Returns the dtype to which a step rounds each new parameter before sending it.

    None if it does not round it: devices hold such parameters as the main parameters define them.
    """
    found: list[Any] = [None] * len(schedule.layout.leaves)
    for entry in schedule.buckets:
        for gather in entry.after_update:
            for i in entry.bucket.leaves:
                found[i] = None if gather.dtype == entry.bucket.dtype else gather.dtype
    return found


def paths_that_differ(
    config: DistributedConfig, layout: Layout, specs: Any, params: Params, opt_state: OptState
) -> list[str]:
    """Returns the paths of params that are not the rounded main parameters of the state.

    Each device compares the shard that matches its main parameters; nothing is gathered. Leaves
    that share a bucket are named together. Remainders are not compared: there the parameters are
    one half of the main parameters themselves.

    Args:
      config: The configuration.
      layout: The layout of the params.
      specs: PartitionSpecs of the params.
      params: Tree of global params.
      opt_state: The state, or that of a chain.
    """
    main = find_state(opt_state).main_params
    if main is None or not layout.main_size or config.policy.main_params.is_remainder:
        return []
    leaves = jax.tree.leaves(params)
    buckets = tuple(bucket for bucket in layout.buckets if bucket.has_main)
    compare = _comparison(
        config.parallel, config.policy.param_comm_dtype, buckets, tuple(jax.tree.leaves(specs))
    )
    differ = np.asarray(compare(leaves, main))
    return [
        layout.leaves[i].path
        for bucket, found in zip(buckets, differ.tolist(), strict=True)
        for i in bucket.leaves
        if found
    ]


@functools.lru_cache(maxsize=64)
def _comparison(
    parallel: DataParallel, sent: Any, buckets: tuple[Bucket, ...], specs: tuple[P, ...]
) -> Any:
    """The program of ``paths_that_differ``, compiled once for a layout."""
    compare = compat.shard_map(
        functools.partial(_differ_local, parallel, sent, buckets),
        mesh=parallel.mesh,
        in_specs=(list(specs), parallel.state_spec),
        out_specs=P(),
    )
    return jax.jit(compare)


def _differ_local(
    parallel: DataParallel, sent: Any, buckets: Sequence[Bucket], leaves: Sequence[Any], main: Any
) -> jax.Array:
    """For each bucket with main parameters, whether any device's shard of the params differs."""
    found = []
    for bucket in buckets:
        kept = flat_arrays.shard_in(main, bucket)
        rounded = kept.astype(bucket.dtype)
        have = packing.state_shard(parallel, bucket, leaves, bucket.dtype)
        equal = (have == rounded) | (jnp.isnan(have) & jnp.isnan(rounded))
        if sent is not None:  # as received; not so before the first step
            arrived = collectives.round_to(rounded, sent)
            equal |= have == arrived.astype(bucket.dtype)
        found.append(~jnp.all(equal))
    axes = parallel.data_axes + parallel.tensor_axes
    return collectives.all_reduce(jnp.stack(found).astype(jnp.int32), axes) > 0
