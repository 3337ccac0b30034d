"""Gradients of several micro-batches, and the factor of their sum; inside shard_map."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, trees
from jdistadam.core.trees import Grads
from jdistadam.distributed import communication, packing
from jdistadam.distributed.checks import check_grads, check_inside
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.shard import is_shard, leaves_of, refuse_sums
from jdistadam.errors import MeshError, TreeError


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sums", "weight"], meta_fields=["like"]
)
@dataclasses.dataclass(frozen=True)
class AccumulatedGrads:
    """Gradients of several micro-batches, as ``tx.accumulate`` returns them.

    Attributes:
      sums: The weighted sum of gradients in main_grads_dtype. Under "optim_grads" and
        "optim_grads_params" a list: for each bucket of the layout this device's shard of the sum
        over ``shard_axis``. Under "no_shard" and "optim", and with ``reshard_after_forward=False``,
        a tree like params of this device's own gradients.
      weight: Shape (), float32: the sum of this device's weights. A numpy number if it is known at
        compile time, the same on all devices and above zero.
      like: Structure, shapes and dtypes of the params, on which the layout depends.
    """

    sums: Any
    weight: Any
    like: Any

    def like_params(self) -> Any:
        """Returns shapes and dtypes of the params.

        Returns:
          A tree of ``jax.ShapeDtypeStruct``.
        """
        treedef, leaves = self.like
        return treedef.unflatten(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves)


def likeness(schedule: Schedule) -> Any:
    """Returns structure, shapes and dtypes of params, as in ``AccumulatedGrads.like``."""
    leaves = schedule.layout.leaves
    return schedule.treedef, tuple((leaf.shape, jnp.dtype(leaf.dtype).name) for leaf in leaves)


def init_grads_local(config: DistributedConfig, schedule: Schedule) -> AccumulatedGrads:
    """The sum before the first micro-batch."""
    check_inside(config.parallel, "init_grads")
    layout, dtype = schedule.layout, config.policy.main_grads_dtype
    sums: Any
    if config.parallel.shards_grads:
        sums = [jnp.zeros(bucket.inner_shape, dtype) for bucket in layout.buckets]
    else:
        sums = schedule.treedef.unflatten(jnp.zeros(leaf.shape, dtype) for leaf in layout.leaves)
    zeros = AccumulatedGrads(sums, jnp.zeros((), jnp.float32), likeness(schedule))
    axes = config.parallel.data_axes
    return jax.tree.map(lambda x: collectives.to_varying(x, axes), zeros)


def accumulate_local(
    config: DistributedConfig,
    acc: AccumulatedGrads,
    grads: Grads,
    weight: Any,
    *,
    weighted_in: str | None,
) -> AccumulatedGrads:
    """Adds one micro-batch's gradients in main_grads_dtype.

    ``weighted_in``: "gather": shards already have the weight from before ``gather_params`` summed
    them. "loss": all gradients have it.
    """
    check_inside(config.parallel, "accumulate")
    _check_sum(acc)
    schedule = config.schedule(acc.like_params())
    if not config.parallel.shards_grads:
        refuse_sums(
            grads,
            ", but acc sums this device's own gradients",
            "With reshard_after_forward=False differentiate with respect to "
            "gather_params(local_params(params, opt), opt).",
        )
    check_grads(config, schedule, grads, marker=acc.weight, like_name="accumulated grads")
    trees.check_scalar("weight", 1 if weight is None else weight)
    dtype = config.policy.main_grads_dtype
    if weight is not None:
        weight = valid_weight(weight)
        if weighted_in is None:
            _refuse_late_weight(schedule)
            refuse_sums(
                grads,
                ": this device's weight comes too late",
                "Multiply the loss by the weight, divided by the sum of all weights, and pass no "
                "weight.",
            )
        if weighted_in != "loss":
            grads = jax.tree.map(
                lambda x: x if is_shard(x) else weighted(x.astype(jnp.float32), weight),
                grads,
                is_leaf=is_shard,
            )
    if config.parallel.shards_grads:
        grads = summed_shards(config, schedule, leaves_of(grads), of_step=False)

    def add(total: jax.Array, grad: jax.Array) -> jax.Array:
        grad = collectives.to_varying(grad, tuple(collectives.varying_axes(total)))
        return (total.astype(jnp.float32) + grad.astype(jnp.float32)).astype(dtype)

    new_weight = acc.weight + jnp.asarray(1 if weight is None else weight, jnp.float32)
    return dataclasses.replace(acc, sums=jax.tree.map(add, acc.sums, grads), weight=new_weight)


def _check_sum(acc: Any) -> None:
    """Raises TreeError unless ``acc`` is a sum of gradients."""
    if not isinstance(acc, AccumulatedGrads):
        raise TreeError(
            f"acc: not a sum of gradients: got {type(acc).__name__}, "
            "expected what init_grads or accumulate returned. "
            "Begin with tx.init_grads(params); call tx.accumulate(acc, grads, weight)."
        )


def _refuse_late_weight(schedule: Schedule) -> None:
    """Raises MeshError if gradients are sums over devices that each have a weight."""
    for leaf in schedule.layout.leaves:
        if leaf.split > 1:
            raise MeshError(
                f"{leaf.path}: differs along an axis of data, and its gradient is of the data of "
                "several devices: this device's weight comes too late: got a weight, expected "
                "None. Multiply the loss by the weight, divided by the sum of all weights, and "
                "pass no weight."
            )


def weighted(x: jax.Array, weight: Any) -> jax.Array:
    """``x * weight`` in float32, and zero if the weight is zero, even for a non-finite x.

    The mean over no tokens is NaN, and must not count. A NaN weight makes the result NaN.
    """
    weight = valid_weight(weight)
    return jnp.where(weight == 0, jnp.zeros((), x.dtype), x * weight)


def valid_weight(weight: Any) -> jax.Array:
    """A weight in float32; NaN if it is negative, because a program cannot raise."""
    weight = jnp.asarray(weight, jnp.float32)
    return jnp.where(weight < 0, jnp.nan, weight)


def mean_factor(config: DistributedConfig, weight: Any) -> tuple[jax.Array, jax.Array | None]:
    """The factor of a sum over devices: one over the sum of all weights, or zero.

    Args:
      config: The configuration.
      weight: This device's weight, a float32 scalar. None: 1 on every device. A numpy number: the
        same on every device.

    Returns:
      The factor, and whether the sum of weights is zero; None if that is impossible.
    """
    num_devices = config.parallel.num_devices
    if weight is None or isinstance(weight, np.generic):
        return jnp.float32(1 / (num_devices * (1 if weight is None else float(weight)))), None
    total = collectives.all_reduce(weight, config.parallel.data_axes)
    return jnp.where(total == 0, 0, 1 / total), total == 0


class StepGrads(NamedTuple):
    """Checked gradients, as a step uses them.

    Attributes:
      arrays: This device's shard of the sum of every bucket over devices; ``Parts`` if they have
        arrived, but are not added yet.
      mean_scale: The factor that turns the sum into the mean, shape (), float32; 1 without
        average_grads.
      is_empty: Whether the total weight is zero, shape (), bool; None if that is impossible.
    """

    arrays: list[Any]
    mean_scale: jax.Array
    is_empty: jax.Array | None


def _sums_and_weight(grads: Grads) -> tuple[Any, Any]:
    """Gradients, or sums of them, and this device's weight; None: 1."""
    is_accumulated = isinstance(grads, AccumulatedGrads)
    return (grads.sums, grads.weight) if is_accumulated else (grads, None)


def _mean_scale(config: DistributedConfig, weight: Any) -> tuple[jax.Array, jax.Array | None]:
    """``mean_factor``, or 1 without average_grads."""
    factor, is_empty = mean_factor(config, weight)
    return factor if config.average_grads else jnp.float32(1), is_empty


def _check_local(config: DistributedConfig, schedule: Schedule, grads: Grads) -> None:
    """Raises unless gradients are like the params and each device's own."""
    marker = collectives.axis_index(config.parallel.data_axes)  # varies, if types say so
    check_grads(config, schedule, grads, marker=marker, like_name="params")


def _whole_buckets(
    config: DistributedConfig, schedule: Schedule, grads: Sequence[Any]
) -> Iterator[Any]:
    """The gradient of each bucket in its own dtype; small leaves are packed."""
    for entry in schedule.buckets:
        bucket = entry.bucket
        if bucket.is_packed:
            dtype = jnp.promote_types(bucket.dtype, config.policy.comm_dtype)
            yield packing.bucket_array(bucket, grads, dtype)
        else:
            yield grads[bucket.leaf]


def summed_gradients(config: DistributedConfig, schedule: Schedule, grads: Grads) -> StepGrads:
    """Sums local gradients, or the result of ``accumulate``, over all devices.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: The gradients.
    """
    sums, weight = _sums_and_weight(grads)
    if weight is None or not config.parallel.shards_grads:
        _check_local(config, schedule, sums)
        shards = summed_shards(config, schedule, leaves_of(sums), of_step=True)
    else:  # summed over shard_axes, micro-batch by micro-batch
        pairs = zip(schedule.buckets, sums, strict=True)
        shards = [
            communication.sum_gradients([entry.reduce_outer], shard, entry.bucket.cut_dim)
            for entry, shard in pairs
        ]
    return StepGrads(shards, *_mean_scale(config, weight))


def summed_shards(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Sequence[Any],
    *,
    of_step: bool,
) -> list[Any]:
    """Returns this device's shard of every bucket's gradient sum over ``shard_axes``.

    A ``Shard`` in ``grads`` is already summed over ``shard_axes``. The sums of a step are also over
    ``replica_axes``, and parts that do not come from XLA are not added; those of a micro-batch are.
    """
    shards = list[Any]()
    arrays = _whole_buckets(config, schedule, grads)
    for entry, array in zip(schedule.buckets, arrays, strict=True):
        phases = [entry.reduce, entry.reduce_outer] if of_step else [entry.reduce]
        if is_shard(array):
            phases, array = phases[1:], array.value
        dim = entry.bucket.cut_dim
        parts = communication.exchanged_parts(phases, array, dim) if of_step else None
        shards.append(parts or communication.sum_gradients(phases, array, dim))
    return shards
