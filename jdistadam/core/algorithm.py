"""What an optimizer computes and how it stores its state, independent of placement.

Groups of parameters come first: labels, masks, and the hyperparameters of each group. The kernel
reads one row of coefficients per group, so many groups need only one launch. Every group has two
rows: one with weight decay, and one without it for masked leaves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jdistadam.core import trees
from jdistadam.core.arguments import check_flag, nearest, shown
from jdistadam.core.codecs import FLOAT32, NOTHING, Codec
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.core.storage import MOMENTS, UNSET, Storage, parse, parse_main_params
from jdistadam.core.trees import Params
from jdistadam.errors import DtypeError, HyperparameterError, PolicyError, TreeError


def is_function(given: Any) -> bool:
    """Returns whether this is no tree, as optax decides.

    A module may be called, and be a tree of bools.
    """
    leaves = jax.tree.leaves(given)
    return bool(leaves) and all(map(callable, leaves))


def decay_groups(mask: Any | Callable[[Any], Any] | None, params: Params) -> tuple[int, ...]:
    """Returns for each leaf 0 if decay applies to it and 1 if it is masked out."""
    num_leaves = len(jax.tree.leaves(params))
    if mask is None or not num_leaves:
        return (0,) * num_leaves
    if is_function(mask):
        mask = mask(params)
        if isinstance(mask, bool | np.bool_) and num_leaves > 1:
            raise TreeError(
                "mask: a function that returns one value: "
                f"it is called with the tree, not with a path: got {bool(mask)}, "
                f"expected a tree of bools, for {num_leaves} leaves. Write lambda params: "
                "jax.tree.map_with_path(lambda path, x: ..., params), or pass the bool itself."
            )
    keeps = for_each_leaf(
        mask,
        params,
        name="mask",
        kind=bool | np.bool_,
        what="bool",
        expected="True or False",
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
      name: The name of ``given`` in messages.
      kind: The type of every value.
      what: The name of that type in messages.
      expected: What may be given.
      is_leaf: Which containers in ``given`` are values.
    """
    given = given(params) if is_function(given) else given
    values: list[Any] = []

    def spread(value: Any, subtree: Any) -> None:
        values.extend([value] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, given, params, is_leaf=is_leaf)
    except (ValueError, TypeError):
        where, got, expected_node = trees.first_difference(
            given, params, is_prefix=True, is_leaf=is_leaf
        )
        raise TreeError(
            f"{name}{where}: structure differs from params: got {got}, expected {expected_node}. "
            f"Give each leaf of params, or each subtree, {expected}, in the same containers."
        ) from None
    for path, value in trees.leaves_with_path(given, is_leaf):
        if hasattr(value, "keys") and hasattr(value, "items"):  # optax takes it as True
            raise DtypeError(
                f"{name}{jax.tree_util.keystr(path)}: a mapping that jax does not take as a tree: "
                f"got {type(value).__name__}, expected a dict, with {expected} for each leaf. "
                "Turn it into a dict."
            )
        if not isinstance(value, kind):
            raise DtypeError(
                f"{name}{jax.tree_util.keystr(path)}: not a {what}: "
                f"got {shown(value)}, expected {expected}. Fix {name}."
            )
    return values


_KEYS = ("learning_rate", "lr_scale", "weight_decay", "b1", "b2", "frozen")


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of an optimizer.

    Attributes:
      hypers: Hyperparameters by label; a single one, under "", without labels. Frozen groups have
        none.
      labels: Labels of the leaves: a tree that is a prefix of params, or a function of params that
        returns one.
      mask: Which leaves decay, likewise.
    """

    hypers: dict[str, Hyperparameters | None]
    labels: Any
    mask: Any

    @property
    def used(self) -> list[Hyperparameters]:
        """The hyperparameters of the groups that are not frozen, in row order."""
        return [hyper for hyper in self.hypers.values() if hyper is not None]

    def row_of_leaves(self, params: Params) -> tuple[int | None, ...]:
        """Returns the row of each leaf, None if it is frozen."""
        masked_out = decay_groups(self.mask, params)
        if self.labels is None:
            return masked_out
        labels = for_each_leaf(
            self.labels, params, name="param_labels", kind=str, what="str", expected="a label"
        )
        used = [label for label, hyper in self.hypers.items() if hyper is not None]
        rows: list[int | None] = []
        paths = trees.paths(params, "params")
        for path, label, out in zip(paths, labels, masked_out, strict=True):
            if label not in self.hypers:
                raise TreeError(
                    f"{path}: its label belongs to no group: got {label!r}, "
                    f"expected {' or '.join(map(repr, self.hypers))}. "
                    f"Add {label!r} to groups, for example with an empty dict, or fix param_labels."
                )
            rows.append(2 * used.index(label) + out if label in used else None)
        self._check_all_named(labels)
        return tuple(rows)

    def _check_all_named(self, labels: Sequence[str]) -> None:
        """Raises TreeError if a group has no leaf, most often because of its spelling."""
        unnamed = [group for group in self.hypers if group not in labels]
        if not labels or not unnamed:
            return
        raise TreeError(
            f"groups[{unnamed[0]!r}]: no leaf has this label: "
            f"got the labels {', '.join(map(repr, sorted(set(labels))))}, "
            f"expected {unnamed[0]!r} among them. Fix its spelling, or leave this group out."
        )


def make_groups(hyper: Hyperparameters, mask: Any, param_labels: Any, groups: Any) -> Groups:
    """Checks the arguments of ``fused_adamw`` with the same names."""
    if param_labels is None and groups is None:
        return Groups({"": hyper}, None, mask)
    if param_labels is None or not isinstance(groups, Mapping) or not groups:
        raise HyperparameterError(
            f"groups: labels and groups belong together: got param_labels={shown(param_labels)}, "
            f"groups={shown(groups)}, expected both, groups as a dict of dicts by label. "
            'Pass e.g. groups={"body": {}, "head": dict(lr_scale=0.1)}.'
        )
    hypers = {k: _hyper_of(k, hyper, given) for k, given in groups.items()}
    if not any(hypers.values()):
        raise HyperparameterError(
            f"groups: all are frozen: nothing is left to train: got {groups}, "
            "expected a group that is not frozen. Remove frozen=True from one of them."
        )
    return Groups(hypers, param_labels, mask)


def _hyper_of(label: str, hyper: Hyperparameters, given: Any) -> Hyperparameters | None:
    """The hyperparameters of a group; None if it is frozen."""
    unknown = sorted(set(given) - set(_KEYS)) if isinstance(given, Mapping) else [repr(given)]
    if unknown:
        action = "Pass a dict."
        if isinstance(given, Mapping):
            action = f"Pass {nearest(unknown[0], _KEYS)}, or remove it."
        if unknown[0] == "lr":
            action = "Pass learning_rate, or lr_scale, which multiplies that of the optimizer."
        raise HyperparameterError(
            f"groups[{label!r}]: unknown setting {unknown[0]}: got {given}, "
            f"expected a dict with some of {', '.join(_KEYS)}. {action}"
        )
    path = f"groups[{label!r}]"
    check_flag(f"{path}['frozen']", given.get("frozen", False))
    if given.get("frozen", False):
        return None
    if {"learning_rate", "lr_scale"} <= given.keys():
        raise HyperparameterError(
            f"{path}: two settings of one learning rate: got learning_rate and lr_scale, expected "
            "one of them. lr_scale multiplies the learning rate of the optimizer."
        )
    changed = {k: v for k, v in given.items() if k not in ("lr_scale", "frozen")}
    scale = given.get("lr_scale", 1)
    try:
        new = dataclasses.replace(hyper, **changed)
        checked = Hyperparameters(scale)  # raises unless it is a number
    except HyperparameterError as error:
        message = str(error)
        if "lr_scale" in given:
            message = re.sub(r"^learning_rate(?=:)|learning_rate(?=\.$)", "lr_scale", message)
        raise HyperparameterError(f"{path}, {message}") from None
    rate = hyper.learning_rate
    if "lr_scale" not in given:
        return new
    return dataclasses.replace(new, learning_rate=product(rate, checked.learning_rate))


def product(rate: Any, scale: Any) -> Any:
    """Returns a product: a schedule if one of the two is."""
    if not callable(rate) and not callable(scale):
        return rate * scale

    def schedule(count: Any) -> Any:
        factors = [x(count) if callable(x) else x for x in (rate, scale)]
        return factors[0] * factors[1]

    return schedule


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The arguments of ``fused_adamw`` or ``fused_adam``, checked.

    Attributes:
      hyper: Hyperparameters before groups change them.
      groups: The hyperparameters of each group and the group of each leaf.
      like_optax: The optax optimizer that has the same state.
      storage: How moments are stored and rounded.
      main_params_dtype: How main parameters are stored, as given, or ``UNSET``.
      reads_params: Whether an update needs the params.
    """

    hyper: Hyperparameters
    groups: Groups
    like_optax: optax.GradientTransformation
    storage: Storage
    main_params_dtype: Any
    reads_params: bool

    @property
    def main_params(self) -> Codec:
        """How main parameters are stored; ``NOTHING`` if unset."""
        is_open = self.main_params_dtype is UNSET
        return NOTHING if is_open else parse_main_params(self.main_params_dtype)

    @property
    def numbers(self) -> tuple[dict[str, Any], ...]:
        """Hyperparameters that are arrays: first of all leaves, then of each group."""
        return tuple(hyper.arrays for hyper in (self.hyper, *self.groups.used))

    def with_numbers(self, numbers: tuple[dict[str, Any], ...]) -> Algorithm:
        """Returns a copy with other arrays in place of ``numbers``."""
        if not any(numbers):
            return self
        replaced = iter(numbers)
        hyper = dataclasses.replace(self.hyper, **next(replaced))
        groups = {
            label: old and dataclasses.replace(old, **next(replaced))
            for label, old in self.groups.hypers.items()
        }
        return dataclasses.replace(
            self, hyper=hyper, groups=dataclasses.replace(self.groups, hypers=groups)
        )

    def resolved_main_params(self, given: Any) -> Codec:
        """Returns how sharded state stores main parameters; float32 by default.

        Args:
          given: The main_params_dtype of the policy.

        Raises:
          PolicyError: The optimizer and the policy contradict each other.
        """
        kinds = [parse_main_params(x) for x in (self.main_params_dtype, given) if x is not UNSET]
        if len(set(kinds)) > 1:
            raise PolicyError(
                "MixedPrecisionPolicy.main_params_dtype: "
                f"contradicts the optimizer's main_params_dtype: got {kinds[1].argument}, "
                f"expected {kinds[0].argument}. Set it in only one of the two places."
            )
        return kinds[0] if kinds else FLOAT32

    def __str__(self) -> str:
        """Returns the formats of the moments, in lines like those of a policy."""
        storage = self.storage
        rows: dict[str, Any] = {
            **{f"{moment}_dtype": storage.codec_of(moment).name for moment in MOMENTS},
            "rounding": "stochastic" if storage.is_stochastic else "nearest",
        }
        if storage.is_stochastic:
            rows["seed"] = storage.seed
        if storage.float32_moments is not None:
            rows["float32_moments"] = "by path"
        return "\n".join(f"{name:<18}  {value}" for name, value in rows.items())


def make_algorithm(
    groups: Groups,
    hyper: Hyperparameters,
    like_optax: optax.GradientTransformation,
    *,
    main_params_dtype: Any,
    reads_params: bool,
    **of_moments: Any,
) -> Algorithm:
    """Checks that storage formats fit the decay rates of every group.

    ``of_moments``: the arguments of ``storage.parse`` apart from decay rates.

    Raises:
      PolicyError: They do not.
    """
    for used in groups.used:
        storage = parse(**of_moments, b1=used.b1, b2=used.b2)
    if main_params_dtype is not UNSET:
        parse_main_params(main_params_dtype)
    return Algorithm(hyper, groups, like_optax, storage, main_params_dtype, reads_params)
