"""What every optimizer here is: optax's pair of functions, and a fused step beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import optax

from jdistadam.core.algorithm import Algorithm
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
    _made_of: tuple[Any, ...]
    algorithm: Algorithm | None = None
    """What the optimizer computes; None where other functions stand around it or in its place."""
    distributed_by: Callable[[Callable[[Any], Any]], Any] | None = None
    """Distributes this one, where ``inject_hyperparams`` made it, by a function that can do so for
    an optimizer with hyperparameters."""

    def __new__(cls, init: Any, update: Any, step: StepFn) -> FusedTransformation:
        """Makes the pair that optax unpacks, with ``step`` as an attribute of it."""
        self = super().__new__(cls, init, update)
        self.step, self._made_of = step, (init, update, step)
        return self

    @property
    def is_as_made(self) -> bool:
        """Whether none of the functions was replaced."""
        return (*self, self.step) == self._made_of

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
