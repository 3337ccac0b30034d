"""The only module that talks to other devices. Everything here runs inside ``jax.shard_map``.

[Note: casts that XLA deletes]
XLA may delete a cast to 16 bits and back, and does so where a collective over one device vanishes
between the two: one device would then compute other numbers than two. It may also move a cast to
float32 behind a collective that only copies, so that other bytes are sent than the policy says.
``round_to`` keeps the first kind, ``keep_cast`` both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

Axes = tuple[str, ...]
"""Names of mesh axes."""


def to_varying(x: Any, axes: Axes) -> Any:
    """Marks ``x`` as different on each device, for the types of ``shard_map(check_vma=True)``."""
    varying = varying_axes(x)
    if varying is None:
        return x
    missing = tuple(axis for axis in axes if axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_together(tree: Any) -> Any:
    """Marks every leaf as varying over all axes over which any of them varies.

    A foreign call takes the types of its results from one operand: it must know of all others.
    """
    axes = frozenset().union(*(varying_axes(x) or () for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: to_varying(x, tuple(sorted(axes))), tree) if axes else tree


def unbound(axes: Axes) -> Axes:
    """Returns those axes that this code does not run inside a shard_map over."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in manual)


def varying_axes(x: Any) -> frozenset[str] | None:
    """Returns the axes over which ``x`` may differ; None where the types do not track it."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return None if manual is None else frozenset(manual.varying)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts, and makes sure that the rounding happens: [Note: casts that XLA deletes]."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype or dtype.itemsize >= x.dtype.itemsize:
        return x.astype(dtype)
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # reduce_precision would make zeros of the subnormal numbers of narrower exponents (in float16
    # of all below 6.1e-5), and knows no format without infinities, as float8_e4m3fn is.
    return lax.optimization_barrier(x.astype(dtype))


def keep_cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts, and makes sure that a result that is sent is sent in ``dtype``.

    See [Note: casts that XLA deletes].
    """
    if jnp.dtype(dtype).itemsize > x.dtype.itemsize:
        return lax.optimization_barrier(x.astype(dtype))
    return round_to(x, dtype)


def reduce_scatter(x: jax.Array, axes: Axes, *, dim: int, comm_dtype: Any) -> jax.Array:
    r"""Sums ``x`` over mesh axes and keeps this device's part.

    Device :math:`i` of :math:`N` returns :math:`\sum_r x_r[iS:(i+1)S]` along ``dim``. The
    collective library adds, in ``comm_dtype`` and in an order that it chooses.

    Args:
      x: This device's contribution. ``x.shape[dim]`` must divide by N.
      axes: Mesh axes to sum over, the most significant one first.
      dim: Dimension to scatter.
      comm_dtype: Each contribution is rounded to it once, sent and summed in it. Bytes sent per
        device: (N - 1) / N * x.size * itemsize.

    Returns:
      The sum (not the mean), dtype ``comm_dtype``, ``x.shape`` with dimension ``dim`` cut to 1/N.
    """
    with jax.named_scope("jdistadam/reduce_scatter"):
        return lax.psum_scatter(round_to(x, comm_dtype), axes, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """Sends slice ``i`` of dimension ``dim`` to device ``i`` of an axis.

    Args:
      x: ``x.shape[dim]`` must be the number of devices along the axis.
      axis: The mesh axis.
      dim: The dimension that is handed out.

    Returns:
      What the devices sent, stacked in a new first dimension; ``dim`` is gone.
    """
    with jax.named_scope("jdistadam/all_to_all"):
        return lax.all_to_all(x, axis, split_axis=dim, concat_axis=0)


def send_around(x: jax.Array, axes: Axes, *, distance: int, devices: int) -> jax.Array:
    """Sends to the device that is ``distance`` places on; returns what came from as far before.

    XLA may do so by the copy engines of GPUs, which take no multiprocessor from other work.
    """
    with jax.named_scope("jdistadam/send_around"):
        return lax.ppermute(x, axes, [(i, (i + distance) % devices) for i in range(devices)])


def all_gather(shard: jax.Array, axes: Axes, *, dim: int, to: str = "invarying") -> jax.Array:
    """Concatenates every device's shard along ``dim``; the same array on all devices.

    Its type says that they are the same unless ``to`` is "varying".
    """
    if not axes:
        return shard
    with jax.named_scope("jdistadam/all_gather"):
        return lax.all_gather(shard, axes, axis=dim, tiled=True, to=to)


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Sums over mesh axes; the same array on all devices."""
    return lax.psum(x, axes) if axes else x


def all_reduce_mean(x: jax.Array, axes: Axes) -> jax.Array:
    """Averages over mesh axes; the same array on all devices."""
    return lax.pmean(x, axes)


def all_reduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Takes the largest over mesh axes; the same array on all devices."""
    return lax.pmax(x, axes) if axes else x


def axis_index(axes: Axes) -> jax.Array:
    """Returns this device's index along mesh axes, the first one most significant."""
    return lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Brings a traced array outside of shard_map to a sharding, on Explicit and on Auto axes."""
    explicit = jax.sharding.AxisType.Explicit
    if explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def to_invariant(x: jax.Array, axes: Axes) -> jax.Array:
    """Tells the types of ``shard_map(check_vma=True)`` that equal arrays are equal.

    Only for what is computed from the same operands on all devices; a collective is spent on it
    where types say otherwise, none where they say nothing.
    """
    differs_over = varying_axes(x) or ()
    return all_reduce_max(x, tuple(axis for axis in axes if axis in differs_over))
