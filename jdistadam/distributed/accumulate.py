"""Gradients of several micro-batches, and what their sum is multiplied by; inside shard_map."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, trees, varying
from jdistadam.distributed import packing
from jdistadam.distributed.checks import check_grads, check_inside, refuse_weights_of_sums
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.reduce import reduce_inner
from jdistadam.errors import TreeError


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sums", "weight"], meta_fields=["like"]
)
@dataclasses.dataclass(frozen=True)
class AccumulatedGrads:
    """Gradients of several micro-batches, as ``tx.accumulate`` returns them.

    Attributes:
      sums: The weighted sum of gradients, in main_grads_dtype. Under "no_shard" and "optim" a tree
        like params, of this device's own gradients. Under "optim_grads" and "optim_grads_params"
        a list, for each bucket of the layout this device's shard of the sum over ``shard_axis``.
      weight: Shape (), float32: the sum of this device's weights. A numpy number where it is
        known while compiling, the same on all devices and above zero.
      like: Structure, shapes and dtypes of the params, on which the layout depends.
    """

    sums: Any
    weight: Any
    like: Any

    def like_params(self) -> Any:
        """Returns shapes and dtypes of the params."""
        treedef, leaves = self.like
        return treedef.unflatten(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves)


def init_grads_local(config: DistributedConfig, params: Any) -> AccumulatedGrads:
    """A sum of no gradients."""
    check_inside(config.parallel, "init_grads")
    trees.check_dtypes(params, name="params")
    whole = config.whole(params)
    dtype = config.policy.main_grads_dtype
    if config.parallel.shards_grads:
        shapes: Any = [config.inner_shard_shape(b) for b in config.layout(whole).buckets]
        sums = [jnp.zeros(shape, dtype) for shape in shapes]
    else:
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), whole)
    leaves = tuple((tuple(x.shape), jnp.dtype(x.dtype).name) for x in jax.tree.leaves(whole))
    zeros = AccumulatedGrads(sums, jnp.zeros((), jnp.float32), (jax.tree.structure(whole), leaves))
    axes = config.parallel.data_axes
    return jax.tree.map(lambda x: varying.to_varying(x, axes), zeros)


def accumulate_local(
    config: DistributedConfig, acc: AccumulatedGrads, grads: Any, weight: Any
) -> AccumulatedGrads:
    """Adds one micro-batch's gradients, in main_grads_dtype."""
    check_inside(config.parallel, "accumulate")
    _check_sum(acc)
    whole = acc.like_params()
    check_grads(config, grads, whole, acc.weight, like_name="accumulated grads")
    trees.check_scalar("weight", 1 if weight is None else weight)
    dtype = config.policy.main_grads_dtype
    if weight is not None:
        refuse_weights_of_sums(grads, whole)
        weight = _valid(weight)
        grads = jax.tree.map(lambda x: weighted(x.astype(jnp.float32), weight), grads)
    if config.parallel.shards_grads:
        grads = inner_shards(config, config.layout(whole), jax.tree.leaves(grads))

    def add(total: jax.Array, grad: jax.Array) -> jax.Array:
        grad = varying.to_varying(grad, tuple(varying.varying_axes(total) or ()))
        return (total.astype(jnp.float32) + grad.astype(jnp.float32)).astype(dtype)

    new_weight = acc.weight + jnp.asarray(1 if weight is None else weight, jnp.float32)
    return dataclasses.replace(acc, sums=jax.tree.map(add, acc.sums, grads), weight=new_weight)


def _check_sum(acc: Any) -> None:
    """Raises TreeError unless ``acc`` is a sum of gradients."""
    if not isinstance(acc, AccumulatedGrads):
        raise TreeError(
            "acc",
            "not a sum of gradients",
            got=type(acc).__name__,
            expected="what init_grads or accumulate returned",
            action="Begin with tx.init_grads(params); call tx.accumulate(acc, grads, weight).",
        )


def weighted(x: jax.Array, weight: Any) -> jax.Array:
    """``x * weight`` in float32, and zero where the weight is zero, whatever x holds.

    The mean over no tokens is NaN, and must not count. A weight that is NaN makes NaN of x.
    """
    weight = _valid(weight)
    return jnp.where(weight == 0, jnp.zeros((), x.dtype), x * weight)


def _valid(weight: Any) -> jax.Array:
    """A weight in float32. A negative one becomes NaN: a program cannot raise, this shows."""
    weight = jnp.asarray(weight, jnp.float32)
    return jnp.where(weight < 0, jnp.nan, weight)


def mean_factor(config: DistributedConfig, weight: Any) -> tuple[jax.Array, jax.Array | None]:
    """What a sum over devices is multiplied by: one over the sum of all weights, or zero.

    Args:
      config: The configuration.
      weight: This device's weight, a float32 scalar. None: 1 on every device. A numpy number: the
        same on every device.

    Returns:
      The factor, and whether the sum of weights is zero; None where that cannot be.
    """
    num_devices = config.parallel.num_devices
    if weight is None or isinstance(weight, np.generic):
        return jnp.float32(1 / (num_devices * (1 if weight is None else float(weight)))), None
    total = collectives.all_reduce(weight, config.parallel.data_axes)
    return jnp.where(total == 0, 0, 1 / total), total == 0


def inner_shards(
    config: DistributedConfig, layout: Layout, grads: Sequence[Any]
) -> list[jax.Array]:
    """Returns for every bucket this device's shard of the gradients' sum over ``shard_axis``.

    A gradient that has the shape of the shard already came through ``gather_params``: it is one.
    """
    parallel, policy = config.parallel, config.policy
    shards = []
    for bucket in layout.buckets:
        first = grads[bucket.leaves[0]]
        if config.is_sharded_param(bucket) and first.shape != layout.leaves[bucket.leaves[0]].shape:
            shards.append(first)
            continue
        whole = first  # as it lies, and in its own dtype
        if bucket.dim is None:
            dtype = jnp.promote_types(bucket.dtype, policy.wire_dtype)
            whole = packing.bucket_array(bucket, grads, dtype)
        shards.append(reduce_inner(parallel, policy, whole, bucket.dim or 0))
    return shards
