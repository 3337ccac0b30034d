"""What a train state remembers, outside its fields, of its origin.

A state remembers the very arrays with which it was made and that are the rounded main parameters. A
step then sees at no cost that they were not replaced. A state made otherwise, by a tree map or a
checkpoint, remembers nothing, and is compared once. A state that a step returned also remembers its
layout and its other arrays; no array is there twice.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import jax

from jdistadam.distributed.transformation import DistributedTransformation

_ORIGIN = "_origin"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Leaves:
    """A tree with cached leaves: a call looks at them repeatedly, and flattens it once."""

    leaves: list[Any]
    treedef: Any = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(cls, tree: Any) -> Leaves:
        """Flattens a tree."""
        return cls(*jax.tree.flatten(tree))

    @property
    def tree(self) -> Any:
        """The tree."""
        return self.treedef.unflatten(self.leaves)

    def is_same(self, other: Leaves) -> bool:
        """Whether two trees contain the very same arrays under the same paths."""
        same = len(self.leaves) == len(other.leaves) and self.treedef == other.treedef
        return same and all(map(operator.is_, self.leaves, other.leaves))


class _Origin(NamedTuple):
    """What is recorded when a state is made.

    Attributes:
      params: Its params: the rounded main parameters.
      others: Its arrays apart from the params, if a step returned it.
      tx: The optimizer of the step.
      digest: The digest of its layout.
    """

    params: Leaves
    others: Leaves | None = None
    tx: DistributedTransformation | None = None
    digest: bytes | None = None


class Memory(NamedTuple):
    """What a state remembers, if it still contains the same arrays.

    Attributes:
      params: Its params.
      has_params: Whether these are the arrays with which it was made: the rounded main parameters.
        Paths must match too: under others they belong to another layout.
      arrays: The arrays of the step result from which it was made; empty if it was made otherwise.
      tx: The optimizer of the step that returned its other arrays; None: they are not a step's.
      digest: The digest of their layout, or None.
    """

    params: Leaves
    has_params: bool
    arrays: tuple[Any, ...] = ()
    tx: DistributedTransformation | None = None
    digest: bytes | None = None

    @classmethod
    def of(cls, state: Any) -> Memory:
        """The memory of a train state."""
        params = Leaves.of(state.params)
        made: _Origin | None = state.__dict__.get(_ORIGIN)
        has_params = made is not None and params.is_same(made.params)
        if made is None or made.others is None:
            return cls(params, has_params)
        arrays = (*made.params.leaves, *made.others.leaves)
        if not _others(state).is_same(made.others):
            return cls(params, has_params, arrays)
        return cls(params, has_params, arrays, made.tx, made.digest)


def remember_params(state: Any) -> Any:
    """Records that the params of a state are its rounded main parameters; returns the state."""
    return _with_origin(state, _Origin(Leaves.of(state.params)))


def remember_returned(
    state: Any, params: Leaves, tx: DistributedTransformation, digest: bytes
) -> Any:
    """Records that a step returned all arrays of a state; returns the state."""
    return _with_origin(state, _Origin(params, _others(state), tx, digest))


def keep_memory(state: Any, new: Any) -> None:
    """Copies the memory of a state to another one with the same params and optimizer state."""
    if _ORIGIN in state.__dict__:
        _with_origin(new, state.__dict__[_ORIGIN])


def _with_origin(state: Any, made: _Origin) -> Any:
    object.__setattr__(state, _ORIGIN, made)  # it is frozen
    return state


def _others(state: Any) -> Leaves:
    return Leaves.of((state.opt_state, state.model_state, state.rng))
