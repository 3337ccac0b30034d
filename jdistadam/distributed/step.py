"""The distributed step on one device; runs inside ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistadam.core import collectives, trees
from jdistadam.core.loss_scale import LossScaleState, new_loss_scale, next_loss_scale
from jdistadam.core.norm_guard import NormGuardState, new_norm_guard, next_norm_guard
from jdistadam.core.primitives import make_primitive
from jdistadam.core.types import Grads, Params
from jdistadam.distributed import communication, host_memory, packing
from jdistadam.distributed.accumulate import sum_over_devices
from jdistadam.distributed.checks import check_inside, check_options, check_step
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.ema import new_ema, next_ema
from jdistadam.distributed.flat_moments import types_of_moment
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.main_params import main_shard
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.norms import norms_of
from jdistadam.distributed.peer_step import step_over_peer_memory
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import (
    DistributedState,
    StepResult,
    check_own_state,
    differs,
    find_state,
)
from jdistadam.distributed.update import (
    UpdateResult,
    norm_and_finite,
    skipped,
    step_scalars,
    update_shards,
)
from jdistadam.errors import PolicyError, TreeError
from jdistadam.kernels.coefficients import at_count


def init_local(config: DistributedConfig, layout: Layout, params: Params) -> DistributedState:
    """This device's part of the initial state; ``params`` are whole, or shards."""
    main = None
    if layout.main_size or config.ema_decay is not None:
        check_not_transformed("init", params)
    if layout.main_size:
        main = main_shard(config, layout, jax.tree.leaves(params))
    # Varying over the axes, as shards are, for the type checker of shard_map.
    axes = config.parallel.state_axes + config.parallel.tensor_axes

    def zeros(name: str) -> Any:
        types = types_of_moment(config.algorithm, layout, name)
        return jax.tree.map(lambda x: collectives.to_varying(jnp.zeros_like(x), axes), types)

    storage = config.algorithm.storage
    new = DistributedState(
        count=jnp.zeros((), jnp.int32),
        main_params=main,
        mu=zeros("mu"),
        nu=zeros("nu"),
        grad_norm=jnp.zeros((), jnp.float32),
        layout_digest=jnp.asarray(config.layout_digest(layout)),
        scaling=None if config.loss_scale is None else new_loss_scale(config.loss_scale),
        key=storage.key if storage.is_stochastic else None,
        guard=None if config.norm_guard is None else new_norm_guard(),
        ema=new_ema(config, layout, jax.tree.leaves(params), main),
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
    is_other = differs(state.layout_digest, config.layout_digest(layout))
    if config.communication.is_peer and schedule.buckets:
        done = step_over_peer_memory(config, schedule, grads, state, leaves, is_other)
    else:
        summed = sum_over_devices(config, schedule, grads)
        norm, found_inf = norm_and_finite(config, layout, summed, state.scaling)
        norm, found_inf = jnp.where(is_other, jnp.nan, norm), found_inf & ~is_other
        is_skipped = skipped(config, state, norm, found_inf, summed.is_empty, is_other)
        scalars = step_scalars(config, state, summed.mean_scale, norm, is_skipped, is_other)
        flat, shards, sums = update_shards(
            config, layout, scalars, grads=summed.shards, state=state, params=leaves
        )
        new = gather_new_params(config.parallel, schedule, shards)
        if config.policy.param_comm_dtype is not None:
            # Rounding for sending would change params that a skipped step must leave unchanged.
            new = {i: trees.keep_if(is_skipped, leaves[i], leaf) for i, leaf in new.items()}
        norms = norms_of(config, layout, sums, norm, is_skipped, is_other)
        done = UpdateResult(flat, shards, new, norm, found_inf, is_skipped, summed.is_empty, norms)
    for i, leaf in done.leaves.items():
        leaves[i] = leaf  # frozen and empty leaves stay unchanged
    is_skipped = done.is_skipped
    new_state = DistributedState(
        count=trees.keep_if(is_skipped, state.count, optax.safe_increment(state.count)),
        main_params=done.flat.main_params,
        mu=done.flat.mu,
        nu=done.flat.nu,
        grad_norm=done.norm,
        layout_digest=state.layout_digest,
        scaling=_next_scaling(config, state.scaling, done.found_inf, done.is_empty),
        key=state.key,
        guard=_next_guard(config, state.guard, done, is_other),
        ema=next_ema(config, layout, state.ema, done.shards, done.flat.main_params, is_skipped),
    )
    learning_rate = jnp.float32(at_count(config.algorithm.hyper.learning_rate, state.count))
    params = schedule.treedef.unflatten(leaves)
    return StepResult(params, new_state, is_skipped, is_other, learning_rate, done.norms)


def _next_scaling(
    config: DistributedConfig,
    scaling: LossScaleState | None,
    found_inf: jax.Array,
    is_empty: jax.Array | None,
) -> LossScaleState | None:
    """The loss scale of the next step. A step of total weight zero does not change it."""
    if scaling is None:
        return None
    assert config.loss_scale is not None
    return trees.keep_if(is_empty, scaling, next_loss_scale(config.loss_scale, scaling, found_inf))


def _next_guard(
    config: DistributedConfig, guard: NormGuardState | None, done: UpdateResult, is_other: jax.Array
) -> NormGuardState | None:
    """The state of the guard after a step. Steps skipped for another reason do not count."""
    if config.norm_guard is None or guard is None:
        return None
    is_void = done.found_inf | is_other
    if done.is_empty is not None:
        is_void |= done.is_empty
    assert done.is_skipped is not None
    return next_norm_guard(config.norm_guard, guard, done.norm, done.is_skipped, ~is_void)


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


def gather_new_params(
    parallel: DataParallel, schedule: Schedule, shards: Sequence[jax.Array]
) -> dict[int, jax.Array]:
    """Returns the new parameters by leaf index, for all leaves in a bucket."""
    leaves: dict[int, jax.Array] = {}
    for entry, shard in zip(schedule.buckets, shards, strict=True):
        bucket = entry.bucket
        new = communication.gather_parameters(entry.after_update, shard, bucket.cut_dim)
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
        new = collectives.to_invariant(new, copies)
        leaves.update(packing.leaves_of_bucket(schedule.layout, bucket, new))
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
