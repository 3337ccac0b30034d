"""What a train state remembers, outside of its fields, of how it was made.

A state remembers the very arrays that it was made with and that are the rounded main parameters. So
a step sees at no cost that nothing was put in their place; a state made in another way, by a tree
map or a checkpoint, remembers nothing, and is compared once. One that a step returned also
remembers its layout and its other arrays, none of which is there twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdistadam.distributed.transformation import DistributedTransformation

_KNOWN, _RETURNED = "_params_made_with", "_returned"


class Returned(NamedTuple):
    """What a state remembers that a step returned.

    Attributes:
      others: Its arrays beside the params.
      tx: The optimizer of the step.
      digest: The digest of its layout.
    """

    others: tuple[Any, ...]
    tx: DistributedTransformation
    digest: bytes


def remember_params(state: Any, leaves: Sequence[Any] | None = None) -> Any:
    """Notes that the params of a state are its rounded main parameters; returns the state.

    Args:
      state: The state.
      leaves: Those of its params, if they are known.
    """
    leaves = jax.tree.leaves(state.params) if leaves is None else leaves
    object.__setattr__(state, _KNOWN, (tuple(leaves), jax.tree.structure(state.params)))
    return state


def remember_returned(state: Any, tx: DistributedTransformation, digest: bytes) -> Any:
    """Notes that a step returned all arrays of a state beside its params; returns the state."""
    object.__setattr__(state, _RETURNED, Returned(tuple(_others(state)), tx, digest))
    return state


def returned(state: Any) -> Returned | None:
    """What a state remembers that a step returned; None of another one."""
    found: Returned | None = state.__dict__.get(_RETURNED)
    return found if found is not None and same_arrays(_others(state), found.others) else None


def _others(state: Any) -> list[Any]:
    return jax.tree.leaves((state.opt_state, state.model_state, state.rng))


def same_arrays(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences have the very same arrays."""
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def same_params(params: Any, others: Any) -> bool:
    """Whether two trees have the very same arrays under the same paths."""
    mine: Any = jax.tree.structure(params)
    theirs: Any = jax.tree.structure(others)
    return bool(mine == theirs) and same_arrays(jax.tree.leaves(params), jax.tree.leaves(others))


def is_known(state: Any, leaves: Sequence[Any], treedef: Any = None) -> bool:
    """Whether the params, which flatten to these, are the arrays that the state was made with.

    Under the same paths: under others they belong to another layout.
    """
    arrays, structure = state.__dict__.get(_KNOWN, (None, None))
    treedef = jax.tree.structure(state.params) if treedef is None else treedef
    return arrays is not None and treedef == structure and same_arrays(leaves, arrays)


def returned_arrays(state: Any) -> tuple[Any, ...]:
    """Returns the arrays of the state that a step returned, of which this one was made, if any."""
    found: Returned | None = state.__dict__.get(_RETURNED)
    return () if found is None else (*state.__dict__.get(_KNOWN, ((), None))[0], *found.others)


def keep_memory(state: Any, new: Any) -> None:
    """Has a state with the same params and optimizer state remember what another one does."""
    if _KNOWN in state.__dict__:
        object.__setattr__(new, _KNOWN, state.__dict__[_KNOWN])
        object.__setattr__(new, _RETURNED, state.__dict__.get(_RETURNED))
