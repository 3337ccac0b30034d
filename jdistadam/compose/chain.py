"""optax's combinators, keeping the fused step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jdistadam.compose.linearity import example_params, why_not_linear
from jdistadam.core import trees
from jdistadam.distributed.accumulate import AccumulatedGrads
from jdistadam.distributed.state import StepResult
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.main_params import MainParamsState
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.errors import PolicyError, TreeError


def chain(*transformations: optax.GradientTransformation) -> FusedTransformation:
    """``optax.chain`` with a ``step``: the same state, the same updates.

    ``step`` is fused where the last transformation has a step of its own, as those of jdistadam
    do; the ones before it change the gradients. Otherwise it is update and ``apply_updates``.

    Before a distributed optimizer come unreduced gradients. What stands there must be linear in
    them, so that the order of it and of the sum over devices is irrelevant: ``optax.scale``,
    ``optax.masked``, schedules of scales, but no clipping and no normalisation. Where the optimizer
    skips a step, their states stay as they were too. Selecting between the old and the new state
    is one more read and write of it, in steps that can be skipped: nothing for counts, 12 bytes per
    float32 element for a state as large as the parameters.

    Args:
      *transformations: Gradient transformations, applied in this order.

    Returns:
      A ``FusedTransformation``; a ``DistributedTransformation`` if the last one is.

    Raises:
      PolicyError: Something is no transformation; something before a distributed optimizer is not
        linear; something stands behind a distributed optimizer, or behind one that keeps main
        parameters (raised by ``init``).

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(1e-2))
      >>> params = {"w": jnp.ones(3)}
      >>> params, state = tx.step({"w": jnp.full(3, 100.0)}, tx.init(params), params)
      >>> round(float(params["w"][0]), 4)
      0.99
    """
    if not transformations:
        raise PolicyError(
            "chain",
            "empty",
            got="no transformation",
            expected="at least one",
            action="Pass an optimizer.",
        )
    for i, tx in enumerate(transformations):
        _check_transformation(i, tx)
    *before, last = transformations
    for i, tx in enumerate(before):
        if isinstance(tx, DistributedTransformation):
            raise _misplaced(i, "a distributed optimizer must come last")
    joined = optax.chain(*transformations)
    if isinstance(last, DistributedTransformation):
        return _distributed_chain(joined, before, last)

    def init(params: Any) -> Any:
        state = joined.init(params)
        for i, part in enumerate(state[:-1]):
            if any(map(_has_main_params, jax.tree.leaves(part, is_leaf=_has_main_params))):
                raise _misplaced(i, "params must follow its main parameters exactly")
        return state

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _check_state(before, state)
        return _with_extra_args(joined).update(grads, state, params, **extra)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(optax._src.base.NO_PARAMS_MSG)
        if not isinstance(last, FusedTransformation):
            trees.check_same_structure(grads, params, name="grads", like_name="params")
            updates, state = update(grads, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        grads, states = _pass_through(before, grads, state, params, extra_args)
        params, last_state = last.step(grads, state[-1], params, **extra_args)
        return params, (*states, last_state)

    return FusedTransformation(init, update, step)


def _check_transformation(i: int, tx: Any) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise PolicyError(
            f"chain, transformation {i}",
            "not a gradient transformation",
            got=getattr(tx, "__name__", type(tx).__name__),
            expected="what optax.scale(0.5) or fused_adamw(1e-3) returns",
            action="Call chain(first, second), without a list; of a schedule make one with "
            "optax.scale_by_schedule.",
        )


def _has_main_params(part: Any) -> bool:
    return isinstance(part, MainParamsState)


def _misplaced(i: int, why: str) -> PolicyError:
    return PolicyError(
        f"chain, transformation {i}",
        why,
        got="others behind it",
        expected="the last place",
        action="Move it to the end.",
    )


def _with_extra_args(tx: optax.GradientTransformation) -> Any:
    return optax.with_extra_args_support(tx)


def _pass_through(
    before: Sequence[optax.GradientTransformation],
    grads: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, tuple[Any, ...]]:
    """Updates the gradients by everything before the last; returns them and the new states."""
    _check_state(before, state)
    accumulated = None
    if isinstance(grads, AccumulatedGrads):  # transformations see the sums alone
        accumulated, grads = grads, grads.sums
    new_states = []
    for tx, part in zip(before, state, strict=False):
        grads, part = _with_extra_args(tx).update(grads, part, params, **extra_args)
        new_states.append(part)
    if accumulated is not None:
        grads = dataclasses.replace(accumulated, sums=grads)
    return grads, tuple(new_states)


def _check_state(before: Sequence[optax.GradientTransformation], state: Any) -> None:
    """Raises TreeError unless a state has one part for each transformation."""
    if not isinstance(state, tuple) or len(state) != len(before) + 1:
        raise TreeError(
            "opt_state",
            "not a state of this chain",
            got=f"{len(state)} parts" if isinstance(state, tuple) else type(state).__name__,
            expected=f"{len(before) + 1} parts",
            action="Pass opt_state as init, update or step returned it.",
        )


def _distributed_chain(
    joined: optax.GradientTransformation,
    before: Sequence[optax.GradientTransformation],
    last: DistributedTransformation,
) -> DistributedTransformation:
    def check(params: Any) -> None:
        for i, tx in enumerate(before):
            if why := why_not_linear(tx, params):
                raise PolicyError(
                    f"chain, transformation {i}",
                    f"it would see each device's gradients before they are summed, and {why}",
                    got="a distributed optimizer behind it",
                    expected="something linear in the gradients",
                    action="For clipping pass max_grad_norm, for decay weight_decay or l2.",
                )

    def refuse_shards(grads: Any) -> None:
        is_sum = isinstance(grads, AccumulatedGrads)
        if before and is_sum and last.config.parallel.shards_grads:
            raise PolicyError(
                "chain",
                "accumulated gradients are reduced and cut into shards already",
                got="a transformation before the distributed optimizer",
                expected="none, under 'optim_grads' and 'optim_grads_params'",
                action="Use sharding_strategy='optim'.",
            )

    def local_step(
        grads: Any, state: Any, params: Any, *, is_verified: bool = False, **extra_args: Any
    ) -> StepResult:
        check(params)
        refuse_shards(grads)
        grads, states = _pass_through(before, grads, state, params, extra_args)
        result = last.local_step(grads, state[-1], params, is_verified=is_verified, **extra_args)
        # Schedules and other states before the optimizer stay with its own where it skips a step.
        states = trees.keep_if(result.is_skipped, state[:-1], states)
        return result._replace(opt_state=(*states, result.opt_state))

    def norm(grads: Any, state: Any) -> Any:
        refuse_shards(grads)
        grads, _ = _pass_through(before, grads, state, None, {})
        return last.grad_norm(grads, state[-1])

    def init(params: Any) -> Any:
        check(params)
        return joined.init(params)

    try:
        check(example_params())
    except PolicyError:
        raise
    except Exception:  # it needs the real params, e.g. for a mask: init checks with them
        pass
    specs = (*(jax.sharding.PartitionSpec() for _ in before), last.state_specs())
    return DistributedTransformation.make(
        init=init,
        local_step=local_step,
        norm=norm,
        seen=last.seen,
        config=last.config,
        specs=specs,
    )
