"""``optax.inject_hyperparams``, keeping the fused step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax

from jdistadam.core.dtypes import float_dtype
from jdistadam.core.types import Grads, OptState, Params
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.errors import HyperparameterError, PolicyError, TreeError

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
    static_names = _static_names(static_args, signature)
    if hyperparam_dtype is not None:
        float_dtype("hyperparam_dtype", hyperparam_dtype, _HYPERPARAM_DTYPES)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> FusedTransformation:
        given = signature.bind(*args, **kwargs).arguments
        # Numbers become arrays, which nothing can check: so check them before.
        factory(**{k: v for k, v in given.items() if not callable(v) or k in _MAY_BE_CALLED})
        absent = {"l2"} & signature.parameters.keys() - given.keys()
        updating, stepping = (
            optax.inject_hyperparams(f, static_names | absent, hyperparam_dtype)(*args, **kwargs)
            for f in (factory, _with_step_as_update(factory))
        )
        return FusedTransformation(
            init=stepping.init, update=_checked(updating.update), step=_checked(stepping.update)
        )

    return make


_HYPERPARAM_DTYPES = ("float32", "float64", "bfloat16", "float16")
_NEVER_INJECTED = ("mask", "nesterov", "bias_correction")


def _with_step_as_update(
    factory: Callable[..., FusedTransformation],
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Has optax, which knows of ``update`` alone, inject hyperparameters into ``step``."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        tx = factory(*args, **kwargs)
        if isinstance(tx, DistributedTransformation) or not isinstance(tx, FusedTransformation):
            raise _cannot_inject(factory)
        return optax.GradientTransformationExtraArgs(tx.init, tx.step)

    return make


def _static_names(static_args: Any, signature: inspect.Signature) -> set[str]:
    """The names in ``static_args``, checked, and of what is never an array."""
    names = static_args if isinstance(static_args, Iterable) else (static_args,)
    names = {static_args} if isinstance(static_args, str) else set(names)
    if unknown := [name for name in names if name not in signature.parameters]:
        raise HyperparameterError(
            "static_args",
            "names no argument of the optimizer",
            got=repr(unknown[0]),
            expected=", ".join(signature.parameters),
            action="Fix the name.",
        )
    never = {x for x in signature.parameters if x in _NEVER_INJECTED or x.endswith("_dtype")}
    return names | never


def _checked(update: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which says in words that a state was not made by inject_hyperparams."""

    @functools.wraps(update)
    def checked(grads: Grads, state: OptState, params: Params = None, **extra: Any) -> Any:
        if not hasattr(state, "hyperparams"):
            raise TreeError(
                "opt_state",
                "not a state of inject_hyperparams",
                got=type(state).__name__,
                expected="a state with hyperparams in it",
                action="Make it with init(params) of this optimizer.",
            )
        return update(grads, state, params, **extra)

    return checked


def _cannot_inject(factory: Any) -> PolicyError:
    return PolicyError(
        "inject_hyperparams",
        "cannot be used with this optimizer",
        got=getattr(factory, "__name__", type(factory).__name__),
        expected="fused_adamw or fused_adam",
        action="Pass a schedule to it instead.",
    )
