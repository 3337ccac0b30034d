"""A fused step, jitted so that donated arrays are updated in place."""

from __future__ import annotations

from typing import Any

import jax

from jdistadam.core.types import Grads, OptState, Params
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.errors import PolicyError

# XLA makes a CUDA graph of five operations or more, and a step alone has three: the count, the
# coefficients and the kernel. As a graph, a call no longer prepares all its arrays.
_GRAPHS_OF_ANY_SIZE = {"xla_gpu_graph_min_graph_size": 1}


class JittedStep:
    """What ``jit_step`` returns: call it as ``tx.step``."""

    def __init__(self, tx: FusedTransformation, jit_options: dict[str, Any]) -> None:
        def in_order_of_results(
            params: Params, opt_state: OptState, grads: Grads, extra_args: dict[str, Any]
        ) -> tuple[Params, OptState]:
            return tx.step(grads, opt_state, params, **extra_args)

        compiler_options = _GRAPHS_OF_ANY_SIZE | (jit_options.pop("compiler_options", None) or {})
        self._jitted = jax.jit(
            in_order_of_results,
            donate_argnums=(0, 1),
            compiler_options=compiler_options,
            **jit_options,
        )

    def __call__(
        self, grads: Grads, opt_state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        """Takes one step; ``opt_state`` and ``params`` are donated."""
        return self._jitted(params, opt_state, grads, extra_args)

    def lower(self, grads: Any, opt_state: Any, params: Any, **extra_args: Any) -> Any:
        """Lowers for arrays or shapes, as ``jax.jit(f).lower``."""
        return self._jitted.lower(params, opt_state, grads, extra_args)


def jit_step(tx: FusedTransformation, **jit_options: Any) -> JittedStep:
    """Jits ``tx.step`` alone so that params and state are updated in place.

    ``jax.jit`` pairs donated arrays with results of equal shape and dtype in order. The step takes
    ``(grads, opt_state, params)`` and returns ``(params, opt_state)``: jitted as it is, with
    ``donate_argnums=(1, 2)``, new parameters are written over old moments, and every array is
    copied first. Here the arrays are handed over in the order of the results, and none is.

    Within a larger jitted function it is enough to take ``(params, opt_state, ...)`` in this order.

    Args:
      tx: ``fused_adamw``, ``fused_adam`` or a ``chain`` that ends with one of them.
      **jit_options: Further arguments of ``jax.jit``, such as ``compiler_options``.

    Returns:
      ``step(grads, opt_state, params) -> (params, opt_state)``, which donates the last two, with a
      method ``lower``.

    Raises:
      PolicyError: ``tx`` has no ``step``, or steps inside of ``jax.shard_map`` alone.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.fused_adamw(1e-2)
      >>> step = jda.jit_step(tx)
      >>> params = {"w": jnp.ones(3)}
      >>> opt_state = tx.init(params)
      >>> params, opt_state = step({"w": jnp.ones(3)}, opt_state, params)
      >>> round(float(params["w"][0]), 6)
      0.989999
    """
    if not isinstance(tx, FusedTransformation) or hasattr(tx, "config"):
        raise PolicyError(
            f"jit_step: cannot be used with this optimizer: got {type(tx).__name__}, "
            "expected fused_adamw, fused_adam, or jda.chain(..., fused_adamw(...)). "
            "For a distributed optimizer use train_step; in place of optax.chain use jda.chain."
        )
    return JittedStep(tx, jit_options)
