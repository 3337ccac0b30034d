"""What is looked at in a train state before a program takes it; on the host."""

from __future__ import annotations

from typing import Any

import jax

from jdistadam.distributed.checks import check_placement, check_scaling
from jdistadam.distributed.state import DistributedState, find_state
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.training.train_state import (
    TrainState,
    check_layout,
    is_known,
    placed,
    replicated_extras,
)
from jdistadam.training.train_state_checks import check_structure


class StateCheck:
    """Raises where a state does not fit an optimizer; remembers the layout that it saw last.

    Attributes:
      identity: The array of the last state, known to be of the right layout.
    """

    def __init__(self, tx: DistributedTransformation) -> None:
        self._tx = tx
        self.identity: Any = ()

    def knows(self, optimizer_state: DistributedState) -> bool:
        """Whether a state has the very array that was looked at last."""
        return optimizer_state.layout_identity is self.identity

    def __call__(self, state: TrainState, optimizer_state: DistributedState) -> TrainState:
        """Returns the state with its arrays placed as the optimizer needs them.

        Args:
          state: A train state.
          optimizer_state: The one inside of it.
        """
        check_placement(self._tx.config, optimizer_state)
        check_scaling(self._tx.config, optimizer_state)
        check_structure(state.opt_state, self._tx)
        identity = optimizer_state.layout_identity
        if identity is None or not self.knows(optimizer_state):
            check_layout(state, self._tx)
            self.identity = identity
        if is_known(state, jax.tree.leaves(state.params)):
            return replicated_extras(state, self._tx)
        state = placed(state, self._tx)
        self.identity = find_state(state.opt_state).layout_identity
        return state
