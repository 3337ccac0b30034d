"""The distributed step on one device; runs inside ``jax.shard_map``.

If the transport is peer memory,

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
gradients are freed before the kernel: 2 P bytes of them instead of 2 P (N - 1) / N + 2 P, for P
bfloat16 gradients. Two devices would copy half of the gradients to free the
other half. At the rate of the copies above that takes 0.9 ms of the 1.2 ms that sending ahead saves
there, so two devices keep whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdistadam.core import collectives, trees
from jdistadam.core.collectives import make_primitive
from jdistadam.core.guards import LossScaleState, new_loss_scale, new_norm_guard
from jdistadam.core.hyperparameters import at_count
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed import host_memory, packing
from jdistadam.distributed.accumulate import local_grads, sum_over_devices
from jdistadam.distributed.checks import check_inside, check_options, check_step
from jdistadam.distributed.communication import keeps_shards_alone, places
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import types_of_arrays
from jdistadam.distributed.flat_parts import in_parts
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.main_params import main_shard, new_ema, next_ema
from jdistadam.distributed.norms import norm_and_finite, norm_of_squares, norms_of
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import (
    DistributedState,
    StepResult,
    check_own_state,
    differs,
    find_state,
)
from jdistadam.distributed.store import FlatState
from jdistadam.distributed.update import ShardUpdate, update_shards
from jdistadam.distributed.verdict import Verdict
from jdistadam.errors import PolicyError, TreeError
from jdistadam.kernels import multi_tensor, native


def init_local(config: DistributedConfig, layout: Layout, params: Params) -> DistributedState:
    """This device's part of the initial state; ``params`` are whole, or shards."""
    if layout.main_size or config.ema_decay is not None:
        check_not_transformed("init", params)
    leaves = jax.tree.leaves(params)

    def mains(config: DistributedConfig, layout: Layout) -> Any:
        return main_shard(config, layout, leaves) if layout.main_size else None

    # Varying over the axes, as shards are, for the type checker of shard_map.
    axes = config.parallel.state_axes + config.parallel.tensor_axes

    types = types_of_arrays(config, layout)

    def zeros(name: str) -> Any:
        return jax.tree.map(lambda x: collectives.to_varying(jnp.zeros_like(x), axes), types[name])

    def average(config: DistributedConfig, layout: Layout, main: Any) -> Any:
        return new_ema(config, layout, leaves, main)

    main = in_parts(config, layout, mains)
    storage = config.algorithm.storage
    new = DistributedState(
        count=jnp.zeros((), jnp.int32),
        main_params=main if config.policy.main_params.is_stored else None,
        mu=zeros("mu"),
        nu=zeros("nu"),
        grad_norm=jnp.zeros((), jnp.float32),
        layout_digest=jnp.asarray(config.layout_digest(layout)),
        scaling=None if config.loss_scale is None else new_loss_scale(config.loss_scale),
        key=storage.key if storage.is_stochastic else None,
        guard=None if config.norm_guard is None else new_norm_guard(),
        ema=None if config.ema_decay is None else in_parts(config, layout, average, main),
    )
    return host_memory.to_host(config, new)


def step_local(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Grads,
    state: DistributedState,
    params: Params,
) -> StepResult:
    """One step on one device: reduction, norm, kernel, all-gather.

    With a state of another layout the coefficients are NaN and the step is never skipped: so
    parameters, moments and norm become NaN, and the digest stays that of the other layout.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: Local gradients, or the result of ``accumulate``.
      state: The state.
      params: The params in the form that this device holds.
    """
    check_inside(config.parallel, "step")
    check_own_state(state)
    check_not_transformed("step", (grads, state, params))
    host_memory.check_memory(config, grads=grads, opt_state=state, params=params)
    layout = schedule.layout
    check_step(config, layout, state)
    leaves: list[Any] = jax.tree.leaves(params)
    over_peers = config.communication.is_peer and bool(schedule.buckets)
    update = step_over_peer_memory if over_peers else _step_over_xla
    done, verdict = update(config, schedule, grads, state, leaves)
    new = leaves_of_buckets(layout, done.gathered)
    if config.policy.param_comm_dtype is not None:
        # Rounding for sending would change params that a skipped step must leave unchanged.
        new = {i: trees.keep_if(verdict.is_skipped, leaves[i], leaf) for i, leaf in new.items()}
    for i, leaf in new.items():
        leaves[i] = leaf  # frozen and empty leaves stay unchanged
    is_skipped = verdict.is_skipped
    new_state = DistributedState(
        count=trees.keep_if(is_skipped, state.count, optax.safe_increment(state.count)),
        main_params=done.flat.main_params,
        mu=done.flat.mu,
        nu=done.flat.nu,
        grad_norm=verdict.norm,
        layout_digest=state.layout_digest,
        scaling=verdict.next_scaling(config, state.scaling),
        key=state.key,
        guard=verdict.next_guard(config, state.guard),
        ema=next_ema(
            config,
            layout,
            state.ema,
            done.shards,
            done.flat.main_params,
            is_skipped,
            after=jax.tree.leaves(done.flat),  # windows of both are not on the device at once
        ),
    )
    return StepResult(
        schedule.treedef.unflatten(leaves),
        new_state,
        is_skipped,
        verdict.is_other,
        jnp.float32(at_count(config.algorithm.hyper.learning_rate, state.count)),
        norms_of(config, layout, done.squares, verdict),
    )


def _is_other(config: DistributedConfig, schedule: Schedule, state: DistributedState) -> jax.Array:
    """Whether the state has another layout than that of the params."""
    return differs(state.layout_digest, config.layout_digest(schedule.layout))


def _step_over_xla(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Grads,
    state: DistributedState,
    leaves: list[Any],
) -> tuple[ShardUpdate, Verdict]:
    """Reduction, norm, kernels, and gathers by XLA's collectives."""
    is_other = _is_other(config, schedule, state)
    summed = sum_over_devices(config, schedule, grads)
    norm, found_inf = norm_and_finite(config, schedule.layout, summed, state.scaling)
    verdict = Verdict.of(config, state, norm, found_inf, grads=summed, is_other=is_other)
    done = update_shards(
        config, schedule, verdict.scalars, grads=summed.arrays, state=state, params=leaves
    )
    return done, verdict


def scaling_of(config: DistributedConfig, state: Any) -> LossScaleState | None:
    """The loss scale of a state, which may be a chain's; None without ``loss_scale``."""
    if config.loss_scale is None:
        return None
    if state is None:
        raise TreeError(
            "grad_norm: needs the state, because the gradients were multiplied by its loss scale: "
            "got None, expected tx.grad_norm(grads, opt_state). Pass the state."
        )
    check_options(config, find_state(state))
    return find_state(state).scaling


def grad_norm_local(
    config: DistributedConfig, schedule: Schedule, grads: Grads, scaling: LossScaleState | None
) -> jax.Array:
    """The global norm of the mean gradient, reduced as a step reduces it."""
    check_inside(config.parallel, "grad_norm")
    summed = sum_over_devices(config, schedule, grads)
    return norm_and_finite(config, schedule.layout, summed, scaling)[0]


def leaves_of_buckets(layout: Layout, arrays: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """Returns the content of all buckets by leaf index."""
    leaves: dict[int, jax.Array] = {}
    for bucket, x in zip(layout.buckets, arrays, strict=True):
        leaves.update(packing.leaves_of_bucket(layout, bucket, x))
    return leaves


def check_not_transformed(function: str, tree: Any) -> None:
    """Raises PolicyError if ``jax.vmap`` or a derivative runs over an array of ``tree``.

    Inside a jit such an array looks like any other, but JAX calls the rule of a primitive. Its
    results are unused, so the compiled program does not contain it.
    """
    _passed_p.bind(*jax.tree.leaves(tree), function=function)


def _batched(leaves: Any, dims: Any, *, function: str) -> Any:
    sizes = {x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None}
    raise PolicyError(
        f"{function}: a distributed optimizer cannot run under jax.vmap: got vmap over "
        f"{', '.join(map(str, sizes))}, expected one model, on all devices of the mesh. "
        "Step ensembles and sweeps with jax.vmap(fused_adamw(...).step)."
    )


def _jvp(leaves: Any, tangents: Any, *, function: str) -> Any:
    del tangents
    raise PolicyError(
        f"{function}: a distributed optimizer cannot be differentiated: got a derivative with "
        f"respect to some of {len(leaves)} arrays, expected only a use of its values. "
        "Differentiate "
        "fused_adamw(...).step, or put jax.lax.stop_gradient around what this one takes."
    )


_passed_p = make_primitive(
    "jdistadam_passed",
    lambda *leaves, function: list(leaves),
    lambda *leaves, function: list(leaves),
    batched=_batched,
    jvp=_jvp,
)


def step_over_peer_memory(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Grads,
    state: DistributedState,
    leaves: list[Any],
) -> tuple[ShardUpdate, Verdict]:
    """Reduction, norm, update and new parameters, bitwise equal to float32 sums over XLA.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: Local gradients, or the result of ``accumulate``.
      state: The state.
      leaves: The leaves of the params.
    """
    is_other = _is_other(config, schedule, state)
    local = local_grads(config, schedule, grads)
    scaling, buckets = state.scaling, schedule.layout.buckets
    norm_scale = jnp.float32(1) if scaling is None else 1 / scaling.loss_scale
    is_early = schedule.order is not None  # [Note: sent ahead]
    is_sent = [is_early and x.reduce[0].op == "collective-permute" for x in schedule.buckets]
    flat, spec = FlatState(state.main_params, state.mu, state.nu), _spec(config, buckets, is_sent)
    arrays, received = _send_ahead(config, spec, buckets, local.arrays)
    norm, found_inf = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    if config.takes_norm_first:
        arrays, squares, found = multi_tensor.sum_over_peers(spec, norm_scale, arrays, received)
        received = []
        norm, found_inf = norm_of_squares(config, squares, found, local.mean_scale, scaling)
    verdict = Verdict.of(config, state, norm, found_inf, grads=local, is_other=is_other)
    params, flat_arrays, of_sums = multi_tensor.step_over_peers(
        spec,
        verdict.scalars,
        arrays,
        received,
        flat,
        norm_scale=norm_scale,
        param_types=[_type_of_params(bucket, schedule, leaves) for bucket in buckets],
        summed=config.takes_norm_first,
    )
    if of_sums is not None:
        known = norm_of_squares(config, *of_sums, local.mean_scale, scaling)
        verdict = verdict.with_norm(*known)
    return ShardUpdate(FlatState(*flat_arrays), params, params), verdict


def _send_ahead(
    config: DistributedConfig,
    spec: multi_tensor.PeerSpec,
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
) -> multi_tensor.PeerSpec:
    """The static side of the calls."""
    return multi_tensor.PeerSpec(
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
