"""What every optimizer here is: optax's pair of functions, and a fused step beside it."""

from __future__ import annotations

from typing import Any, Protocol

import optax


class StepFn(Protocol):
    """``(grads, opt_state, params) -> (params, opt_state)``."""

    def __call__(self, grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Takes one step."""


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An ``optax.GradientTransformationExtraArgs`` (init, update) that also has ``step``.

    ``step(grads, opt_state, params)`` returns the new parameters straight from the kernel. It
    moves 28 bytes a float32 parameter, ``update`` followed by ``optax.apply_updates`` 40.

    To have it work in place, donate params and state, and take them in the order in which they
    are returned, since ``jax.jit`` pairs donated buffers with results of equal shape in order::

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, opt_state, batch):
            grads = jax.grad(loss)(params, batch)
            return tx.step(grads, opt_state, params)
    """

    step: StepFn

    def __new__(cls, init: Any, update: Any, step: StepFn) -> FusedTransformation:
        """Makes the pair that optax unpacks, and hangs ``step`` beside it."""
        self = super().__new__(cls, init, update)
        self.step = step
        return self

    def __copy__(self) -> FusedTransformation:
        """Returns itself: there is nothing in it that changes."""
        return self

    def __deepcopy__(self, memo: Any) -> FusedTransformation:
        """Returns itself: there is nothing in it that changes."""
        return self
