"""Places arrays: batches and states on the mesh, arrays of a mesh on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, memory, trees
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import DtypeError, MeshError, ShapeError, TreeError


def copy_to(tree: Any, sharding: Any) -> Any:
    """Returns copies placed by ``sharding``, which share no memory and have definite types.

    ``device_put`` may return the caller's own buffer as the replica of its device, even with
    may_alias=False; the results of a jitted copy are never shared with its arguments. A step would
    return a Python number as another type, which would compile the step again. Random keys are
    placed as their words, because ``device_put`` cannot move keys to devices of other processes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    kinds = [jax.random.key_impl(x) if trees.is_key(x) else None for x in leaves]
    words = [jax.random.key_data(x) if trees.is_key(x) else x for x in leaves]

    on_device = jax.tree.map(memory.device_sharding, sharding)
    tree = jax.device_put(compat.row_major(jax.tree.unflatten(treedef, words)), on_device)
    placed = jax.tree.leaves(tree)
    types = [(*type_of(x), getattr(x, "sharding", None)) for x in placed]
    for some in trees.batches_of_equals(types, _MOST_COPIES):
        copied = _copies([placed[i] for i in some], tuple(kinds[i] for i in some))
        for i, x in zip(some, copied, strict=True):
            placed[i] = x
    copies = jax.tree.unflatten(treedef, placed)
    if not any(map(memory.is_on_host, jax.tree.leaves(sharding))):
        return copies
    return jax.device_put(copies, sharding)  # copies made by a program are on the device


_MOST_COPIES = 256  # in one program: [Note: programs of few leaves]


@functools.partial(jax.jit, static_argnums=1)
def _copies(arrays: Sequence[Any], kinds: tuple[Any, ...]) -> list[Any]:
    """Copies of arrays; words become random keys if ``kinds`` has their implementation."""

    def one(x: Any, kind: Any) -> Any:
        copied = jax.lax.convert_element_type(jnp.copy(x), x.dtype)
        return copied if kind is None else jax.random.wrap_key_data(copied, impl=kind)

    return [one(x, kind) for x, kind in zip(arrays, kinds, strict=True)]


def is_at(x: Any, place: Any, *, exactly: bool) -> bool:
    """Whether an array is placed as required.

    Args:
      x: The array.
      place: A sharding.
      exactly: Whether the spelling must match too: P(None) places an array as P() does, and on one
        device P("data") does too; on Explicit axes these are different types.
    """
    if not isinstance(x, jax.Array):
        return False
    if exactly or x.sharding == place:
        return bool(x.sharding == place)
    is_typed = jax.sharding.AxisType.Explicit in place.mesh.axis_types
    is_same_type = not is_typed or _dims(x.sharding, x.ndim) == _dims(place, x.ndim)
    return is_same_type and x.sharding.is_equivalent_to(place, x.ndim)


def _dims(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """The mesh axes that cut each dimension of an array."""
    spec = tuple(getattr(sharding, "spec", ("no mesh",)))
    return spec + (None,) * (ndim - len(spec))


def brought(tree: Any, wanted: Sequence[Any], *, exactly: bool = True) -> Any:
    """Returns a tree placed as ``wanted``; leaves that were elsewhere are copies."""
    leaves: Any = jax.tree.leaves(tree)
    pairs = enumerate(zip(leaves, wanted, strict=True))
    moved = [i for i, (x, place) in pairs if not is_at(x, place, exactly=exactly)]
    if not moved:
        return tree
    copies = copy_to([leaves[i] for i in moved], [wanted[i] for i in moved])
    for i, x in zip(moved, copies, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


_SMALL = 1024  # elements: of a learning rate or a key that was set by hand


def apart(tree: Any, others: Iterable[Any] = (), returned: Iterable[Any] = ()) -> Any:
    """Returns a tree whose arrays share no memory with each other or with ``others``.

    Arrays that share memory are copied. JAX would donate them twice, or donate and read them, which
    ends the process on several devices. Two arrays of one mesh share all of their memory or none,
    so comparing the first shard is enough.

    Reading an array's address may wait for the program that makes it. The arrays ``returned`` by a
    program share no memory, so their addresses are read only if a large leaf from elsewhere has the
    same shape and dtype. Small leaves from elsewhere share memory only if identical.
    """
    leaves: Any = jax.tree.leaves(tree)
    known, ids = {id(x) for x in returned}, set[int]()
    new, twice = [], []
    for i, x in enumerate(leaves):
        if not isinstance(x, jax.Array) or not x.size:
            continue
        if id(x) in ids:
            twice.append(i)
        elif id(x) not in known and (x.size > _SMALL or not known):
            new.append(i)
        ids.add(id(x))
    types = {type_of(leaves[i]) for i in new}
    asked = (x for x in leaves if id(x) in known and type_of(x) in types)
    seen = {_memory_of(x) for x in (*others, *asked)}
    for i in new:
        memory = _memory_of(leaves[i])
        if memory is not None and memory in seen:
            twice.append(i)
        seen.add(memory)
    for i in twice:
        leaves[i] = copy_to(leaves[i], leaves[i].sharding)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves) if twice else tree


def type_of(x: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of an array."""
    return x.shape, x.dtype


def _memory_of(x: Any) -> int | None:
    """The address of an array's first shard in this process; None if it has none."""
    if not isinstance(x, jax.Array) or not x.size or x.is_deleted():
        return None
    words = jax.random.key_data(x) if trees.is_key(x) else x
    return words.addressable_data(0).unsafe_buffer_pointer()


def fetch(x: Any) -> np.ndarray:
    """Returns a whole array, even if other processes hold parts: all processes call this."""
    if isinstance(x, jax.core.Tracer):
        raise TreeError(
            "state: this runs on the host, not inside of a program: "
            "got a traced array, as in jax.jit or jax.lax.scan, expected arrays with values. "
            "Call it outside; in a program jda.full_params(state, tx) has the parameters."
        )
    if isinstance(x, jax.Array) and not x.size:
        return np.zeros(x.shape, x.dtype)  # an array that a program cut cannot be read
    x = memory.from_host(x) if jax.process_count() > 1 else x
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        replicated = NamedSharding(x.sharding.mesh, P())
        x = jax.jit(lambda x: x, out_shardings=replicated)(x)
    return np.asarray(x)


def copy_of(x: Any) -> Any:
    """Returns a numpy array that shares no memory; for random keys new ones, on no mesh."""
    if trees.is_key(x):
        words = jnp.array(fetch(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.array(fetch(x))


def shard_batch(batch: Any, tx: DistributedTransformation, batch_spec: Any = None) -> Any:
    """Places a batch on the mesh, its leading dimension split over the devices.

    Arrays that are already there are returned unchanged. With several processes, each passes the
    part of its own devices.

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
        if isinstance(x, jax.Array) and not is_traced and x.sharding == sharding:
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

    given: list[Any] = jax.tree.leaves(batch)
    paths = trees.paths(batch, "batch")
    leaves = [place(path, x) for path, x in zip(paths, given, strict=True)]
    for path, x in zip(paths, given, strict=True):
        if np.ndim(x) and np.ndim(given[0]) and np.shape(x)[0] != np.shape(given[0])[0]:
            raise ShapeError(
                f"{path}: leading dimension differs from that of {paths[0]}: got {np.shape(x)[0]}, "
                f"expected {np.shape(given[0])[0]}. Give every leaf one row for each example."
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
    return all(
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and x.sharding == sharding
        and x.shape[:1] == leaves[0].shape[:1] != (0,)
        for x in leaves
    )


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
    array = np.asarray(x)
    if not trees.is_number(array):
        got = type(x).__name__ if array.dtype == object else array.dtype
        raise DtypeError(
            f"{path}: not an array of numbers: got {got}, expected a jax or numpy array. "
            "Keep what the loss does not read out of the batch."
        )
    return array
