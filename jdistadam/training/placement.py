"""Places batches on the mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, trees
from jdistadam.distributed.global_arrays import is_at
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import DtypeError, MeshError, ShapeError


def shard_batch(batch: Any, tx: DistributedTransformation, batch_spec: Any = None) -> Any:
    """Places a batch on the mesh, its leading dimension split over the devices.

    Arrays that are already there are returned unchanged. numpy arrays are copied, so a data loader
    may fill them again at once; to copy beside a step, call it in the loader's thread. With several
    processes, each passes the part of its own devices.

    Args:
      batch: Tree of arrays; the number of devices divides their leading dimension.
      tx: A distributed optimizer.
      batch_spec: PartitionSpec of all leaves. None: the leading dimension over all data axes.

    Returns:
      A tree like ``batch`` of global jax arrays.

    Raises:
      ShapeError: A leaf has no leading dimension, or one that is 0, that does not divide, or that
        differs from the other leaves'.
      DtypeError: A leaf is not an array of numbers.
      MeshError: ``batch_spec`` is not a PartitionSpec, or names an axis that the mesh lacks.
    """
    check_distributed(tx)
    config = tx.config
    spec = config.parallel.batch_spec if batch_spec is None else batch_spec
    check_batch_spec(spec, tx)
    sharding = NamedSharding(config.mesh, spec)
    num_local = max(1, config.parallel.num_devices // jax.process_count())

    def place(path: str, x: Any) -> Any:
        is_traced = isinstance(x, jax.core.Tracer)
        if is_at(x, sharding, exactly=True):
            return x
        x = _as_array(path, x)
        divides_by = config.parallel.num_devices if is_traced else num_local
        if x.ndim == 0 and len(spec):
            raise ShapeError(
                f"{path}: a leaf without dimensions cannot be split over the devices: got shape "
                "(), expected one row for each example. Pass a number of this step as "
                "np.full(batch_size, number), of which the loss reads one, or by "
                "state.replace(model_state=...). "
                "What the loss closes over is compiled in, and stays as it was."
            )
        if batch_spec is None and x.shape[0] % divides_by:
            raise ShapeError(
                f"{path}: leading dimension is not divisible by the number of devices: "
                f"got {x.shape}, expected a multiple of {divides_by}. "
                "Change the batch size, or drop the remainder."
            )
        if batch_spec is not None:
            _check_divides(path, x.shape, spec, tx)
        if is_traced:
            return collectives.constrain(x, sharding)
        if jax.process_count() > 1:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))
        return jax.device_put(compat.row_major(x), sharding)

    named = trees.named_leaves(batch, "batch")
    leaves = [place(path, x) for path, x in named]
    for path, x in named:
        name, first = named[0]
        if np.ndim(x) and np.ndim(first) and np.shape(x)[0] != np.shape(first)[0]:
            raise ShapeError(
                f"{path}: leading dimension differs from that of {name}: got {np.shape(x)[0]}, "
                f"expected {np.shape(first)[0]}. Give every leaf one row for each example."
            )
        if np.shape(x)[:1] == (0,):
            raise ShapeError(
                f"{path}: holds no examples: the mean of their losses would be NaN: "
                f"got {np.shape(x)}, expected a leading dimension above 0. Leave empty batches out."
            )
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def is_placed(batch: Any, sharding: NamedSharding) -> bool:
    """Whether shard_batch would return a batch unchanged."""
    leaves = jax.tree.leaves(batch)
    are_there = all(is_at(x, sharding, exactly=True) for x in leaves)
    return are_there and all(x.shape[:1] == leaves[0].shape[:1] != (0,) for x in leaves)


def check_batch_spec(spec: Any, tx: DistributedTransformation) -> None:
    """Raises MeshError unless ``spec`` is a PartitionSpec over axes of the mesh, each once."""
    axes = collectives.axes_of(spec) if isinstance(spec, P) else ()
    unknown = [axis for axis in axes if axis not in tx.config.mesh.axis_names]
    if not isinstance(spec, P) or unknown or len(set(axes)) < len(axes):
        raise MeshError(
            "batch_spec: not a PartitionSpec over the axes of the mesh, each at most once: "
            f"got {spec!r}, "
            f"expected one PartitionSpec for all leaves, over {tx.config.mesh.axis_names}. "
            f"Pass PartitionSpec{(*tx.config.parallel.batch_spec,)}, or leave it out."
        )


def _check_divides(
    path: str, shape: tuple[int, ...], spec: P, tx: DistributedTransformation
) -> None:
    """Raises ShapeError unless ``spec`` can cut a leaf. Processes hold parts of it."""
    sizes = [tx.config.parallel.size(collectives.axes_in(names)) for names in spec]
    divides = jax.process_count() > 1 or all(n % k == 0 for n, k in zip(shape, sizes, strict=False))
    if len(sizes) > len(shape) or not divides:
        raise ShapeError(
            f"{path}: cannot be split as batch_spec says: got shape {shape} and {spec}, "
            f"expected dimensions that divide by {tuple(sizes)}. Change the batch, or batch_spec."
        )


def _as_array(path: str, x: Any) -> Any:
    """Raises DtypeError unless ``x`` is an array of numbers, or converts to one."""
    if isinstance(x, jax.Array):
        return x
    # A copy: JAX may read a numpy array later, or on CPUs always, and the caller may fill it again.
    array = np.array(x)
    if not trees.is_number(array):
        got = type(x).__name__ if array.dtype == object else array.dtype
        raise DtypeError(
            f"{path}: not an array of numbers: got {got}, expected a jax or numpy array. "
            "Keep what the loss does not read out of the batch."
        )
    return array
