"""Functions of the paths of leaves: what a model gathers itself, and what stays unsharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdistadam.errors import HyperparameterError, TreeError

SCAN, BLOCK = "scan", "block"


class Layers:
    """The argument ``layers``, with its results checked.

    It remembers its results other than None, on which the options for compiling a step depend.
    """

    def __init__(self, function: Callable[[str], str | None]) -> None:
        self._function = function
        self._kinds: frozenset[str] | None = None  # of all params so far

    def __call__(self, path: str) -> str | None:
        """Returns what the model does with a leaf.

        Raises:
          HyperparameterError: The function returned anything else.
        """
        kind = self._function(path)
        if kind is not None and not (isinstance(kind, str) and kind in (SCAN, BLOCK)):
            raise HyperparameterError(
                f"layers: not a kind of layers: got {kind!r:.60} for {path}, expected "
                '"scan" for a leaf whose first dimension the model scans over, "block" for one '
                'that it gathers before its block, or None. Return "scan" in place of True.'
            )
        return kind

    def of(self, paths: Sequence[str]) -> list[str | None]:
        """Returns what the model does with each leaf.

        Raises:
          TreeError: It is None for all of them.
        """
        of_paths = [self(path) for path in paths]
        kinds = frozenset(kind for kind in of_paths if kind is not None)
        if paths and not kinds:
            raise TreeError(
                f"layers: selects no leaf: got None for {paths[0]} and {len(paths) - 1} more, "
                'expected "scan" or "block" for the layers that the model scans over or gathers. '
                "Test for a part of their paths, or leave layers out."
            )
        self._kinds = kinds if self._kinds is None else self._kinds | kinds
        return of_paths

    def known_kinds(self) -> frozenset[str]:
        """Returns the results other than None for all params so far.

        Raises:
          TreeError: There were no params yet.
        """
        if self._kinds is None:
            raise TreeError(
                "compiler_options: depend on layers, which has seen no params yet: got no state of "
                "this optimizer, expected one before. Make it first, with TrainState.create or "
                "TrainState.shapes."
            )
        return self._kinds


def as_layers(value: Any) -> Layers | None:
    """Returns the argument as ``Layers``; raises HyperparameterError unless it is a function."""
    if value is None or isinstance(value, Layers):
        return value
    if not callable(value):
        raise HyperparameterError(
            f"layers: not a function: got {value!r}, expected a function of the path of a leaf "
            'that returns "scan", "block" or None. '
            'Pass for example layers=lambda path: "scan" if "layers" in path else None.'
        )
    return Layers(value)


def rest_whole(
    reshard_after_backward: Callable[[str], bool] | None, paths: Sequence[str]
) -> list[bool]:
    """Returns for each leaf whether devices hold it unsharded between steps, if they cut others.

    Raises:
      HyperparameterError: The function returned anything but True or False.
      TreeError: It is True for all of them.
    """
    if reshard_after_backward is None:
        return [False] * len(paths)
    are_whole = []
    for path in paths:
        is_cut = reshard_after_backward(path)
        if not isinstance(is_cut, bool | np.bool_):
            raise HyperparameterError(
                f"reshard_after_backward: not a bool: got {is_cut!r:.60} for {path}, expected "
                "False for a leaf that stays whole between steps, True for others. Return one."
            )
        are_whole.append(not is_cut)
    if paths and not any(are_whole):
        raise TreeError(
            f"reshard_after_backward: selects no leaf: got True for {paths[0]} and "
            f"{len(paths) - 1} more, expected False for the leaves that stay whole between steps. "
            "Test for a part of their paths, or leave it out."
        )
    return are_whole
