"""Hyperparameters of two frameworks: compared on import, translated on export."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import numpy as np

from jdistadam.core.algorithm import Groups
from jdistadam.core.arguments import shown
from jdistadam.core.hyperparameters import FLAGS, Hyperparameters
from jdistadam.errors import HyperparameterError
from jdistadam.interop.named_state import Group, NamedState, Place, joined_groups, our_arguments

# Arguments that other frameworks lack; they behave like our defaults.
_OURS_ALONE = {x: getattr(Hyperparameters(0.0), x) for x in ("eps_root", "bias_correction", *FLAGS)}
# A schedule uses float32 arithmetic here and float64 there: some ten operations of half an ulp.
_SCHEDULE_TOLERANCE = 10 * 2.0**-24

Numbers = dict[str, Any]


def numbers_of_leaves(groups: Groups, like: Any, step: int) -> list[Numbers | None]:
    """Returns the hyperparameters of each leaf in the step after ``step``; None for frozen ones.

    A hyperparameter is None if it is unknown, as in a program.
    """

    def number(x: Any) -> Any:
        x = x(step) if callable(x) else x
        if isinstance(x, jax.core.Tracer):
            return None
        return x if isinstance(x, bool) else float(x)

    rows: list[Numbers] = []
    for hyper in groups.used:
        decayed = {field.name: number(getattr(hyper, field.name)) for field in fields(hyper)}
        rows += [decayed, decayed | {"weight_decay": 0.0}]
    return [None if row is None else rows[row] for row in groups.row_of_leaves(like)]


def compare(
    theirs: NamedState,
    numbers: Sequence[Numbers | None] | None,
    ours: Sequence[Place],
    differences: str,
) -> None:
    """Raises HyperparameterError, or warns, if the other optimizer's hyperparameters differ.

    ``numbers``: the hyperparameters of each leaf; None if they are hidden.
    """
    if differences not in ("raise", "warn"):
        raise HyperparameterError(
            f'differences: unknown: got {differences!r}, expected "raise" or "warn". Change it.'
        )
    if numbers is None:
        warnings.warn(
            "tx: its hyperparameters cannot be seen from outside, as of a chain, and were not "
            "compared with those of the other optimizer. Compare them with "
            f"{[shown(our_arguments(group.settings)) for group in theirs.groups]}.",
            stacklevel=3,
        )
        return
    settings = {name: group.settings for group in theirs.groups for name in group.names}
    first: dict[Any, Place] = {}  # the first leaf with each difference
    for place, mine in zip(ours, numbers, strict=True):
        for found in _differences(mine or {}, settings.get(place.name, {})):
            first.setdefault(found, place)
    for (key, got, expected), place in first.items():
        error = HyperparameterError(
            f"tx, {key} for {place.where}: differs from what the other "
            f"optimizer has for {place.name!r}: got {got}, expected {expected}. "
            'Make tx with the hyperparameters in NamedState.groups, or pass differences="warn".'
        )
        if differences == "raise":
            raise error
        warnings.warn(str(error), stacklevel=3)


def _differences(mine: Numbers, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the hyperparameters that differ, with our and their values."""
    theirs = _OURS_ALONE | our_arguments(settings)
    if "weight_decay" in settings:
        theirs = {"weight_decay": 0.0, "l2": 0.0} | theirs
    for key, value in mine.items():
        if key in theirs and value is not None:
            a, b = np.float32(value), np.float32(theirs[key])
            is_scheduled = key in ("learning_rate", "weight_decay")
            if not abs(a - b) <= (_SCHEDULE_TOLERANCE * abs(b) if is_scheduled else 0):
                yield key, value, theirs[key]


def groups_of(
    numbers: Sequence[Numbers | None] | None, ours: Sequence[Place], names: Sequence[str]
) -> tuple[Group, ...]:
    """Returns groups of parameters with equal hyperparameters by torch's names, in this order.

    Frozen leaves are in no group; if numbers are unknown, all are in one without settings.
    """
    if numbers is None:
        return (Group(tuple(names), {}),)
    of_name = {place.name: mine for place, mine in zip(ours, numbers, strict=True)}
    return joined_groups({k: _torch_settings(k, mine) for k in names if (mine := of_name[k])})


def _torch_settings(name: str, mine: Numbers) -> dict[str, Any]:
    lacking = ("eps_root", *FLAGS, *(["l2"] if mine["weight_decay"] else []))
    for key in lacking:
        if mine[key]:
            raise HyperparameterError(
                f"{key} for {name!r}: Adam of torch's layout has no such hyperparameter, "
                f"or not beside weight_decay: got {mine[key]}, expected 0. "
                "Pass groups with the settings that it is to go on with."
            )
    return {
        "lr": mine["learning_rate"],
        "betas": (mine["b1"], mine["b2"]),
        "eps": mine["eps"],
        "weight_decay": mine["weight_decay"] or mine["l2"],
        "decoupled_weight_decay": not mine["l2"],
        "bias_correction": mine["bias_correction"],
    }
