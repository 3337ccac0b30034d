"""The parts of AdamW as transformations, as in optax: ``jda.chain`` joins them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import add_decayed_weights as optax_add_decayed_weights
from optax import scale_by_learning_rate as optax_scale_by_learning_rate

from jdistadam.core.hyperparameters import ScalarOrSchedule
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.drop_in.optimizer import fused_adam, fused_adamw
from jdistadam.drop_in.transformation import (
    FullResult,
    FusedTransformation,
    full_step_of,
    step_of,
)


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
    rate = optax.ScaleByScheduleState(np.zeros((), np.int32))

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


_ONE = np.ones(1, np.float32)  # of numpy, which needs no device

# optax's functions that multiply updates by one number, and whether it depends on the step count.
_FACTORS: dict[Any, bool] = {
    optax.scale(1.0).update.__code__: False,
    optax.scale_by_schedule(jnp.float32).update.__code__: True,
}


def joined(transformations: Sequence[Any]) -> tuple[FusedTransformation, int] | str:
    """Returns the optimizer at the end of a chain and the number of its parts, or why it has none.

    It is ``jda.scale_by_adam``, perhaps ``jda.add_decayed_weights``, and what multiplies by a
    number: ``jda.scale_by_learning_rate``, or ``optax.scale``, ``optax.scale_by_schedule`` and
    ``optax.scale_by_learning_rate``. Their factors are multiplied first.
    """
    count = next((i for i, tx in enumerate(transformations[::-1]) if not _is_factor(tx)), 0)
    before, factors = transformations[: len(transformations) - count], transformations[-count:]
    adam = _arguments_at_the_end(before)
    if adam is None or not count or sum(map(_has_count, factors)) > 1:
        return _why_not_joined(transformations)
    arguments, num_parts = adam
    make = fused_adamw if num_parts == 2 else fused_adam
    if count == 1 and isinstance(factors[0], Part):
        return make(**arguments, **factors[0].arguments), num_parts + 1
    fused = make(**arguments, learning_rate=_rate_of(factors))
    return _with_states_of(fused, factors), num_parts + count


def _why_not_joined(transformations: Sequence[Any]) -> str:
    """Why a chain whose last transformation has no step is not fused."""
    kinds = [getattr(tx, "kind", None) for tx in transformations]
    ours = [
        i
        for i, tx in enumerate(transformations)
        if kinds[i] is scale_by_adam or isinstance(tx, FusedTransformation)
    ]
    if not ours:
        return "no transformation in it has a fused step"
    after = ours[-1] + 1
    if kinds[ours[-1]] is scale_by_adam and kinds[after : after + 1] == [add_decayed_weights]:
        after += 1
    if after == len(transformations):
        return f"nothing multiplies by a learning rate after transformation {after - 1}"
    return (
        f"transformation {after} and later ones follow the optimizer, and do more than to multiply "
        "by numbers, of which one may depend on the step count"
    )


def _arguments_at_the_end(transformations: Sequence[Any]) -> tuple[dict[str, Any], int] | None:
    """The arguments of Adam and of decay at the end of a chain, and the number of their parts."""
    for kinds in ((scale_by_adam, add_decayed_weights), (scale_by_adam,)):
        parts = transformations[-len(kinds) :]
        if tuple(getattr(part, "kind", None) for part in parts) == kinds:
            return {k: x for part in parts for k, x in part.arguments.items()}, len(kinds)
    return None


def _is_factor(tx: Any) -> bool:
    """Whether a transformation multiplies all updates by one number."""
    if isinstance(tx, Part):
        return tx.kind is scale_by_learning_rate
    has_count = _FACTORS.get(getattr(getattr(tx, "update", None), "__code__", None))
    if has_count is False:  # `scale` takes arrays, too
        factor, _ = tx.update(_ONE, optax.EmptyState())
        return np.shape(factor) == (1,) and not np.issubdtype(factor.dtype, np.complexfloating)
    return has_count is not None


def _has_count(tx: Any) -> bool:
    """Whether a factor depends on the step count."""
    if isinstance(tx, Part):
        return callable(tx.arguments["learning_rate"])
    return _FACTORS[tx.update.__code__]


def _rate_of(factors: Sequence[Any]) -> ScalarOrSchedule:
    """The learning rate of some factors, of which at most one depends on the step count."""

    def rate(count: Any) -> Any:
        product: Any = _ONE
        for tx in factors:
            state = optax.ScaleByScheduleState(count) if _has_count(tx) else optax.EmptyState()
            product, _ = tx.update(product, state)
        return (-product).reshape(())

    # An array, because optax does not warn of factors that climb.
    return rate if any(map(_has_count, factors)) else rate(None)


def _with_states_of(fused: FusedTransformation, factors: Sequence[Any]) -> FusedTransformation:
    """The same optimizer with the states of factors in place of that of its learning rate."""
    place = next((i for i, tx in enumerate(factors) if _has_count(tx)), None)

    def inner(state: Any) -> tuple[Any, ...]:
        adam, of_factors = state[: -len(factors)], state[-len(factors) :]
        return (*adam, optax.EmptyState() if place is None else of_factors[place])

    def outer(state: Any) -> tuple[Any, ...]:
        states = [tx.init(()) for tx in factors]
        if place is not None:
            states[place] = state[-1]
        return (*state[:-1], *states)

    def init(params: Params) -> OptState:
        return outer(fused.init(params))

    def update(grads: Grads, state: OptState, params: Params = None) -> tuple[Any, OptState]:
        updates, state = fused.update(grads, inner(state), params)
        return updates, outer(state)

    def full_step(
        grads: Grads, state: Any, params: Params, extra: Any, is_skipped: Any, norms: bool
    ) -> FullResult:
        step = full_step_of(fused, "chain")
        result = step(grads, inner(state), params, extra, is_skipped, norms)
        return result._replace(state=outer(result.state))

    tx = FusedTransformation(init, update, step_of(full_step))
    tx.full_step = full_step
    return tx
