"""Parameters as a loss takes them: local to a device, and whole, with local or summed gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jdistadam.core import varying
from jdistadam.core.types import Params
from jdistadam.distributed import model_axes, transport
from jdistadam.distributed.checks import check_inside
from jdistadam.distributed.schedule import BucketSchedule
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed


def local_params(params: Params, tx: DistributedTransformation) -> Any:
    """Marks replicated params as different on each device, BEFORE ``jax.grad``.

    Inside ``jax.shard_map(check_vma=True)`` the gradient of a replicated array is summed over the
    devices on the way; of the array that this returns, it stays local, as ``tx.step`` needs it.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "local_params", over_data_alone=True)
    axes = tx.config.parallel.data_axes
    return jax.tree.map(lambda x: varying.to_varying(x, axes), params)


def gather_params(shards: Any, tx: DistributedTransformation) -> Any:
    r"""Gathers sharded parameters over ``shard_axis``; inside ``jax.shard_map``.

    For "optim_grads_params". Leaves that are not sharded are returned as they are, and so are
    stacked ones, unless ``shards`` is one layer of them inside of ``jax.lax.scan``. Shards travel
    in ``policy.param_comm_dtype``. The gradient with respect to a shard is this device's part of

    .. math:: \sum_r g_r

    summed over ``shard_axis`` as the policy says, rounded to the dtype of the parameter; ``step``
    takes it as it is, and gradients with respect to the whole leaf likewise. In your own loop::

        grads = jax.grad(lambda p: loss(jda.gather_params(p, tx)))(jda.local_params(params, tx))

    In a model that scans over stacked layers, also under ``train_step``::

        @functools.partial(jax.checkpoint, policy=jda.remat_policy)
        def body(x, layer):
            return block(jda.gather_params(layer, tx), x), None

        x, _ = jax.lax.scan(body, x, params["layers"])

    so that one layer's parameters are gathered at a time, forward and backward, and each layer's
    gradients are reduced while the backward pass computes those of the next.

    Args:
      shards: The params as this device holds them, or one layer of stacked params: any part of the
        tree of which all leaves are stacked.
      tx: The optimizer. ``tx.init`` or ``tx.param_specs`` must have seen the params.

    Returns:
      The whole params, on every device.

    Raises:
      MeshError: Called outside of shard_map, or the shapes of these shards are not known.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "gather_params", over_data_alone=True)
    leaves: list[Any] = list(jax.tree.leaves(shards))
    on_a_device, run = model_axes.each_leaf(tx.config, shards)
    for i, (dim, entry) in _gathered_leaves(tx, on_a_device).items():
        leaves[i] = _gather_leaf(entry, dim, leaves[i], run(i))
    return jax.tree.unflatten(jax.tree.structure(shards), leaves)


def remat_policy(primitive: Any, *_: Any, **__: Any) -> bool:
    """Says what ``jax.checkpoint`` saves: not what ``gather_params`` returned, so it gathers again.

    Saved is what costs time to compute: products, reductions, exponentials, foreign calls. What
    only moves or converts is done again, so that no gathered parameter stays in memory from the
    forward to the backward pass::

        body = jax.checkpoint(body, policy=jda.remat_policy)

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=remat_policy)
      >>> jax.grad(lambda w: f(w, jnp.ones((1, 2))).sum())(jnp.zeros((2, 2))).tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """
    return primitive.name not in _GATHERED_AGAIN


# The collective itself, and what may lie between it and the first use: saved, these would keep a
# whole parameter alive.
_GATHERED_AGAIN = frozenset(
    "all_gather all_gather_invariant pvary pcast reduce_precision optimization_barrier name "
    "convert_element_type bitcast_convert_type reshape squeeze expand_dims transpose "
    "broadcast_in_dim slice concatenate copy custom_vjp_call jit".split()
)


def _gathered_leaves(
    tx: DistributedTransformation, shards: Any
) -> dict[int, tuple[int, BucketSchedule]]:
    """Which leaves to gather, and how: of all params, or of one scanned layer."""
    layer = tx.seen.layer(shards)
    if layer is not None:
        return {i: (x.dim, x.schedule) for i, x in enumerate(layer) if x is not None}
    leaves, gathered = jax.tree.leaves(shards), {}
    for entry in tx.seen.schedule(shards).buckets:
        bucket = entry.bucket
        is_scanned = bucket.num_layers is not None  # gathered layer by layer
        if bucket.is_sharded_param and not is_scanned:
            if leaves[bucket.leaf].shape == bucket.inner_shape:
                gathered[bucket.leaf] = bucket.cut_dim, entry
    return gathered


def _gather_leaf(
    entry: BucketSchedule, dim: int, shard: jax.Array, run: Callable[..., jax.Array]
) -> jax.Array:
    """Gathers one leaf; ``run(f, x)`` is ``f(x)``, manual over all axes of the mesh."""

    @jax.custom_vjp
    def gather(shard: jax.Array) -> jax.Array:
        # Typed as varying: otherwise types would have every use of it summed over the devices.
        return run(lambda x: transport.gather_parameters(entry.gather, x, dim, to="varying"), shard)

    def forward(shard: jax.Array) -> tuple[jax.Array, None]:
        return gather(shard), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        summed = run(lambda x: transport.sum_gradients([entry.reduce], x, dim), cotangent)
        return (summed.astype(shard.dtype),)

    gather.defvjp(forward, backward)
    return gather(shard)
