"""The arguments of a distributed optimizer, and the layout and schedule that follow from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives, guards, memory, precision, trees
from jdistadam.core.algorithm import Algorithm
from jdistadam.core.storage import MOMENTS, check_main_dtype
from jdistadam.core.trees import Params
from jdistadam.distributed import mesh_axes
from jdistadam.distributed.block_positions import check_cuts, whole_size
from jdistadam.distributed.layers import Layers, rest_whole
from jdistadam.distributed.layout import Layout, Leaf, make_layout
from jdistadam.distributed.layout_text import digest_of, text_of
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import Schedule, make_schedule
from jdistadam.distributed.transport import OVER_XLA, Transport
from jdistadam.errors import MeshError, PolicyError


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The arguments of a distributed optimizer.

    Params come in three forms. *Global* arrays are those of the caller, outside of shard_map.
    Inside, a device has its shard of arrays that tensor axes cut; the model computes with these
    *whole* params, and layouts are made from them. Under "optim_grads_params" a device holds only a
    ``Shard`` of the large ones. The state holds shards of all params in *flat* arrays; those named
    in ``on_host`` are in host memory between steps.
    """

    algorithm: Algorithm
    parallel: DataParallel
    policy: precision.MixedPrecisionPolicy
    max_grad_norm: float | None
    loss_scale: float | guards.DynamicLossScale | None
    average_grads: bool
    bucket_bytes: int
    param_specs: Any
    layers: Layers | None = None
    transport: Transport = OVER_XLA
    ema_decay: float | None = None
    norm_guard: guards.NormGuard | None = None
    norms: str | Callable[[str], str | None] | None = None
    on_host: tuple[str, ...] = ()
    early_updates: bool | None = None
    reshard_after_backward: Callable[[str], bool] | None = None

    @property
    def steps_on_host(self) -> bool:
        """Whether arrays that a kernel steps are in host memory: all but the average."""
        return any(name != "ema" for name in self.on_host)

    def state_sharding(self, name: str) -> NamedSharding:
        """The sharding of a flat array of the state, one of ``FLAT_ARRAYS``."""
        sharding = NamedSharding(self.mesh, self.parallel.state_spec)
        return sharding.with_memory_kind(memory.HOST) if name in self.on_host else sharding

    @property
    def takes_norm_first(self) -> bool:
        """Whether every update depends on all gradients: for clipping or a skip."""
        return self.max_grad_norm is not None or bool(self.active_guards)

    @property
    def active_guards(self) -> list[tuple[guards.Guard, Any]]:
        """The guards of a step, each with the value of its option."""
        pairs = ((guard, getattr(self, guard.option)) for guard in guards.GUARDS)
        return [(guard, value) for guard, value in pairs if value is not None]

    @property
    def kinds_of_layers(self) -> frozenset[str]:
        """What the model gathers itself: "scan", "block"; an error before params are known."""
        if self.layers is None or not self.parallel.gathers_layers:
            return frozenset()
        return self.layers.known_kinds()

    @property
    def updates_early(self) -> bool:
        """Whether ``train_step`` updates windows of the state during the backward pass."""
        option = self.early_updates
        is_wanted = self.steps_on_host if option is None else option
        return is_wanted and not self.takes_norm_first

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.parallel.mesh

    def differentiated_dtype(self, dtype: Any) -> jnp.dtype:
        """Returns the dtype in which shards of parameters are differentiated.

        It holds every parameter of ``dtype`` and every sum of their gradients: [Note: widened
        shards] in gather_params.py.
        """
        return jnp.promote_types(dtype, self.policy.reduced_dtype)

    @property
    def has_model_axes(self) -> bool:
        """Whether ``train_step`` leaves axes of the mesh to XLA: see [Note: model axes]."""
        return bool(self.parallel.tensor_axes) and self.param_specs is not None

    def tensor_local(self, params: Params) -> Any:
        """Returns the shapes of the unsharded params on one device, for global params."""
        specs = mesh_axes.tensor_specs(self.param_specs, params)
        local = mesh_axes.shapes_on_a_device(self.parallel, params, specs)
        if callable(self.param_specs):
            _check_same_specs(specs, mesh_axes.tensor_specs(self.param_specs, local))
        return local

    def tensor_specs(self, params: Params) -> Any:
        """Returns the PartitionSpec of every leaf as given: not over axes that shard its state."""
        specs = mesh_axes.tensor_specs(self.param_specs, params)
        return jax.tree.unflatten(jax.tree.structure(params), specs)

    def layout(self, whole: Params) -> Layout:
        """Returns the position of every element of the state, for a tree of unsharded params."""
        specs = mesh_axes.tensor_specs(self.param_specs, whole)
        paths = trees.paths(whole, "params")
        # Functions of params decide by the sizes on a single device.
        seen = mesh_axes.global_shapes(self.parallel, whole, specs)
        rows = self.algorithm.groups.row_of_leaves(seen)
        leaves = []
        kinds = [None] * len(paths) if self.layers is None else self.layers.of(paths)
        are_whole = rest_whole(self.reshard_after_backward, paths)
        each = zip(paths, jax.tree.leaves(whole), rows, specs, kinds, are_whole, strict=True)
        for path, x, row, spec, kind, is_whole in each:
            leaf = Leaf(
                path=path,
                shape=tuple(x.shape),
                dtype=jnp.dtype(x.dtype),
                group=row,
                tensor_axes=collectives.axes_of(spec),
                layers=kind,
                cuts=mesh_axes.tensor_cuts(spec, self.parallel.cutting_axes),
                rests_whole=is_whole,
                split=self.parallel.size(self.parallel.splitting(collectives.axes_of(spec))),
            )
            is_coded, is_rounded = self._is_coded(leaf), self._is_rounded(leaf)
            leaves.append(dataclasses.replace(leaf, is_coded=is_coded, is_rounded=is_rounded))
            if leaf.dtype == jnp.float16:
                check_main_dtype(self.policy.main_params, leaf.path, leaf.dtype)
        _check_param_comm_dtype(self.policy, leaves)
        if self.algorithm.storage.is_any:
            self._check_low_precision(leaves)
            for leaf in leaves:
                check_cuts(leaf, self.parallel)
        return make_layout(
            leaves,
            self.parallel.num_shards,
            self.bucket_bytes,
            packs=self.parallel.num_devices > 1,
            keeps_main=self._keeps_main,
            num_inner_shards=self.parallel.num_inner_shards,
            shards_params=self.parallel.shards_params,
            gathers_layers=self.parallel.gathers_layers,
            in_blocks=self.algorithm.storage.is_any,
        )

    def schedule(self, whole: Params, *, accumulate_steps: int = 1) -> Schedule:
        """Returns the collectives of a step in order, with the layout; for unsharded params.

        It depends on their tree structure, shapes and dtypes, and is cached for these.
        """
        shapes = tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in jax.tree.leaves(whole))
        treedef: Any = jax.tree.structure(whole)
        key = treedef, shapes, accumulate_steps
        if key not in self._schedules:
            layout = self.layout(whole)
            schedule = make_schedule(
                layout, self.parallel, self.policy, accumulate_steps, self.transport
            )
            self._schedules[key] = dataclasses.replace(schedule, treedef=treedef)
        return self._schedules[key]

    def schedule_of(self, params: Params, *, accumulate_steps: int = 1) -> Schedule:
        """Returns the schedule for a tree of global params, or of their shapes."""
        return self.schedule(self.tensor_local(params), accumulate_steps=accumulate_steps)

    @functools.cached_property
    def _schedules(self) -> dict[Any, Schedule]:
        return {}

    def layout_text(self, layout: Layout) -> str:
        """Returns the text of a layout; states carry its digest."""
        main = self.policy.main_params
        axes, tensor_axes = self.parallel.cutting_axes, self.parallel.tensor_axes
        sizes = tuple(self.mesh.shape[x] for x in axes if x in tensor_axes)
        of_data = tuple(self.mesh.shape[x] for x in axes if x not in tensor_axes)
        return text_of(layout, sizes, main.argument or "", of_data)

    def layout_digest(self, layout: Layout) -> np.ndarray:
        """Returns the digest of a layout, shape (16,), uint8."""
        return digest_of(self.layout_text(layout))

    def _keeps_main(self, dtype: Any, is_held: bool) -> bool:
        """Whether parameters of a dtype need main parameters.

        Parameters held as shards (``is_held``) need none in the shards' dtype.
        """
        parallel, policy = self.parallel, self.policy
        if not policy.main_params.is_stored:
            return False
        if policy.main_params.is_remainder:
            return bool(dtype == jnp.bfloat16)
        if not (precision.is_sent_as_is(policy, dtype) or is_held):
            return True
        is_placed_alike = parallel.num_shards == 1 or (
            is_held and parallel.num_inner_shards == parallel.num_shards
        )
        return dtype != jnp.float32 or not is_placed_alike

    def _is_coded(self, leaf: Leaf) -> bool:
        """Whether the moments of a leaf are coded, if any are; depends on the whole leaf."""
        storage, path = self.algorithm.storage, leaf.path.removeprefix("params")
        return storage.is_coding and storage.codes_leaf(path, whole_size(leaf, self.parallel))

    def _is_rounded(self, leaf: Leaf) -> bool:
        """Whether floats of a leaf are rounded stochastically, or would be if it were not coded."""
        floats = [self.algorithm.storage.float_dtype(x) for x in MOMENTS]
        if not self._keeps_main(leaf.dtype, is_held=False):
            floats.append(leaf.dtype)
        return self.algorithm.storage.is_stochastic and any(x.itemsize == 2 for x in floats)

    def _check_low_precision(self, leaves: Sequence[Leaf]) -> None:
        """Raises if an option has no effect on any leaf."""
        storage = self.algorithm.storage
        sizes = {x.path.removeprefix("params"): whole_size(x, self.parallel) for x in leaves}
        storage.check_paths(sizes)
        stored = [storage.float_dtype(x) for x in MOMENTS] if leaves else []
        if not self.policy.main_params.is_stored:
            stored += [leaf.dtype for leaf in leaves]
        storage.check_rounded(stored)


def global_specs(config: DistributedConfig, layout: Layout, params: Params) -> Any:
    """Returns the PartitionSpec of every leaf of global params, over tensor and data axes."""
    specs: list[P] = mesh_axes.tensor_specs(config.param_specs, params)
    specs = mesh_axes.with_data_axes(layout, config.parallel, specs)
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def _check_same_specs(specs: list[P], of_local: list[P]) -> None:
    """Raises MeshError if a function gives other specs for a device's shard of params."""
    if specs != of_local:
        raise MeshError(
            "param_specs: a function whose result depends on the sizes of leaves, which are "
            f"smaller on each device: got {of_local} for these, expected {specs}, "
            "as for unsharded leaves. Pass the tree that the function returns for the unsharded "
            "params."
        )


def _check_param_comm_dtype(policy: precision.MixedPrecisionPolicy, leaves: Sequence[Leaf]) -> None:
    """Raises PolicyError if sending would lose bits of parameters, or would widen them."""
    comm = policy.param_comm_dtype
    for leaf in leaves:
        has_main = policy.main_params.is_stored and not policy.main_params.is_remainder
        if not (precision.is_sent_as_is(policy, leaf.dtype) or has_main):
            raise PolicyError(
                f"{leaf.path}: would be rounded to param_comm_dtype at every step: got {comm} for "
                f"{leaf.dtype} and no float32 main parameters, expected main_params_dtype float32, "
                "or param_comm_dtype None. Set main_params_dtype=jnp.float32."
            )
        if comm is not None and comm.itemsize > jnp.dtype(leaf.dtype).itemsize:
            raise PolicyError(
                f"{leaf.path}: param_comm_dtype is wider than the parameter: got {comm} for "
                f"{jnp.dtype(leaf.dtype)}, expected {jnp.dtype(leaf.dtype)} or a narrower dtype. "
                "Leave param_comm_dtype at None."
            )
