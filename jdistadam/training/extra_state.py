"""What a train state holds in addition to optax's state, and optax's Adam inside a chain."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.guards import LossScaleState, NormGuardState, saved_loss_scale
from jdistadam.core.hyperparameters import check_step_count
from jdistadam.core.trees import OptState
from jdistadam.distributed.global_arrays import copy_of, copy_to
from jdistadam.distributed.state import find_state, map_state
from jdistadam.distributed.state_view import StateView
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.state import MainParamsState
from jdistadam.errors import HyperparameterError, TreeError
from jdistadam.training.train_state import TrainState


class ExtraState(NamedTuple):
    """What a train state holds in addition to ``main_params`` and the state of ``optax.adamw``.

    ``to_optax_state`` returns it and ``from_optax_state`` takes it. It is a tree of numpy arrays,
    except for random keys. It is independent of mesh, number of processes and strategy, and can be
    saved by pickle or orbax.

    Attributes:
      step: Shape (), int32: steps taken, without skipped ones; the count of the optimizer.
      grad_norm: Shape (), float32: global norm of the last mean gradient, before clipping.
      scaling: The loss scale, its counters and the number of skipped steps. None without
        ``loss_scale``; a constant one has ``growth_count`` and ``hysteresis_count`` None.
      model_state: As in ``TrainState``.
      rng: As in ``TrainState``: a key of ``jax.random.key``, or a legacy one.
      ema: The average of the parameters, a tree like ``main_params``; None without ``ema_decay``.
      guard: The mean of norms and the counts of steps that it skipped; None without ``norm_guard``.
    """

    step: Any
    grad_norm: Any
    scaling: LossScaleState | None
    model_state: Any
    rng: Any
    ema: Any = None
    guard: NormGuardState | None = None


def extra_state_of(state: TrainState, tx: DistributedTransformation) -> ExtraState:
    """Returns the additional state of a train state made with ``tx``; on the host."""
    sharded = find_state(state.opt_state)
    scaling = saved_loss_scale(tx.config.loss_scale, sharded.scaling)
    own = (state.model_state, state.rng)
    extra = ExtraState(sharded.count, sharded.grad_norm, scaling, *own, guard=sharded.guard)
    return jax.tree.map(copy_of, extra)


def with_extra_state(
    state: TrainState, tx: DistributedTransformation, extra: ExtraState
) -> TrainState:
    """Returns a copy of a state made with ``tx``, with copies of the contents of ``extra``."""
    view = StateView(tx.config, state.params)
    scalars = view.scalars(extra.grad_norm, lambda guard: getattr(extra, guard.field))
    replicated = NamedSharding(tx.config.mesh, P())
    scalars, model_state, rng = copy_to((scalars, extra.model_state, extra.rng), replicated)
    opt_state = map_state(lambda part: part._replace(**scalars), state.opt_state)
    if extra.ema is not None and tx.config.ema_decay is not None:
        trees.check_same_shapes(
            extra.ema, state.params, name="extra_state.ema", like_name="main_params"
        )
        trees.check_dtypes(extra.ema, name="extra_state.ema", allowed=[jnp.float32])
        ema = copy_to(extra.ema, tx.param_shardings(state.params))
        opt_state = view.with_begun("ema", opt_state, ema)
    return dataclasses.replace(state, opt_state=opt_state, model_state=model_state, rng=rng)


def check_extra_state(extra: Any, count: Any) -> None:
    """Raises unless ``extra`` is an ExtraState that matches a state with this step count."""
    if not isinstance(extra, ExtraState):
        raise TreeError(
            f"extra_state: not an ExtraState: got {type(extra).__name__}, "
            "expected the third value that to_optax_state returned. Pass it as it was; restore a "
            "checkpoint into what to_optax_state returns for a new state, which gives it its types."
        )
    trees.check_arrays(extra, name="extra_state")
    _check_number("extra_state.step", extra.step, check_step_count)
    if int(extra.step) != int(count):
        raise TreeError(
            "extra_state.step: differs from the count of opt_state: they are of different steps: "
            f"got {int(extra.step)}, expected {int(count)}. "
            "Pass the three values that one call of to_optax_state returned."
        )
    _check_number("extra_state.grad_norm", extra.grad_norm)
    if extra.scaling is not None:
        _check_scaling("extra_state.scaling", extra.scaling)
    if extra.guard is not None:
        _check_guard("extra_state.guard", extra.guard)
    if extra.rng is not None:
        trees.check_key("extra_state.rng", extra.rng)


def _check_scaling(path: str, scaling: Any) -> None:
    """Raises unless training can continue from a loss scale."""
    has_both = isinstance(scaling, LossScaleState) and (
        (scaling.growth_count is None) == (scaling.hysteresis_count is None)
    )
    if not has_both:
        got = scaling if isinstance(scaling, LossScaleState) else type(scaling).__name__
        raise TreeError(
            f"{path}: not the state of a loss scale: got {got}, expected None, "
            "or LossScaleState with both counts or none. Pass what to_optax_state returned."
        )
    _check_number(f"{path}.loss_scale", scaling.loss_scale)
    if not 0 < float(scaling.loss_scale) < math.inf:
        raise HyperparameterError(
            f"{path}.loss_scale: out of range: got {float(scaling.loss_scale)}, "
            "expected a positive number. Pass what to_optax_state returned."
        )
    has_counts = scaling.growth_count is not None
    for name in ("skipped", *(("growth_count", "hysteresis_count") if has_counts else ())):
        _check_number(f"{path}.{name}", getattr(scaling, name), check_step_count)


def _check_guard(path: str, guard: Any) -> None:
    """Raises unless training can continue from a mean of norms."""
    if not isinstance(guard, NormGuardState):
        raise TreeError(
            f"{path}: not the state of a guard: got {type(guard).__name__}, expected None "
            "or NormGuardState. Pass what to_optax_state returned."
        )
    _check_number(f"{path}.mean", guard.mean)
    for name in ("steps", "spikes", "nonfinite"):
        _check_number(f"{path}.{name}", getattr(guard, name), check_step_count)


def _check_number(path: str, value: Any, check: Any = trees.check_scalar) -> None:
    if value is None:
        raise TreeError(
            f"{path}: missing: got None, expected a number. Pass what to_optax_state returned."
        )
    check(path, value)


def like_template(opt_state: OptState, template: Any) -> OptState:
    """Returns the part of a state with the structure of a template: the whole, or one part.

    For ``optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))`` it is the state of the
    last one. nnx.Optimizer has boxes in other places; the result has the boxes of the template.

    Raises:
      TreeError: There is no such part, or more than one; or the state has arrays outside it.
    """
    wanted: Any = jax.tree.structure(trees.unboxed(template))

    def fits(x: Any) -> bool:
        return jax.tree.structure(trees.unboxed(x)) == wanted

    flat, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=fits)
    parts = [(jax.tree_util.keystr(path), x) for path, x in flat if fits(x)]
    others = [jax.tree_util.keystr(path) for path, x in flat if not fits(x)]
    if len(parts) == 1 and not others:
        expected: Any = jax.tree.structure(template)
        return expected.unflatten(jax.tree.leaves(parts[0][1]))
    if len(parts) != 1:
        both = trees.unboxed((opt_state, template))
        where, got, expected_node = trees.first_difference(*both)
        raise TreeError(
            f"opt_state{where}: not the state of optax's optimizer with these hyperparameters: "
            f"got {got}, expected {expected_node}. Use the same schedules and mask on both sides."
        )
    main = isinstance(opt_state, MainParamsState)
    also = ", and jda.main_params(params, opt_state) as main_params" if main else ""
    raise TreeError(
        f"opt_state{others[0]}: has no place in the state of this optimizer: "
        f"got {len(others)} arrays in addition to the state of Adam, "
        f"expected opt_state{parts[0][0]} alone. Pass opt_state{parts[0][0]}{also}. "
        "Instead of wrappers use max_grad_norm, accumulate_steps or loss_scale."
    )


def check_counts(adamw: Any) -> None:
    """Raises TreeError if a schedule's step count differs from Adam's: here both have one count.

    Args:
      adamw: The state of ``optax.adamw`` or ``optax.adam``: Adam's, then those of schedules.
    """
    count = int(adamw[0].count)
    for i, part in enumerate(adamw[1:], start=1):
        for own in jax.tree.leaves(part):  # all leaves but Adam's are step counts
            other = int(np.asarray(own))
            if other != count:
                raise TreeError(
                    f"opt_state[{i}]: its schedule is at another step than Adam, but a "
                    f"distributed optimizer has only one count: got count {other}, "
                    f"expected count {count}, as opt_state[0].count. Shift the schedule, as in "
                    f"lambda step: schedule(step - {count - other}), and set this count to Adam's."
                )
