"""What stands between two frameworks: the arrays of Adam by the names of the other one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jdistadam.errors import HyperparameterError, TreeError


class NamedLeaf(NamedTuple):
    """One parameter of the other framework, in its shape, and what Adam keeps of it.

    Attributes:
      param: The parameter as exact as it is known: the main parameter where one was kept. None if
        it was not given.
      mu: The first moment; None where the other optimizer has none, as of frozen parameters.
      nu: The second moment, likewise.
    """

    param: Any
    mu: Any
    nu: Any


class Group(NamedTuple):
    """A group of parameters with hyperparameters of its own.

    Attributes:
      names: The names of its parameters, in their order.
      settings: The hyperparameters, by the other framework's names: ``lr``, ``betas`` and so on.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class NamedState:
    """The state of an Adam of another framework, as numpy arrays.

    Attributes:
      step: The number of steps taken.
      leaves: The parameters and their moments, by the other framework's names.
      groups: Its groups of parameters, in their order.
    """

    step: int
    leaves: Mapping[str, NamedLeaf]
    groups: tuple[Group, ...]

    def arguments(self) -> dict[str, Any]:
        """Returns the hyperparameters as arguments of our optimizers.

        Those of ``fused_adamw``; where weight decay is a part of
        the gradient, ``l2`` instead of ``weight_decay``, as ``fused_adam`` takes it.

        Raises:
          HyperparameterError: There are groups with different ones.

        Example:
          >>> import jdistadam as jda
          >>> settings = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
          >>> theirs = NamedState(0, {}, (Group(("w",), settings),))
          >>> tx = jda.fused_adamw(**theirs.arguments())
          >>> theirs.arguments()["b2"]
          0.95
        """
        found = [our_arguments(group.settings) for group in self.groups if group.names]
        if not found or any(other != found[0] for other in found):
            what = "have different hyperparameters" if found else "there are none"
            raise HyperparameterError(
                f"groups: {what}: got {found}, expected the same in all groups. "
                "Pass them as mask, or as param_labels and groups: see NamedState.groups."
            )
        return found[0]


def our_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of one group by our names."""
    arguments = {"learning_rate": settings["lr"]} if "lr" in settings else {}
    if "betas" in settings:
        arguments |= dict(zip(("b1", "b2"), settings["betas"], strict=True))
    if "eps" in settings:
        arguments["eps"] = settings["eps"]
    if "weight_decay" in settings:
        is_decoupled = settings.get("decoupled_weight_decay", True)
        arguments["weight_decay" if is_decoupled else "l2"] = settings["weight_decay"]
    if not settings.get("bias_correction", True):
        arguments["bias_correction"] = False
    return arguments


def joined_groups(settings: Mapping[str, Mapping[str, Any]]) -> tuple[Group, ...]:
    """Returns groups of parameters with equal settings, in the order of their first ones."""
    groups: list[Group] = []
    for name, given in settings.items():
        for i, group in enumerate(groups):
            if group.settings == given:
                groups[i] = Group((*group.names, name), given)
                break
        else:
            groups.append(Group((name,), given))
    return tuple(groups)


def check_named_state(theirs: Any) -> None:
    """Raises TreeError unless ``theirs`` is a NamedState."""
    if not isinstance(theirs, NamedState):
        raise TreeError(
            f"theirs: not a NamedState: got {type(theirs).__name__}, "
            "expected what from_torch, from_train_state or another reader returned. "
            "Read the other framework's dictionary with one of them first."
        )
