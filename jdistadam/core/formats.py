"""In which order the dimensions of each leaf are in memory: as a caller says, and as they are.

[Note: orders of dimensions]
An order lists the dimensions of a leaf from the slowest to the fastest in memory, as
``Layout.major_to_minor`` of JAX does. None is row-major. It is all of a layout that matters here: a
step is elementwise, so every array of a leaf may be in any order as long as it is one for all of
them. A foreign call must be told it: without layouts XLA gives each operand its own, and the kernel
would add elements that do not belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from jdistadam.core import trees
from jdistadam.core.masks import for_each_leaf
from jdistadam.errors import DtypeError, ShapeError

Order = tuple[int, ...]
Orders = tuple[Order | None, ...]

_KINDS = (Format, Layout, tuple, type(None))


def leaf_orders(given: Any, params: Any) -> Orders:
    """Returns the order of each leaf; () where all are row-major.

    Args:
      given: The argument ``formats`` of an optimizer: Formats, Layouts, tuples of dimensions, or
        None for row-major, in a tree like params, a prefix of it, or a function of params.
      params: Tree of arrays or of their shapes.

    Raises:
      TreeError, DtypeError, ShapeError: There is another tree, something else in it, or a layout of
        another rank or with tiles.

    Example:
      >>> kernel, bias = jax.ShapeDtypeStruct((3, 3, 8, 16), "float32"), np.zeros(16)
      >>> leaf_orders({"k": (3, 0, 1, 2), "b": None}, {"k": kernel, "b": bias})
      (None, (3, 0, 1, 2))
    """
    if given is None:
        return ()
    found = for_each_leaf(
        given,
        params,
        name="formats",
        kind=_KINDS,
        what="Format",
        expected="a Format, a Layout, the dimensions from major to minor, or None",
        is_leaf=_is_format,
    )
    paths = trees.paths(params, "formats")
    leaves = jax.tree.leaves(params)
    orders = [
        _order(path, value, len(np.shape(x)))
        for path, value, x in zip(paths, found, leaves, strict=True)
    ]
    return tuple(orders) if any(orders) else ()


def _is_format(x: Any) -> bool:
    is_dims = isinstance(x, tuple) and len(x) > 0 and all(isinstance(n, int) for n in x)
    return x is None or is_dims or isinstance(x, Format | Layout)


def _order(path: str, value: Any, rank: int) -> Order | None:
    """The order that stands for one leaf; None for row-major."""
    layout: Any = value.layout if isinstance(value, Format) else value
    if layout is None:
        return None
    if isinstance(layout, Layout):
        _check_without_tiles(path, layout)
        layout = layout.major_to_minor
    if not _is_format(layout) and layout != ():
        raise DtypeError(
            path,
            "leaves the layout open",
            got=layout,
            expected="the dimensions from major to minor",
            action="Ask the compiler with jdistadam.preferred_formats(loss_fn, params, batch).",
        )
    if sorted(layout) != list(range(rank)):
        raise ShapeError(
            path,
            "not an order of the dimensions of this leaf",
            got=tuple(layout),
            expected=f"each of 0 to {rank - 1} once" if rank else "() or None for a scalar",
            action="Give a layout of the rank of the leaf, or None for row-major.",
        )
    return None if tuple(layout) == tuple(range(rank)) else tuple(layout)


def _check_without_tiles(path: str, layout: Layout) -> None:
    if layout.tiling:
        raise ShapeError(
            path,
            "a layout with tiles, which the kernel does not read",
            got=layout.tiling,
            expected="an order of dimensions alone",
            action=f"Pass {layout.major_to_minor}, or what jdistadam.preferred_formats returns.",
        )


def as_stored(x: Any, order: Order | None) -> Any:
    """Returns an array, jax or numpy, with its dimensions in the order in which they are stored."""
    return x if order is None else x.transpose(order)


def as_leaf(x: Any, order: Order | None) -> Any:
    """The inverse of ``as_stored``."""
    return x if order is None else x.transpose([order.index(d) for d in range(len(order))])


def stored_dims(entries: Sequence[Any], order: Order | None) -> tuple[Any, ...]:
    """Returns a shape, or another tuple with one entry a dimension, as ``as_stored`` orders it."""
    return tuple(entries) if order is None else tuple(entries[d] for d in order)


def leaf_dims(entries: Sequence[Any], order: Order | None) -> tuple[Any, ...]:
    """The inverse of ``stored_dims``."""
    return (
        tuple(entries)
        if order is None
        else tuple(entries[order.index(d)] for d in range(len(order)))
    )


def order_of(x: Any) -> Order | None:
    """Returns the order of an array, or of a shape with a Format; None: row-major, or unknown."""
    layout = None if isinstance(x, jax.core.Tracer) else getattr(x, "format", Format()).layout
    order = getattr(layout, "major_to_minor", None)  # Layout.AUTO has none
    return None if order is None or order == tuple(range(len(order))) else tuple(order)


def with_order(sharding: Sharding, order: Order | None) -> Any:
    """Returns the Format of arrays of this order, or the sharding alone where it is row-major."""
    return sharding if order is None else Format(Layout(order), sharding)


def formats_of(tree: Any) -> Any:
    """Returns the Formats of arrays: ``out_shardings`` of a jit whose results are to have the same.

    ``jax.jit`` returns row-major arrays unless it is told otherwise.

    Args:
      tree: Tree of arrays, or of ``jax.ShapeDtypeStruct``.

    Returns:
      The same tree with the Format of each array that is not row-major, and None for the others,
      which leaves them to ``jax.jit``.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.zeros((2, 3))
      >>> w = jax.device_put(w, Format(Layout((1, 0)), w.sharding))
      >>> print(formats_of({"w": w})["w"].layout.major_to_minor)
      (1, 0)
    """

    def of(x: Any) -> Any:
        order = order_of(x)
        return None if order is None else with_order(x.sharding, order)

    return jax.tree.map(of, tree)


def is_row_major(tree: Any) -> bool:
    """Whether all arrays of a tree are row-major, as far as that is known."""
    return all(order_of(x) is None for x in jax.tree.leaves(tree))


def placed_in_order(leaves: Sequence[Any], orders: Orders) -> list[Any]:
    """Returns the leaves with those that are arrays, not traced, in the given orders."""

    def place(x: Any, order: Order | None) -> Any:
        if order is None or not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        return x if order_of(x) == order else jax.device_put(x, with_order(x.sharding, order))

    return [place(*pair) for pair in zip(leaves, orders, strict=True)] if orders else list(leaves)
