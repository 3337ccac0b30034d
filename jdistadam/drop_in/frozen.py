"""Frozen leaves of an optimizer of one program: they have no state, as with ``optax.masked``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax


def without_frozen(rows: Sequence[int | None], tree: Any) -> Any:
    """Returns a tree with ``optax.MaskedNode()`` in the place of each leaf that has no row."""
    if None not in rows:
        return tree
    treedef: Any = jax.tree.structure(tree)
    pairs = zip(rows, jax.tree.leaves(tree), strict=True)
    return treedef.unflatten([optax.MaskedNode() if row is None else x for row, x in pairs])


def with_frozen(rows: Sequence[int | None], stepped: Any, whole: Any) -> Any:
    """Returns ``stepped`` with the leaves of ``whole`` where ``without_frozen`` took them out."""
    if None not in rows:
        return stepped
    treedef: Any = jax.tree.structure(whole)
    new = iter(jax.tree.leaves(stepped))
    pairs = zip(rows, jax.tree.leaves(whole), strict=True)
    return treedef.unflatten([x if row is None else next(new) for row, x in pairs])
