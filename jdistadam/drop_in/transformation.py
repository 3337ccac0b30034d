"""What every optimizer here is: optax's pair of functions, and a fused step beside it."""

from __future__ import annotations

from typing import Any, Protocol

import optax

from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.core.types import Grads, OptState, Params


class StepFn(Protocol):
    """``(grads, opt_state, params) -> (params, opt_state)``."""

    def __call__(
        self, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        """Takes one step."""


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An ``optax.GradientTransformationExtraArgs`` (init, update) that also has ``step``.

    ``step(grads, opt_state, params)`` returns the new parameters straight from the kernel. It
    moves 28 bytes per float32 parameter, ``update`` followed by ``optax.apply_updates`` 40.

    To have it work in place, donate params and state, and take them in the order in which they
    are returned, since ``jax.jit`` pairs donated buffers with results of equal shape in order::

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, opt_state, batch):
            grads = jax.grad(loss)(params, batch)
            return tx.step(grads, opt_state, params)

    ``tx._replace(init=..., update=..., step=...)`` returns a transformation with other functions.
    What is not given stays as it is: with another ``update`` alone, ``step`` still does what it did
    before. Give both where both should change.
    """

    step: StepFn
    hyper: Hyperparameters | None = None
    """Of the optimizer itself, to be compared; None where it is a part of something else."""
    mask: Any = None
    """Where weight decay applies, as given."""

    def __new__(cls, init: Any, update: Any, step: StepFn) -> FusedTransformation:
        """Makes the pair that optax unpacks, with ``step`` as an attribute of it."""
        self = super().__new__(cls, init, update)
        self.step = step
        return self

    def _replace(self, **changes: Any) -> FusedTransformation:
        """As of every named tuple, for ``step`` and other attributes as well."""
        attributes = {name: changes.pop(name, value) for name, value in vars(self).items()}
        new = super()._replace(**changes)
        vars(new).update(attributes)
        return new

    __replace__ = _replace  # of copy.replace

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What pickle makes it from; it pickles where its functions do."""
        return (*self, self.step)

    def __copy__(self) -> FusedTransformation:
        """Returns itself: there is nothing in it that changes."""
        return self

    def __deepcopy__(self, memo: Any) -> FusedTransformation:
        """Returns itself: there is nothing in it that changes."""
        return self
