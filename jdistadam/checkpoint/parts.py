"""The parts of the training states that are saved and restored, and their names.

A state is a tree with ``params`` and ``opt_state``: a TrainState of this package or of Flax, or a
dictionary. An array's name begins with its kind and ends with its path::

    params['w']         a parameter, in the dtype of the model
    main_params['w']    its exact value, unless params have it
    mu['w'], nu['w']    its moments; in codes mu['w'].codes and mu['w'].scales
    ema['w']            the average of its exact values
    count               steps taken
    key                 the seed of random bits
    opt_state[0].x      state of transforms in a chain; other fields: model_state['mean'], rng
    extra['epoch']      a leaf of the user's extra tree

The states of a distributed optimizer and of ``optax.adamw`` have the same names, so one can be
restored from the other.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import optax

from jdistadam.core import trees
from jdistadam.core.codecs import is_codes
from jdistadam.core.guards import GUARDS
from jdistadam.core.storage import MOMENTS
from jdistadam.distributed.state import DistributedState
from jdistadam.drop_in.low_precision import RoundingState
from jdistadam.drop_in.state import MainParamsState
from jdistadam.errors import TreeError

_ADAM = (DistributedState, optax.ScaleByAdamState)

_SINGLE = ("grad_norm", "key")
SCALARS = (*_SINGLE, *(guard.field for guard in GUARDS))
"""The small fields of a distributed state besides ``count``, which other states lack, or may."""


class Leaf(NamedTuple):
    """A named array of a state."""

    name: str
    value: Any  # the array, or its shape; BlockCodes, or a DistributedState, named ""
    keys: tuple[str, ...] | None = None  # the path to it, if it consists of dictionary keys alone
    section: str = ""  # "params", "main_params", "mu", "nu"; "" for all others
    is_count: bool = False  # a step counter besides Adam's: a schedule's, or Flax's
    was: str = ""  # its name in files of earlier revisions


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array in the files of a checkpoint."""

    name: str
    shape: tuple[int, ...]  # without padding
    dtype: Any
    key: str | None = None  # of random keys, the implementation: the array holds their words
    keys: tuple[str, ...] | None = None  # as in Leaf
    is_count: bool = False  # a step counter equal to Adam's
    sent: str | None = None  # dtype to which a parameter was rounded to be sent
    sum: str | None = None  # its checksum, once it is in a file

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the saved array; for random keys those of the keys."""
        words = jax.ShapeDtypeStruct(self.shape, self.dtype)
        if self.key is None:
            return words
        key: Any = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=self.key), words)
        return jax.ShapeDtypeStruct(key.shape, key.dtype)


def fields_of(state: Any) -> dict[str, Any]:
    """Returns the fields of a state by name.

    Raises TreeError without params and opt_state, or with a field that has the name of the arrays
    from which a restore takes the exact values of params.
    """
    children, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    fields = {jax.tree_util.keystr(path, simple=True): child for path, child in children}
    if not {"params", "opt_state"} <= fields.keys():
        raise TreeError(
            f"state: has no params and opt_state: got {type(state).__name__} "
            f"with {sorted(fields) or 'no fields'}, expected a TrainState, "
            "or a dictionary with these two. Pass TrainState.shapes(params, tx) to restore a "
            "TrainState, or {'params': params, 'opt_state': opt_state}; tx comes after it."
        )
    if "main_params" in fields:
        raise TreeError(
            "main_params: the optimizer's arrays have this name in a checkpoint, and params would "
            "be restored from it: got a field of that name, expected another name. "
            "Rename the field."
        )
    return fields


def adam_of(opt_state: Any) -> Any:
    """Returns the only DistributedState or ScaleByAdamState in a state; else raises TreeError."""
    found = trees.parts_of(opt_state, _ADAM)
    if len(found) != 1:
        raise TreeError(
            f"opt_state: not the state of one Adam: got {type(opt_state).__name__} with "
            f"{len(found)} of them, expected that of a distributed optimizer, of fused_adamw or "
            "of optax.adamw, or of a chain with one. Use one optimizer: a distributed one takes "
            "groups. What optax joins of several, as in multi_transform, orbax saves by itself."
        )
    return found[0]


def leaves_of(field: str, tree: Any) -> Iterator[Leaf]:
    """Yields the parts of a field of a state, in the order of its leaves."""
    if field == "params":
        yield from _section(field, tree)
        return
    kinds = (*_ADAM, RoundingState, MainParamsState)
    is_of_optimizer = re.split(r"[.\[]", field)[0] == "opt_state"
    for leaf in leaves(field, tree, lambda x: isinstance(x, kinds) or _is_schedule(x)):
        part = leaf.value
        if isinstance(part, RoundingState):
            yield Leaf("key", part.key, was=f"{leaf.name}.key")
            yield from leaves_of(f"{leaf.name}.inner", part.inner)
        elif isinstance(part, MainParamsState):
            yield from _section("main_params", part.main_params)
            yield from leaves_of(leaf.name, part.inner)
        elif isinstance(part, optax.ScaleByAdamState):
            yield Leaf("count", trees.unboxed(part.count))
            for moment in MOMENTS:
                yield from _section(moment, trees.codes_inside(getattr(part, moment)))
        elif isinstance(part, DistributedState):
            yield Leaf("", part)
        elif _is_schedule(part):
            yield Leaf(leaf.name, part.count, is_count=is_of_optimizer)
        else:
            yield leaf._replace(is_count=leaf.name == "step")


def _section(section: str, tree: Any) -> Iterator[Leaf]:
    return (leaf._replace(section=section) for leaf in leaves(section, tree, is_codes))


def _is_schedule(x: Any) -> bool:
    """Whether this is optax's state of a schedule, of the learning rate or weight decay."""
    return getattr(x, "_fields", None) == ("count",)


def leaves(name: str, tree: Any, is_leaf: Any = None) -> Iterator[Leaf]:
    """Yields the leaves of a tree with their names."""
    for path, x in trees.leaves_with_path(tree, is_leaf):
        names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        keys = tuple(name for name in names if isinstance(name, str))
        yield Leaf(name + jax.tree_util.keystr(path), x, keys if len(keys) == len(path) else None)


def is_empty(x: Any) -> bool:
    """Whether this is a container without leaves."""
    return type(x) in (dict, list, tuple) and not x


def is_value(x: Any) -> bool:
    """Whether an extra tree keeps this as a value: None, or an empty container."""
    return x is None or is_empty(x)


def nested(keys: dict[str, Any], where: Any, what: str) -> Any:
    """Returns names in nested dictionaries by their keys, or a single name without keys."""
    tree: dict[str, Any] = {}
    for name, path in keys.items():
        if path is None:
            raise TreeError(
                f"{where}: {name}: not in dictionaries alone: its tree cannot be told from "
                "its path: got a list, a class or a key that is no string, expected like=. "
                f"Pass restore_{what}(folder, like=tree)."
            )
        if not path:
            return name
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = name
    return tree


def is_scalar(x: Leaf | Entry) -> bool:
    """Whether an array belongs to one of ``SCALARS``; a guard has several arrays.

    A field of a state may have such a name, too: it has ``keys``, of which there are none.
    """
    is_single = x.name in _SINGLE and x.keys is None
    return is_single or x.name.startswith(tuple(f"{guard.field}." for guard in GUARDS))


def check_names(names: Iterable[str]) -> None:
    """Raises TreeError if two arrays of a state have the same name."""
    times = collections.Counter(names)
    if twice := [name for name in times if times[name] > 1]:
        raise TreeError(
            f"{twice[0]}: two arrays of the state have this name in a checkpoint: "
            "got a field of that name, expected fields other than main_params, mu, nu, count, "
            "grad_norm, key, scaling, ema, guard, and extra beside extra=. Rename the field."
        )


def path_of(name: str) -> str:
    """Returns the path of a parameter from the name of one of its arrays; else the name itself.

    Example:
      >>> path_of("main_params['w']"), path_of("mu['w'].codes"), path_of("opt_state[0].mu['w']")
      ("params['w']", "params['w']", "opt_state[0].mu['w']")
    """
    for section in ("main_params", *MOMENTS):
        rest = name.removeprefix(section)
        if rest != name and (not rest or rest[0] in "[."):
            return f"params{re.sub(r'[.](codes|scales)$', '', rest)}"
    return name
