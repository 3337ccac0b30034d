"""Flax's ``TrainState`` and ``nnx.Optimizer`` with the fused step; needs Flax.

Both of Flax's classes call ``tx.update`` and then ``optax.apply_updates``, which together read and
write 40 bytes per float32 parameter; ``tx.step`` reads and writes 28.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.core.frozen_dict import FrozenDict
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from jdistadam.core.arguments import warn_caller
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.transformation import PARTS, FusedTransformation

__all__ = ["Optimizer", "TrainState"]


def _has_step(tx: Any) -> bool:
    """Whether an optimizer has a step for one program; warns if that is not fused."""
    if isinstance(tx, DistributedTransformation):
        return False  # its update raises, and says what to use
    has_step = isinstance(tx, FusedTransformation)
    if has_step and not tx.only_updates:
        return True  # also a step that the user wrote
    got = type(tx).__name__ + (f": {tx.why_not_fused}" if has_step else "")
    warn_caller(
        f"tx: has no fused step, so that its update runs, which reads and writes more: got {got}, "
        "expected what jda.fused_adamw, jda.chain or jda.inject_hyperparams returns. Write "
        f"jda.chain, MultiSteps and apply_if_finite in place of those of optax. {PARTS}"
    )
    return has_step


class TrainState(train_state.TrainState):
    """Flax's ``TrainState``, whose ``apply_gradients`` calls ``tx.step``.

    The new parameters equal those of Flax's class, except for bfloat16 gradients of float32
    parameters, which ``update`` rounds to bfloat16 first. If ``tx`` has no ``step``, it warns once
    and does what Flax's class does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jdistadam as jda
      >>> tx = jda.fused_adamw(1e-2)
      >>> state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)
      >>> state = state.apply_gradients(grads={"w": jnp.ones(3)})
      >>> round(float(state.params["w"][0]), 4), int(state.step)
      (0.99, 1)
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        """Takes a step.

        Args:
          grads: Gradients like the params.
          **kwargs: New values of other fields.

        Returns:
          The new state.
        """
        overwrites = isinstance(grads, dict | FrozenDict) and OVERWRITE_WITH_GRADIENT in grads
        if overwrites or not _has_step(self.tx):
            return super().apply_gradients(grads=grads, **kwargs)
        assert isinstance(self.tx, FusedTransformation)
        params, opt_state = self.tx.step(grads, self.opt_state, self.params)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)


class Optimizer(nnx.Optimizer):
    """``nnx.Optimizer``, whose ``update`` calls ``tx.step``; otherwise like ``TrainState``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jdistadam as jda
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, jda.fused_adamw(1e-2), wrt=nnx.Param)
      >>> optimizer.update(model, nnx.grad(lambda model: model(jnp.ones(2)).sum())(model))
      >>> int(optimizer.step[...])
      1
    """

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> None:
        """Takes a step, and updates the parameters of the model.

        It returns nothing, where newer versions of Flax return the updates: the kernel writes none.
        For updates, call ``tx.step_with_updates``.

        Args:
          model: The model.
          grads: Gradients like its parameters.
          **kwargs: Further arguments of the transformations.
        """
        if not _has_step(self.tx):
            return super().update(model, grads, **kwargs)
        assert isinstance(self.tx, FusedTransformation)
        options = {"graph": self.graph} if hasattr(self, "graph") else {}  # older Flax has none
        params, grads = (nnx.state(x, self.wrt, **options) for x in (model, grads))
        params, opt_state = self.tx.step(
            *map(nnx.as_pure, (grads, self.opt_state, params)), **nnx.as_pure(kwargs)
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, **options))
        self.step[...] += 1
        return None
