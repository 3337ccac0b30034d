"""optax's combinators, keeping the fused step."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from jdistadam import trees
from jdistadam.accumulation import AccumulatedGrads
from jdistadam.config import float_dtype
from jdistadam.distributed_state import StepResult, keep_if
from jdistadam.distributed_transformation import DistributedTransformation
from jdistadam.errors import HyperparameterError, PolicyError, TreeError, describe
from jdistadam.linearity import example_params, why_not_linear
from jdistadam.main_state import MainParamsState
from jdistadam.transformation import FusedTransformation


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
            describe(
                "chain",
                "empty",
                got="no transformation",
                expected="at least one",
                action="Pass an optimizer.",
            )
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
            describe(
                f"chain, transformation {i}",
                "not a gradient transformation",
                got=getattr(tx, "__name__", type(tx).__name__),
                expected="what optax.scale(0.5) or fused_adamw(1e-3) returns",
                action="Call chain(first, second), without a list; of a schedule make one with "
                "optax.scale_by_schedule.",
            )
        )


def _has_main_params(part: Any) -> bool:
    return isinstance(part, MainParamsState)


def _misplaced(i: int, why: str) -> PolicyError:
    return PolicyError(
        describe(
            f"chain, transformation {i}",
            why,
            got="others behind it",
            expected="the last place",
            action="Move it to the end.",
        )
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
            describe(
                "opt_state",
                "not a state of this chain",
                got=f"{len(state)} parts" if isinstance(state, tuple) else type(state).__name__,
                expected=f"{len(before) + 1} parts",
                action="Pass opt_state as init, update or step returned it.",
            )
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
                    describe(
                        f"chain, transformation {i}",
                        f"it would see each device's gradients before they are summed, and {why}",
                        got="a distributed optimizer behind it",
                        expected="something linear in the gradients",
                        action="For clipping pass max_grad_norm, for decay weight_decay or l2.",
                    )
                )

    def refuse_shards(grads: Any) -> None:
        is_sum = isinstance(grads, AccumulatedGrads)
        if before and is_sum and last.config.parallel.shards_grads:
            raise PolicyError(
                describe(
                    "chain",
                    "accumulated gradients are reduced and cut into shards already",
                    got="a transformation before the distributed optimizer",
                    expected="none, under 'optim_grads' and 'optim_grads_params'",
                    action="Use sharding_strategy='optim'.",
                )
            )

    def local_step(
        grads: Any, state: Any, params: Any, *, is_verified: bool = False, **extra_args: Any
    ) -> StepResult:
        check(params)
        refuse_shards(grads)
        grads, states = _pass_through(before, grads, state, params, extra_args)
        result = last.local_step(grads, state[-1], params, is_verified=is_verified, **extra_args)
        # Schedules and other states before the optimizer stay with its own where it skips a step.
        states = keep_if(result.is_skipped, state[:-1], states)
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
    return DistributedTransformation.make(init, local_step, norm, last.config, specs)


_MAY_BE_CALLED = ("learning_rate", "weight_decay", "mask")


def inject_hyperparams(
    factory: Callable[..., FusedTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: Any = jax.numpy.float32,
) -> Callable[..., FusedTransformation]:
    """``optax.inject_hyperparams`` for an optimizer with a ``step``: the result has one too.

    The numbers given to the optimizer become arrays in its state, under
    ``state.hyperparams["learning_rate"]`` and so on: they can be read, and set between steps
    without a recompilation. Schedules are evaluated each step and stored there for reading.

    Args:
      factory: ``fused_adamw`` or ``fused_adam``.
      static_args: Names of arguments that stay Python values, besides mask, nesterov,
        bias_correction, the dtypes, and an l2 that is not given.
      hyperparam_dtype: Dtype of the numbers in the state. float32, whatever the params are: optax
        takes the params' dtype, in which for bfloat16 a b2 of 0.999 would be 1.

    Returns:
      A function with the arguments of ``factory``.

    Raises:
      PolicyError: The factory makes a distributed optimizer, or nothing with a step.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = inject_hyperparams(jda.fused_adamw)(learning_rate=1e-2)
      >>> params = {"w": jnp.ones(3)}
      >>> state = tx.init(params)
      >>> state.hyperparams["learning_rate"] = jnp.float32(0.0)
      >>> params, state = tx.step({"w": jnp.ones(3)}, state, params)
      >>> float(params["w"][0])
      1.0
    """
    if not callable(factory):
        raise _cannot_inject(factory)
    signature = inspect.signature(factory)
    if "mesh" in signature.parameters:
        raise _cannot_inject(factory)
    always_static = {
        name
        for name in signature.parameters
        if name in ("mask", "nesterov", "bias_correction") or name.endswith("_dtype")
    }
    always_static |= _static_names(static_args, signature)
    if hyperparam_dtype is not None:
        float_dtype("hyperparam_dtype", hyperparam_dtype, _HYPERPARAM_DTYPES)

    @functools.wraps(factory)
    def stepping(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        tx = factory(*args, **kwargs)
        if isinstance(tx, DistributedTransformation) or not isinstance(tx, FusedTransformation):
            raise _cannot_inject(factory)
        return optax.GradientTransformationExtraArgs(tx.init, tx.step)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> FusedTransformation:
        given = signature.bind(*args, **kwargs).arguments
        # Numbers become arrays, which nothing can check: so check them before.
        factory(**{k: v for k, v in given.items() if not callable(v) or k in _MAY_BE_CALLED})
        absent = {"l2"} & signature.parameters.keys() - given.keys()
        updating, stepping_too = (
            optax.inject_hyperparams(f, always_static | absent, hyperparam_dtype)(*args, **kwargs)
            for f in (factory, stepping)
        )
        return FusedTransformation(
            stepping_too.init, _checked(updating.update), _checked(stepping_too.update)
        )

    return make


_HYPERPARAM_DTYPES = ("float32", "float64", "bfloat16", "float16")


def _static_names(static_args: Any, signature: inspect.Signature) -> set[str]:
    """The names in ``static_args``; raises HyperparameterError where one is unknown."""
    names = static_args if isinstance(static_args, Iterable) else (static_args,)
    names = {static_args} if isinstance(static_args, str) else set(names)
    if unknown := [name for name in names if name not in signature.parameters]:
        raise HyperparameterError(
            describe(
                "static_args",
                "names no argument of the optimizer",
                got=repr(unknown[0]),
                expected=", ".join(signature.parameters),
                action="Fix the name.",
            )
        )
    return names


def _checked(update: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which says in words that a state was not made by inject_hyperparams."""

    @functools.wraps(update)
    def checked(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if not hasattr(state, "hyperparams"):
            raise TreeError(
                describe(
                    "opt_state",
                    "not a state of inject_hyperparams",
                    got=type(state).__name__,
                    expected="a state with hyperparams in it",
                    action="Make it with init(params) of this optimizer.",
                )
            )
        return update(grads, state, params, **extra)

    return checked


def _cannot_inject(factory: Any) -> PolicyError:
    return PolicyError(
        describe(
            "inject_hyperparams",
            "cannot be used with this optimizer",
            got=getattr(factory, "__name__", type(factory).__name__),
            expected="fused_adamw or fused_adam",
            action="Pass a schedule to it instead.",
        )
    )
