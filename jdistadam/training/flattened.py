"""Params that were flattened already, for a program whose caller looks at their leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Leaves:
    """A tree that was flattened already: a call looks at its leaves, and need not do so twice."""

    def __init__(self, leaves: Sequence[Any], treedef: Any) -> None:
        self.leaves, self.treedef = leaves, treedef

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        """Returns the leaves, and what is static."""
        return self.leaves, self.treedef

    @classmethod
    def tree_unflatten(cls, treedef: Any, leaves: Sequence[Any]) -> Leaves:
        """The inverse."""
        return cls(leaves, treedef)


def flattened(step: Any) -> Any:
    """A step of a train state whose params are flattened, on both sides."""

    def flat_step(state: Any, batch: Any) -> tuple[Any, Any]:
        treedef = state.params.treedef
        whole = treedef.unflatten(state.params.leaves)
        new, metrics = step(dataclasses.replace(state, params=whole), batch)
        params = Leaves(jax.tree.leaves(new.params), treedef)
        return dataclasses.replace(new, params=params), metrics

    return flat_step
