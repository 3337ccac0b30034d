"""The parts of AdamW as transformations, as in optax: ``jda.chain`` joins them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
from optax import add_decayed_weights as optax_add_decayed_weights
from optax import scale_by_learning_rate as optax_scale_by_learning_rate

from jdistadam.core.hyperparameters import ScalarOrSchedule
from jdistadam.drop_in.effects import Effect
from jdistadam.drop_in.optimizer import fused_adam
from jdistadam.drop_in.transformation import FusedTransformation, with_state


class Part(optax.GradientTransformationExtraArgs):
    """A transformation of optax that says what it does, so that ``chain`` can join it."""

    effect: Effect

    @classmethod
    def of(cls, made: optax.GradientTransformation, effect: Effect) -> Part:
        """Returns ``made`` with its effect."""
        self = cls(made.init, optax.with_extra_args_support(made).update)
        self.effect = effect
        return self


def scale_by_adam(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> FusedTransformation:
    r"""``optax.scale_by_adam`` by the fused kernel: the direction of Adam, without a learning rate.

    .. math::

      m \leftarrow b_1 m + (1 - b_1) g, \qquad v \leftarrow b_2 v + (1 - b_2) g^2, \qquad
      u = \frac{m / c_1}{\sqrt{v / c_2 + \bar\varepsilon} + \varepsilon}

    with gradient :math:`g`, update :math:`u`, :math:`c_i = 1 - b_i^t` in step :math:`t`,
    :math:`\varepsilon` = ``eps`` and :math:`\bar\varepsilon` = ``eps_root``. The state is optax's
    ``ScaleByAdamState``, so it composes with all of optax. In a ``jda.chain``, one kernel computes
    it with the ``jda.add_decayed_weights`` and the learning rates that follow, as ``fused_adamw``.

    Args:
      b1: Decay rate of the first moment :math:`m`, in [0, 1).
      b2: Decay rate of the second moment :math:`v`, in [0, 1).
      eps: Added outside the square root, >= 0.
      eps_root: Added inside the square root, >= 0.
      mu_dtype: Dtype in which :math:`m` is stored. None: the dtype of the parameters.
      nesterov: Whether to use Nesterov momentum.

    Returns:
      A ``FusedTransformation`` whose updates have the gradients' dtype.

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
    minus_one: Any = np.full((), -1.0, np.float32)  # the rate whose update is the direction itself
    arguments = dict(b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype, nesterov=nesterov)
    adam = fused_adam(minus_one, **arguments)
    tx = with_state(adam, lambda state: state[0], lambda state: (state, optax.EmptyState()))
    tx.is_direction, tx._of_another = True, "nothing multiplies by a learning rate"
    return tx


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
    return Part.of(made, Effect("decay", weight_decay, mask))


def scale_by_learning_rate(
    learning_rate: ScalarOrSchedule, *, flip_sign: bool = True
) -> optax.GradientTransformation:
    """``optax.scale_by_learning_rate``, which ``jda.chain`` joins with what it follows.

    Args:
      learning_rate: A number, or a schedule.
      flip_sign: Whether to multiply by ``-learning_rate``.

    Returns:
      optax's transformation.
    """
    return optax_scale_by_learning_rate(learning_rate, flip_sign=flip_sign)
