"""Arrays brought to where they are to be."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam import compat
from jdistadam.core import trees


def copy_to(tree: Any, sharding: Any) -> Any:
    """Returns copies placed as ``sharding`` says, which no one else holds, with definite types.

    ``device_put`` may hand out the caller's own buffer as the replica of its device, also with
    may_alias=False; the results of a jitted copy are never shared with its arguments. A Python
    number would come back from a step as another type, and compile the step again. Of random keys
    the words are placed: ``device_put`` cannot bring keys to devices of other processes.
    """
    leaves = jax.tree.leaves(tree)
    treedef: Any = jax.tree.structure(tree)
    kinds = [jax.random.key_impl(x) if trees.is_key(x) else None for x in leaves]
    words = [jax.random.key_data(x) if trees.is_key(x) else x for x in leaves]

    placed = jax.device_put(compat.row_major(treedef.unflatten(words)), sharding)
    return _copies(placed, tuple(kinds))


@functools.partial(jax.jit, static_argnums=1)
def _copies(tree: Any, kinds: tuple[Any, ...]) -> Any:
    """Copies of arrays; random keys of those of which ``kinds`` has one."""

    def one(x: Any, kind: Any) -> Any:
        copied = jax.lax.convert_element_type(jnp.copy(x), x.dtype)
        return copied if kind is None else jax.random.wrap_key_data(copied, impl=kind)

    treedef: Any = jax.tree.structure(tree)
    return treedef.unflatten(map(one, jax.tree.leaves(tree), kinds))


def is_at(x: Any, place: Any, *, exactly: bool = True) -> bool:
    """Whether an array is where it should be.

    Args:
      x: The array.
      place: A sharding.
      exactly: Whether its sharding is also spelled so: P(None) places an array as P() does, and on
        one device P("data") too, which on Explicit axes is another type.
    """
    if not isinstance(x, jax.Array):
        return False
    if exactly or x.sharding == place:
        return bool(x.sharding == place)
    is_typed = jax.sharding.AxisType.Explicit in place.mesh.axis_types
    is_same_type = not is_typed or _dims(x.sharding, x.ndim) == _dims(place, x.ndim)
    return is_same_type and x.sharding.is_equivalent_to(place, x.ndim)


def _dims(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """What cuts each dimension of an array."""
    spec = tuple(getattr(sharding, "spec", ("no mesh",)))
    return spec + (None,) * (ndim - len(spec))


def brought(tree: Any, wanted: Sequence[Any], *, exactly: bool = True) -> Any:
    """Returns a tree whose leaves are where they are wanted; those that were not are copies."""
    leaves: Any = jax.tree.leaves(tree)
    pairs = enumerate(zip(leaves, wanted, strict=True))
    moved = [i for i, (x, place) in pairs if not is_at(x, place, exactly=exactly)]
    if not moved:
        return tree
    copies = copy_to([leaves[i] for i in moved], [wanted[i] for i in moved])
    for i, x in zip(moved, copies, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


_SMALL = 1024  # elements, of a rate or a key that was set by hand


def apart(tree: Any, others: Iterable[Any] = (), returned: Iterable[Any] = ()) -> Any:
    """Returns a tree of which no array has the memory of another one, or of one of ``others``.

    Those that have it are copied: JAX would donate it twice, or donate and read it, which ends the
    process on several devices. Two arrays of one mesh share all of it or nothing: the first shard
    says so.

    To ask where an array is may wait for the program that makes it. So of the ``returned``, which a
    program returned and are apart, only those are asked that have the shape and dtype of a large
    leaf that is not among them; small ones that are not are no others' unless they are the same.
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
    """Where the first shard of an array is that this process has; None if it has none."""
    if not isinstance(x, jax.Array) or not x.size or x.is_deleted():
        return None
    words = jax.random.key_data(x) if trees.is_key(x) else x
    place: int = words.addressable_data(0).unsafe_buffer_pointer()
    return place
