"""The parts of AdamW as transformations, as in optax: ``jda.chain`` joins them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import add_decayed_weights as optax_add_decayed_weights
from optax import scale_by_learning_rate as optax_scale_by_learning_rate

from jdistadam.core.hyperparameters import ScalarOrSchedule
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.drop_in.optimizer import fused_adam, fused_adamw
from jdistadam.drop_in.transformation import FusedTransformation


class Part(optax.GradientTransformationExtraArgs):
    """A transformation that shows its arguments, so that ``chain`` can join it with others.

    Attributes:
      kind: The function that made it.
      arguments: The arguments of ``fused_adamw`` that it stands for.
    """

    kind: Callable[..., Part]
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        kind: Callable[..., Part],
        made: optax.GradientTransformation,
        arguments: dict[str, Any],
    ) -> Part:
        """Returns ``made`` with its arguments."""
        self = cls(made.init, optax.with_extra_args_support(made).update)
        self.kind, self.arguments = kind, arguments
        return self


def scale_by_adam(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> Part:
    r"""``optax.scale_by_adam`` by the fused kernel: the direction of Adam, without a learning rate.

    .. math::

      m \leftarrow b_1 m + (1 - b_1) g, \qquad v \leftarrow b_2 v + (1 - b_2) g^2, \qquad
      u = \frac{m / c_1}{\sqrt{v / c_2 + \bar\varepsilon} + \varepsilon}

    with gradient :math:`g`, update :math:`u`, :math:`c_i = 1 - b_i^t` in step :math:`t`,
    :math:`\varepsilon` = ``eps`` and :math:`\bar\varepsilon` = ``eps_root``. The state is optax's
    ``ScaleByAdamState``, so it composes with all of optax. At the end of a ``jda.chain``, it is
    joined with ``jda.scale_by_learning_rate`` into ``fused_adam``, or with
    ``jda.add_decayed_weights`` between the two into ``fused_adamw``: one kernel, with a ``step``.

    Args:
      b1: Decay rate of the first moment :math:`m`, in [0, 1).
      b2: Decay rate of the second moment :math:`v`, in [0, 1).
      eps: Added outside the square root, >= 0.
      eps_root: Added inside the square root, >= 0.
      mu_dtype: Dtype in which :math:`m` is stored. None: the dtype of the parameters.
      nesterov: Whether to use Nesterov momentum.

    Returns:
      A transformation whose updates have the gradients' dtype.

    Raises:
      HyperparameterError, PolicyError: An argument is out of range.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.chain(
      ...     jda.scale_by_adam(b2=0.95),
      ...     jda.add_decayed_weights(0.1),
      ...     jda.scale_by_learning_rate(1e-2),
      ... )
      >>> params = {"w": jnp.ones(3)}
      >>> params, state = tx.step({"w": jnp.ones(3)}, tx.init(params), params)
      >>> round(float(params["w"][0]), 4)
      0.989

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2015.
    """
    arguments = dict(b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype, nesterov=nesterov)
    tx = fused_adam(_minus_one, **arguments)
    rate = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def init(params: Params) -> OptState:
        return tx.init(params)[0]

    def update(grads: Grads, state: OptState, params: Params = None) -> tuple[Any, OptState]:
        updates, (state, _) = tx.update(grads, (state, rate), params)
        return updates, state

    return Part.of(scale_by_adam, optax.GradientTransformation(init, update), arguments)


def _minus_one(count: jax.Array) -> jax.Array:
    """The learning rate whose update is the direction itself, with optax's sign."""
    return jnp.float32(-1.0)


def add_decayed_weights(weight_decay: ScalarOrSchedule = 0.0, mask: Any = None) -> Part:
    """``optax.add_decayed_weights``, which ``jda.chain`` can join with ``jda.scale_by_adam``.

    Args:
      weight_decay: The factor of the parameters that is added, or a schedule.
      mask: A tree of bools that is a prefix of params, or a function of params that returns one:
        which leaves decay. None: all.

    Returns:
      optax's transformation.
    """
    made = optax_add_decayed_weights(weight_decay, mask)
    return Part.of(add_decayed_weights, made, dict(weight_decay=weight_decay, mask=mask))


def scale_by_learning_rate(
    learning_rate: ScalarOrSchedule, *, flip_sign: bool = True
) -> optax.GradientTransformation:
    """``optax.scale_by_learning_rate``, which ``jda.chain`` can join with ``jda.scale_by_adam``.

    Args:
      learning_rate: A number, or a schedule.
      flip_sign: Whether to multiply by ``-learning_rate``. If not, ``jda.chain`` does not join it.

    Returns:
      optax's transformation.
    """
    made = optax_scale_by_learning_rate(learning_rate, flip_sign=flip_sign)
    if not flip_sign or learning_rate is None:
        return made
    return Part.of(scale_by_learning_rate, made, dict(learning_rate=learning_rate))


_ADAM = (scale_by_adam, scale_by_learning_rate)
_ADAMW = (scale_by_adam, add_decayed_weights, scale_by_learning_rate)


def joined(transformations: Sequence[Any]) -> tuple[FusedTransformation, int] | None:
    """Returns the optimizer at the end of a chain and the number of its parts; None without one."""
    for kinds, make in ((_ADAMW, fused_adamw), (_ADAM, fused_adam)):
        parts = transformations[-len(kinds) :]
        if tuple(getattr(part, "kind", None) for part in parts) == kinds:
            arguments = {k: x for part in parts for k, x in part.arguments.items()}
            return make(**arguments), len(kinds)
    return None
