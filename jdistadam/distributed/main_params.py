"""The main parameters in a distributed state: made from parameters, and compared with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam import compat
from jdistadam.core import collectives
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.state import find_state, map_state
from jdistadam.distributed.step import main_shard, state_shard
from jdistadam.distributed.transformation import DistributedTransformation


def with_main_params(tx: DistributedTransformation, opt_state: Any, params: Any, main: Any) -> Any:
    """Returns the state with main parameters of the values of ``main``, a tree like ``params``."""
    config = tx.config
    layout = config.layout(config.tensor_local(params))
    if not layout.main_size:
        return opt_state
    shard = compat.shard_map(
        lambda tree: main_shard(config, layout, jax.tree.leaves(tree)),
        mesh=config.mesh,
        in_specs=(tx.param_specs(params),),
        out_specs=config.parallel.state_spec,
    )
    flat = jax.jit(shard)(main)
    return map_state(lambda state: state._replace(main_params=flat), opt_state)


def paths_that_differ(tx: DistributedTransformation, params: Any, opt_state: Any) -> list[str]:
    """Returns the paths of params that are not the rounded main parameters of the state.

    Each device compares the shard of which it has the main parameters; nothing is gathered. Leaves
    that share a bucket are named together. Remainders are not compared: with them the parameters
    are a part of the main parameters themselves, and what they hold is what is updated.
    """
    config = tx.config
    main = find_state(opt_state).main_params
    if main is None or config.policy.keeps_remainders:
        return []
    layout = config.layout(config.tensor_local(params))
    compare = compat.shard_map(
        lambda params, main: _differ_local(config, layout, params, main),
        mesh=config.mesh,
        in_specs=(tx.param_specs(params), config.parallel.state_spec),
        out_specs=jax.sharding.PartitionSpec(),
    )
    differ = np.asarray(jax.jit(compare)(params, main))
    buckets = [bucket for bucket in layout.buckets if bucket.has_main]
    return [
        layout.leaves[i].path
        for bucket, found in zip(buckets, differ.tolist(), strict=True)
        for i in bucket.leaves
        if found
    ]


def _differ_local(config: DistributedConfig, layout: Layout, params: Any, main: Any) -> jax.Array:
    """For each bucket with main parameters, whether any device's shard of the params differs."""
    leaves = jax.tree.leaves(params)
    found = []
    for bucket in (bucket for bucket in layout.buckets if bucket.has_main):
        kept = main[bucket.offset : bucket.offset + bucket.shard_size].reshape(bucket.shard_shape)
        rounded = kept.astype(bucket.dtype)
        have = state_shard(config, bucket, leaves, bucket.dtype)
        equal = (have == rounded) | (jnp.isnan(have) & jnp.isnan(rounded))
        if config.policy.param_comm_dtype is not None:  # as they arrived, not before the first step
            arrived = collectives.round_to(rounded, config.policy.param_comm_dtype)
            equal |= have == arrived.astype(bucket.dtype)
        found.append(~jnp.all(equal))
    everyone = config.parallel.data_axes + config.parallel.tensor_axes
    return collectives.all_reduce(jnp.stack(found).astype(jnp.int32), everyone) > 0
