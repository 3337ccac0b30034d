"""The only module that talks to other devices. Everything here runs inside ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jdistadam.errors import ShapeError, describe


def shard_map(
    f: Callable[..., Any], *, mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any
) -> Any:
    """``jax.shard_map`` without vma checks, for arguments that may hold zero-size arrays.

    jaxlib 0.11 crashes while compiling a program of several CPU devices that passes a zero-size
    array into a manual region. Such arrays hold nothing: they are made anew inside.
    """

    def mapped(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        treedef: Any = jax.tree.structure(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        passed = [i for i, x in enumerate(leaves) if x.size]

        def local(arrays: list[Any]) -> Any:
            given = iter(arrays)
            return f(
                *treedef.unflatten(
                    next(given)
                    if x.size
                    else jnp.zeros(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)
                    for x, spec in zip(leaves, specs, strict=True)
                )
            )

        inner = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=([specs[i] for i in passed],),
            out_specs=out_specs,
            check_vma=False,
        )
        arguments = [leaves[i] for i in passed]
        if crashes_on_empty_arrays(mesh):
            _refuse_empty_constants(inner, arguments)
        return inner(arguments)

    return mapped


def crashes_on_empty_arrays(mesh: Mesh) -> bool:
    """Whether XLA ends the process where a zero-size array enters a manual region of the mesh."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_cpu and mesh.size > 1 and jax.__version_info__[:2] == (0, 11)


def _refuse_empty_constants(mapped: Any, arguments: list[Any]) -> None:
    """Raises where a mapped function closes over a zero-size array, which enters it unseen."""
    for constant in jax.make_jaxpr(mapped)(arguments).consts:
        if not jnp.size(constant):
            raise ShapeError(
                describe(
                    "loss_fn",
                    "closes over a zero-size array, on which jax 0.11 crashes",
                    got=jnp.shape(constant),
                    expected="at least one element",
                    action="Make the array inside of loss_fn, or pass it in the batch.",
                )
            )


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts, and makes sure that the rounding happens.

    XLA may delete a cast to 16 bits and back, and does so where a collective over one device
    vanishes between them: one device would then compute other numbers than two.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype != dtype and dtype.itemsize < x.dtype.itemsize:
        info = jnp.finfo(dtype)
        x = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return x.astype(dtype)


def reduce_scatter(x: jax.Array, axis: str, *, dim: int, wire_dtype: Any) -> jax.Array:
    r"""Sums ``x`` over a mesh axis and keeps this device's part.

    Device :math:`i` of :math:`N` returns :math:`\sum_r x_r[iS:(i+1)S]` along ``dim``. The
    collective library adds, in ``wire_dtype`` and in an order of its own.

    Args:
      x: This device's contribution. ``x.shape[dim]`` must divide by N.
      axis: Mesh axis to sum over.
      dim: Dimension to scatter.
      wire_dtype: Each contribution is rounded to it once, sent and summed in it. Bytes sent per
        device: (N - 1) / N * x.size * itemsize.

    Returns:
      The sum (not the mean), dtype ``wire_dtype``, ``x.shape`` with dimension ``dim`` cut to 1/N.
    """
    with jax.named_scope("jdistadam/reduce_scatter"):
        return lax.psum_scatter(round_to(x, wire_dtype), axis, scatter_dimension=dim, tiled=True)


def all_gather(shard: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """Concatenates every device's shard along ``dim``; the same array on all devices."""
    with jax.named_scope("jdistadam/all_gather"):
        return lax.all_gather(shard, axis, axis=dim, tiled=True, to="invarying")


def all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Sums over a mesh axis; the same array on all devices."""
    return lax.psum(x, axis)


def all_reduce_mean(x: jax.Array, axis: str) -> jax.Array:
    """Averages over a mesh axis; the same array on all devices."""
    return lax.pmean(x, axis)


def all_reduce_max(x: jax.Array, axis: str) -> jax.Array:
    """Takes the largest over a mesh axis; the same array on all devices."""
    return lax.pmax(x, axis)


def axis_index(axis: str) -> jax.Array:
    """Returns this device's index along a mesh axis."""
    return lax.axis_index(axis)


def to_varying(x: Any, axis: str) -> Any:
    """Marks ``x`` as different on each device, for the types of ``shard_map(check_vma=True)``."""
    return x if axis in (varying_axes(x) or ()) else lax.pcast(x, axis, to="varying")


def vary_together(tree: Any) -> Any:
    """Marks every leaf as varying over all axes over which any of them varies.

    A foreign call takes the types of its results from one operand: it must know of all others.
    """
    axes = frozenset().union(*(varying_axes(x) or () for x in jax.tree.leaves(tree)))
    for axis in sorted(axes):
        tree = jax.tree.map(lambda x, axis=axis: to_varying(x, axis), tree)
    return tree


def is_bound(axis: str) -> bool:
    """Whether this code runs inside a shard_map over the axis."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def varying_axes(x: Any) -> frozenset[str] | None:
    """Returns the axes over which ``x`` may differ; None where the types do not track it."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return None if manual is None else frozenset(manual.varying)
