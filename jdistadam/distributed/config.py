"""What a distributed optimizer was given, checked, and what follows from it for given params."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.groups import Groups
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.core.loss_scale import DynamicLossScale
from jdistadam.core.masks import for_each_leaf
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.distributed.layout import Bucket, Layout, Leaf, make_layout
from jdistadam.distributed.layout_identity import identity_of
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import MeshError, PolicyError, ShapeError, TreeError


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The arguments of a distributed optimizer.

    Params come in three forms. *Global* ones are what the caller holds outside of shard_map. Inside
    of it, a device has its part of what is sharded over tensor axes; such *whole* params are what
    the model computes with and what layouts are made from. Under "optim_grads_params" a device
    holds of the large ones only a *shard*.
    """

    hyper: Hyperparameters
    like_optax: optax.GradientTransformation  # what state to_optax_state returns
    groups: Groups
    parallel: DataParallel
    policy: MixedPrecisionPolicy
    max_grad_norm: float | None
    loss_scale: float | DynamicLossScale | None
    average_grads: bool
    bucket_bytes: int
    given_param_specs: Any
    stacked: Callable[[str], bool] | None = None
    # Whole params by what the shards look like: inside of shard_map only the latter are seen.
    _seen: dict[Any, list[Any]] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    # Along which dimension to gather each leaf, by what one layer of stacked shards looks like.
    _layers: dict[Any, set[Any]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.parallel.mesh

    @property
    def num_shards(self) -> int:
        """Number of devices that share the optimizer state."""
        return self.parallel.num_shards

    def layout(self, whole: Any) -> Layout:
        """Returns where everything lies, for a tree of whole params or their shapes."""
        rows = self.groups.row_of_leaves(whole)
        specs = self._tensor_specs(whole)
        paths = trees.paths(whole, "params")
        leaves = [
            Leaf(
                path,
                tuple(x.shape),
                jnp.dtype(x.dtype),
                row,
                axes_of(spec),
                self.stacked is not None and bool(self.stacked(path)),
                self._cuts(spec),
            )
            for path, x, row, spec in zip(paths, jax.tree.leaves(whole), rows, specs, strict=True)
        ]
        self._check_param_comm_dtype(leaves)
        if self.stacked is not None and paths and not any(leaf.is_stacked for leaf in leaves):
            raise TreeError(
                "stacked",
                "says no to every leaf",
                got=f"False for {paths[0]} and {len(paths) - 1} more",
                expected="True for the scanned layers",
                action="Look for a part of their paths, or leave stacked out.",
            )
        return make_layout(
            leaves,
            self.num_shards,
            self.bucket_bytes,
            packs=self.parallel.num_devices > 1,
            keeps_main=self._keeps_main,
        )

    def identity(self, whole: Any) -> np.ndarray:
        """Returns the identity of the layout of a tree of whole params: bytes of its text."""
        kind = "remainder16" if self.policy.keeps_remainders else "float32"
        parts = tuple(self.mesh.shape[axis] for axis in self._cutting_axes)
        return identity_of(self.layout(whole), parts, kind)

    def tensor_local(self, params: Any) -> Any:
        """Returns the shapes of the whole params on one device, for global params."""
        specs = self._tensor_specs(params)
        if not any(map(axes_of, specs)):
            return params
        leaves = [
            jax.ShapeDtypeStruct(self._cut(path, x.shape, spec), x.dtype)
            for path, x, spec in zip(
                trees.paths(params, "params"), jax.tree.leaves(params), specs, strict=True
            )
        ]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def param_specs(self, params: Any) -> Any:
        """Returns the PartitionSpec of every leaf, for global params; remembers their shapes."""
        specs = self._tensor_specs(params)
        whole = self.tensor_local(params)
        if self.parallel.shards_params:
            layout = self.layout(whole)
            self._remember(layout, whole)
            axes = self.parallel.shard_axes
            for bucket in layout.buckets:
                if bucket.dim is not None:
                    (i,) = bucket.leaves
                    specs[i] = _with_axes(specs[i], bucket.dim, axes)
        return jax.tree.unflatten(jax.tree.structure(params), specs)

    def tensor_specs(self, params: Any) -> Any:
        """Returns the PartitionSpec of every leaf over tensor axes alone."""
        return jax.tree.unflatten(jax.tree.structure(params), self._tensor_specs(params))

    def whole(self, params: Any) -> Any:
        """Returns the shapes of the whole params, for what a device holds inside of shard_map."""
        if not self.parallel.shards_params:
            return params
        known = self._seen.get(_key(params), [])
        if not known and any(_key(params) == _key(x) for xs in self._seen.values() for x in xs):
            return params  # gathered already
        if len(known) != 1:
            raise MeshError(
                "params",
                "the shapes of their shards do not say what they are shards of",
                got=f"{len(known)} params with such shards",
                expected="the params of one init, or of one param_specs",
                action="Call tx.init(params) or tx.param_specs(params) outside of shard_map "
                "first, with this tx; use one tx for each model.",
            )
        return known[0]

    def layer_dims(self, layer: Any) -> tuple[int | None, ...] | None:
        """Returns along which dimension to gather each leaf of one layer of stacked params.

        None: this is not one layer of what was seen. Of a leaf that is not sharded: None.
        """
        known = self._layers.get(_key(layer), set())
        if len(known) > 1:
            raise MeshError(
                "params",
                "the shapes of one layer's shards do not say how to gather them",
                got=f"{len(known)} ways",
                expected="one",
                action="Gather a larger part of the layer at once, or use one tx a model.",
            )
        return next(iter(known), None)

    def inner_shard_shape(self, bucket: Bucket) -> tuple[int, ...]:
        """Shape of a bucket's part after the reduction over shard_axes."""
        dim = bucket.dim or 0
        factor = self.num_shards // self.parallel.num_inner_shards
        return (
            *bucket.shard_shape[:dim],
            bucket.shard_shape[dim] * factor,
            *bucket.shard_shape[dim + 1 :],
        )

    def is_sharded_param(self, bucket: Bucket) -> bool:
        """Whether devices hold only shards of a bucket's parameters."""
        return self.parallel.shards_params and bucket.dim is not None

    def _keeps_main(self, dtype: Any, scattered: bool) -> bool:
        parallel = self.parallel
        if self.policy.main_params_dtype is None:
            return False
        if self.policy.keeps_remainders:
            return bool(dtype == jnp.bfloat16)
        if self._is_rounded_on_the_wire(dtype) and not (parallel.shards_params and scattered):
            return True
        lies_alike = parallel.num_shards == 1 or (
            parallel.shards_params
            and scattered
            and parallel.num_inner_shards == parallel.num_shards
        )
        return dtype != jnp.float32 or not lies_alike

    @property
    def _cutting_axes(self) -> tuple[str, ...]:
        """Tensor axes of more than one device: one alone cuts nothing."""
        return tuple(axis for axis in self.parallel.tensor_axes if self.mesh.shape[axis] > 1)

    def _cuts(self, spec: P) -> tuple[tuple[int, ...], ...]:
        """For each dimension, the indices of the tensor axes that cut it."""
        axes = self._cutting_axes
        cuts = [tuple(axes.index(axis) for axis in _names(x) if axis in axes) for x in spec]
        while cuts and not cuts[-1]:  # P("model", None) cuts as P("model") does
            cuts.pop()
        return tuple(cuts)

    def _tensor_specs(self, params: Any) -> list[P]:
        """One PartitionSpec for each leaf, over tensor axes alone."""
        if self.given_param_specs is None:
            return [P()] * len(jax.tree.leaves(params))
        return for_each_leaf(
            self.given_param_specs,
            params,
            "param_specs",
            P,
            "PartitionSpec",
            "a PartitionSpec over tensor axes",
            is_leaf=lambda x: isinstance(x, P),
        )

    def _cut(self, path: str, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """The shape of a device's part of a global array."""
        unknown = [axis for axis in axes_of(spec) if axis not in self.parallel.tensor_axes]
        if unknown:
            raise MeshError(
                path,
                f"param_specs names axis {unknown[0]!r}",
                got=spec,
                expected=f"axes that carry no data: {self.parallel.tensor_axes}",
                action="Leave sharding over data axes to sharding_strategy.",
            )
        sizes = [1] * len(shape)
        for dim, names in enumerate(spec):
            if dim < len(shape):
                sizes[dim] = self.parallel.size(_names(names))
        fits = len(spec) <= len(shape) and all(
            n % k == 0 for n, k in zip(shape, sizes, strict=True)
        )
        if not fits:
            raise ShapeError(
                path,
                "does not divide as param_specs says",
                got=f"shape {shape}, {spec}",
                expected=f"dimensions that divide by {tuple(sizes)}",
                action="Change param_specs for this leaf.",
            )
        return tuple(n // k for n, k in zip(shape, sizes, strict=True))

    def _remember(self, layout: Layout, whole: Any) -> None:
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(whole)]
        shards, stacked = list(leaves), list(leaves)  # the latter: what train_step's loss gets
        dims: list[int | None] = [None] * len(leaves)
        for bucket in layout.buckets:
            if self.is_sharded_param(bucket):
                (i,) = bucket.leaves
                shards[i] = jax.ShapeDtypeStruct(self.inner_shard_shape(bucket), leaves[i].dtype)
                if layout.leaves[i].is_stacked:
                    stacked[i], dims[i] = shards[i], bucket.dim
        treedef: Any = jax.tree.structure(whole)
        for form in (shards, stacked):
            known = self._seen.setdefault(_key(treedef.unflatten(form)), [])
            if not any(_key(tree) == _key(whole) for tree in known):
                known.append(treedef.unflatten(leaves))
        layers = [
            _StackedLeaf(x, dim) if leaf.is_stacked else None
            for x, dim, leaf in zip(stacked, dims, layout.leaves, strict=True)
        ]
        for subtree in _subtrees(treedef.unflatten(layers)):
            parts = jax.tree.leaves(subtree, is_leaf=lambda x: x is None)
            if parts and all(part is not None for part in parts):
                where = tuple(None if part.dim is None else part.dim - 1 for part in parts)
                self._layers.setdefault(_key(subtree), set()).add(where)

    def _is_rounded_on_the_wire(self, dtype: Any) -> bool:
        comm = self.policy.param_comm_dtype
        return comm is not None and comm != dtype

    def _check_param_comm_dtype(self, leaves: list[Leaf]) -> None:
        comm = self.policy.param_comm_dtype
        for leaf in leaves:
            has_main = isinstance(self.policy.main_params_dtype, jnp.dtype)
            if self._is_rounded_on_the_wire(leaf.dtype) and not has_main:
                raise PolicyError(
                    leaf.path,
                    "would be rounded to param_comm_dtype at every step",
                    got=f"{comm} for {leaf.dtype} and no float32 main parameters",
                    expected="main_params_dtype float32, or param_comm_dtype None",
                    action="Set main_params_dtype=jnp.float32.",
                )
            if comm is not None and comm.itemsize > jnp.dtype(leaf.dtype).itemsize:
                raise PolicyError(
                    leaf.path,
                    "param_comm_dtype is wider than the parameter",
                    got=f"{comm} for {jnp.dtype(leaf.dtype)}",
                    expected=f"{jnp.dtype(leaf.dtype)} or a narrower dtype",
                    action="Leave param_comm_dtype at None.",
                )


class _StackedLeaf:
    """The shape of one layer of a stacked leaf, and the dimension that is scattered."""

    def __init__(self, stacked: Any, dim: int | None) -> None:
        self.shape, self.dtype, self.dim = stacked.shape[1:], stacked.dtype, dim


def _subtrees(tree: Any) -> Iterator[Any]:
    """Yields a tree and all trees within it, leaves too."""
    yield tree
    one_level = jax.tree_util.default_registry.flatten_one_level(tree)
    for child in () if one_level is None else one_level[0]:
        yield from _subtrees(child)


def axes_of(spec: P) -> tuple[str, ...]:
    """Returns the mesh axes that a PartitionSpec names."""
    return tuple(axis for names in spec for axis in _names(names))


def _names(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _with_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Adds axes to one dimension: inside of what tensor axes leave to a device."""
    entries = list(spec) + [None] * (dim + 1 - len(spec))
    both = (*_names(entries[dim]), *axes)
    entries[dim] = both if len(both) > 1 else both[0]
    return P(*entries)


def _key(tree: Any) -> Any:
    leaves = tuple((tuple(x.shape), jnp.dtype(x.dtype).name) for x in jax.tree.leaves(tree))
    return jax.tree.structure(tree), leaves
