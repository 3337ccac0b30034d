"""The only module that communicates between devices. All of it runs inside ``jax.shard_map``.

[Note: casts that XLA deletes]
XLA may delete a cast to 16 bits and back. On one device it removes the collective between the two
casts and then the casts; a run on one device would then differ from a run on two. XLA may also move
a cast to float32 behind a collective that only copies data; the collective then sends more bytes
than the policy says. ``round_to`` prevents the first, ``keep_cast`` prevents both.

Our own JAX primitives: operations for which JAX has no rule, or must not have one.

[Note: primitives of our own]
``jax.custom_jvp`` and ``custom_vmap`` fail for second derivatives of a loop. When ``lax.scan``
looks for values that are equal in all iterations, it drops the rule of ``custom_jvp``, and JAX then
tries to differentiate the foreign call. JAX never drops the rules of a primitive. The computation
of a primitive is stored as a jaxpr in its parameters, because JAX searches these for
``custom_partitioning``, which needs the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]
"""Names of mesh axes."""


def to_varying(x: Any, axes: Axes) -> Any:
    """Marks ``x`` as varying over axes for the types of ``shard_map(check_vma=True)``."""
    varying = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_together(tree: Any) -> Any:
    """Marks every leaf as varying over the union of the leaves' varying axes.

    The result types of a foreign call come from one operand, so it must have the axes of all.
    """
    axes = varying_axes(tree)
    return jax.tree.map(lambda x: to_varying(x, tuple(sorted(axes))), tree) if axes else tree


def no_mesh() -> Any:
    """A context for code of one device in a partition rule, where new arrays have no sharding.

    On Explicit axes JAX would otherwise ask how they are sharded, too late.
    """
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def axes_in(entry: Any) -> Axes:
    """Returns the mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(spec: P) -> Axes:
    """Returns the mesh axes in a PartitionSpec."""
    return tuple(axis for entry in spec for axis in axes_in(entry))


def unbound(axes: Axes) -> Axes:
    """Returns the axes over which this code does not run inside a shard_map."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in manual)


def varying_axes(tree: Any) -> frozenset[str]:
    """Returns the axes over which any leaf may differ; none where types do not track it."""
    of_leaves = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))
    return frozenset[str]().union(*of_leaves)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts, and guarantees the rounding: [Note: casts that XLA deletes]."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype or dtype.itemsize >= x.dtype.itemsize:
        return x.astype(dtype)
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # reduce_precision flushes subnormal numbers of narrower exponents to zero (in float16 all below
    # 6.1e-5) and knows no format without infinities, such as float8_e4m3fn.
    return lax.optimization_barrier(x.astype(dtype))


def follows(param: jax.Array, main: jax.Array) -> jax.Array:
    """Returns, for each element, whether a parameter is its float32 main parameter, rounded."""
    rounded = round_to(main, param.dtype)
    return (param == rounded) | (jnp.isnan(param) & jnp.isnan(rounded))


def keep_cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts, and guarantees that a collective sends ``dtype``.

    See [Note: casts that XLA deletes].
    """
    if jnp.dtype(dtype).itemsize > x.dtype.itemsize:
        return lax.optimization_barrier(x.astype(dtype))
    return round_to(x, dtype)


def reduce_scatter(x: jax.Array, axes: Axes, *, dim: int, comm_dtype: Any) -> jax.Array:
    r"""Sums ``x`` over mesh axes and keeps this device's shard.

    Device :math:`i` of :math:`N` returns :math:`\sum_r x_r[iS:(i+1)S]` along ``dim``. The
    collective library adds, in ``comm_dtype`` and in an order that it chooses.

    Args:
      x: This device's contribution. ``x.shape[dim]`` must divide by N.
      axes: Mesh axes to sum over, the most significant one first.
      dim: Dimension to scatter.
      comm_dtype: Contributions are rounded to it once, then sent and summed in it. Bytes sent per
        device: (N - 1) / N * x.size * itemsize.

    Returns:
      The sum (not the mean), dtype ``comm_dtype``, shape of ``x`` with ``dim`` divided by N.
    """
    with jax.named_scope("jdistadam/reduce_scatter"):
        return lax.psum_scatter(round_to(x, comm_dtype), axes, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """Sends slice ``i`` of dimension ``dim`` to device ``i`` of an axis.

    Args:
      x: ``x.shape[dim]`` must be the number of devices along the axis.
      axis: The mesh axis.
      dim: The dimension to distribute.

    Returns:
      The received slices, stacked in a new first dimension; ``dim`` is gone.
    """
    with jax.named_scope("jdistadam/all_to_all"):
        return lax.all_to_all(x, axis, split_axis=dim, concat_axis=0)


def all_gather(shard: jax.Array, axes: Axes, *, dim: int, to: str = "invarying") -> jax.Array:
    """Concatenates every device's shard along ``dim``; the result is equal on all devices.

    Its type says so unless ``to`` is "varying".
    """
    if not axes:
        return shard
    with jax.named_scope("jdistadam/all_gather"):
        return lax.all_gather(shard, axes, axis=dim, tiled=True, to=to)


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Sums over mesh axes; the result is equal on all devices."""
    if not axes:
        return x
    with jax.named_scope("jdistadam/all_reduce"):
        return lax.psum(x, axes)


def all_reduce_mean(x: jax.Array, axes: Axes) -> jax.Array:
    """Averages over mesh axes; the result is equal on all devices."""
    return lax.pmean(x, axes)


def all_reduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Takes the maximum over mesh axes; the result is equal on all devices."""
    return lax.pmax(x, axes) if axes else x


def axis_index(axes: Axes) -> jax.Array:
    """Returns this device's index along mesh axes, the first one most significant."""
    return lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Reshards a traced array outside of shard_map, on Explicit and on Auto axes."""
    explicit = jax.sharding.AxisType.Explicit
    if explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def to_invariant(x: jax.Array, axes: Axes) -> jax.Array:
    """Marks equal arrays as invariant for the types of ``shard_map(check_vma=True)``.

    Only for values that all devices compute from the same operands. It costs a collective if types
    say otherwise, and nothing if types say nothing.
    """
    differs_over = varying_axes(x)
    return all_reduce_max(x, tuple(axis for axis in axes if axis in differs_over))


Rule = Callable[..., Any]


def make_primitive(
    name: str,
    run: Rule,
    types: Rule,
    *,
    batched: Rule | None = None,
    jvp: Rule | None = None,
    lowering: Rule | None = None,
    is_cached: bool = True,
) -> Primitive:
    """Makes a primitive with several results.

    Args:
      name: Its name in jaxprs.
      run: Computes a list of results from operands and parameters.
      types: Computes the result types from operand types.
      batched: Its rule under ``jax.vmap``, which otherwise raises.
      jvp: Its rule for differentiation, likewise.
      lowering: How it is compiled; None: as ``run``.
      is_cached: Whether equal ones in a program may be compiled once, as a function.
    """
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(run)
    made.def_abstract_eval(types)
    rule = lowering or mlir.lower_fun(run, multiple_results=True)
    mlir.register_lowering(made, rule, cacheable=is_cached)
    if batched is not None:
        batching.primitive_batchers[made] = batched
    if jvp is not None:
        ad.primitive_jvps[made] = jvp
    return made
