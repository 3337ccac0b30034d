"""Values for each leaf, given as a prefix of the tree: where decay applies, labels, specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdistadam.core import trees
from jdistadam.core.types import Params
from jdistadam.errors import DtypeError, TreeError


def decay_groups(mask: Any | Callable[[Any], Any] | None, params: Params) -> tuple[int, ...]:
    """Returns, for each leaf, 0 if decay applies to it and 1 if it is masked out."""
    num_leaves = len(jax.tree.leaves(params))
    if mask is None or not num_leaves:
        return (0,) * num_leaves
    if callable(mask):
        mask = mask(params)
        if isinstance(mask, bool | np.bool_) and num_leaves > 1:
            raise TreeError(
                "mask: a function that returns one value: "
                f"it is called with the tree, not with a path: got {bool(mask)}, "
                f"expected a tree of bools, for {num_leaves} leaves. Write lambda params: "
                "jax.tree.map_with_path(lambda path, x: ..., params), or pass the bool itself."
            )
    keeps = for_each_leaf(
        mask, params, name="mask", kind=bool | np.bool_, what="bool", expected="True or False"
    )
    return tuple(0 if keep else 1 for keep in keeps)


def for_each_leaf(
    given: Any | Callable[[Any], Any],
    params: Params,
    name: str,
    kind: Any,
    what: str,
    expected: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """Returns one value for each leaf of params.

    Args:
      given: A tree of values that is a prefix of params, as in optax, or a function that returns
        one for params.
      params: The tree.
      name: How to call ``given`` in messages.
      kind: The type that every value must have.
      what: How to call that type.
      expected: What may be given.
      is_leaf: What counts as a value of ``given`` although it is a container.
    """
    given = given(params) if callable(given) else given

    def spread(value: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda _: _Value(value), subtree)

    try:
        full = jax.tree.map(spread, given, params, is_leaf=is_leaf)
    except (ValueError, TypeError):
        where, got, expected_node = trees.first_difference(
            given, params, is_prefix=True, is_leaf=is_leaf
        )
        raise TreeError(
            f"{name}{where}: structure differs from params: got {got}, expected {expected_node}. "
            f"Give each leaf of params, or each subtree, {expected}."
        ) from None
    values = [leaf.value for leaf in jax.tree.leaves(full)]
    for path, value in zip(trees.paths(full, name), values, strict=True):
        if not isinstance(value, kind):
            raise DtypeError(
                f"{path}: not a {what}: got {value!r}, expected {expected}. Fix {name}."
            )
    return values


class _Value:
    """Keeps jax.tree from looking into a value."""

    def __init__(self, value: Any) -> None:
        self.value = value
