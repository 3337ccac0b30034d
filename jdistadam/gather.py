"""Whole parameters from shards, differentiable: the transpose is the policy's reduction."""

from __future__ import annotations

from typing import Any

import jax

from jdistadam.distributed_checks import check_inside
from jdistadam.distributed_config import DistributedConfig
from jdistadam.distributed_transformation import DistributedTransformation
from jdistadam.gradient_reduction import gather_shards, reduce_inner


def gather_params(shards: Any, tx: DistributedTransformation) -> Any:
    r"""Gathers sharded parameters over ``shard_axis``; inside ``jax.shard_map``.

    For "optim_grads_params". Leaves that are not sharded are returned as they are. Shards travel
    in ``policy.param_comm_dtype``. The gradient with respect to a shard is this device's part of

    .. math:: \sum_r g_r

    summed over ``shard_axis`` as the policy says, rounded to the dtype of the parameter; ``step``
    takes it as it is, and gradients with respect to the whole leaf likewise. In your own loop::

        grads = jax.grad(lambda p: loss(jda.gather_params(p, tx)))(jda.local_params(params, tx))

    Args:
      shards: The params as this device holds them.
      tx: The optimizer. ``tx.init`` or ``tx.param_specs`` must have seen the params.

    Returns:
      The whole params, on every device.

    Raises:
      MeshError: Called outside of shard_map, or the shapes of these shards are not known.
    """
    config = tx.config
    check_inside(config.parallel, "gather_params")
    whole = config.whole(shards)
    leaves = list(jax.tree.leaves(shards))
    for bucket in config.layout(whole).buckets:
        i = bucket.leaves[0]
        if config.is_sharded_param(bucket) and leaves[i].shape == config.inner_shard_shape(bucket):
            assert bucket.dim is not None
            leaves[i] = _gather_leaf(config, bucket.dim, leaves[i])
    return jax.tree.unflatten(jax.tree.structure(shards), leaves)


def _gather_leaf(config: DistributedConfig, dim: int, shard: jax.Array) -> jax.Array:
    parallel, policy = config.parallel, config.policy

    @jax.custom_vjp
    def gather(shard: jax.Array) -> jax.Array:
        # Typed as varying: otherwise types would have every use of it summed over the devices.
        return gather_shards(parallel, policy, shard, parallel.shard_axes, dim, to="varying")

    def forward(shard: jax.Array) -> tuple[jax.Array, None]:
        return gather(shard), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        summed = reduce_inner(parallel, policy, cotangent, dim)
        return (summed.astype(shard.dtype),)

    gather.defvjp(forward, backward)
    return gather(shard)
