"""``optax.inject_hyperparams`` with the fused step, also for distributed optimizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from optax import inject_hyperparams as optax_inject_hyperparams  # also if a user replaces it
from optax.schedules import StatefulSchedule

from jdistadam.compose.wrappers import kept_around
from jdistadam.core.arguments import float_dtype
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import Functions, StepResult
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.effects import How
from jdistadam.drop_in.transformation import FullResult, FusedTransformation, full_step_of
from jdistadam.errors import HyperparameterError, PolicyError, TreeError

# Arguments of the optimizers that are numbers or functions but no hyperparameters of Adam.
_NEVER_INJECTED = frozenset(
    "mask bucket_bytes loss_scale mesh param_specs param_labels layers seed "
    "float32_moments ema_decay state_memory norms".split()
)
_ALWAYS_FLOAT = frozenset("learning_rate weight_decay b1 b2 eps eps_root l2 max_grad_norm".split())


def inject_hyperparams(
    factory: Callable[..., FusedTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: Any = jax.numpy.float32,
) -> Callable[..., FusedTransformation]:
    """``optax.inject_hyperparams`` for an optimizer with a ``step``: the result has one too.

    Numbers given to the optimizer become arrays in its state, such as
    ``state.hyperparams["learning_rate"]``. They can be read, and set between steps without
    recompilation. Schedules are evaluated in each step, and their values are stored there.

    The hyperparameters are learning_rate, weight_decay, b1, b2, eps, eps_root and l2; groups still
    override them. ``distributed`` takes the result, and ``train_step`` also takes Python numbers in
    its state::

        adamw = jda.inject_hyperparams(jda.fused_adamw)(1e-3)
        tx = jda.distributed(adamw, mesh=mesh)
        state = jda.TrainState.create(params, tx)
        state.opt_state.hyperparams["learning_rate"] = 5e-4

    The factory may also return a distributed optimizer. A given max_grad_norm then becomes a number
    in the state, too.

    Checks that need a value, such as that b2 is below 1, see only the first one: the number given
    to the optimizer, or the schedule's value at step 0. Later values are not checked.

    Args:
      factory: ``fused_adamw``, ``fused_adam``, or a function that returns such an optimizer,
        ``distributed`` around one, or a ``chain``.
      static_args: Names of further arguments that do not become numbers in the state. Arguments
        that are not hyperparameters never do (mask, nesterov, bucket_bytes, loss_scale, dtypes),
        nor does l2 if it is not given.
      hyperparam_dtype: Dtype of the numbers in the state: float32 for params of any dtype. optax
        takes the params' dtype; in bfloat16 a b2 of 0.999 would be 1.

    Returns:
      A function with the arguments of ``factory``.

    Raises:
      PolicyError: The factory's result has no step.
      HyperparameterError: A first value is out of range; or, when a step is traced, a name in the
        state is no hyperparameter, or one was removed.

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
    static_names = _static_names(static_args, signature)
    if hyperparam_dtype is not None:
        float_dtype("hyperparam_dtype", hyperparam_dtype, _HYPERPARAM_DTYPES)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> FusedTransformation:
        given = dict(signature.bind(*args, **kwargs).arguments)
        for name in _ALWAYS_FLOAT & given.keys() - static_names:
            if type(given[name]) is int:  # optax would keep it an integer, even if a float is set
                given[name] = float(given[name])
        static = static_names | ({"l2"} & signature.parameters.keys() - given.keys())
        first = factory(**_first_values(given, static))
        if not isinstance(first, FusedTransformation):
            raise _cannot_inject(factory)

        names = _hyperparam_names(signature, given, static)

        def inject(
            functions_of: Callable[[Any], Any], wrap: Callable[[Any], Any] = lambda tx: tx
        ) -> optax.GradientTransformationExtraArgs:
            """Has optax inject into the init and update of wrap(tx)."""

            @functools.wraps(factory)
            def with_update(**kwargs: Any) -> optax.GradientTransformationExtraArgs:
                tx = wrap(factory(**kwargs))
                return optax.GradientTransformationExtraArgs(*functions_of(tx))

            injected = optax_inject_hyperparams(with_update, static, hyperparam_dtype)(**given)
            return injected._replace(update=_checked(injected.update, names))

        if isinstance(first, DistributedTransformation):
            return inject_distributed(first, inject)
        updating = inject(lambda tx: (tx.init, tx.update))
        stepping = inject(lambda tx: (tx.init, tx.step))
        tx = FusedTransformation(stepping.init, updating.update, stepping.update)
        tx.full_step = functools.partial(_full_step, inject)
        tx.merges, tx.is_direction = first.merges, first.is_direction
        tx._of_another = first._of_another
        if first.algorithm is not None:  # each part of a chain is distributed by itself
            tx.distributed_by = lambda distributed: inject_distributed(
                distributed(first), functools.partial(inject, wrap=distributed)
            )
        return tx

    return make


def _full_step(
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs],
    grads: Grads,
    state: Any,
    params: Params,
    extra_args: dict[str, Any],
    how: How,
) -> FullResult:
    """The step for wrappers; if it is skipped, schedules do not advance."""

    def functions_of(tx: Any) -> Any:
        step = full_step_of(tx, "inject_hyperparams", may_be_direction=True)

        def stepped(grads: Grads, inner: Any, params: Params, **extra: Any) -> Any:
            result = step(grads, inner, params, extra, how)
            return result, result.state

        return tx.init, stepped

    result, new = inject(functions_of).update(grads, state, params, **extra_args)
    return result._replace(state=kept_around(result.state, how.is_skipped, state, new))


_HYPERPARAM_DTYPES = ("float32", "float64", "bfloat16", "float16")


def _first_values(given: Mapping[str, Any], static_names: Iterable[str]) -> dict[str, Any]:
    """The arguments with every schedule replaced by its value at step 0.

    Arrays cannot be checked, so an optimizer is made from numbers first.
    """

    def first(name: str, value: Any) -> Any:
        if name in static_names or not callable(value):
            return value
        is_stateful = isinstance(value, StatefulSchedule)
        try:
            with jax.ensure_compile_time_eval():
                return float(value(value.init() if is_stateful else jnp.zeros((), jnp.int32)))
        except (TypeError, ValueError) as error:
            raise HyperparameterError(
                f"{name}: not a schedule: {error}: got {value!r}, "
                "expected a function from the step count to a number. "
                f"If it is not a schedule, pass static_args={name!r} to inject_hyperparams."
            ) from error

    return {name: first(name, value) for name, value in given.items()}


def _hyperparam_names(
    signature: inspect.Signature, given: Mapping[str, Any], static_names: Iterable[str]
) -> frozenset[str]:
    """The names that optax puts into the state: numbers and schedules, including defaults."""
    bound = signature.bind(**given)
    bound.apply_defaults()
    return frozenset(
        name
        for name, value in bound.arguments.items()
        if name not in static_names
        and not isinstance(value, bool)
        and (callable(value) or isinstance(value, int | float | jax.Array | np.ndarray))
    )


def _static_names(static_args: Any, signature: inspect.Signature) -> set[str]:
    """The names in ``static_args``, checked, and those that are never arrays."""
    names = static_args if isinstance(static_args, Iterable) else (static_args,)
    names = {static_args} if isinstance(static_args, str) else set(names)
    if unknown := [name for name in names if name not in signature.parameters]:
        raise HyperparameterError(
            f"static_args: names no argument of the optimizer: got {unknown[0]!r}, "
            f"expected {', '.join(signature.parameters)}. Fix the name."
        )
    never = {
        name
        for name, parameter in signature.parameters.items()
        if name in _NEVER_INJECTED or name.endswith("_dtype") or isinstance(parameter.default, bool)
    }
    return names | never


def _checked(update: Callable[..., Any], names: frozenset[str]) -> Callable[..., Any]:
    """The same function, with a clear error for the state of another optimizer."""

    @functools.wraps(update)
    def checked(grads: Grads, state: OptState, params: Params = None, **extra: Any) -> Any:
        if not hasattr(state, "hyperparams"):
            raise TreeError(
                "opt_state: not a state of inject_hyperparams: "
                f"got {type(state).__name__}, expected a state with hyperparams in it. "
                "Make it with init(params) of this optimizer."
            )
        if wrong := sorted(names ^ state.hyperparams.keys()):
            what = "missing" if wrong[0] in names else "no hyperparameter of this optimizer"
            raise HyperparameterError(
                f"opt_state.hyperparams[{wrong[0]!r}]: {what}: "
                f"got {', '.join(sorted(state.hyperparams))}, expected {', '.join(sorted(names))}. "
                "Set the numbers that the optimizer was made with; "
                "max_grad_norm is one of them if it was given."
            )
        return update(grads, state, params, **extra)

    return checked


def _cannot_inject(factory: Any) -> PolicyError:
    return PolicyError(
        "inject_hyperparams: cannot be used with this optimizer: "
        f"got {getattr(factory, '__name__', type(factory).__name__)}, "
        "expected an optimizer of this package, such as fused_adamw, or what returns one. "
        "For optax's own optimizers use optax.inject_hyperparams."
    )


def inject_distributed(
    first: DistributedTransformation,
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs],
) -> DistributedTransformation:
    """Makes a distributed optimizer whose numbers are arrays in its state.

    Args:
      first: The optimizer made with the first values. It provides whatever does not depend on
        numbers, such as mesh, layout and schedule of collectives.
      inject: Takes a function that returns two functions of an optimizer, and returns a
        transformation whose ``init`` and ``update`` call these with the numbers in the state.
    """
    return DistributedTransformation.make(
        _Injected(first, inject),
        first.config,
        optax.InjectStatefulHyperparamsState(P(), P(), P(), first.state_specs()),
        bound=first.bound,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # by identity, like functions
class _Injected:
    """The functions of a distributed optimizer with injected hyperparameters."""

    first: DistributedTransformation
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs]

    def init(self, schedule: Schedule, params: Params) -> OptState:
        """Makes the state."""
        return self._injected(lambda functions: None, schedule).init(params)

    def local_step(
        self, schedule: Schedule, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> StepResult:
        """Takes a step with the numbers in the state."""

        def step_of(functions: Functions) -> Callable[..., tuple[StepResult, Any]]:
            def step(grads: Grads, inner: Any, params: Params, **extra: Any) -> Any:
                result = functions.local_step(schedule, grads, inner, params, **extra)
                return result, result.opt_state

            return step

        injected = self._injected(step_of, schedule)
        result, new = injected.update(grads, state, params, **extra_args)
        # Schedules do not advance in a skipped step; numbers that were set stay either way.
        kept = kept_around(result.opt_state, result.is_skipped, state, new)
        return result._replace(opt_state=kept)

    def norm(self, schedule: Schedule, grads: Grads, state: OptState) -> jax.Array:
        """The norm, with the numbers in the state."""
        if state is None:
            return self.first.functions.norm(schedule, grads, None)

        def norm_of(functions: Functions) -> Callable[..., tuple[jax.Array, Any]]:
            return lambda grads, inner, params: (functions.norm(schedule, grads, inner), inner)

        return self._injected(norm_of, schedule).update(grads, state)[0]

    def _injected(
        self, function_of: Callable[[Functions], Any], schedule: Schedule
    ) -> optax.GradientTransformationExtraArgs:
        """``inject`` for ``init`` and a function of an optimizer's functions."""

        def functions_of(tx: DistributedTransformation) -> Any:
            return functools.partial(tx.functions.init, schedule), function_of(tx.functions)

        return self.inject(functions_of)
