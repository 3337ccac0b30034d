"""The region in which each device works on its part of a state and of a batch.

It is manual over all axes of the mesh; if XLA partitions the model, only over the data axes. See
[Note: model axes].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, jaxprs
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.mesh_axes import DataParallel, over_axes
from jdistadam.distributed.model_axes import cut_twice
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import DtypeError, MeshError
from jdistadam.training.overlap import with_overlap
from jdistadam.training.reordered import Ordered, unseen
from jdistadam.training.train_state import TrainState

_Region = Callable[[TrainState, Any], tuple[TrainState, Any]]


def over_devices(
    tx: DistributedTransformation,
    on_a_device: _Region,
    *,
    specs: TrainState,
    batch_spec: P,
    result_specs: Any,
    seen: Callable[[Ordered], None] = unseen,
) -> _Region:
    """Maps the program of a device over the mesh.

    Args:
      tx: The optimizer.
      on_a_device: What each device does with its part of a state and of a batch; it returns a
        state, and anything else.
      specs: PartitionSpecs of the state over all axes.
      batch_spec: PartitionSpec of the batch over all axes.
      result_specs: PartitionSpecs of the results other than the state, over data axes.
      seen: Called with the order of the program, if it is another than it is written in.
    """
    jaxprs.warn_of_unknown()
    if tx.config.has_model_axes:
        return _over_data_axes(tx, on_a_device, specs, batch_spec, result_specs)
    if tx.config.transport.is_peer:
        saves_memory, unrolls = tx.config.parallel.shards_grads, tx.config.parallel.is_on_gpu
        options: dict[str, Any] = dict(saves_memory=saves_memory, unrolls=unrolls)
        on_a_device = with_overlap(on_a_device, **options, seen=seen)
    # Without vma checks: gradients of replicated params stay local, and models may use
    # primitives (Pallas, scans from a zero carry) that the check does not accept.
    return compat.shard_map(
        on_a_device,
        mesh=tx.config.mesh,
        in_specs=(specs, batch_spec),
        out_specs=(specs, result_specs),
    )


def rows_spec(config: DistributedConfig, batch_spec: P) -> P:
    """PartitionSpec of arrays with rows from each device, in the order of the batch's rows."""
    axes = config.parallel.data_axes
    rows = over_axes(batch_spec, axes) if config.has_model_axes else batch_spec
    first = collectives.axes_in(rows[0]) if len(rows) else ()
    first += tuple(axis for axis in axes if axis not in first)
    return P(first if len(first) > 1 else first[0])


def _over_data_axes(
    tx: DistributedTransformation,
    on_a_device: _Region,
    specs: TrainState,
    batch_spec: P,
    result_specs: Any,
) -> _Region:
    """Maps the program of a device over the data axes and leaves all others to XLA."""
    config = tx.config
    mesh, axes = config.mesh, config.parallel.data_axes

    def mapped(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        stacked = _StackedShards(config.parallel, specs.params, config.tensor_specs(state.params))

        def region(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            state = _with_params(state, stacked.each(lambda x: x[0]))
            new, results = _naming_no_axis_left_to_xla(config, on_a_device, state, batch)
            return _with_params(new, stacked.each(lambda x: x[None])), results

        inside = dataclasses.replace(specs, params=stacked.specs)
        inside = jax.tree.map(lambda spec: over_axes(spec, axes), inside)
        run = compat.shard_map(
            region,
            mesh=mesh,
            in_specs=(inside, over_axes(batch_spec, axes)),
            out_specs=(inside, result_specs),
            axis_names=axes,
        )
        arguments = _with_params(state, stacked.enter(mesh)), batch
        if mesh.devices.flat[0].platform == "cpu":
            _refuse_bfloat16_sums(jax.make_jaxpr(run)(*arguments).jaxpr, config.parallel)
        new, results = run(*arguments)
        return _placed(_with_params(new, stacked.leave(mesh)), specs, config), results

    return mapped


class _StackedShards:
    """Shards of params whose tensor axes cut the same dimension, stacked inside the region.

    Inside, the larger blocks would be over data axes; in the params they are over tensor axes. A
    new first dimension for the data axes keeps the two apart, and moves no data.
    """

    def __init__(self, parallel: DataParallel, specs: Any, tensor_specs: Any) -> None:
        leaves: list[P] = jax.tree.leaves(specs)
        of_tensor_axes: list[P] = jax.tree.leaves(tensor_specs)
        self._whole = {i: s for i, s in enumerate(leaves) if cut_twice(parallel, s)}
        self._stacked = {i: P(parallel.shard_axes, *of_tensor_axes[i]) for i in self._whole}
        treedef: Any = jax.tree.structure(specs)
        self.specs = treedef.unflatten(self._stacked.get(i, s) for i, s in enumerate(leaves))

    def each(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of params that maps these shards and leaves the others unchanged."""
        return lambda params: self._replaced(params, [function(x) for x in self._chosen(params)])

    def enter(self, mesh: Any) -> Callable[[Any], Any]:
        """A function that stacks them, outside the region."""
        return self._moved(mesh, self._whole, self._stacked, lambda x: x[None])

    def leave(self, mesh: Any) -> Callable[[Any], Any]:
        """The inverse of ``enter``."""
        return self._moved(mesh, self._stacked, self._whole, lambda x: x[0])

    def _moved(
        self, mesh: Any, before: dict[int, P], after: dict[int, P], function: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        if not before:
            return lambda params: params
        run = jax.shard_map(
            lambda shards: [function(x) for x in shards],
            mesh=mesh,
            in_specs=(list(before.values()),),
            out_specs=list(after.values()),
            check_vma=False,
        )
        return lambda params: self._replaced(params, run(self._chosen(params)))

    def _chosen(self, params: Any) -> list[Any]:
        leaves: list[Any] = jax.tree.leaves(params)
        return [leaves[i] for i in self._whole]

    def _replaced(self, params: Any, shards: list[Any]) -> Any:
        leaves: list[Any] = jax.tree.leaves(params)
        for i, x in zip(self._whole, shards, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _with_params(state: TrainState, function: Callable[[Any], Any]) -> TrainState:
    return dataclasses.replace(state, params=function(state.params))


def _placed(state: TrainState, specs: TrainState, config: DistributedConfig) -> TrainState:
    """Tells XLA how a state is sharded over the axes left to it."""

    def place(spec: P, x: jax.Array) -> jax.Array:
        return collectives.constrain(x, NamedSharding(config.mesh, spec)) if x.size else x

    return jax.tree.map(place, jax.tree.broadcast(specs, state), state)


def _naming_no_axis_left_to_xla(
    config: DistributedConfig, on_a_device: _Region, state: TrainState, batch: Any
) -> tuple[TrainState, Any]:
    """Calls a device's program; raises MeshError if a loss names an axis that is not manual."""
    try:
        return on_a_device(state, batch)
    except NameError as error:  # JAX raises it
        named = [axis for axis in config.parallel.tensor_axes if str(error).endswith(f" {axis}")]
        if not named or "unbound axis name" not in str(error):
            raise
        raise MeshError(
            f"loss_fn: names axis {named[0]!r}, over which XLA partitions the model: "
            f"got {error}, "
            "expected what is written for jax.jit, with jax.lax.with_sharding_constraint or, "
            "on Explicit axes, jax.sharding.reshard and out_sharding. Leave the collective out, "
            f"or write it in a jax.shard_map(..., axis_names={{{named[0]!r}}}) in loss_fn."
        ) from error


def check_model_axes(config: DistributedConfig) -> None:
    """Raises MeshError if a step cannot leave axes to XLA."""
    if not config.has_model_axes:
        return
    if len(set(config.mesh.axis_types)) > 1:
        raise MeshError(
            "mesh: axes of different types, but the model is partitioned over some of them: "
            f"got {config.mesh.axis_types}, expected all Explicit, as jax.make_mesh makes them, "
            "or all Auto. Pass axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(config.mesh.axis_types)} to jax.make_mesh."
        )
    if AxisType.Manual in config.mesh.axis_types:
        raise MeshError(
            f"mesh: its axes are manual already: got {config.mesh.axis_types}, "
            "expected Explicit or Auto axes. Call it outside of jax.shard_map."
        )


def _refuse_bfloat16_sums(jaxpr: Any, parallel: DataParallel) -> None:
    """Raises DtypeError if XLA's CPU backend would crash.

    jaxlib 0.10 to 0.12 cannot widen the computation of these sums in a region that leaves axes to
    XLA. XLA's own sums over those axes do not crash, nor do nested regions.
    """
    for eqn, manual in jaxprs.manual_inside(jaxpr, frozenset()):
        if not manual >= set(parallel.tensor_axes) and jaxprs.sums_bfloat16(eqn):
            raise DtypeError(
                f"loss_fn: {jaxprs.name_of(eqn)} of bfloat16 over data axes, which crashes XLA's "
                f"CPU backend while it partitions over the axes {parallel.tensor_axes}: "
                "got bfloat16 on CPU, expected float32, or a GPU. "
                "Cast to float32 before the sum, and back."
            )
