"""Hyperparameters of two frameworks: compared on import, translated on export."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdistadam.core import trees
from jdistadam.core.arguments import shown
from jdistadam.core.groups import Groups
from jdistadam.core.hyperparameters import FLAGS, Hyperparameters
from jdistadam.errors import HyperparameterError
from jdistadam.interop.named_state import Group, NamedState, joined_groups, our_arguments

_COMPARED = tuple(field.name for field in dataclasses.fields(Hyperparameters))
_OURS_ALONE = ("eps_root", "bias_correction", *FLAGS)
_DEFAULTS = Hyperparameters(0.0)
# A schedule is float32 arithmetic here and float64 there: some ten operations, of half an ulp each.
_SCHEDULE_TOLERANCE = 10 * 2.0**-24

Numbers = dict[str, Any]


def numbers_of(hyper: Hyperparameters, has_decay: bool, step: int) -> Numbers:
    """Returns hyperparameters as numbers, those of the step after ``step``; None if not known."""

    def value(x: Any) -> Any:
        x = x(step) if callable(x) else x
        if isinstance(x, jax.core.Tracer):
            return None
        return x if isinstance(x, bool) else float(x)

    found = {name: value(getattr(hyper, name)) for name in _COMPARED}
    return found if has_decay else found | {"weight_decay": 0.0}


def numbers_of_leaves(groups: Groups, like: Any, step: int) -> list[Numbers | None]:
    """Returns the hyperparameters of each leaf as numbers; None for frozen ones."""
    rows = [numbers_of(hyper, decay, step) for hyper in groups.used for decay in (True, False)]
    return [None if row is None else rows[row] for row in groups.row_of_leaves(like)]


def compare(
    theirs: NamedState,
    ours: Sequence[Numbers | None] | None,
    like: Any,
    names: Sequence[str],
    differences: str,
) -> None:
    """Raises, or warns, where the other optimizer stepped with other hyperparameters than ours.

    Args:
      theirs: The state.
      ours: Hyperparameters of each leaf; None for frozen ones. None: not known.
      like: Our parameters.
      names: Their names of the leaves.
      differences: "raise" or "warn".

    Raises:
      HyperparameterError: They differ, and that was not to warn.
    """
    if differences not in ("raise", "warn"):
        raise HyperparameterError(
            "differences",
            "unknown",
            got=repr(differences),
            expected='"raise" or "warn"',
            action="Change it.",
        )
    if ours is None:
        warnings.warn(
            "tx: its hyperparameters cannot be seen from outside, as of a chain, and were not "
            "compared with those of the other optimizer. Compare them with "
            f"{[shown(our_arguments(group.settings)) for group in theirs.groups]}.",
            stacklevel=3,
        )
        return
    settings = {name: group.settings for group in theirs.groups for name in group.names}
    seen: list[Any] = []  # each difference once, whatever the number of its leaves
    for path, name, mine in zip(trees.paths(like, "params"), names, ours, strict=True):
        for found in _differences(mine or {}, settings.get(name, {})):
            if found in seen:
                continue
            seen.append(found)
            key, got, expected = found
            error = HyperparameterError(
                f"tx, {key} for {path}",
                f"differs from what the other optimizer has for {name!r}",
                got=got,
                expected=expected,
                action="Make tx with the hyperparameters in NamedState.groups, or pass "
                'differences="warn".',
            )
            if differences == "raise":
                raise error
            warnings.warn(str(error), stacklevel=3)


def _differences(mine: Numbers, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the hyperparameters that differ, with ours and theirs."""
    # What no other framework has, as it is here by default.
    theirs: dict[str, Any] = {name: getattr(_DEFAULTS, name) for name in _OURS_ALONE}
    theirs |= our_arguments(settings)
    if "weight_decay" in settings:
        theirs = {"weight_decay": 0.0, "l2": 0.0} | theirs
    for key, value in mine.items():
        if key in theirs and value is not None and not _equal(value, theirs[key], key):
            yield key, value, theirs[key]


def _equal(mine: Any, theirs: Any, key: str) -> bool:
    a, b = np.float32(mine), np.float32(theirs)
    tolerance = _SCHEDULE_TOLERANCE * abs(b) if key in ("learning_rate", "weight_decay") else 0
    return bool(abs(a - b) <= tolerance)


def groups_of(
    ours: Sequence[Numbers | None] | None, order: Sequence[str], names: Sequence[str]
) -> tuple[Group, ...]:
    """Returns groups of parameters with equal hyperparameters, by torch's names.

    Args:
      ours: Hyperparameters of each leaf, None for frozen ones, which are in no group. None: not
        known, so that all are in one group without settings.
      order: Their names of the leaves.
      names: The same, in the order that their groups are to have.

    Raises:
      HyperparameterError: torch's Adam has no such hyperparameter.
    """
    if ours is None:
        return (Group(tuple(names), {}),)
    numbers = dict(zip(order, ours, strict=True))
    found = {name: mine for name in names if (mine := numbers[name]) is not None}
    return joined_groups({name: _torch_settings(name, mine) for name, mine in found.items()})


def _torch_settings(name: str, mine: Numbers) -> dict[str, Any]:
    both_decay = mine["weight_decay"] and mine["l2"]
    keys = ("eps_root", *FLAGS)
    for key in (*keys, "l2") if both_decay else keys:
        if mine[key]:
            raise HyperparameterError(
                f"{key} for {name!r}",
                "Adam of torch's layout has no such hyperparameter, or not beside weight_decay",
                got=mine[key],
                expected=0,
                action="Pass groups with the settings that it is to go on with.",
            )
    return {
        "lr": mine["learning_rate"],
        "betas": (mine["b1"], mine["b2"]),
        "eps": mine["eps"],
        "weight_decay": mine["weight_decay"] or mine["l2"],
        "decoupled_weight_decay": not mine["l2"],
        "bias_correction": mine["bias_correction"],
    }
