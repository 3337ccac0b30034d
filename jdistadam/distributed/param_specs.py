"""PartitionSpecs of parameters: over tensor axes from the user, over data axes from us."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.groups import for_each_leaf
from jdistadam.core.types import Params
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import MeshError, ShapeError


def tensor_specs(given: Any, params: Params) -> list[P]:
    """Returns the PartitionSpec of each leaf over tensor axes only.

    Args:
      given: The argument ``param_specs`` of the optimizer: PartitionSpecs, NamedShardings, or None
        for a leaf that is not sharded, as Flax returns them.
      params: Tree of params or of their shapes.
    """
    if given is None:
        return [P()] * len(jax.tree.leaves(params))
    found = for_each_leaf(
        given,
        params,
        name="param_specs",
        kind=_SPECS,
        what="PartitionSpec",
        expected="a PartitionSpec over tensor axes",
        is_leaf=lambda x: isinstance(x, _SPECS),
    )
    return [_spec_of(x) for x in found]


_SPECS = (P, NamedSharding, type(None))


def _spec_of(given: P | NamedSharding | None) -> P:
    """One leaf's PartitionSpec from its given form."""
    spec = P() if given is None else given.spec if isinstance(given, NamedSharding) else given
    if any(entry is P.UNCONSTRAINED for entry in spec):
        raise MeshError(
            "param_specs: leaves open over which axes a parameter is sharded: "
            f"got {spec}, expected the names of axes, or None, for each dimension. "
            "Replace PartitionSpec.UNCONSTRAINED."
        )
    return spec


def over_axes(spec: P, axes: Iterable[str]) -> P:
    """Returns the part of a PartitionSpec that concerns these axes."""
    kept = [tuple(name for name in names_of(entry) if name in axes) for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return P(*(names if len(names) > 1 else names[0] if names else None for names in kept))


def shapes_on_a_device(parallel: DataParallel, params: Params, specs: Iterable[P]) -> Any:
    """Returns the shapes of global params on one device, cut only by tensor axes."""
    specs = list(specs)
    if not any(map(axes_of, specs)):
        return params
    paths = trees.paths(params, "params")
    leaves = [
        jax.ShapeDtypeStruct(_cut(parallel, path, x.shape, spec), x.dtype)
        for path, x, spec in zip(paths, jax.tree.leaves(params), specs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def global_shapes(parallel: DataParallel, local: Params, specs: Iterable[P]) -> Any:
    """Returns global shapes from a device's: the inverse of ``shapes_on_a_device``."""
    specs = list(specs)
    if not any(map(axes_of, specs)):
        return local

    def whole(shape: Sequence[int], spec: P) -> tuple[int, ...]:
        parts = [parallel.size(names_of(entry)) for entry in spec]
        return tuple(n * k for n, k in itertools.zip_longest(shape, parts, fillvalue=1))

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
            specs[bucket.leaf] = with_axes(specs[bucket.leaf], bucket.cut_dim, parallel.shard_axes)
    return specs


def with_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Adds axes to one dimension, inside a device's part over tensor axes."""
    if not axes:
        return spec
    entries = list(spec) + [None] * (dim + 1 - len(spec))
    both = (*names_of(entries[dim]), *axes)
    entries[dim] = both if len(both) > 1 else both[0]
    return P(*entries)


def cuts_of(spec: P, cutting_axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For each dimension, the indices of the ``cutting_axes`` that cut it."""
    cuts = [
        tuple(cutting_axes.index(axis) for axis in names_of(entry) if axis in cutting_axes)
        for entry in spec
    ]
    while cuts and not cuts[-1]:  # P("model", None) cuts as P("model") does
        cuts.pop()
    return tuple(cuts)


def axes_of(spec: P) -> tuple[str, ...]:
    """Returns the mesh axes in a PartitionSpec."""
    return tuple(axis for entry in spec for axis in names_of(entry))


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _cut(parallel: DataParallel, path: str, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
    """The shape of a device's part of a global array."""
    unknown = [axis for axis in axes_of(spec) if axis not in parallel.tensor_axes]
    if unknown:
        raise MeshError(
            f"{path}: param_specs names axis {unknown[0]!r}: got {spec}, expected axes that carry "
            f"no data: {parallel.tensor_axes}. {_instead_of(parallel, unknown[0])}"
        )
    sizes = [1] * len(shape)
    for dim, entry in enumerate(spec):
        if dim < len(shape):
            sizes[dim] = parallel.size(names_of(entry))
    fits = len(spec) <= len(shape) and all(n % k == 0 for n, k in zip(shape, sizes, strict=True))
    if not fits:
        raise ShapeError(
            f"{path}: cannot be split as param_specs says: got shape {shape}, {spec}, "
            f"expected dimensions that divide by {tuple(sizes)}. Change param_specs for this leaf."
        )
    return tuple(n // k for n, k in zip(shape, sizes, strict=True))


def _instead_of(parallel: DataParallel, axis: str) -> str:
    """Advice for a spec with an axis that carries data, or is not in the mesh."""
    if axis in parallel.data_axes:
        return (
            "Leave sharding over data axes to sharding_strategy. Experts that differ along an axis "
            "of data are not supported: give them an axis of their own in the mesh."
        )
    return "Name axes of the mesh; flax.linen.logical_to_mesh turns logical names into them."
