"""Global arrays outside of programs: copied, placed, told apart, and fetched to the host."""

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
from jdistadam.core import memory, trees
from jdistadam.errors import TreeError

compiled = jax.disable_jit(False)
"""Makes a function compile its programs, which place their results, under jax_disable_jit too."""


def place(tree: Any, shardings: Any) -> Any:
    """Returns a tree where ``jax.device_put`` would place it, without going through the host.

    ``device_put`` fetches an array to the host if devices of its mesh need other shards. Between
    devices, a program moves it. Small arrays take longer to compile than to fetch.

    Args:
      tree: Arrays.
      shardings: A sharding, or a tree of them like ``tree``, or like its first levels.
    """
    tree = compat.row_major(tree)
    wanted = jax.tree.broadcast(shardings, tree)
    return jax.device_put(jax.tree.map(_moved_in_mesh, tree, wanted), wanted)


_FETCHED_BYTES = 1 << 20
_SMALL = 1024  # elements: of a learning rate or a key that was set by hand


def _moved_in_mesh(x: Any, wanted: Any) -> Any:
    """An array with another sharding of its mesh; others as they are."""
    held = None if trees.is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(held, NamedSharding) or not isinstance(wanted, NamedSharding):
        return x
    if x.nbytes < _FETCHED_BYTES:
        return x
    is_in_mesh = (held.mesh, held.memory_kind) == (wanted.mesh, wanted.memory_kind)
    if not is_in_mesh or held.is_equivalent_to(wanted, x.ndim):
        return x
    return jax.jit(_itself, out_shardings=wanted)(x)


def _itself(x: Any) -> Any:
    return x


def copy_to(tree: Any, sharding: Any) -> Any:
    """Returns copies placed by ``sharding``, which share no memory and have definite types.

    ``place`` may return the caller's own buffer as the replica of its device, even with
    may_alias=False; the results of a jitted copy are never shared with its arguments. A step would
    return a Python number as another type, which would compile the step again. Random keys are
    placed as their words, because ``device_put`` cannot move keys to devices of other processes.

    Nothing reads the caller's numpy arrays afterwards. JAX would: on CPUs it takes aligned ones in
    their place, and its programs run later. Small ones are copied, so that a loop that sets a
    number waits for no step; for the programs that copy large ones this waits.
    """
    leaves, treedef = jax.tree.flatten(tree)
    of_numpy = [isinstance(x, np.ndarray) and x.size > _SMALL for x in leaves]
    leaves = [np.array(x) if isinstance(x, np.ndarray) and x.size <= _SMALL else x for x in leaves]
    kinds, words = [*map(trees.impl_of_key, leaves)], [*map(trees.words_of, leaves)]

    on_device = jax.tree.map(memory.device_sharding, sharding)
    placed = jax.tree.leaves(place(jax.tree.unflatten(treedef, words), on_device))
    types = [(*type_of(x), getattr(x, "sharding", None)) for x in placed]
    for some in trees.batches_of_equals(types, _MOST_COPIES):
        copied = _copies([placed[i] for i in some], tuple(kinds[i] for i in some))
        for i, x in zip(some, copied, strict=True):
            placed[i] = x
    jax.block_until_ready([x for x, is_read in zip(placed, of_numpy, strict=True) if is_read])
    copies = jax.tree.unflatten(treedef, placed)
    if not any(map(memory.is_on_host, jax.tree.leaves(sharding))):
        return copies
    return jax.device_put(copies, sharding)  # copies made by a program are on the device


_MOST_COPIES = 256  # in one program: [Note: programs of few leaves]


@functools.partial(jax.jit, static_argnums=1)
def _copies(arrays: Sequence[Any], kinds: tuple[Any, ...]) -> list[Any]:
    """Copies of arrays; words become random keys if ``kinds`` has their implementation."""

    def one(x: Any, kind: Any) -> Any:
        return trees.from_words(jax.lax.convert_element_type(jnp.copy(x), x.dtype), kind)

    return [one(x, kind) for x, kind in zip(arrays, kinds, strict=True)]


def is_at(x: Any, place: Any, *, exactly: bool) -> bool:
    """Whether an array is placed as required.

    Args:
      x: The array.
      place: A sharding.
      exactly: Whether the spelling must match too: P(None) places an array as P() does, and on one
        device P("data") does too; on Explicit axes these are different types, and so is an array
        of a mesh with Auto axes.
    """
    if not trees.is_concrete(x):
        return False
    if exactly or x.sharding == place:
        return bool(x.sharding == place)
    is_typed = jax.sharding.AxisType.Explicit in place.mesh.axis_types
    is_same_type = not is_typed or _type(x.sharding, x.ndim) == _type(place, x.ndim)
    return is_same_type and x.sharding.is_equivalent_to(place, x.ndim)


def _type(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """The types of the mesh axes, and the axes that cut each dimension of an array."""
    spec = tuple(getattr(sharding, "spec", ("no mesh",)))
    types = getattr(getattr(sharding, "mesh", None), "axis_types", None)
    return types, *spec, *(None,) * (ndim - len(spec))


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
    return trees.words_of(x).addressable_data(0).unsafe_buffer_pointer()


def fetch(x: Any) -> np.ndarray:
    """Returns a whole array, even if other processes hold shards: all processes call this."""
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
