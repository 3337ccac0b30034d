"""Mesh axes by purpose, and the PartitionSpecs of parameters over them; all static.

Data axes and the strategy come first: which axes carry data, and what is sharded over them. Then
PartitionSpecs: over tensor axes from the user, over data axes from us.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.algorithm import for_each_leaf
from jdistadam.core.arguments import check_flag, nearest
from jdistadam.core.collectives import axes_in, axes_of
from jdistadam.core.trees import Params
from jdistadam.distributed.layout import Layout
from jdistadam.errors import MeshError, PolicyError, ShapeError

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER_SHARDING_STRATEGIES = ("no_shard", "optim")


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """The mesh axes by purpose, and the strategy.

    Attributes:
      mesh: The mesh.
      shard_axes: Axes over which state is sharded, outermost first. Sums begin at the last one.
      replica_axes: Axes over which the shards are replicated, or sharded once more.
      strategy: "no_shard": nothing is sharded. "optim": optimizer state is (ZeRO-1).
        "optim_grads": also accumulated gradients (ZeRO-2). "optim_grads_params": also the
        parameters (ZeRO-3).
      outer_strategy: "no_shard", or "optim": optimizer state is sharded over replica_axes too.
      reshard_after_forward: Whether, under "optim_grads_params", stacked parameters are gathered
        layer by layer, and gradients reduced in every micro-batch; otherwise all once per step.
    """

    mesh: Mesh
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...] = ()
    strategy: str = "optim"
    outer_strategy: str = "no_shard"
    reshard_after_forward: bool = True

    @property
    def data_axes(self) -> tuple[str, ...]:
        """All axes that carry different data, in the order of the mesh."""
        both = self.shard_axes + self.replica_axes
        return tuple(axis for axis in self.mesh.axis_names if axis in both)

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """All other axes: parameters may be sharded over them."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.data_axes)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """Axes over which the optimizer state is sharded, the most significant one first."""
        if self.strategy == "no_shard":
            return ()
        return self.shard_axes + (self.replica_axes if self.outer_strategy == "optim" else ())

    @property
    def num_shards(self) -> int:
        """Number of devices that share the optimizer state."""
        return self.size(self.state_axes)

    @property
    def num_devices(self) -> int:
        """Number of devices with different data."""
        return self.size(self.data_axes)

    @property
    def num_inner_shards(self) -> int:
        """Number of shards into which gradients are cut over shard_axes."""
        return 1 if self.strategy == "no_shard" else self.size(self.shard_axes)

    @property
    def shards_params(self) -> bool:
        """Whether devices hold shards of parameters between steps, over shard_axes."""
        return self.strategy == "optim_grads_params"

    @property
    def gathers_layers(self) -> bool:
        """Whether parameters of stacked layers are gathered layer by layer."""
        return self.shards_params and self.reshard_after_forward

    @property
    def shards_grads(self) -> bool:
        """Whether every micro-batch is reduced immediately, and only shards are accumulated."""
        return self.strategy == "optim_grads" or self.gathers_layers

    @property
    def is_on_gpu(self) -> bool:
        """Whether the devices of the mesh are GPUs."""
        return self.mesh.devices.flat[0].platform in ("gpu", "cuda")

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes that cut the flat arrays of state."""
        return self.state_axes + self.tensor_axes

    @property
    def cutting_axes(self) -> tuple[str, ...]:
        """Axes that may cut parameters: tensor axes, then those that split leaves among data.

        Only axes of more than one device: smaller ones cut nothing. ``Leaf.cuts`` has their
        indices.
        """
        axes = self.tensor_axes + self.shard_axes
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    @property
    def state_spec(self) -> P:
        """PartitionSpec of the flat arrays of state."""
        return P(self.cut_axes) if self.cut_axes else P()

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of a batch: its leading dimension over all data axes."""
        return P(self.data_axes)

    def splitting(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of the axes that carry data, and cut a parameter among devices nonetheless."""
        return tuple(axis for axis in axes if axis in self.shard_axes)

    def without(self, axes: Iterable[str]) -> DataParallel:
        """Returns the axes by purpose for a parameter that these axes cut.

        [Note: experts] An axis of ``shard_axes`` that cuts a parameter is an axis of a model for
        it, and carries data for all others. State of this parameter is sharded over the remaining
        ``shard_axes``, and its gradients are summed over them alone: the backward pass of the loss
        has added those from the data of all devices along the axis. So every device has other
        elements of each flat array, and a norm counts each element once. The mean divides by all
        devices, as for other parameters.

        Args:
          axes: Axes in the PartitionSpec of the parameter.
        """
        rest = tuple(axis for axis in self.shard_axes if axis not in axes)
        return self if rest == self.shard_axes else dataclasses.replace(self, shard_axes=rest)

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along several axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def make_data_parallel(
    mesh: Any,
    *,
    shard_axis: Any,
    replica_axis: Any,
    strategy: str,
    outer_strategy: str,
    reshard_after_forward: bool,
    has_param_specs: bool,
) -> DataParallel:
    """Checks the arguments of ``distributed`` with the same names.

    Raises:
      MeshError: The mesh lacks an axis, or has one with no purpose.
      PolicyError: The strategy is unknown.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"mesh: not a mesh: got {type(mesh).__name__}, expected jax.sharding.Mesh. "
            'Make one with jax.sharding.Mesh(jax.devices(), ("data",)).'
        )
    shard_axes = _axes(mesh, "shard_axis", shard_axis)
    replica_axes = () if replica_axis is None else _axes(mesh, "replica_axis", replica_axis)
    if not shard_axes or set(shard_axes) & set(replica_axes):
        raise MeshError(
            "shard_axis: names no axis, or one of replica_axis: "
            f"got shard_axis={shard_axis!r}, replica_axis={replica_axis!r}, "
            "expected different axes, at least one for shard_axis. Give each axis one purpose."
        )
    _check_choice("sharding_strategy", strategy, SHARDING_STRATEGIES)
    _check_choice("outer_sharding_strategy", outer_strategy, OUTER_SHARDING_STRATEGIES)
    check_flag("reshard_after_forward", reshard_after_forward)
    parallel = DataParallel(
        mesh, shard_axes, replica_axes, strategy, outer_strategy, reshard_after_forward
    )
    idle = [axis for axis in parallel.tensor_axes if mesh.shape[axis] > 1]
    if idle and not has_param_specs:
        raise MeshError(
            f"mesh: axis {idle[0]!r} has no purpose: got {dict(mesh.shape)}, "
            "expected only axes that carry data, or over which params are sharded. "
            "Name it in shard_axis or replica_axis if it carries data. If the model is partitioned "
            "over it, say how params are sharded: param_specs={'w': PartitionSpec(None, "
            f"{idle[0]!r}), ...}}, with PartitionSpec() for those that are not sharded over it."
        )
    return parallel


def _axes(mesh: Mesh, name: str, value: Any) -> tuple[str, ...]:
    axes: Any = (value,) if isinstance(value, str) else value
    axes = tuple(axes) if isinstance(axes, list | tuple) else (axes,)
    for axis in axes:
        if axis not in mesh.axis_names:  # a tuple: an axis may have no hash
            close = nearest(axis, mesh.axis_names)
            action = f"Pass {name}={close!r}?" if close else "Name the mesh's axes."
            raise MeshError(
                f"{name} {axis!r}: not an axis of the mesh: got axes {mesh.axis_names}, "
                f"expected one of them, or a tuple of them. {action}"
            )
    if len(set(axes)) != len(axes):
        raise MeshError(
            f"{name}: names an axis twice: got {value!r}, expected every axis once. Remove one."
        )
    return tuple(axes)


# Other libraries' names, in lower case, without separators and without "zero" and "stage".
_MEANT = {
    **{choice.replace("_", ""): choice for choice in SHARDING_STRATEGIES},
    **dict(zip("0123", SHARDING_STRATEGIES, strict=True)),
    "ddp": "no_shard",
    "dp": "no_shard",
    "none": "no_shard",
    "shardoptim": "optim",
    "osdp": "optim",
    "shardgradop": "optim_grads",
    "fsdp": "optim_grads_params",
    "fsdp2": "optim_grads_params",
    "hsdp": "optim_grads_params",
    "fullshard": "optim_grads_params",
    "hybridshard": "optim_grads_params",
}


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        text = "".join(filter(str.isalnum, str(value))).lower()
        close = _MEANT.get(text.replace("zero", "").replace("stage", ""))
        close = close or nearest(value, choices)
        if close not in choices:  # the outer strategy shards only the state
            close = choices[-1]
        raise PolicyError(
            f"{name}: unknown: got {value!r}, expected {' or '.join(map(repr, choices))}. "
            f"Pass {name}={close!r}?"
        )


def tensor_specs(param_specs: Any, params: Params) -> list[P]:
    """Returns the PartitionSpec of each leaf over tensor axes, and data axes that split it.

    Args:
      param_specs: The argument of the optimizer: PartitionSpecs, NamedShardings, or None for a
        leaf that is not sharded, as Flax returns them.
      params: Tree of params or of their shapes.
    """
    if param_specs is None:
        return [P()] * len(jax.tree.leaves(params))
    specs = for_each_leaf(
        param_specs,
        params,
        name="param_specs",
        kind=_SPECS,
        what="PartitionSpec",
        expected="a PartitionSpec over tensor axes",
        is_leaf=lambda x: isinstance(x, _SPECS),
    )
    return [_spec_of(x) for x in specs]


_SPECS = (P, NamedSharding, type(None))


def _spec_of(x: P | NamedSharding | None) -> P:
    """One leaf's PartitionSpec, from what ``param_specs`` has for it."""
    spec = P() if x is None else x.spec if isinstance(x, NamedSharding) else x
    if any(entry is P.UNCONSTRAINED for entry in spec):
        raise MeshError(
            "param_specs: leaves open over which axes a parameter is sharded: "
            f"got {spec}, expected the names of axes, or None, for each dimension. "
            "Replace PartitionSpec.UNCONSTRAINED."
        )
    return spec


def over_axes(spec: P, axes: Iterable[str]) -> P:
    """Returns a PartitionSpec without the axes that are not among these."""
    kept = [tuple(name for name in axes_in(entry) if name in axes) for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return P(*kept)


def shapes_on_a_device(parallel: DataParallel, params: Params, specs: list[P]) -> Any:
    """Returns the shapes of global params on one device, cut only by tensor axes."""
    if not any(map(axes_of, specs)):
        return params
    leaves = [
        jax.ShapeDtypeStruct(_shape_on_a_device(parallel, path, x.shape, spec), x.dtype)
        for (path, x), spec in zip(trees.named_leaves(params, "params"), specs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def global_shapes(parallel: DataParallel, local: Params, specs: list[P]) -> Any:
    """Returns global shapes from a device's: the inverse of ``shapes_on_a_device``."""
    if not any(map(axes_of, specs)):
        return local

    def whole(shape: Sequence[int], spec: P) -> tuple[int, ...]:
        sizes = [parallel.size(axes_in(entry)) for entry in spec]
        return tuple(n * k for n, k in itertools.zip_longest(shape, sizes, fillvalue=1))

    leaves = [
        jax.ShapeDtypeStruct(whole(x.shape, spec), x.dtype)
        for x, spec in zip(jax.tree.leaves(local), specs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(local), leaves)


def with_data_axes(layout: Layout, parallel: DataParallel, specs: list[P]) -> list[P]:
    """Returns the specs, with data axes added if devices hold shards of the parameters."""
    specs = list(specs)
    for bucket in layout.buckets:
        if bucket.is_sharded_param:
            axes = parallel.without(bucket.tensor_axes).shard_axes
            specs[bucket.leaf] = with_axes(specs[bucket.leaf], bucket.cut_dim, axes)
    return specs


def with_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Adds axes to one dimension, inside a device's shard over tensor axes."""
    if not axes:
        return spec
    entries = list(spec) + [None] * (dim + 1 - len(spec))
    entries[dim] = (*axes_in(entries[dim]), *axes)
    return P(*entries)


def tensor_cuts(spec: P, cutting_axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For each dimension, the indices of the ``cutting_axes`` that cut it."""
    kept = over_axes(spec, cutting_axes)  # P("model", None) cuts as P("model") does
    return tuple(tuple(map(cutting_axes.index, axes_in(entry))) for entry in kept)


def _shape_on_a_device(
    parallel: DataParallel, path: str, shape: tuple[int, ...], spec: P
) -> tuple[int, ...]:
    """The shape of a device's shard of a global array."""
    allowed = parallel.tensor_axes + parallel.shard_axes
    unknown = [axis for axis in axes_of(spec) if axis not in allowed]
    if unknown:
        raise MeshError(
            f"{path}: param_specs names axis {unknown[0]!r}: got {spec}, expected axes of a model, "
            f"or of shard_axis: {allowed}. {_instead_of(parallel, unknown[0])}"
        )
    if splits := parallel.splitting(axes_of(spec)):
        _check_split(parallel, path, splits[0])
    sizes = [1] * len(shape)
    for dim, entry in enumerate(spec):
        if dim < len(shape):
            sizes[dim] = parallel.size(axes_in(entry))
    fits = len(spec) <= len(shape) and all(n % k == 0 for n, k in zip(shape, sizes, strict=True))
    if not fits:
        raise ShapeError(
            f"{path}: cannot be split as param_specs says: got shape {shape}, {spec}, "
            f"expected dimensions that divide by {tuple(sizes)}. Change param_specs for this leaf."
        )
    return tuple(n // k for n, k in zip(shape, sizes, strict=True))


def _check_split(parallel: DataParallel, path: str, axis: str) -> None:
    """Raises MeshError if parameters cannot differ along an axis that carries data."""
    beside = [f"{name} axis {x!r}" for name, x in _others(parallel)]
    beside += [f"sharding_strategy {parallel.strategy!r}"] * (parallel.strategy == "no_shard")
    if beside:
        raise MeshError(
            f"{path}: param_specs names axis {axis!r}, which carries data, as for experts: "
            f"got {beside[0]} beside it, expected sharded state, and a mesh of axes of shard_axis "
            "alone. Leave sharding over data axes to sharding_strategy. If these are experts, "
            "leave out the other axes, or give experts an axis that is not in shard_axis: "
            "docs/experts.md."
        )


def _others(parallel: DataParallel) -> list[tuple[str, str]]:
    """The axes besides those of ``shard_axis``, with their purpose."""
    model = [("model", axis) for axis in parallel.tensor_axes]
    return model + [("replica", axis) for axis in parallel.replica_axes]


def why_split(parallel: DataParallel, param_specs: Any) -> str:
    """Says whether ``param_specs`` may cut parameters over axes of data; "": they do not."""
    if param_specs is None:
        return ""
    if callable(param_specs):
        return f"param_specs by a function; {_COPIES_THE_REST}"
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, _SPECS))
    axes = [axis for x in specs if isinstance(x, _SPECS) for axis in axes_of(_spec_of(x))]
    splits = parallel.splitting(axes)
    return f"param_specs over axis {splits[0]!r}; {_COPIES_THE_REST}" if splits else ""


_COPIES_THE_REST = 'communication="peer" copies what all devices need'


def _instead_of(parallel: DataParallel, axis: str) -> str:
    """Advice for a spec with an axis of replicas, or one that is not in the mesh."""
    if axis in parallel.replica_axes:
        return "Leave sharding over data axes to sharding_strategy; experts need shard_axis alone."
    return "Name axes of the mesh; flax.linen.logical_to_mesh turns logical names into them."
