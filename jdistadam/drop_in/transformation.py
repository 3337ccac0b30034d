"""The type of drop-in optimizers: optax's two functions, a fused ``step``, and ``jit_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import optax

from jdistadam.core.algorithm import Algorithm
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.drop_in.effects import How
from jdistadam.drop_in.step import difference
from jdistadam.errors import PolicyError


class StepFn(Protocol):
    """``(grads, opt_state, params) -> (params, opt_state)``."""

    def __call__(
        self, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        """Takes one step."""


class FullResult(NamedTuple):
    """The result of a ``FullStep``.

    Attributes:
      params: New params, or in mode "update" updates.
      state: The new state.
      norms: The global norms "grad_norm", "param_norm" and "update_norm"; None if not requested.
    """

    params: Params
    state: OptState
    norms: dict[str, jax.Array] | None


FullStep = Callable[[Grads, Any, Params, dict[str, Any], How], FullResult]
"""A step of (gradients, state, params, extra arguments of a chain's transformations, how)."""

PARTS = (
    "For weight decay and learning rates, end the chain with jda.scale_by_adam, "
    "jda.add_decayed_weights and what multiplies by a number, such as jda.scale_by_learning_rate, "
    "which jda.chain fuses. Move only what changes gradients before the optimizer. To freeze "
    "parameters, use jda.partition with optax.set_to_zero()."
)
"""What to do about a chain without a fused step."""
NO_OPTIMIZER = "no transformation in it has a fused step"
"""Why a chain without one of our optimizers is not fused."""


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An ``optax.GradientTransformationExtraArgs`` (init, update) that also has ``step``.

    ``step(grads, opt_state, params)`` returns new parameters directly from the kernel. It reads and
    writes 28 bytes per float32 parameter; ``update`` and ``optax.apply_updates`` together need 40.
    Do not call ``optax.apply_updates`` after it: nobody sees that it adds parameters to parameters.

    For updates in place, donate params and state, and pass them in the order of the results.
    ``jax.jit`` pairs donated buffers with results of equal shape in order::

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, opt_state, batch):
            grads = jax.grad(loss)(params, batch)
            return tx.step(grads, opt_state, params)

    ``tx._replace(init=..., update=..., step=...)`` returns a transformation with other functions.
    Functions that are not given stay the same. After a change of only ``update``, ``step`` still
    does what it did before; to change both, give both.
    """

    step: StepFn
    full_step: FullStep | None = None
    """The step for wrappers; None if this optimizer has none."""
    merges: bool = False
    """Whether ``full_step`` takes everything in ``How``: what others do before and after it."""
    is_direction: bool = False
    """Whether its updates lack a learning rate, and decay may follow."""
    _of_another: str = ""
    """Why its step does not count as fused, if there is another reason than its functions."""
    _made_of: tuple[Any, ...]
    algorithm: Algorithm | None = None
    """The algorithm of the optimizer; None if other functions wrap or replace it."""
    distributed_by: Callable[[Callable[[Any], Any]], Any] | None = None
    """Distributes an optimizer that ``inject_hyperparams`` made, given a function that distributes
    one with hyperparameters."""

    def __new__(cls, init: Any, update: Any, step: StepFn) -> FusedTransformation:
        """Makes the pair that optax unpacks, with ``step`` as an attribute."""
        self = super().__new__(cls, init, update)
        self.step, self._made_of = step, (init, update, step)
        return self

    @property
    def is_fused(self) -> bool:
        """Whether ``step`` runs the fused kernel; ``why_not_fused`` says why it does not.

        Example:
          >>> import optax, jdistadam as jda
          >>> jda.chain(optax.clip(1.0), jda.fused_adamw(1e-3)).is_fused
          True
          >>> jda.chain(jda.fused_adamw(1e-3), optax.clip(1.0)).is_fused
          False
        """
        return not self.why_not_fused

    @property
    def why_not_fused(self) -> str:
        """Why ``step`` is only ``update`` and ``apply_updates``, or unknown; "" if it is fused."""
        if not self.is_as_made:
            return "its functions were replaced"
        known = self.full_step is not None or _is_distributed(self)
        return self._of_another or ("" if known else "its step is none of jdistadam's")

    def step_with_updates(
        self, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState, Any]:
        """Takes a step, and also returns the updates, for code that logs or checks them.

        A copy of donated params exists until the updates are computed from it.

        Args:
          grads: The gradients.
          state: The state.
          params: The params.
          **extra_args: Extra arguments of the transformations in a chain.

        Returns:
          New params and the new state, as ``step`` returns them, and the differences between new
          and old params: float32, or the params' dtype if that is float64 or complex.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> tx, params = jda.fused_adamw(1e-2, weight_decay=0.0), {"w": jnp.ones(3)}
          >>> _, _, updates = tx.step_with_updates(params, tx.init(params), params)
          >>> round(float(updates["w"][0]), 4)
          -0.01
        """
        new, state = self.step(grads, state, params, **extra_args)
        return new, state, jax.tree.map(difference, new, params)

    def step_with_norms(
        self, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState, dict[str, jax.Array]]:
        """Takes a step, and also returns three norms that the kernel computes on the way.

        It reads and writes no more than ``step``. Each norm is the square root of the sum of
        squares over all leaves and devices, summed in float32. "grad_norm" is the norm of the
        gradients that the optimizer gets; in a chain, the transformations before it return them.
        "param_norm" is the norm of the new params, or of the main parameters if there are any.
        Frozen leaves do not count. If a wrapper skips the step, "update_norm" is 0.

        Args:
          grads: The gradients.
          state: The state.
          params: The params.
          **extra_args: Extra arguments of the transformations in a chain.

        Returns:
          New params and the new state, as ``step`` returns them, and the float32 scalars
          "grad_norm", "param_norm" and "update_norm".

        Raises:
          PolicyError: Under ``jax.vmap`` or in differentiation; if functions were replaced; if a
            transformation follows the optimizer in a chain.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> tx, params = jda.fused_adamw(1e-2, weight_decay=0.0), {"w": jnp.ones(4)}
          >>> _, _, norms = tx.step_with_norms(params, tx.init(params), params)
          >>> {name: round(float(x), 4) for name, x in norms.items()}
          {'grad_norm': 2.0, 'param_norm': 1.98, 'update_norm': 0.02}
        """
        step = full_step_of(self, "step_with_norms")
        params, state, norms = step(grads, state, params, extra_args, How(norms=True))
        assert norms is not None
        return params, state, norms

    @property
    def is_as_made(self) -> bool:
        """Whether none of the functions was replaced."""
        return (*self, self.step) == self._made_of

    @property
    def only_updates(self) -> bool:
        """Whether it is known that ``step`` is only ``update`` and ``apply_updates``."""
        return self.is_as_made and bool(self._of_another)

    def _replace(self, **changes: Any) -> FusedTransformation:
        """As in every named tuple, also for ``step`` and other attributes."""
        attributes = {name: changes.pop(name, value) for name, value in vars(self).items()}
        new = super()._replace(**changes)
        vars(new).update(attributes)
        return new

    __replace__ = _replace  # for copy.replace

    def __init_subclass__(cls) -> None:
        """Makes ``jax.tree.map`` keep ``step`` and the attributes of a subclass."""
        _register_as_tree(cls)

    def __eq__(self, other: Any) -> bool:
        """Whether the functions are equal, including those that a named tuple does not compare."""
        return type(self) is type(other) and self._functions == other._functions

    def __ne__(self, other: Any) -> bool:
        """Not equal; a tuple has its own."""
        return not self == other

    def __hash__(self) -> int:
        """A hash of the functions, because a transformation may be static in ``jax.jit``."""
        return hash(self._functions)

    @property
    def _functions(self) -> tuple[Any, ...]:
        return (*self, self.step, self.full_step)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle; the functions must be picklable."""
        return _restored, (type(self), tuple(self), vars(self))

    def __copy__(self) -> FusedTransformation:
        """Returns itself: it is immutable."""
        return self

    def __deepcopy__(self, memo: Any) -> FusedTransformation:
        """Returns itself: it is immutable."""
        return self


def _is_distributed(tx: Any) -> bool:
    """Whether an optimizer is a ``DistributedTransformation``, which stands above this file."""
    return hasattr(tx, "config")


def _restored(
    cls: type[FusedTransformation], functions: tuple[Any, ...], attributes: dict[str, Any]
) -> FusedTransformation:
    """A transformation from its parts, whatever the arguments of its class are."""
    tx = cls._make(functions)
    vars(tx).update(attributes)
    return tx


def step_of(full_step: FullStep) -> StepFn:
    """Returns the ``step`` that takes every step, and returns no norms."""

    def step(
        grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        new, state, _ = full_step(grads, state, params, extra_args, How())
        return new, state

    return step


def has_full_step(tx: Any) -> bool:
    """Whether a transformation has a step for wrappers, perhaps only of a direction."""
    if not isinstance(tx, FusedTransformation) or tx.full_step is None or not tx.is_as_made:
        return False
    return tx.is_fused or tx.is_direction


def full_step_of(tx: Any, function: str, *, may_be_direction: bool = False) -> FullStep:
    """Returns the step of an optimizer for wrappers; raises PolicyError if it has none."""
    if has_full_step(tx) and (tx.is_fused or may_be_direction):
        return tx.full_step
    got = type(tx).__name__
    cure = "Write jda.chain in place of optax.chain; wrap other optimizers with those of optax."
    if isinstance(tx, FusedTransformation):
        got += f": {tx.why_not_fused}" if tx.why_not_fused else ""
        cure = PARTS if tx.is_as_made else "Wrap the optimizer before its functions are replaced."
    if _is_distributed(tx):
        cure = (
            "A distributed optimizer has norms=, loss_scale= and norm_guard=, and train_step has "
            "accumulate_steps=: use those."
        )
    raise PolicyError(
        f"{function}: needs an optimizer with a fused step: got {got}, expected what "
        "jda.fused_adamw, jda.chain, inject_hyperparams, MultiSteps or apply_if_finite returns. "
        f"{cure}"
    )


def made_of(init: Callable[[Params], OptState], full_step: FullStep) -> FusedTransformation:
    """Returns the optimizer of a full step that takes everything in ``How``."""

    def update(
        grads: Grads, state: OptState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, OptState]:
        return full_step(grads, state, params, extra_args, How("update"))[:2]

    tx = FusedTransformation(init, update, step_of(full_step))
    tx.full_step, tx.merges = full_step, True
    return tx


def with_state(
    tx: FusedTransformation, outer: Callable[[Any], Any], inner: Callable[[Any], Any]
) -> FusedTransformation:
    """Returns the same optimizer with ``outer(state)`` as its state; ``inner`` is the inverse."""

    def update(
        grads: Grads, state: OptState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, OptState]:
        updates, new = tx.update(grads, inner(state), params, **extra_args)
        return updates, outer(new)

    def step(
        grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        params, new = tx.step(grads, inner(state), params, **extra_args)
        return params, outer(new)

    def full_step(grads: Grads, state: Any, params: Params, extra: Any, how: How) -> FullResult:
        assert tx.full_step is not None
        result = tx.full_step(grads, inner(state), params, extra, how)
        return result._replace(state=outer(result.state))

    new = FusedTransformation(lambda params: outer(tx.init(params)), update, step)
    names = ("merges", "is_direction", "_of_another", "algorithm")
    new.__dict__.update({name: getattr(tx, name) for name in names})
    new.full_step = None if tx.full_step is None else full_step
    return new


def takes_all(tx: Any) -> bool:
    """Returns whether a transformation has a step that takes everything in ``How``."""
    return isinstance(tx, FusedTransformation) and tx.merges and tx.is_as_made


def _register_as_tree(cls: type[FusedTransformation]) -> None:
    """Registers a tree of three functions, because JAX keeps only the fields of a named tuple."""
    names = ("init", "update", "step")
    keys = tuple(map(jax.tree_util.GetAttrKey, names))

    def flatten_with_keys(tx: FusedTransformation) -> tuple[Any, FusedTransformation]:
        return tuple(zip(keys, (*tx, tx.step), strict=True)), tx

    def unflatten(tx: FusedTransformation, functions: Iterable[Any]) -> FusedTransformation:
        return tx._replace(**dict(zip(names, functions, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)


_register_as_tree(FusedTransformation)


def without_frozen(rows: Sequence[Any], tree: Any) -> Any:
    """Returns a tree with ``optax.MaskedNode()`` in place of each leaf without a row."""
    if None not in rows:
        return tree
    treedef: Any = jax.tree.structure(tree)
    pairs = zip(rows, jax.tree.leaves(tree), strict=True)
    return treedef.unflatten([optax.MaskedNode() if row is None else x for row, x in pairs])


def with_frozen(rows: Sequence[int | None], stepped: Any, whole: Any) -> Any:
    """Returns ``stepped`` with the leaves that ``without_frozen`` removed from ``whole``."""
    if None not in rows:
        return stepped
    treedef: Any = jax.tree.structure(whole)
    new = iter(jax.tree.leaves(stepped))
    pairs = zip(rows, jax.tree.leaves(whole), strict=True)
    return treedef.unflatten([x if row is None else next(new) for row, x in pairs])


# By default XLA makes CUDA graphs only of five operations or more. A step alone has three: the
# count, the coefficients and the kernel. In a graph, a call need not prepare all its arrays again.
_GRAPHS_OF_ANY_SIZE = {"xla_gpu_graph_min_graph_size": 1}


class JittedStep:
    """The result of ``jit_step``: call it as ``tx.step``."""

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
    """Jits ``tx.step`` alone, with params and state updated in place.

    ``jax.jit`` pairs donated arrays with results of equal shape and dtype in order. The step takes
    ``(grads, opt_state, params)`` and returns ``(params, opt_state)``. Jitted directly, with
    ``donate_argnums=(1, 2)``, it would copy every array, and write new parameters over old moments.
    ``jit_step`` passes arrays in the order of the results, so none is copied.

    In a larger jitted function it is enough to take ``(params, opt_state, ...)`` in this order.

    Args:
      tx: ``fused_adamw``, ``fused_adam`` or a ``chain`` that ends with one of them.
      **jit_options: Further arguments of ``jax.jit``, such as ``compiler_options``.

    Returns:
      ``step(grads, opt_state, params) -> (params, opt_state)``, which donates the last two, with a
      method ``lower``.

    Raises:
      PolicyError: ``tx`` has no ``step``, or steps only inside ``jax.shard_map``.

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
    if not isinstance(tx, FusedTransformation) or _is_distributed(tx):
        what, action = type(tx).__name__, "Pass what fused_adamw(...) returns."
        if _is_distributed(tx):
            what, action = "a distributed optimizer", "Use jda.train_step, which jits a whole step."
        elif isinstance(tx, optax.GradientTransformation):
            what = f"an optimizer or a chain of optax, {what}"
            action = "Use fused_adamw in place of optax.adamw, and jda.chain for optax.chain."
        raise PolicyError(
            f"jit_step: cannot be used with this optimizer: got {what}, "
            f"expected fused_adamw, fused_adam, or jda.chain(..., fused_adamw(...)). {action}"
        )
    return JittedStep(tx, jit_options)
