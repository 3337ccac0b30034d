"""The numbers of Adam's formula: hyperparameters, checked once, and the coefficients of a step.

Hyperparameters are frozen values. The kernel's float32 coefficients are computed from them on the
device, with optax's expressions.

[Note: coefficients in optax's own expressions]
Updates equal optax's only if every coefficient does, bit for bit. The expressions are therefore
literally optax's: ``1 - b2`` of a Python float is rounded once, from double precision, and
``b2**t`` is the compiler's power function. If the kernel computed ``1 - b2`` from a float32 ``b2``,
it would be 111 units in the last place off for 0.999. They must run inside ``jax.jit``, even for
eager calls, because the compiler contracts them; one operation at a time gives other bits.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import AxisType

from jdistadam.core import collectives, jaxprs, trees
from jdistadam.core.arguments import check_flag, is_real, out_of_range, warn_caller
from jdistadam.core.codecs import HALVES
from jdistadam.errors import DtypeError, HyperparameterError, ShapeError

FLAGS = ("nesterov", "cautious_weight_decay")
"""Variants of the formula, in the order of their bits in cuda/adam_math.h."""

RATES = ("learning_rate", "weight_decay")
"""The hyperparameters that may be schedules."""

ScalarOrSchedule = float | jax.Array | Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of Adam as given: Python numbers, arrays, tracers or schedules.

    Attributes:
      learning_rate: Step size, or a schedule that maps the step count to it.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Added to the square root of the second moment, >= 0.
      eps_root: Added to the second moment under the square root, >= 0.
      weight_decay: Decoupled weight decay, >= 0, or a schedule that maps the step count to it.
      nesterov: Whether to use Nesterov momentum.
      l2: L2 regularisation, >= 0: ``l2 * params`` is added to the gradient.
      bias_correction: Whether to divide the moments by 1 - b^t.
      cautious_weight_decay: Whether decay applies only to elements whose update has its sign.
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-8
    eps_root: Any = 0.0
    weight_decay: Any = 0.0
    nesterov: bool = False
    l2: Any = 0.0
    bias_correction: bool = True
    cautious_weight_decay: bool = False

    def __post_init__(self) -> None:
        """Checks every number known before tracing."""
        if isinstance(self.learning_rate, int | float | np.number) and self.learning_rate < 0:
            warn_caller(
                f"learning_rate: below zero, as optax allows: got {self.learning_rate!r}, expected "
                "a number >= 0. Every step climbs the loss; maximise a negated loss instead."
            )
        for name in ("bias_correction", *FLAGS):
            check_flag(name, getattr(self, name), may_be_number=True)
        _check("learning_rate", self.learning_rate, math.isfinite, "a finite number or a schedule")
        for name in ("b1", "b2"):
            _check(name, getattr(self, name), lambda x: 0.0 <= x < 1.0, "a number in [0, 1)")
        for name in ("eps", "eps_root", "weight_decay", "l2"):
            _check(name, getattr(self, name), lambda x: 0.0 <= x < math.inf, "a finite number >= 0")

    @property
    def flags(self) -> frozenset[str]:
        """The names in ``FLAGS`` that are set."""
        return frozenset(name for name in FLAGS if getattr(self, name))

    @property
    def arrays(self) -> dict[str, Any]:
        """The hyperparameters that are arrays."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: v for k, v in values.items() if isinstance(v, jax.Array | np.ndarray)}

    def split(self) -> tuple[tuple[tuple[str, Any], ...], dict[str, Any], dict[str, Any]]:
        """Returns hashable values that the compiler knows, numbers of the program, and schedules.

        ``Hyperparameters(**dict(known), **numbers, **schedules)`` is equal to this. The learning
        rate and weight decay are numbers of the program: other values need no other program.
        """
        of_rates = {name: getattr(self, name) for name in RATES}
        schedules = {k: v for k, v in of_rates.items() if callable(v)}
        numbers = {k: float(v) if isinstance(v, int) else v for k, v in of_rates.items()}
        numbers = {k: v for k, v in (numbers | self.arrays).items() if k not in schedules}
        names = [field.name for field in dataclasses.fields(self)]
        known = tuple((k, getattr(self, k)) for k in names if k not in (*RATES, *numbers))
        return known, numbers, schedules


def _check(name: str, value: Any, is_valid: Callable[[float], bool], expected: str) -> None:
    if callable(value) and name in RATES:
        return _check_schedule(name, value)
    if isinstance(value, jax.Array | np.ndarray):
        if name == "b2" and value.dtype in HALVES:
            raise HyperparameterError(
                f"{name}: rounded to 16 bits, which turns 0.999 into 1: "
                f"got {value.dtype}, expected float32, or a Python number. "
                "optax.inject_hyperparams casts to the dtype of params: use jda.inject_hyperparams."
            )
        # It may be traced, and reading it would block: only the shape is checked.
        real = not jnp.issubdtype(value.dtype, np.complexfloating)
        valid = value.shape == () and real
        expected = "a scalar" if real else "a real number"
    else:
        valid = is_real(value) and is_valid(float(value))
    if not valid:
        raise out_of_range(name, value, expected)


def _check_schedule(name: str, schedule: Callable[[Any], Any]) -> None:
    """Raises HyperparameterError if a schedule needs more than the step count."""
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # builtins have no signature
        return
    try:
        signature.bind(0)
    except TypeError as error:
        raise HyperparameterError(
            f"{name}: not a schedule of the step count: {error}: got a function of {signature}, "
            f"expected a function of one number. Change {name}."
        ) from None


NAMES = (
    "learning_rate",
    "b1",
    "one_minus_b1",
    "b2",
    "one_minus_b2",
    "eps",
    "eps_root",
    "weight_decay",
    "c1",
    "c1_next",
    "c2",
    "l2",
)
"""The columns of the kernel's coefficients, in the order of ``Coefficients`` in adam_math.h."""


def at_count(value: Any, count: jax.Array) -> Any:
    """Returns a schedule's value at a step count, or the constant itself."""
    return value(count) if callable(value) else value


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """An array as a part of a key: it equals itself alone, and lives as long as the key."""

    x: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced schedule. A step with equal ones is compiled once.

    Equal ones have equal texts, and read the same arrays inside of a ``jax.jit``.
    """

    text: str
    hidden: tuple[Any, ...]
    jaxpr: Any = dataclasses.field(compare=False)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays", "count"], meta_fields=["program"]
)
@dataclasses.dataclass(frozen=True)
class TracedSchedule:
    """A schedule as it is now, for a step to evaluate: an operand of its program.

    Attributes:
      program: What it computes.
      arrays: The arrays that it reads.
      count: The step count.
    """

    program: _Program
    arrays: list[Any]
    count: Any

    def value(self) -> Any:
        """Its value at the step count."""
        closed = core.ClosedJaxpr(self.program.jaxpr, self.arrays)
        return core.jaxpr_as_fun(closed)(self.count)[0]


class Product(NamedTuple):
    """A learning rate as factors, whose product is taken in the program of the step."""

    factors: tuple[Any, ...]

    def value(self) -> Any:
        """The product."""
        return functools.reduce(operator.mul, map(value_of, self.factors))


class Sum(NamedTuple):
    """A weight decay as terms, whose sum is taken in the program of the step."""

    terms: tuple[Any, ...]

    def value(self) -> Any:
        """The sum."""
        return functools.reduce(operator.add, map(value_of, self.terms))


def value_of(x: Any) -> Any:
    """Returns a number that may be a schedule, a product or a sum now."""
    return x.value() if isinstance(x, TracedSchedule | Product | Sum) else x


def schedule_now(name: str, schedule: Callable[[Any], Any], count: Any) -> Any:
    """Returns what a schedule is if it is called now: a ``TracedSchedule``, or a number.

    A schedule may depend on more than the count, such as a variable of the training loop. It is
    therefore traced in each step, also outside ``jax.jit``. It is evaluated in the program of the
    step: one operation at a time, or in a program of its own, it may have other bits. A schedule
    that needs the value of the count, such as one with an ``if``, is called with the count itself.
    """
    known: list[Any] = []  # no tracers, which would leak

    def call(count: Any) -> Any:
        value = schedule(count)
        _check_number(name, value)
        known[:] = [] if trees.is_traced(value) else [value]
        return value

    check_step_count("opt_state's count", count)
    try:
        traced = jax.make_jaxpr(call)(count)
    except jax.errors.JAXTypeError:
        value = call(count)
    else:
        if not known:
            hidden = tuple(
                _Same(x) if isinstance(x, jax.Array | np.ndarray) else x
                for x in jaxprs.hidden_in(traced.jaxpr)
            )
            program = _Program(f"{traced.jaxpr} {traced.out_avals}", hidden, traced.jaxpr)
            return TracedSchedule(program, list(traced.consts), count)
        (value,) = known
    return float(value) if isinstance(value, int) else value


def coefficient_row(hyper: Hyperparameters, count: jax.Array, *, decay: bool = True) -> jax.Array:
    r"""Returns the coefficients of the step after ``count`` steps.

    With :math:`t` = ``count`` + 1: ``c1`` is :math:`1 - b_1^t`, ``c1_next`` :math:`1 - b_1^{t+1}`,
    ``c2`` :math:`1 - b_2^t`. Without bias correction each is 1, and dividing by it is exact.
    Schedules are evaluated at ``count``, before the increment.

    Call it inside ``jax.jit``: [Note: coefficients in optax's own expressions].

    Args:
      hyper: The hyperparameters. Arrays and tracers are allowed.
      count: Number of steps taken so far, shape (), int32.
      decay: Whether decay applies. Otherwise ``weight_decay`` and ``l2`` are zero.

    Returns:
      Shape ``(len(NAMES),)``, float32.

    Example:
      >>> row = jax.jit(lambda t: coefficient_row(Hyperparameters(1e-3, b1=0.5), t))(jnp.int32(1))
      >>> dict(zip(NAMES, row.tolist()))["c1"]
      0.75
    """
    check_step_count("opt_state's count", count)
    count_inc = optax.safe_increment(count)
    b1, b2 = hyper.b1, hyper.b2
    corrections: tuple[Any, ...] = (1.0, 1.0, 1.0)
    if hyper.bias_correction:
        next_inc = optax.safe_increment(count_inc)
        corrections = (1 - b1**count_inc, 1 - b1**next_inc, 1 - b2**count_inc)
    values = (
        hyper.learning_rate,
        b1,
        1 - b1,
        b2,
        1 - b2,
        hyper.eps,
        hyper.eps_root,
        hyper.weight_decay if decay else 0.0,
        *corrections,
        hyper.l2 if decay else 0.0,
    )
    return _stacked([coefficient(*x, count) for x in zip(NAMES, values, strict=True)])


def check_step_count(name: str, count: Any) -> None:
    """Raises ShapeError or DtypeError unless a state's count is one integer."""
    dtype = jnp.result_type(count)
    if np.shape(count) != () or not jnp.issubdtype(dtype, np.integer):
        kind = DtypeError if np.shape(count) == () else ShapeError
        raise kind(
            f"{name}: not a number of steps: got {dtype}, shape {np.shape(count)}, "
            "expected int32, shape (). Pass opt_state as init, update or step returned it."
        )


def _check_number(name: str, value: Any) -> None:
    """Raises HyperparameterError unless a value, perhaps of a schedule, is one real number."""
    is_real = trees.is_number(value) and not jnp.iscomplexobj(value)
    if not is_real or np.shape(value) != ():
        got = f"shape {np.shape(value)}" if is_real else repr(value)
        raise HyperparameterError(
            f"{name}: not one number: got {got}, expected a scalar, also from a schedule. Return a "
            "number; for several rates use param_labels and groups, or optax.multi_transform."
        )


def coefficient(name: str, value: Any, count: jax.Array) -> jax.Array:
    """A constant, or a schedule's value at a step count, as a float32 scalar.

    What a schedule computes in 16 bits has 16 bits: [Note: casts that XLA deletes].
    """
    value = at_count(value, count)
    _check_number(name, value)
    x = jnp.asarray(value)
    return collectives.round_to(x.astype(jnp.float32), x.dtype).astype(jnp.float32)


def coefficient_rows(hypers: Sequence[Hyperparameters], count: jax.Array) -> jax.Array:
    """Returns two rows per group of leaves, with decay and without it.

    Shape ``(2 * len(hypers), len(NAMES))``, float32.
    """
    pairs = [(hyper, decay) for hyper in hypers for decay in (True, False)]
    return _stacked([coefficient_row(hyper, count, decay=decay) for hyper, decay in pairs])


def _stacked(rows: Sequence[jax.Array]) -> jax.Array:
    """Like ``jnp.stack``, also under ``jax.vmap`` over an Explicit axis of ``jax.set_mesh``.

    Some of the rows depend on the count of each member, others are the same for all. JAX then
    cannot concatenate, because only the former are sharded; elementwise operations can.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return jnp.stack(rows)
    stacked = jnp.zeros((len(rows), *rows[0].shape), jnp.float32)
    for i, row in enumerate(rows):
        is_here = (np.arange(len(rows)) == i).reshape(-1, *[1] * row.ndim)
        stacked = jnp.where(is_here, row[None], stacked)
    return stacked
