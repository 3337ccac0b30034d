"""PartitionSpecs of parameters: over tensor axes as the user says, over data axes as we do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.masks import for_each_leaf
from jdistadam.core.types import Params
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import MeshError, ShapeError


def tensor_specs(given: Any, params: Params) -> list[P]:
    """Returns the PartitionSpec of each leaf over tensor axes alone.

    Args:
      given: The argument ``param_specs`` of the optimizer.
      params: Tree of params or of their shapes.
    """
    if given is None:
        return [P()] * len(jax.tree.leaves(params))
    return for_each_leaf(
        given,
        params,
        name="param_specs",
        kind=P,
        what="PartitionSpec",
        expected="a PartitionSpec over tensor axes",
        is_leaf=lambda x: isinstance(x, P),
    )


def shapes_on_a_device(parallel: DataParallel, params: Params, specs: Iterable[P]) -> Any:
    """Returns the shapes that global params have on one device, as far as tensor axes cut them."""
    specs = list(specs)
    if not any(map(axes_of, specs)):
        return params
    paths = trees.paths(params, "params")
    leaves = [
        jax.ShapeDtypeStruct(_cut(parallel, path, x.shape, spec), x.dtype)
        for path, x, spec in zip(paths, jax.tree.leaves(params), specs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def with_data_axes(layout: Layout, parallel: DataParallel, specs: list[P]) -> list[P]:
    """Returns the specs with shard_axes added where devices hold shards of the parameters."""
    specs = list(specs)
    for bucket in layout.buckets:
        if bucket.is_sharded_param:
            i = bucket.leaf
            specs[i] = _with_axes(specs[i], bucket.cut_dim, parallel.shard_axes)
    return specs


def cuts_of(spec: P, cutting_axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For each dimension, the indices of those of ``cutting_axes`` that cut it."""
    cuts = [
        tuple(cutting_axes.index(axis) for axis in names_of(entry) if axis in cutting_axes)
        for entry in spec
    ]
    while cuts and not cuts[-1]:  # P("model", None) cuts as P("model") does
        cuts.pop()
    return tuple(cuts)


def axes_of(spec: P) -> tuple[str, ...]:
    """Returns the mesh axes that a PartitionSpec names."""
    return tuple(axis for entry in spec for axis in names_of(entry))


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _cut(parallel: DataParallel, path: str, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
    """The shape of a device's part of a global array."""
    unknown = [axis for axis in axes_of(spec) if axis not in parallel.tensor_axes]
    if unknown:
        raise MeshError(
            path,
            f"param_specs names axis {unknown[0]!r}",
            got=spec,
            expected=f"axes that carry no data: {parallel.tensor_axes}",
            action="Leave sharding over data axes to sharding_strategy.",
        )
    sizes = [1] * len(shape)
    for dim, entry in enumerate(spec):
        if dim < len(shape):
            sizes[dim] = parallel.size(names_of(entry))
    fits = len(spec) <= len(shape) and all(n % k == 0 for n, k in zip(shape, sizes, strict=True))
    if not fits:
        raise ShapeError(
            path,
            "does not divide as param_specs says",
            got=f"shape {shape}, {spec}",
            expected=f"dimensions that divide by {tuple(sizes)}",
            action="Change param_specs for this leaf.",
        )
    return tuple(n // k for n, k in zip(shape, sizes, strict=True))


def _with_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Adds axes to one dimension: inside of what tensor axes leave to a device."""
    entries = list(spec) + [None] * (dim + 1 - len(spec))
    both = (*names_of(entries[dim]), *axes)
    entries[dim] = both if len(both) > 1 else both[0]
    return P(*entries)
