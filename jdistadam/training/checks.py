"""Checks before a run: the parts of a train state, and where it came from."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdistadam.core import trees
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import TreeError

_FLAX_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}


def check_created(params: Params, model_state: Any, rng: Any) -> None:
    """Raises TreeError or DtypeError unless these are a model's params, other arrays and key."""
    names = set(params) if isinstance(params, Mapping) else set()
    others = names & _FLAX_COLLECTIONS
    if "params" in names and others:
        raise TreeError(
            "params: all variables of a Flax model: the others would be trained as parameters: "
            f'got {", ".join(map(str, params))}, expected variables["params"]. '
            f"Pass these as params, and the rest, such as {sorted(others)[0]!r}, as model_state."
        )
    shapes = "Use TrainState.shapes(params, tx) for shapes."
    trees.refuse_shapes(params, name="params", action=shapes)
    trees.check_dtypes(params, name="params")
    trees.check_arrays(model_state, name="model_state")
    if rng is not None:
        trees.check_key("rng", rng)


def check_structure(opt_state: OptState, tx: DistributedTransformation) -> None:
    """Raises TreeError unless a state has the parts of its optimizer, such as those of a chain."""
    specs = tx.state_specs()
    if _has_structure(specs, opt_state):
        return
    others = ""
    if type(specs) is type(opt_state) and hasattr(specs, "_fields"):
        pairs = zip(specs._fields, specs, opt_state, strict=True)
        names = [name for name, spec, part in pairs if not _has_structure(spec, part)]
        others = f" with another {', '.join(names)}"
    raise TreeError(
        f"opt_state: not the state of this optimizer: got {type(opt_state).__name__}{others}, "
        f"expected {type(specs).__name__}, of the structure that init returns. "
        "Make it with TrainState.create(params, tx) or from_optax_state."
    )


def _has_structure(specs: Any, tree: Any) -> bool:
    """Whether ``specs`` are a prefix of a tree."""
    try:
        jax.tree.broadcast(specs, tree)
    except ValueError:
        return False
    return True


# What a train state remembers, outside its fields, of its origin.
#
# A state remembers the very arrays with which it was made and that are the rounded main parameters.
# So a step sees at no cost that they were not replaced. A state made otherwise, by a tree map or a
# checkpoint, remembers nothing, and is compared once. A state that a step returned also remembers
# its layout and its other arrays; no array is there twice.

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
