"""Finds the state of optax's Adam in what its chains and wrappers make of it, and checks it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jdistadam.core import boxes, trees
from jdistadam.core.types import OptState
from jdistadam.drop_in.main_params import MainParamsState
from jdistadam.errors import TreeError


def like_template(opt_state: OptState, template: Any) -> OptState:
    """Returns the part of a state that has the structure of a template: all of it, or one.

    Of ``optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))`` it is what the last one
    keeps. nnx.Optimizer has boxes in other places: the result has those of the template.

    Raises:
      TreeError: There is no such part, or more than one; or the state has arrays beside it.
    """
    wanted: Any = jax.tree.structure(boxes.unboxed(template))

    def fits(x: Any) -> bool:
        return jax.tree.structure(boxes.unboxed(x)) == wanted

    flat, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=fits)
    parts = [(jax.tree_util.keystr(path), x) for path, x in flat if fits(x)]
    others = [jax.tree_util.keystr(path) for path, x in flat if not fits(x)]
    if len(parts) == 1 and not others:
        expected: Any = jax.tree.structure(template)
        return expected.unflatten(jax.tree.leaves(parts[0][1]))
    if len(parts) != 1:
        both = boxes.unboxed((opt_state, template))
        where, got, expected_node = trees.first_difference(*both)
        raise TreeError(
            f"opt_state{where}: not the state of optax's optimizer with these hyperparameters: "
            f"got {got}, expected {expected_node}. Use the same schedules and mask on both sides."
        )
    main = isinstance(opt_state, MainParamsState)
    also = ", and jda.main_params(params, opt_state) as main_params" if main else ""
    raise TreeError(
        f"opt_state{others[0]}: has no place in the state of this optimizer: "
        f"got {len(others)} arrays beside the state of Adam, "
        f"expected opt_state{parts[0][0]} alone. Pass opt_state{parts[0][0]}{also}. "
        "What a wrapper did is an argument here: max_grad_norm, accumulate_steps, loss_scale."
    )


def check_counts(adamw: Any) -> None:
    """Raises TreeError where a schedule is at another step than Adam: here is one count for both.

    Args:
      adamw: The state of ``optax.adamw`` or ``optax.adam``: that of Adam, then those of schedules.
    """
    count = int(adamw[0].count)
    for i, part in enumerate(adamw[1:], start=1):
        for own in jax.tree.leaves(part):  # the only leaves beside Adam's are step counts
            found = int(np.asarray(own))
            if found != count:
                raise TreeError(
                    f"opt_state[{i}]: its schedule is at another step than Adam, "
                    f"where a distributed optimizer has one count: got count {found}, "
                    f"expected count {count}, as opt_state[0].count. Shift the schedule, as in "
                    f"lambda step: schedule(step - {count - found}), and set this count to Adam's."
                )
