"""Flax's boxes around the arrays of a tree: ``nnx.Variable``, and ``nn.Partitioned`` of linen.

[Note: boxes]
A box is a node of a tree with one child and a note about it, such as how it is to be sharded.
Trees like params have the boxes of params. A moment in codes is two arrays in the place of one:
in a state each of these has a box of its own, as nnx puts one array into a Variable and linen
reads one sharding from a box. While a step computes, the box is around both, as around the
parameter. Leaves have the same order either way, and the same names: those of a tree without boxes.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jdistadam.core.codecs import BlockCodes, is_codes

_KINDS = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
_SHARDINGS = ("out_sharding", "optimizer_sharding")  # of a Variable, if it has them


def is_box(x: Any) -> bool:
    """Whether ``x`` is a box. Flax is not imported: without it there are none."""
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in _KINDS)
    return isinstance(x, tuple(kind for kind in kinds if kind is not None))


def _content(box: Any) -> Any:
    return next(iter(jax.tree.leaves(box, is_leaf=lambda x: x is not box)), None)


def _with(box: Any, content: Any) -> Any:
    treedef: Any = jax.tree.structure(box, is_leaf=lambda x: x is not box)
    return treedef.unflatten([content])


def unboxed(tree: Any) -> Any:
    """Returns a tree without its boxes."""
    return jax.tree.map(lambda x: unboxed(_content(x)) if is_box(x) else x, tree, is_leaf=is_box)


def leaves_with_path(tree: Any, is_leaf: Any = None) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a tree, each with the keys that lead to it in a tree without boxes."""
    stop = is_leaf or (lambda x: False)
    found: list[tuple[tuple[Any, ...], Any]] = []
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: stop(x) or is_box(x))
    for path, x in flat:
        if is_box(x) and not stop(x):
            found.extend((path + rest, y) for rest, y in leaves_with_path(_content(x), is_leaf))
        else:
            found.append((path, x))
    return found


def codes_outside(moments: Any) -> Any:
    """Returns moments as a state has them: codes and scales each in a box."""

    def outside(x: Any) -> Any:
        if not is_box(x):
            return x
        content = codes_outside(_content(x))
        if not is_codes(content):
            return _with(x, content)
        return BlockCodes(_with(x, content.codes), _of_scales(_with(x, content.scales)))

    return jax.tree.map(outside, moments, is_leaf=is_box)


def codes_inside(moments: Any) -> Any:
    """Returns moments as a step has them: the inverse."""

    def inside(x: Any) -> Any:
        if not is_codes(x) or not is_box(x.codes):
            return x
        both = inside(BlockCodes(_content(x.codes), _content(x.scales)))
        return _with(x.codes, both)

    return jax.tree.map(inside, moments, is_leaf=is_codes)


def _of_scales(box: Any) -> Any:
    """Gives the box of scales, which have one dimension, the sharding of the first one of codes."""
    if isinstance(names := getattr(box, "names", None), tuple):
        return box.replace(names=names[:1])
    if hasattr(box, "set_metadata"):
        known = box.get_metadata()
        for name in _SHARDINGS:
            if isinstance(known.get(name), tuple | list | P):
                box.set_metadata(name, tuple(known[name])[:1])
    return box
