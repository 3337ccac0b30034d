"""What every device does in a distributed step; runs inside ``jax.shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistadam.core import collectives, trees, varying
from jdistadam.core.loss_scale import LossScaleState, new_loss_scale, next_loss_scale
from jdistadam.distributed import packing
from jdistadam.distributed.accumulate import AccumulatedGrads, inner_shards, mean_factor
from jdistadam.distributed.checks import (
    check_grads,
    check_identity_type,
    check_inside,
    check_params,
    check_scaling,
    check_state,
)
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.reduce import gather_shards, reduce_outer
from jdistadam.distributed.state import (
    DistributedState,
    StepResult,
    check_own_state,
    find_state,
    keep_if,
)
from jdistadam.errors import TreeError
from jdistadam.kernels import adam as kernel
from jdistadam.kernels import multi_tensor, reference
from jdistadam.kernels.coefficients import coefficient_row


def init_local(config: DistributedConfig, params: Any, whole: Any) -> DistributedState:
    """This device's part of the initial state; ``params`` are whole, or shards of ``whole``."""
    layout = config.layout(whole)
    main = main_shard(config, layout, jax.tree.leaves(params)) if layout.main_size else None
    # Varying over the axes also for the type checker of shard_map, as shards are.
    axes = config.parallel.state_axes + config.parallel.tensor_axes
    zeros = varying.to_varying(jnp.zeros(layout.flat_size), axes)
    return DistributedState(
        jnp.zeros((), jnp.int32),
        main,
        zeros.astype(config.policy.mu_dtype),
        zeros.astype(config.policy.nu_dtype),
        jnp.zeros((), jnp.float32),
        jnp.asarray(config.identity(whole)),
        None if config.loss_scale is None else new_loss_scale(config.loss_scale),
    )


def main_shard(config: DistributedConfig, layout: Layout, params: Sequence[Any]) -> jax.Array:
    """This device's flat array of main parameters, with the values of ``params``."""
    axes = config.parallel.state_axes + config.parallel.tensor_axes
    shards = [
        state_shard(config, bucket, params, jnp.float32) if bucket.has_main else None
        for bucket in layout.buckets
    ]
    flat = varying.to_varying(packing.flat_of(layout, shards, jnp.float32, main=True), axes)
    return reference.split(flat, jnp.bfloat16, jnp)[1] if config.policy.keeps_remainders else flat


def step_local(
    config: DistributedConfig,
    grads: Any,
    state: DistributedState,
    params: Any,
    *,
    is_verified: bool = False,
) -> StepResult:
    """One step on one device: reduction, norm, kernel, all-gather.

    Args:
      config: The configuration.
      grads: Local gradients, or what ``accumulate`` returned.
      state: The state.
      params: The params as this device holds them.
      is_verified: Whether the layout of the state was checked before this program runs. If not, the
        program checks it: with a state of another layout everything stays as in a skipped step,
        and the norm is NaN.
    """
    check_inside(config.parallel, "step")
    check_own_state(state)
    trees.check_dtypes(params, name="params")
    whole = config.whole(params)
    layout = config.layout(whole)
    check_params(config, layout, params)
    is_other = None if is_verified else _is_other_layout(config, whole, state)
    check_state(config, layout, state)
    shards, mean_scale, is_empty = _reduced_gradients(config, layout, grads, whole)
    norm, found_inf = _norm_and_finite(config, layout, shards, mean_scale, state.scaling)
    rows = [coefficient_row(h, state.count, decay=decay) for h, decay in config.groups.rows]
    inv_scale = _clipped(config, mean_scale, norm)
    scaling = state.scaling
    if scaling is not None:
        inv_scale = inv_scale * (1 / scaling.loss_scale)
        assert config.loss_scale is not None
        # A step without any weight says nothing about the scale.
        new_scaling = next_loss_scale(config.loss_scale, scaling, found_inf)
        scaling = keep_if(is_empty, scaling, new_scaling)
    is_skipped = _any(None if state.scaling is None else found_inf, is_empty, is_other)
    count = keep_if(is_skipped, state.count, optax.safe_increment(state.count))
    if is_other is not None:
        norm = jnp.where(is_other, jnp.nan, norm)
    skip = jnp.zeros((), jnp.bool_) if is_skipped is None else is_skipped
    scalars = kernel.Scalars(jnp.stack(rows), inv_scale, skip)
    leaves: list[Any] = list(jax.tree.leaves(params))  # frozen and zero-size ones stay as they are
    flats, new_shards = _update_shards(config, layout, scalars, shards, state, leaves)
    if is_other is not None:  # what is in these main parameters belongs to other leaves
        new_shards = _keep_shards(config, layout, is_other, leaves, new_shards)
    for bucket, shard in zip(layout.buckets, new_shards, strict=True):
        for i, leaf in _new_params(config, layout, bucket, shard):
            if config.policy.param_comm_dtype is not None:
                # The rounding for the wire would change what a skipped step must leave alone.
                leaf = keep_if(is_skipped, leaves[i], leaf)
            leaves[i] = leaf
    new_params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    new_state = DistributedState(count, *flats, norm, state.layout_identity, scaling)
    return StepResult(new_params, new_state, is_skipped, is_other)


def _any(*flags: jax.Array | None) -> jax.Array | None:
    """Whether any flag is set; None where there is none."""
    given = [flag for flag in flags if flag is not None]
    return functools.reduce(jnp.logical_or, given) if given else None


def _is_other_layout(config: DistributedConfig, whole: Any, state: DistributedState) -> jax.Array:
    """Whether the state is of another layout, found by the program itself."""
    expected = config.identity(whole)
    check_identity_type(expected, state.layout_identity)
    return jnp.any(state.layout_identity != expected)


def _keep_shards(
    config: DistributedConfig,
    layout: Layout,
    is_kept: jax.Array,
    params: Sequence[Any],
    new_shards: Sequence[jax.Array],
) -> list[jax.Array]:
    """Takes the old parameters in place of new ones that come from main parameters.

    One call for those that are scattered in the same way and have one dtype, which costs nothing
    where nothing is kept. Packed leaves, which are small, are packed once more and selected.
    """
    shards = list(new_shards)
    if config.policy.keeps_remainders:
        return shards  # they come from the params themselves, which the kernel left alone
    calls: dict[Any, list[int]] = {}
    for i, bucket in enumerate(layout.buckets):
        if bucket.has_main and bucket.dim is None:
            old = state_shard(config, bucket, params, shards[i].dtype)
            shards[i] = jnp.where(is_kept, old, shards[i])
        elif bucket.has_main:
            axes = _axes_of_shard(config, bucket, params[bucket.leaves[0]].shape)
            calls.setdefault((axes, bucket.dtype), []).append(i)
    for (axes, _), indices in calls.items():
        mine = [layout.buckets[i] for i in indices]
        kept = multi_tensor.kept_shards(
            is_kept,
            collectives.axis_index(axes),
            config.parallel.size(axes),
            [bucket.dim or 0 for bucket in mine],
            [shards[i] for i in indices],
            [params[bucket.leaves[0]] for bucket in mine],
        )
        for i, shard in zip(indices, kept, strict=True):
            shards[i] = shard
    return shards


def grad_norm_local(config: DistributedConfig, grads: Any, state: Any) -> jax.Array:
    """The global norm of the mean gradient, reduced as a step reduces it."""
    check_inside(config.parallel, "grad_norm")
    is_sum = isinstance(grads, AccumulatedGrads)
    whole = grads.like_params() if is_sum else config.whole(grads)
    layout = config.layout(whole)
    shards, mean_scale, _ = _reduced_gradients(config, layout, grads, whole)
    scaling = None
    if config.loss_scale is not None:
        if state is None:
            raise TreeError(
                "grad_norm",
                "needs the state, whose loss scale the gradients were multiplied by",
                got=None,
                expected="tx.grad_norm(grads, opt_state)",
                action="Pass the state.",
            )
        check_scaling(config, find_state(state))
        scaling = find_state(state).scaling
    return _norm_and_finite(config, layout, shards, mean_scale, scaling)[0]


def _reduced_gradients(
    config: DistributedConfig, layout: Layout, grads: Any, whole: Any
) -> tuple[list[jax.Array], jax.Array, jax.Array | None]:
    """Returns each bucket's part of the gradients' sum, and what turns the sum into the mean.

    The third value says whether the total weight is zero; None where it cannot be.
    """
    weight = None
    if isinstance(grads, AccumulatedGrads):
        grads, weight = grads.sums, grads.weight
    if weight is None or not config.parallel.shards_grads:
        marker = collectives.axis_index(config.parallel.data_axes)  # varies, where types say so
        check_grads(config, grads, whole, marker, like_name="params")
        grads = inner_shards(config, layout, jax.tree.leaves(grads))
    outer = [
        reduce_outer(config.parallel, config.policy, shard, bucket.dim or 0)
        for bucket, shard in zip(layout.buckets, grads, strict=True)
    ]
    mean_scale, is_empty = mean_factor(config, weight)
    return outer, mean_scale if config.average_grads else jnp.float32(1), is_empty


def reduce_gradients(
    config: DistributedConfig, layout: Layout, grads: Sequence[Any]
) -> list[jax.Array]:
    """Returns this device's part of every bucket's summed gradient, from local gradients."""
    shards = inner_shards(config, layout, grads)
    return [
        reduce_outer(config.parallel, config.policy, shard, bucket.dim or 0)
        for bucket, shard in zip(layout.buckets, shards, strict=True)
    ]


def _norm_and_finite(
    config: DistributedConfig,
    layout: Layout,
    shards: Sequence[jax.Array],
    mean: jax.Array,
    scaling: LossScaleState | None,
) -> tuple[jax.Array, jax.Array]:
    """The global norm of the mean gradient, and whether any gradient is not finite.

    Every element counts once: devices that hold the same leaf beside tensor-parallel ones leave it
    to the first of them.
    """
    parallel = config.parallel
    inv_scale = None if scaling is None else 1 / scaling.loss_scale
    by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
    for bucket, shard in zip(layout.buckets, shards, strict=True):
        by_axes.setdefault(bucket.tensor_axes, []).append(shard)
    squares, found = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    for axes, arrays in sorted(by_axes.items()):
        mine, found_here = multi_tensor.sum_of_squares(arrays, inv_scale)
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in axes)
        if copies:
            mine = jnp.where(collectives.axis_index(copies) == 0, mine, 0)
        squares, found = squares + mine, found | found_here
    everyone = parallel.state_axes + parallel.tensor_axes
    if scaling is None:
        squares = collectives.all_reduce(squares, everyone)
        return jnp.sqrt(squares) * mean, jnp.zeros((), jnp.bool_)
    both = jnp.stack([squares, found.astype(jnp.float32)])
    squares, count = collectives.all_reduce(varying.to_varying(both, everyone), everyone)
    return jnp.sqrt(squares) * mean, count > 0


def _clipped(config: DistributedConfig, mean: jax.Array, norm: jax.Array) -> jax.Array:
    """What every summed gradient is multiplied by: the mean, and the clip on top of it."""
    if config.max_grad_norm is None:
        return mean
    max_norm = jnp.float32(config.max_grad_norm)
    # Written so that a norm that is not a number reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean, mean * (max_norm / norm))


def _update_shards(
    config: DistributedConfig,
    layout: Layout,
    scalars: kernel.Scalars,
    shards: Sequence[jax.Array],
    state: DistributedState,
    params: Sequence[Any],
) -> tuple[tuple[Any, Any, Any], list[jax.Array]]:
    """Updates the flat state in place; returns it and each bucket's new parameter shard.

    One kernel call for each parameter dtype, each in place on its part of the whole flat arrays:
    slicing them in XLA would copy the state. Parameters without a main copy are updated themselves.
    """
    main, mu, nu = state.main_params, state.mu, state.nu
    new_shards: list[Any] = [None] * len(shards)
    calls: dict[Any, list[int]] = {}
    for i, bucket in enumerate(layout.buckets):
        key = (bucket.dtype, bucket.has_main, shards[i].dtype)
        calls.setdefault(key, []).append(i)
    for (dtype, has_main, _), indices in calls.items():
        mine: list[Bucket] = [layout.buckets[i] for i in indices]
        splits = has_main and config.policy.keeps_remainders
        casts = has_main and not splits
        flat = {"mu", "nu"} | ({"params"} if casts else {"out"} if splits else set())
        spec = kernel.Spec(
            "step_and_cast" if casts else "step_split" if splits else "step",
            groups=tuple(bucket.group for bucket in mine),
            nesterov=config.hyper.nesterov,
            out_dtype=dtype if casts else None,
            flat=frozenset(flat),
            sizes=tuple(bucket.shard_size for bucket in mine),
            offsets=tuple(bucket.offset for bucket in mine),
        )
        grads = tuple(shards[i] for i in indices)
        updated = [main] if casts else [state_shard(config, b, params, dtype) for b in mine]
        out = (main,) if splits else ()
        results = kernel.adam(spec, scalars, kernel.Operands(grads, updated, (mu,), (nu,), out))
        (mu,), (nu,) = results.mu, results.nu
        if has_main:
            (main,) = results.params if casts else results.out
        for i, shard in zip(indices, results.out if casts else results.params, strict=True):
            new_shards[i] = shard
    return (main, mu, nu), new_shards


def state_shard(
    config: DistributedConfig, bucket: Bucket, params: Sequence[Any], dtype: Any
) -> jax.Array:
    """Returns the part of a bucket's parameters of which this device has the state."""
    array = packing.bucket_array(bucket, params, dtype)
    axes = _axes_of_shard(config, bucket, array.shape)
    if not axes:
        return array
    return packing.shard_of(
        array, collectives.axis_index(axes), config.parallel.size(axes), bucket.dim or 0
    )


def _axes_of_shard(
    config: DistributedConfig, bucket: Bucket, shape: tuple[int, ...]
) -> tuple[str, ...]:
    """Axes over which an array of this shape, a whole bucket or a part of it, is still to cut."""
    axes = config.parallel.state_axes
    if config.is_sharded_param(bucket) and shape == config.inner_shard_shape(bucket):
        return tuple(axis for axis in axes if axis in config.parallel.replica_axes)
    return axes


def _new_params(
    config: DistributedConfig, layout: Layout, bucket: Bucket, shard: jax.Array
) -> list[tuple[int, jax.Array]]:
    """Gathers a bucket's new parameters as far as devices hold them: index and array of leaves."""
    parallel, dim = config.parallel, bucket.dim or 0
    axes = parallel.state_axes
    if config.is_sharded_param(bucket):
        axes = tuple(axis for axis in axes if axis in parallel.replica_axes)
    if axes:
        shard = gather_shards(parallel, config.policy, shard, axes, dim)
    copies = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
    shard = collectives.to_invariant(shard, copies)
    if bucket.dim is not None:
        return [(bucket.leaves[0], shard)]
    return packing.leaves_of_bucket(layout, bucket, shard)
