"""What is looked at in a train state before a program takes it; on the host."""

from __future__ import annotations

import jax

from jdistadam.distributed.checks import check_placement, check_scaling
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.training.state_memory import is_known
from jdistadam.training.train_state import (
    TrainState,
    check_layout,
    placed,
    replicated_extras,
)
from jdistadam.training.train_state_checks import check_structure


def checked(
    state: TrainState, optimizer_state: DistributedState, tx: DistributedTransformation
) -> tuple[TrainState, bytes]:
    """Returns a state with its arrays placed as an optimizer needs them; raises if it does not fit.

    Args:
      state: A train state.
      optimizer_state: The one inside of it.
      tx: The optimizer.

    Returns:
      The state, and the digest of its layout.
    """
    check_placement(tx.config, optimizer_state)
    check_scaling(tx.config, optimizer_state)
    check_structure(state.opt_state, tx)
    check_layout(state, tx)
    digest = tx.config.layout_digest(tx.layout(state.params)).tobytes()
    is_placed = is_known(state, jax.tree.leaves(state.params))
    return (replicated_extras if is_placed else placed)(state, tx), digest
