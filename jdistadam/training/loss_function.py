"""A user's loss function: how it is called, and the meaning of its results."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jdistadam.core import trees
from jdistadam.core.arguments import check_flag
from jdistadam.core.trees import Params
from jdistadam.distributed.accumulate import weighted
from jdistadam.errors import DtypeError, PolicyError, TreeError


class LossOutput(NamedTuple):
    """The named results of a loss function."""

    loss: jax.Array  # shape (), float32
    weight: Any  # shape (), float32; None: 1
    model_state: Any  # the new one; None if there is none
    aux: Any  # None without has_aux

    @property
    def weighted_loss(self) -> jax.Array:
        """The term of the sum over micro-batches and devices."""
        return self.loss if self.weight is None else weighted(self.loss, self.weight)


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """A user's loss function, and how to read its results."""

    function: Callable[..., Any]
    has_aux: bool
    weighted: bool

    def __post_init__(self) -> None:
        """Checks the types of the arguments of ``train_step`` or ``eval_step``."""
        check_flag("has_aux", self.has_aux)
        check_flag("weighted", self.weighted)
        if not callable(self.function):
            raise TreeError(
                f"loss_fn: not a function: got {type(self.function).__name__}, expected "
                "loss_fn(params, batch). Call train_step(loss_fn, tx) or eval_step(loss_fn, tx)."
            )

    def __call__(self, params: Params, batch: Any, model_state: Any, rng: Any) -> LossOutput:
        """Calls it with the enabled keywords."""
        given = {"model_state": model_state, "rng": rng}
        keywords = {name: value for name, value in given.items() if value is not None}
        self._check_signature(params, batch, keywords)
        out = self.function(params, batch, **keywords)
        names = ["(loss, weight)" if self.weighted else "loss"]
        names += ["model_state"] if model_state is not None else []
        names += ["aux"] if self.has_aux else []
        if len(names) == 1:
            out = (out,)
        if not isinstance(out, tuple) or len(out) != len(names):
            raise self._unexpected(
                f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__, names
            )
        value = dict(zip(names, out, strict=True))
        loss, weight = self._loss_and_weight(out[0], names)
        if model_state is not None:
            trees.check_same_shapes(
                value["model_state"],
                model_state,
                name="loss_fn's model_state",
                like_name="the state's model_state",
            )
            _check_kinds(value["model_state"], model_state)
        return LossOutput(loss, weight, value.get("model_state"), _arrays(value.get("aux")))

    def _loss_and_weight(self, value: Any, names: list[str]) -> tuple[jax.Array, Any]:
        if isinstance(value, tuple) != self.weighted or (self.weighted and len(value) != 2):
            got = f"{len(value)} values" if isinstance(value, tuple) else "the loss alone"
            raise self._unexpected(got, names)
        loss, weight = value if self.weighted else (value, None)
        trees.check_scalar("loss_fn's loss", loss)
        loss = jnp.asarray(loss)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise DtypeError(
                f"loss_fn's loss: cannot be differentiated: got {loss.dtype}, "
                "expected a floating-point scalar. Compute the loss in floating point."
            )
        if self.weighted:
            trees.check_scalar("loss_fn's weight", weight)
            weight = jnp.asarray(weight).astype(jnp.float32)
        return loss.astype(jnp.float32), weight

    def _unexpected(self, got: str, names: list[str]) -> TreeError:
        expected = names[0] if len(names) == 1 else f"a tuple ({', '.join(names)})"
        return TreeError(
            f"loss_fn: returned something other than expected: got {got}, expected {expected}. "
            "A second value to report needs has_aux=True; a weight of this micro-batch needs "
            "weighted=True; a model_state must be given to TrainState.create."
        )

    def _check_signature(self, params: Params, batch: Any, keywords: dict[str, Any]) -> None:
        """Raises TreeError if the function does not take these arguments."""
        try:
            signature = inspect.signature(self.function)
        except (ValueError, TypeError):  # builtins have no signature
            return
        try:
            signature.bind(params, batch, **keywords)
        except TypeError as error:
            called = ", ".join(["params", "batch", *(f"{name}={name}" for name in keywords)])
            raise TreeError(
                f"loss_fn: cannot be called with what the state holds: {error}: got "
                f"loss_fn{signature}, expected a function that can be called as loss_fn({called}). "
                "Accept these arguments, or change model_state and rng of the state."
            ) from None


def _check_kinds(new: Any, old: Any) -> None:
    """Raises DtypeError if the model state's dtype would drop a part of the new values.

    A float is rounded to its old width; a fraction or an imaginary part would be lost.
    """
    name = "loss_fn's model_state"
    trees.check_arrays(new, name=name)
    for path, x, like in zip(
        trees.paths(new, name), jax.tree.leaves(new), jax.tree.leaves(old), strict=True
    ):
        if _kind(x) > _kind(like) or (_kind(x) == _KEY) != (_kind(like) == _KEY):
            raise DtypeError(
                f"{path}: would lose a part of its values: "
                f"got {jnp.result_type(x) if _kind(x) < _KEY else x.dtype}, "
                f"expected {like.dtype}, as in the state. "
                "Cast it in loss_fn, or begin with this dtype in TrainState.create."
            )


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating, jax.dtypes.prng_key)
_KEY = len(_KINDS) - 1


def _kind(x: Any) -> int:
    """The rank of a dtype's kind of numbers; each kind contains those before it."""
    dtype = getattr(x, "dtype", None) or np.result_type(type(x))
    return next(i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))


def _arrays(aux: Any) -> Any:
    """Raises DtypeError if a value to report is no array."""
    for path, x in zip(trees.paths(aux, "loss_fn's aux"), jax.tree.leaves(aux), strict=True):
        if not trees.is_number(x):
            raise DtypeError(
                f"{path}: cannot leave a jitted program: got {x!r}, expected an array or a number. "
                "Return it from outside of loss_fn."
            )
    return aux


def refuse_summed_loss(
    loss_fn: Callable[[Any], Any], params: Params, axes: tuple[str, ...]
) -> None:
    """Raises PolicyError if a loss is a plain sum over devices, as from ``psum``.

    The loss of a step is already averaged over devices. A ``pmean``, or a sum divided by a sum,
    does not change it or its gradient. A plain sum makes both too large by the number of devices.
    The function is traced once more for this check.

    Args:
      loss_fn: A function of params that returns a tree with the loss as first leaf.
      params: The params.
      axes: The mesh axes that carry data.
    """
    jaxpr = jax.make_jaxpr(loss_fn)(params)
    summed = [axis for axis in _summed_over(jaxpr.jaxpr, 0) if axis in axes]
    if summed:
        raise PolicyError(
            "loss_fn's loss: already summed over the devices, so its gradient would count each "
            f"device again: got a psum over axis {summed[0]!r}, expected the loss of this device's "
            "part of the batch. Return the local loss, which train_step averages over devices; "
            "for a mean over tokens return (loss, weight) with weighted=True."
        )


_PASSED_ON = frozenset("convert_element_type reshape squeeze broadcast_in_dim copy".split())


def _summed_over(jaxpr: Any, result: int) -> tuple[str, ...]:
    """The axes of the psum that gives a program's result; empty if another operation gives it."""
    var = jaxpr.outvars[result]
    made_by = {} if isinstance(var, Literal) else {v: e for e in jaxpr.eqns for v in e.outvars}
    while not isinstance(var, Literal) and var in made_by:
        eqn = made_by[var]
        name = eqn.primitive.name
        if name.startswith("psum") and not name.startswith("psum_scatter"):
            return tuple(eqn.params["axes"])
        inner = next((x for k, x in eqn.params.items() if k in ("jaxpr", "call_jaxpr")), None)
        if name not in _PASSED_ON and inner is None:
            return ()
        if inner is not None:
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            place = eqn.outvars.index(var)
            same_results = len(inner.outvars) == len(eqn.outvars)
            return _summed_over(inner, place) if same_results else ()
        var = eqn.invars[0]
    return ()
