"""Model axes: the step over mesh axes along which XLA partitions the model.

[Note: model axes]
Params may be sharded over mesh axes that carry no data, the tensor axes of ``param_specs``. A model
written for ``jax.jit`` runs in a region that is manual over the data axes only, and XLA partitions
it over the others. The optimizer runs in a region *nested* in it, manual over all axes: each
function of this file enters one, unless it is inside one already.

Without the nested region, a reduce-scatter over the data axes makes XLA gather the model axes
first, and XLA's CPU backend ends the process at a bfloat16 sum. The alternative, to pass stacked
local gradients to a second region, compiles to the same collectives and copies. (Compared for eight
H200s as 4 x 2, for each sharding strategy, with one and with four micro-batches.) The nested region
also works within a loop over micro-batches and in a user's own region.

In a region over the data axes, an array consists of the shards of devices along the tensor axes,
concatenated along the dimensions that its PartitionSpec cuts. This holds for shards of parameters
and for the flat arrays too. If tensor axes and shards cut the same dimension, the order differs
from that of the whole parameter, whose blocks over tensor axes are the larger ones: ``train_step``
enters and leaves its region with such shards stacked (``training/partitioned.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, trees
from jdistadam.core.collectives import Axes
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed import mesh_axes
from jdistadam.distributed.accumulate import (
    AccumulatedGrads,
    accumulate_local,
    init_grads_local,
    likeness,
)
from jdistadam.distributed.config import DistributedConfig, global_specs
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.shard import plain
from jdistadam.distributed.state import DistributedState, StepResult, check_own_state
from jdistadam.distributed.step import grad_norm_local, init_local, scaling_of, step_local
from jdistadam.errors import PolicyError


def axes_left_to_xla(parallel: DataParallel) -> Axes:
    """The tensor axes, if the calling code is manual over the data axes only; else none."""
    return (
        () if collectives.unbound(parallel.data_axes) else collectives.unbound(parallel.tensor_axes)
    )


def init(
    config: DistributedConfig, schedule: Schedule, specs: DistributedState, params: Params
) -> DistributedState:
    """``init_local`` for params in the form of this region."""
    local = functools.partial(init_local, config, schedule.layout)
    if not axes_left_to_xla(config.parallel):
        return local(params)
    return _manual(config, local, (params,), (config.tensor_specs(params),), specs)


def step(
    config: DistributedConfig,
    schedule: Schedule,
    specs: DistributedState,
    grads: Grads,
    state: Any,
    params: Params,
) -> StepResult:
    """``step_local``; ``specs`` are those of the state."""
    check_own_state(state)
    if not axes_left_to_xla(config.parallel):
        return step_local(config, schedule, grads, state, params)
    clip = config.max_grad_norm
    # Hyperparameters that are arrays, as ``inject_hyperparams`` makes them.
    numbers = config.algorithm.numbers, clip if isinstance(clip, jax.Array) else None

    def local(numbers: Any, grads: Grads, state: DistributedState, params: Params) -> StepResult:
        of_algorithm, of_clip = numbers
        inside = dataclasses.replace(
            config,
            algorithm=config.algorithm.with_numbers(of_algorithm),
            max_grad_norm=clip if of_clip is None else of_clip,
        )
        return step_local(inside, schedule, grads, state, params)

    of_grads, of_params = _specs_of(config, grads, params), config.tensor_specs(params)
    everywhere: Any = P()
    return _manual(
        config,
        local,
        (numbers, grads, state, params),
        (P(), of_grads, specs, of_params),
        StepResult(of_params, specs, everywhere, everywhere, everywhere, everywhere),
    )


def init_grads(config: DistributedConfig, schedule: Schedule) -> AccumulatedGrads:
    """``init_grads_local``."""
    local = functools.partial(init_grads_local, config, schedule)
    if not axes_left_to_xla(config.parallel):
        return local()
    specs = AccumulatedGrads(_specs_of_sums(config, schedule), P(), likeness(schedule))
    zeros: AccumulatedGrads = _manual(config, local, (), (), specs)
    return zeros


def accumulate(
    config: DistributedConfig,
    acc: AccumulatedGrads,
    grads: Grads,
    weight: Any,
    *,
    weighted_in: str | None = None,
) -> AccumulatedGrads:
    """``accumulate_local``."""
    local = functools.partial(accumulate_local, config, weighted_in=weighted_in)
    if not axes_left_to_xla(config.parallel) or not isinstance(acc, AccumulatedGrads):
        return local(acc, grads, weight)
    of_acc, like = _specs_of(config, acc, None), acc.like_params()
    _check_like(grads, like, "accumulated grads")
    specs = (of_acc, config.tensor_specs(like), P())
    added: AccumulatedGrads = _manual(config, local, (acc, grads, weight), specs, of_acc)
    return added


def grad_norm(config: DistributedConfig, schedule: Schedule, grads: Grads, state: Any) -> jax.Array:
    """``grad_norm_local``."""
    local, scaling = functools.partial(grad_norm_local, config, schedule), scaling_of(config, state)
    if not axes_left_to_xla(config.parallel):
        return local(grads, scaling)
    specs = (_specs_of(config, grads, schedule.whole()), P())
    return _manual(config, local, (grads, scaling), specs, P())


def on_each_shard(config: DistributedConfig, spec: P) -> Callable[..., jax.Array]:
    """Returns a function that applies another to one array, manual over all mesh axes.

    ``spec`` cuts the array and the result over tensor axes.
    """
    if not axes_left_to_xla(config.parallel):
        return lambda function, x: function(x)
    return lambda function, x: _manual(config, function, (x,), (spec,), spec)


def unsharded(config: DistributedConfig, schedule: Schedule, params: Params) -> Any:
    """Shapes of unsharded params in this region; outside, params."""
    if not config.parallel.shards_params or collectives.unbound(config.parallel.shard_axes):
        return params
    specs = _specs_left_to_xla(config, params)
    return mesh_axes.global_shapes(config.parallel, schedule.whole(), specs)


def check_own_region(config: DistributedConfig, schedule: Schedule, params: Params) -> None:
    """Raises PolicyError if shards of params in a user's own region are in another order."""
    if not axes_left_to_xla(config.parallel) or not config.parallel.shards_params:
        return
    specs = jax.tree.leaves(global_specs(config, schedule.layout, params))
    for path, spec in zip(trees.paths(params, "params"), specs, strict=True):
        if cut_twice(config.parallel, spec):
            raise PolicyError(
                f"{path}: one dimension is split over tensor axes and into shards, in a region "
                f"that is manual only over the data axes: got {spec}, expected each dimension to "
                "be split only once. Use train_step, a shard_map over all axes, or 'optim_grads'."
            )


def cut_twice(parallel: DataParallel, spec: P) -> bool:
    """Whether tensor axes and data axes cut the same dimension."""
    names = [set(collectives.axes_in(entry)) for entry in spec]
    return any(n & set(parallel.tensor_axes) and n & set(parallel.data_axes) for n in names)


def _manual(
    config: DistributedConfig,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """Calls a function manual over all axes; specs are prefixes, and may name any axes."""
    axes = axes_left_to_xla(config.parallel)
    left = lambda specs: jax.tree.map(lambda spec: mesh_axes.over_axes(spec, axes), specs)  # noqa: E731
    leaves: list[Any] = jax.tree.leaves(arguments)
    treedef: Any = jax.tree.structure(arguments)
    specs = jax.tree.leaves(jax.tree.broadcast(left(in_specs), arguments))
    # A numpy number is known at compile time; it stays so.
    passed = [i for i, x in enumerate(leaves) if not isinstance(x, np.generic)]

    def local(arrays: list[Any]) -> Any:
        inside = list(leaves)
        for i, x in zip(passed, arrays, strict=True):
            inside[i] = x
        return function(*treedef.unflatten(inside))

    index = collectives.axis_index(config.parallel.data_axes)  # varies, if types record that
    kinds = dict(zip(config.mesh.axis_names, config.mesh.axis_types, strict=True))
    if any(kinds[axis] is jax.sharding.AxisType.Explicit for axis in axes):
        leaves = [
            x if i not in passed else jax.sharding.reshard(x, specs[i])
            for i, x in enumerate(leaves)
        ]
    return compat.shard_map(
        local,
        mesh=config.mesh,
        in_specs=([specs[i] for i in passed],),
        out_specs=left(out_specs),
        axis_names=axes,
        check_vma=bool(collectives.varying_axes(index)),
    )([leaves[i] for i in passed])


def on_a_device(config: DistributedConfig, params: Params) -> Any:
    """Shapes on one device of params, or of their shards, in this region."""
    specs = _specs_left_to_xla(config, params)
    return mesh_axes.shapes_on_a_device(config.parallel, params, specs)


def _specs_left_to_xla(config: DistributedConfig, params: Params) -> list[P]:
    """The PartitionSpec of every leaf over the axes that this region leaves to XLA."""
    axes = axes_left_to_xla(config.parallel)
    specs = jax.tree.leaves(config.tensor_specs(params))
    return [mesh_axes.over_axes(spec, axes) for spec in specs]


def _specs_of(config: DistributedConfig, grads: Grads, params: Params) -> Any:
    """PartitionSpecs of gradients, or of the result of ``accumulate``."""
    if not isinstance(grads, AccumulatedGrads):
        _check_like(grads, params, "params")
        return config.tensor_specs(params)
    sums = _specs_of_sums(config, config.schedule(grads.like_params()))
    return dataclasses.replace(grads, sums=sums, weight=P())


def _check_like(grads: Grads, like: Any, like_name: str) -> None:
    """Raises unless gradients are arrays in a tree like another one."""
    grads = plain(grads)
    trees.check_same_structure(grads, like, name="grads", like_name=like_name)
    trees.check_dtypes(grads, name="grads", action="Cast the gradients.")


def _specs_of_sums(config: DistributedConfig, schedule: Schedule) -> Any:
    """PartitionSpecs of accumulated sums; concatenated for packed buckets."""
    specs = config.tensor_specs(schedule.whole())
    if not config.parallel.shards_grads:
        return specs
    of_leaves = jax.tree.leaves(specs)
    packed = P(config.parallel.tensor_axes)
    # Stored leaves may have permuted dimensions. The shards of devices are concatenated along one
    # of them, and split along the same one.
    return [packed if b.is_packed else of_leaves[b.leaf] for b in schedule.layout.buckets]
