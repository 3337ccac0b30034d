"""What the states of training that are saved and restored consist of, and what it is called.

A state is a tree with ``params`` and ``opt_state``: a TrainState of this package or of Flax, or a
dictionary. Its arrays have names of which a part says what they are and the rest where::

    params['w']         a parameter, in the dtype of the model
    main_params['w']    its exact value, where params do not say it
    mu['w'], nu['w']    its moments; in codes mu['w'].codes and mu['w'].scales
    ema['w']            the average of its exact values
    count               steps taken
    key                 the seed of random bits
    opt_state[0].x      what transforms of a chain keep; any other field: model_state['mean'], rng

The state of a distributed optimizer and the one of ``optax.adamw`` have the same names, so that
one is restored from the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import optax

from jdistadam.core import trees
from jdistadam.core.codecs import is_codes
from jdistadam.distributed.state import DistributedState
from jdistadam.drop_in.state import MainParamsState
from jdistadam.errors import TreeError

MOMENTS = ("mu", "nu")
_ADAM = (DistributedState, optax.ScaleByAdamState)


class Leaf(NamedTuple):
    """An array of a state that has a name of its own.

    Attributes:
      name: Its name in a checkpoint.
      value: The array, or its shape.
      keys: The keys that lead to it from the field, if all are names in dictionaries; else None.
      is_count: Whether it is a step counter beside that of Adam: of a schedule, or of Flax.
    """

    name: str
    value: Any
    keys: tuple[str, ...] | None
    is_count: bool = False


def fields_of(state: Any) -> dict[str, Any]:
    """Returns the fields of a state by name.

    Raises:
      TreeError: It has no ``params`` and ``opt_state``.
    """
    children, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    fields = {_name_of(path): child for path, child in children}
    if not {"params", "opt_state"} <= fields.keys():
        raise TreeError(
            f"state: has no params and opt_state: got {type(state).__name__} "
            f"with {sorted(fields) or 'no fields'}, expected a TrainState, "
            "or a dictionary with these two. Pass {'params': params, 'opt_state': opt_state}."
        )
    return fields


def _name_of(path: Any) -> str:
    key = path[0] if path else None
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", ""))))


def adam_of(opt_state: Any) -> Any:
    """Returns the DistributedState or ScaleByAdamState in the state of an optimizer.

    Raises:
      TreeError: There is none, or more than one.
    """
    parts = jax.tree.leaves(opt_state, is_leaf=_is(_ADAM))
    found = [part for part in parts if isinstance(part, _ADAM)]
    if len(found) != 1:
        raise TreeError(
            f"opt_state: not the state of one Adam: got {type(opt_state).__name__} with "
            f"{len(found)} of them, expected that of a distributed optimizer, of fused_adamw or "
            "of optax.adamw, or of a chain with one. Use one optimizer: a distributed one takes "
            "groups. What optax joins of several, as in multi_transform, orbax saves by itself."
        )
    adam = found[0]
    if isinstance(adam, DistributedState):
        return adam
    mu, nu = map(trees.codes_inside, (adam.mu, adam.nu))  # with the names of params
    return adam._replace(count=trees.unboxed(adam.count), mu=mu, nu=nu)


def kept_main_params(opt_state: Any) -> Any:
    """Returns the main parameters in the state of an optimizer of one program, or None."""
    parts = jax.tree.leaves(opt_state, is_leaf=_is(MainParamsState))
    return next((part.main_params for part in parts if isinstance(part, MainParamsState)), None)


def other_leaves(fields: dict[str, Any]) -> Iterator[Leaf]:
    """Yields what is neither a parameter nor of Adam: of chains, and of the other fields."""
    rest = [(name, tree) for name, tree in fields.items() if name != "params"]
    for leaf in (leaf for name, tree in rest for leaf in leaves(name, tree, _is_part)):
        if isinstance(leaf.value, MainParamsState):
            yield from other_leaves({leaf.name: leaf.value.inner})
        elif _is_schedule(leaf.value):
            yield Leaf(leaf.name, leaf.value.count, None, is_count=True)
        elif not isinstance(leaf.value, _ADAM):
            yield leaf._replace(is_count=leaf.name == "step")


def rebuilt(name: str, tree: Any, others: dict[str, Any], adam: Any, main: Any) -> Any:
    """Returns a field like ``tree`` with other values.

    With ``others`` by the names of ``other_leaves``, ``adam`` in place of the DistributedState or
    ScaleByAdamState, and ``main`` as the main parameters of a MainParamsState.
    """

    def value(leaf: Leaf) -> Any:
        if isinstance(leaf.value, MainParamsState):
            return MainParamsState(main, rebuilt(leaf.name, leaf.value.inner, others, adam, None))
        if isinstance(leaf.value, _ADAM):
            return adam
        found = others[leaf.name]
        return leaf.value._replace(count=found) if _is_schedule(leaf.value) else found

    treedef: Any = jax.tree.structure(tree, is_leaf=_is_part)
    return treedef.unflatten(map(value, leaves(name, tree, _is_part)))


def leaves(section: str, tree: Any, is_leaf: Any = None) -> Iterator[Leaf]:
    """Yields the leaves of a tree with their names."""
    for path, x in trees.leaves_with_path(tree, is_leaf):
        names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        keys = tuple(name for name in names if isinstance(name, str))
        name = f"{section}{jax.tree_util.keystr(path)}"
        yield Leaf(name, x, keys if len(keys) == len(path) else None)


def named(section: str, tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name; those in codes are one."""
    return {leaf.name: leaf.value for leaf in leaves(section, tree, is_codes)}


def path_of(name: str) -> str:
    """Returns the path of a parameter, from the name of what belongs to it; else the name itself.

    Example:
      >>> path_of("main_params['w']"), path_of("opt_state[0].mu['w']")
      ("params['w']", "opt_state[0].mu['w']")
    """
    for section in ("main_params", *MOMENTS):
        rest = name.removeprefix(section)
        if rest != name and (not rest or rest[0] in "[."):
            return f"params{rest}"
    return name


def _is_schedule(x: Any) -> bool:
    """Whether this is what optax keeps for a schedule, of the learning rate or weight decay."""
    return getattr(x, "_fields", None) == ("count",)


def _is_part(x: Any) -> bool:
    return isinstance(x, (*_ADAM, MainParamsState)) or _is_schedule(x)


def _is(kinds: Any) -> Any:
    return lambda x: isinstance(x, kinds)
