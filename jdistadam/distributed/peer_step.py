"""A step whose transport is peer memory; inside ``jax.shard_map``.

    gradients of all devices -> sum -> update -> parameters of all devices

is one kernel, which also computes the norm, if the update does not depend on the norm. With
``max_grad_norm``, ``loss_scale`` or ``norm_guard`` it does; then there are two kernels, with the
norm between them.

[Note: sent ahead] In ``train_step`` a backward pass computes the gradients one after another. As
soon as a gradient is computed, its shards are sent to the devices that sum them (schedule.py
decides which gradients). So (N - 1) / N of the gradients are sent during the backward pass, by the
copy engines if ``train_step`` asks XLA for them, and the kernel reads them from this device's own
memory. This costs one copy of that part, because XLA sends whole arrays. In a custom training loop
gradients may exist before the program starts, so the kernel reads them in place.

Among four or eight devices each also copies its own shard, 1 / N of the gradients, so that the sent
gradients are freed before the kernel: compiled for eight H200s, a GPT of 1.3e9 parameters takes 2.7
instead of 4.9 GB of temporary memory. Two devices would copy half of the gradients to free the
other half. At the rate of the copies above that takes 0.9 ms of the 1.2 ms that sending ahead saves
there, so two devices keep whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdistadam.core import collectives
from jdistadam.core.types import Grads
from jdistadam.distributed import packing
from jdistadam.distributed.accumulate import AccumulatedGrads, local_grads
from jdistadam.distributed.communication import keeps_shards_alone, places
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.update import (
    FlatState,
    UpdateResult,
    norm_of_squares,
    skipped,
    step_scalars,
)
from jdistadam.kernels import native, peer

sending_ahead: Any = jax.make_user_context(False)
"""Whether gradients come in sequence from a backward pass of this program: [Note: sent ahead]."""


def step_over_peer_memory(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Grads,
    state: DistributedState,
    leaves: list[Any],
    is_other: jax.Array,
) -> UpdateResult:
    """Reduction, norm, update and new parameters, bitwise equal to float32 sums over XLA.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: Local gradients, or the result of ``accumulate``.
      state: The state.
      leaves: The leaves of the params.
      is_other: Whether the state has another layout.
    """
    local = local_grads(config, schedule, grads)
    scaling, buckets = state.scaling, schedule.layout.buckets
    norm_scale = jnp.float32(1) if scaling is None else 1 / scaling.loss_scale
    is_early = sending_ahead.value and not isinstance(grads, AccumulatedGrads)
    is_sent = [is_early and x.reduce[0].op == "collective-permute" for x in schedule.buckets]
    flat, spec = FlatState(state.main_params, state.mu, state.nu), _spec(config, buckets, is_sent)
    arrays, received = _send_ahead(config, spec, buckets, local.buckets)
    norm, found_inf = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    if config.takes_norm_first:
        arrays, squares, found = peer.sum_over_peers(spec, norm_scale, arrays, received)
        received = []
        norm, found_inf = norm_of_squares(config, squares, found, local.mean_scale, scaling)
    norm, found_inf = jnp.where(is_other, jnp.nan, norm), found_inf & ~is_other
    is_skipped = skipped(config, state, norm, found_inf, local.is_empty, is_other)
    params, flat_arrays, of_sums = peer.step_over_peers(
        spec,
        step_scalars(config, state, local.mean_scale, norm, is_skipped, is_other),
        arrays,
        received,
        flat,
        norm_scale=norm_scale,
        param_types=[_type_of_params(bucket, schedule, leaves) for bucket in buckets],
        summed=config.takes_norm_first,
    )
    if of_sums is not None:
        norm, found_inf = norm_of_squares(config, *of_sums, local.mean_scale, scaling)
        norm = jnp.where(is_other, jnp.nan, norm)
    new: dict[int, jax.Array] = {}
    for bucket, whole in zip(buckets, params, strict=True):
        new.update(packing.leaves_of_bucket(schedule.layout, bucket, whole))
    flat = FlatState(*flat_arrays)
    return UpdateResult(flat, params, new, norm, found_inf, is_skipped, local.is_empty)


def _send_ahead(
    config: DistributedConfig,
    spec: peer.PeerSpec,
    buckets: Sequence[Bucket],
    grads: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sends the other devices their shards of gradients.

    Returns:
      The part of its own gradients that this device still needs, and its shards of all others'
      gradients, starting with the next lower place.
    """
    axes, n = config.parallel.data_axes, config.parallel.num_devices
    me, own, received = collectives.axis_index(axes), list(grads), list[jax.Array]()
    for i, bucket in enumerate(buckets):
        if not spec.received[i]:
            continue
        length, dim = bucket.shard_shape[bucket.cut_dim], bucket.cut_dim
        parts = [
            lax.dynamic_slice_in_dim(grads[i], (me + distance) % n * length, length, dim)
            for distance in range(0 if spec.takes_shards else 1, n)
        ]
        if spec.takes_shards:
            # All at once, so the gradient can be freed before any of them is sent.
            own[i], *parts = lax.optimization_barrier(parts)
        for distance, part in enumerate(parts, start=1):
            received.append(collectives.send_around(part, axes, distance=distance, devices=n))
    return own, received


def _spec(
    config: DistributedConfig, buckets: Sequence[Bucket], is_sent: Sequence[bool]
) -> peer.PeerSpec:
    """The static side of the calls."""
    return peer.PeerSpec(
        devices=places(config.mesh),
        sizes=tuple(bucket.shard_size for bucket in buckets),
        runs=tuple(math.prod(bucket.shard_shape[bucket.cut_dim :]) for bucket in buckets),
        offsets=tuple(bucket.offset for bucket in buckets),
        groups=tuple(bucket.group for bucket in buckets),
        flags=config.algorithm.hyper.flags,
        received=tuple(is_sent),
        takes_shards=keeps_shards_alone(config.parallel),
    )


def _type_of_params(bucket: Bucket, schedule: Schedule, leaves: list[Any]) -> Any:
    """The type of a bucket's new parameters: like that of the old ones."""
    if not bucket.is_packed:
        return jax.typeof(leaves[bucket.leaf])
    size = schedule.layout.whole_size(bucket)
    return native.type_like(leaves[bucket.leaves[0]], (size,), bucket.dtype)
