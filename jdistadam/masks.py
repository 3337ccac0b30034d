"""Where weight decay applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdistadam import trees
from jdistadam.errors import DtypeError, TreeError, describe


def decay_groups(mask: Any | Callable[[Any], Any] | None, params: Any) -> tuple[int, ...]:
    """Returns, for each leaf, 0 if decay applies to it and 1 if it is masked out."""
    num_leaves = len(jax.tree.leaves(params))
    if mask is None or not num_leaves:
        return (0,) * num_leaves
    mask = mask(params) if callable(mask) else mask
    try:  # as in optax, a mask may be a prefix of the params
        full = jax.tree.map(lambda keep, tree: jax.tree.map(lambda _: keep, tree), mask, params)
    except (ValueError, TypeError):
        raise TreeError(
            describe(
                "mask",
                "structure differs from params",
                got=jax.tree.structure(mask),
                expected=jax.tree.structure(params),
                action="Give each leaf of params, or each subtree, True or False.",
            )
        ) from None
    groups = []
    for path, keep in zip(trees.paths(full, "mask"), jax.tree.leaves(full), strict=True):
        if not isinstance(keep, bool | np.bool_):
            raise DtypeError(
                describe(
                    path,
                    "not a bool",
                    got=repr(keep),
                    expected="True or False",
                    action="Fix the mask.",
                )
            )
        groups.append(0 if keep else 1)
    return tuple(groups)
