"""What a train state remembers, outside its fields, of its origin.

A state remembers the very arrays with which it was made and that are the rounded main parameters. A
step then sees at no cost that they were not replaced. A state made otherwise, by a tree map or a
checkpoint, remembers nothing, and is compared once. A state that a step returned also remembers its
layout and its other arrays; no array is there twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdistadam.distributed.transformation import DistributedTransformation

_KNOWN, _RETURNED = "_params_made_with", "_returned"


class Returned(NamedTuple):
    """What a state that a step returned remembers.

    Attributes:
      others: Its arrays apart from the params.
      tx: The optimizer of the step.
      digest: The digest of its layout.
    """

    others: tuple[Any, ...]
    tx: DistributedTransformation
    digest: bytes


def remember_params(state: Any, leaves: Sequence[Any] | None = None) -> Any:
    """Records that the params of a state are its rounded main parameters; returns the state.

    Args:
      state: The state.
      leaves: The leaves of its params, if known.
    """
    leaves = jax.tree.leaves(state.params) if leaves is None else leaves
    object.__setattr__(state, _KNOWN, (tuple(leaves), jax.tree.structure(state.params)))
    return state


def remember_returned(state: Any, tx: DistributedTransformation, digest: bytes) -> Any:
    """Records that a step returned all arrays of a state but its params; returns the state."""
    object.__setattr__(state, _RETURNED, Returned(tuple(_others(state)), tx, digest))
    return state


def returned(state: Any) -> Returned | None:
    """What a state that a step returned remembers; None for other states."""
    found: Returned | None = state.__dict__.get(_RETURNED)
    return found if found is not None and same_arrays(_others(state), found.others) else None


def _others(state: Any) -> list[Any]:
    return jax.tree.leaves((state.opt_state, state.model_state, state.rng))


def same_arrays(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences contain the very same arrays."""
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def same_params(params: Any, others: Any) -> bool:
    """Whether two trees contain the very same arrays under the same paths."""
    mine: Any = jax.tree.structure(params)
    theirs: Any = jax.tree.structure(others)
    return bool(mine == theirs) and same_arrays(jax.tree.leaves(params), jax.tree.leaves(others))


def is_known(state: Any, leaves: Sequence[Any], treedef: Any = None) -> bool:
    """Whether the params, with these leaves, are the arrays with which the state was made.

    Paths must match too: under others they belong to another layout.
    """
    arrays, structure = state.__dict__.get(_KNOWN, (None, None))
    treedef = jax.tree.structure(state.params) if treedef is None else treedef
    return arrays is not None and treedef == structure and same_arrays(leaves, arrays)


def returned_arrays(state: Any) -> tuple[Any, ...]:
    """Returns the arrays of the step result from which this state was made, if any."""
    found: Returned | None = state.__dict__.get(_RETURNED)
    return () if found is None else (*state.__dict__.get(_KNOWN, ((), None))[0], *found.others)


def keep_memory(state: Any, new: Any) -> None:
    """Copies the memory of a state to another one with the same params and optimizer state."""
    if _KNOWN in state.__dict__:
        object.__setattr__(new, _KNOWN, state.__dict__[_KNOWN])
        object.__setattr__(new, _RETURNED, state.__dict__.get(_RETURNED))
