"""optax's ``MultiSteps`` and ``apply_if_finite`` with the fused step.

``optax.MultiSteps`` computes an update in every call and selects between it and zeros. Here the
kernel gets a flag: if it is set, the kernel changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import MultiSteps as optax_MultiSteps  # also if a user replaces them
from optax import apply_if_finite as optax_apply_if_finite

from jdistadam.compat import inlined_jit
from jdistadam.core import trees
from jdistadam.core.arguments import check_count, hinted
from jdistadam.core.trees import Grads, Params
from jdistadam.drop_in.effects import How
from jdistadam.drop_in.transformation import (
    FullResult,
    FusedTransformation,
    full_step_of,
    step_of,
)
from jdistadam.errors import DtypeError, HyperparameterError, TreeError


class MultiSteps(FusedTransformation):
    r"""``optax.MultiSteps`` with a ``step``: gradients accumulate, and every k-th call steps.

    .. math::

      a \leftarrow a + (g - a) / (n + 1), \qquad n = 0, \ldots, k - 1

    with the gradient :math:`g` of a call and the mean :math:`a`; or the sum. When :math:`n = k - 1`
    the optimizer steps with :math:`a`, cast to the gradients' dtypes. The state is optax's. A call
    that only accumulates reads and writes 20 bytes per float32 parameter; optax's ``update``
    computes the whole step in each call, and then selects.

    Transformations before the optimizer in a chain run in every call, and replicated params of a
    sharded state are gathered in every call, as with optax. After a step :math:`a` is zero, even if
    it was not finite; optax's ``update`` multiplies it by zero, so NaN stays. If members of a
    ``jax.vmap`` decide differently, ``step`` warns, steps all of them, and selects. To save after
    each call, pass a step to ``jda.save``: the optimizer's count changes only when it steps.

    Args:
      opt: ``fused_adamw``, ``fused_adam``, or a ``chain`` or ``inject_hyperparams`` of them.
      every_k_schedule: The number of calls for one step, or a function from the number of steps
        taken to it.
      use_grad_mean: Whether to average gradients instead of summing them.
      should_skip_update_fn: A function of (gradients, number of steps taken, params) that returns
        (whether to ignore this call, what the state shall keep as ``skip_state``).
      accumulator_dtype: The dtype of :math:`a`; a complex one if any parameter is complex.

    Raises:
      PolicyError: ``opt`` has no fused step.
      DtypeError: A parameter is complex, and :math:`a` is not (raised by ``init``).
      HyperparameterError: ``every_k_schedule`` is neither a number of 1 or more nor a function;
        ``should_skip_update_fn`` decides otherwise than with one bool (raised on use).

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.MultiSteps(jda.fused_adamw(1e-2), every_k_schedule=2)
      >>> params = {"w": jnp.ones(3)}
      >>> state = tx.init(params)
      >>> for g in (1.0, 2.0):
      ...     params, state = tx.step({"w": jnp.full(3, g)}, state, params)
      ...     print(round(float(params["w"][0]), 4), bool(tx.has_updated(state)))
      1.0 False
      0.99 True
    """

    inner_opt: Any

    @hinted(accumulation_steps="Write every_k_schedule in place of accumulation_steps.")
    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[Any], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[..., tuple[jax.Array, Any]] | None = None,
        accumulator_dtype: Any = jnp.float32,
    ) -> MultiSteps:
        """Wraps an optimizer."""
        inner = full_step_of(opt, "MultiSteps")
        if not callable(every_k_schedule) and not isinstance(every_k_schedule, jax.Array):
            check_count("every_k_schedule", every_k_schedule)
            every_k_schedule = int(every_k_schedule)
        schedule = every_k_schedule if callable(every_k_schedule) else lambda _: every_k_schedule
        skips = should_skip_update_fn
        skips = None if skips is None else functools.partial(_decision, skips)
        how = (use_grad_mean, skips, accumulator_dtype)
        theirs = optax_MultiSteps(opt, schedule, *how)

        def full_step(
            grads: Grads, state: Any, params: Params, extra_args: Any, how: How
        ) -> FullResult:
            is_skipped = how.is_skipped
            check_state_of("MultiSteps", optax.MultiStepsState, state)
            trees.check_same_shapes(grads, state.acc_grads, name="grads", like_name="acc_grads")
            ignored, skip_state = is_skipped, state.skip_state
            if skips is not None:
                rejected, skip_state = skips(grads, state.gradient_step, params)
                skip_state = trees.keep_if(is_skipped, state.skip_state, skip_state)
                ignored = rejected if is_skipped is None else is_skipped | rejected
            n, k = state.mini_step, schedule(state.gradient_step)
            is_last = n == k - 1

            sums = _added(state.acc_grads, grads, n if use_grad_mean else None)
            sums = trees.keep_if(ignored, state.acc_grads, sums)
            emits = is_last if ignored is None else is_last & ~ignored
            means = jax.tree.map(lambda x, grad: x.astype(grad.dtype), sums, grads)
            given = means, state.inner_opt_state, params, extra_args
            result = inner(*given, how._replace(is_skipped=~emits))
            # Zeros are written when the kernel has read the sums: no second array is needed. One
            # barrier for each leaf: in a shard_map, jax 0.10 lets all results of one vary alike.
            sums = jax.tree.map(
                lambda x, p: lax.optimization_barrier((x, p))[0], sums, result.params
            )
            next_n = trees.keep_if(ignored, n, optax.safe_increment(n) % k)
            new = optax.MultiStepsState(
                mini_step=next_n.astype(n.dtype),
                gradient_step=jnp.where(
                    emits, optax.safe_increment(state.gradient_step), state.gradient_step
                ),
                inner_opt_state=result.state,
                acc_grads=jax.tree.map(lambda x: jnp.where(emits, jnp.zeros_like(x), x), sums),
                skip_state=skip_state,
            )
            return FullResult(result.params, new, result.norms)

        init = functools.partial(_with_placed_sums, theirs.init)
        self = super().__new__(cls, init, theirs.update, step_of(full_step))
        self.full_step, self.inner_opt = full_step, opt
        return self

    def has_updated(self, state: optax.MultiStepsState) -> Any:
        """Returns whether the last call took a step, unless it was ignored.

        Args:
          state: The state after the call.

        Returns:
          A bool on the device.
        """
        return (state.mini_step == 0) & (state.gradient_step > 0)

    def gradient_transformation(self) -> MultiSteps:
        """Returns itself, because this class is a transformation, unlike optax's.

        Returns:
          Itself.
        """
        return self


def apply_if_finite(
    inner: optax.GradientTransformation, max_consecutive_errors: int
) -> FusedTransformation:
    """``optax.apply_if_finite`` with a ``step``: a step with a non-finite gradient is skipped.

    Args:
      inner: ``fused_adamw``, ``fused_adam``, or a ``chain`` or ``inject_hyperparams`` of them.
      max_consecutive_errors: After so many skipped steps in a row, non-finite gradients are used.

    Returns:
      A ``FusedTransformation`` with optax's state. Its ``step`` takes 16-bit gradients of any
      parameters; its ``update`` is optax's, for gradients of the updates' dtype.

    Raises:
      PolicyError: ``inner`` has no fused step.
      HyperparameterError: ``max_consecutive_errors`` is no number of 0 or more.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.apply_if_finite(jda.fused_adamw(1e-2), max_consecutive_errors=3)
      >>> params = {"w": jnp.ones(3)}
      >>> params, state = tx.step({"w": jnp.full(3, jnp.nan)}, tx.init(params), params)
      >>> float(params["w"][0]), int(state.total_notfinite)
      (1.0, 1)
    """
    step = full_step_of(inner, "apply_if_finite")
    check_count("max_consecutive_errors", max_consecutive_errors, least=0)
    theirs = optax_apply_if_finite(inner, max_consecutive_errors)

    def full_step(
        grads: Grads, state: Any, params: Params, extra_args: Any, how: How
    ) -> FullResult:
        is_skipped = how.is_skipped
        check_state_of("apply_if_finite", optax.ApplyIfFiniteState, state)
        zero = jnp.zeros((), jnp.int32)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grads)]
        is_finite = jnp.all(jnp.stack(finite)) if finite else jnp.ones((), jnp.bool_)
        in_a_row = jnp.where(is_finite, zero, optax.safe_increment(state.notfinite_count))
        rejected = ~is_finite & (in_a_row <= max_consecutive_errors)
        ignored = rejected if is_skipped is None else rejected | is_skipped
        given = grads, state.inner_state, params, extra_args
        result = step(*given, how._replace(is_skipped=ignored))
        total = optax.safe_increment(state.total_notfinite)
        new = optax.ApplyIfFiniteState(
            notfinite_count=in_a_row,
            last_finite=is_finite,
            total_notfinite=jnp.where(is_finite, state.total_notfinite, total),
            inner_state=result.state,
        )
        return result._replace(state=kept_around(result.state, is_skipped, state, new))

    tx = FusedTransformation(theirs.init, theirs.update, step_of(full_step))
    tx.full_step = full_step
    return tx


def _decision(skips: Callable[..., Any], *args: Any) -> tuple[jax.Array, Any]:
    """What ``should_skip_update_fn`` returns, whose decision must be one bool."""
    decision, skip_state = skips(*args)
    kind = jnp.result_type(decision) if trees.is_number(decision) else type(decision).__name__
    if kind != jnp.bool_ or jnp.shape(decision) != ():
        raise HyperparameterError(
            "should_skip_update_fn: its decision is not one bool: "
            f"got {kind} of shape {jnp.shape(decision)}, expected bool of shape (). "
            "Return the result of a comparison, such as optax.global_norm(grads) > 10, first."
        )
    return jnp.asarray(decision), skip_state


def _with_placed_sums(init: Callable[[Params], Any], params: Params) -> optax.MultiStepsState:
    """The state of optax's ``init``, whose sums are sharded like params, also under ``jax.jit``.

    Raises DtypeError for a sum that cannot hold gradients: imaginary parts would be lost.
    """
    state = init(params)
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(state.acc_grads), strict=True)
    for path, (param, acc) in zip(trees.paths(params, "params"), leaves, strict=True):
        if jnp.iscomplexobj(param) and not jnp.iscomplexobj(acc):
            raise DtypeError(
                f"{path}: complex, but sums of its gradients are not, so that imaginary parts "
                f"would be lost: got an accumulator_dtype of {acc.dtype}, expected a complex "
                f"dtype. Pass accumulator_dtype=jnp.{jnp.result_type(param)}."
            )
    return state._replace(acc_grads=jax.tree.map(trees.placed_like, params, state.acc_grads))


@inlined_jit
def _added(acc: Grads, grads: Grads, n: Any) -> Any:
    """The mean of ``n`` gradients and one more, in optax's formula; or without n the sum."""

    def one(a: Any, g: Any) -> Any:
        return (g + a if n is None else a + (g - a) / (n + 1)).astype(a.dtype)

    return jax.tree.map(one, acc, grads)


def kept_around(inner: Any, is_skipped: Any, old: Any, new: Any) -> Any:
    """Returns a wrapper's state after a step that may be skipped, around the new ``inner_state``.

    An inner optimizer skips the step itself, so ``inner`` is right in any case.
    """
    old, new = (x._replace(inner_state=None) for x in (old, new))
    return trees.keep_if(is_skipped, old, new)._replace(inner_state=inner)


def check_state_of(wrapper: str, expected: type, state: Any) -> None:
    """Raises TreeError for the state of another optimizer."""
    if not isinstance(state, expected):
        raise TreeError(
            f"opt_state: not a state of {wrapper}: got {type(state).__name__}, expected "
            f"{expected.__name__}. Make it with init(params) of this optimizer."
        )
