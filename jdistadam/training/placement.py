"""Arrays brought to where they are to be, and into the order of dimensions asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from jdistadam.core import trees
from jdistadam.core.formats import order_of
from jdistadam.core.types import Params


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

    def copy(x: Any, kind: Any) -> Any:
        copied = jax.lax.convert_element_type(jnp.copy(x), x.dtype)
        return copied if kind is None else jax.random.wrap_key_data(copied, impl=kind)

    def copy_all(tree: Any) -> Any:
        return treedef.unflatten(map(copy, jax.tree.leaves(tree), kinds))

    in_order = any(isinstance(x, Format) for x in jax.tree.leaves(sharding))
    options = {"out_shardings": sharding} if in_order else {}
    return jax.jit(copy_all, **options)(jax.device_put(treedef.unflatten(words), sharding))


def put_in_order(params: Params, placement: Any) -> Any:
    """Returns params with those that are to have another Format brought to it."""

    def put(x: Any, place: Any) -> Any:
        is_there = not isinstance(place, Format) or is_at(x, place)
        return x if is_there else jax.device_put(x, place)

    return jax.tree.map(put, params, placement)


def is_at(x: Any, place: Any) -> bool:
    """Whether an array is where it should be, and in which order of dimensions."""
    if not isinstance(x, jax.Array):
        return False
    if isinstance(place, Format):
        return x.sharding == place.sharding and order_of(x) == getattr(
            place.layout, "major_to_minor", None
        )
    return x.sharding == place
