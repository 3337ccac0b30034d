"""Converts a state to optax's own pytree, independent of the mesh, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.hyperparameters import check_step_count
from jdistadam.core.storage import MOMENTS
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.global_arrays import copy_of, copy_to, fetch
from jdistadam.distributed.main_params import round_to_comm_dtype
from jdistadam.distributed.state import DistributedState, find_state, map_state
from jdistadam.distributed.state_view import StateView
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.state import MainParamsState, main_params_of
from jdistadam.errors import TreeError
from jdistadam.training import admission
from jdistadam.training.eval_step import ema_params
from jdistadam.training.extra_state import (
    ExtraState,
    check_counts,
    check_extra_state,
    extra_state_of,
    like_template,
    with_extra_state,
)
from jdistadam.training.remembered import remember_params
from jdistadam.training.train_state import TrainState


def to_optax_state(state: TrainState, tx: DistributedTransformation) -> tuple[Any, Any, ExtraState]:
    """Returns ``(main_params, opt_state, extra_state)``: a train state that needs no mesh.

    The first two are as in ``optax.adamw``; the third contains everything else. Values are exact
    copies, for any number of devices and any buckets. If several processes share the mesh, all of
    them must call this, and all get everything.

    Args:
      state: A train state made with ``tx``.
      tx: The distributed optimizer.

    Raises:
      LayoutError: The state has another layout than that of ``tx``, or its params were changed.

    Returns:
      The float32 main parameters, and exactly the pytree that ``optax.adamw(...).init`` (or
      ``optax.adam``, within ``optax.chain``, as ``tx`` was made) returns for the same
      hyperparameters, with the counts, mu and nu of ``state``; then an ``ExtraState``. numpy
      arrays, except for random keys.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> old = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, loss_scale=jda.DynamicLossScale())
      >>> new = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, loss_scale=jda.DynamicLossScale())
      >>> state = TrainState.create({"w": jnp.ones(3)}, old, rng=jax.random.key(0))
      >>> main_params, opt_state, extra_state = to_optax_state(state, old)
      >>> float(extra_state.scaling.loss_scale)
      65536.0
      >>> int(from_optax_state(main_params, opt_state, new, extra_state).step)
      0
    """
    admission.check_export(state, tx)
    treedef: Any = jax.tree.structure(state.params)
    sharded, view = find_state(state.opt_state), StateView(tx.config, state.params)
    main = [x.astype(np.float32) for x in _main_leaves(view, state.params, sharded)]
    count = np.asarray(sharded.count)
    moments = {
        name: treedef.unflatten(view.to_host(name, getattr(sharded, name))) for name in MOMENTS
    }
    adam, *rest = _optax_template(tx, state.params)
    counts = jax.tree.map(lambda _: count, rest)  # all leaves but Adam's are step counts
    theirs = (adam._replace(count=count, **moments), *counts)
    opt_state = map_state(lambda _: theirs, state.opt_state, others=copy_of)
    extra = extra_state_of(state, tx)
    if sharded.ema is not None:
        extra = extra._replace(ema=jax.tree.map(fetch, ema_params(state, tx)))
    return jax.tree.unflatten(treedef, main), opt_state, extra


def main_params(params: Params, opt_state: OptState, tx: Any = None) -> Any:
    """Returns the exact parameters that the optimizer updates.

    Args:
      params: The params, as ``step`` or ``optax.apply_updates`` returned them.
      opt_state: Their state: of ``fused_adamw``, ``fused_adam``, a distributed optimizer, or a
        ``chain`` with one of them.
      tx: The distributed optimizer, required for its state.

    Returns:
      A tree like params: float32 for 16-bit leaves with main parameters in the state, else the
      leaves themselves. numpy arrays for the state of a distributed optimizer, unsharded.

    Raises:
      LayoutError: A distributed state has another layout than that of ``tx``.
      TreeError, DtypeError: ``params`` and ``opt_state`` do not belong together, or are swapped.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.fused_adamw(1e-3, main_params_dtype="remainder16")
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> params, state = tx.step(params, tx.init(params), params)
      >>> main = jda.main_params(params, state)["w"]
      >>> round(float(main[0]), 6), main.astype(jnp.bfloat16)[0].item()
      (0.999, 1.0)
    """
    _refuse_state("params", params, "main_params(params, opt_state, tx)")
    if opt_state is None:
        raise TreeError(
            "opt_state: missing, but it contains the main parameters: got None, "
            "expected what init, update or step returned. Call main_params(params, opt_state, tx)."
        )
    trees.check_arrays(opt_state, name="opt_state")
    if not trees.parts_of(opt_state, DistributedState):
        return main_params_of(params, opt_state)
    if tx is None:
        raise TreeError(
            "tx: needed to find the main parameters of a distributed state: got None, "
            "expected the distributed optimizer. Call main_params(params, opt_state, tx)."
        )
    admission.check_layout(TrainState(params, opt_state), tx)
    leaves = _main_leaves(StateView(tx.config, params), params, find_state(opt_state))
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _main_leaves(view: StateView, params: Params, state: DistributedState) -> list[np.ndarray]:
    """The leaves that the optimizer updates: main parameters, or the params if none are kept."""
    main = [fetch(x) for x in jax.tree.leaves(params)]
    if view.layout.main_size:
        field, kept = view.fields["main_params"], view.to_host("main_params", state.main_params)
        for i in (i for bucket in view.layout.buckets if field.has(bucket) for i in bucket.leaves):
            main[i] = field.codec.join(main[i], kept[i], np)
    return main


def from_optax_state(
    main_params: Params,
    opt_state: OptState,
    tx: DistributedTransformation,
    extra_state: ExtraState | None = None,
    *,
    param_dtypes: Any = None,
) -> TrainState:
    """Shards parameters and a state of ``optax.adamw`` over the mesh of ``tx``.

    With the three values of ``to_optax_state``, and the dtypes of the params as ``param_dtypes``,
    training continues as if it had not stopped. On another number of devices the loss gets other
    random keys, because the position of a micro-batch is folded into ``rng``.

    If the loss scales of the state and of ``tx`` are both dynamic, the state's scale continues, but
    not below the ``min_scale`` of ``tx``; otherwise the scale begins as ``tx`` says. The number of
    skipped steps stays. If ``tx`` has no ``loss_scale``, scale and number are dropped; without
    ``ema_decay``, the average is dropped. A missing average begins with the parameters.

    Args:
      main_params: Tree of parameters, exact in float32.
      opt_state: The state that ``optax.adamw`` or ``to_optax_state`` returned for it, also as the
        only state in an ``optax.chain``.
      tx: The distributed optimizer.
      extra_state: The third value of ``to_optax_state``. None: a new loss scale, no model_state and
        no rng.
      param_dtypes: Tree of dtypes, or one dtype, in which the model computes. None: as given.

    Returns:
      A train state that continues from these values.

    Raises:
      TreeError, ShapeError, DtypeError: The state is not one of adamw for these parameters;
        ``extra_state`` has another type, or is of another step.
      HyperparameterError: The loss scale of ``extra_state`` is not a positive number.
    """
    call = "from_optax_state(main_params, opt_state, tx, extra_state)"
    _refuse_state("main_params", main_params, call)
    state = TrainState.create(main_params, tx, param_dtypes=param_dtypes)
    return with_optax_state(state, tx, opt_state, extra_state)


def with_optax_state(
    state: TrainState,
    tx: DistributedTransformation,
    opt_state: OptState,
    extra_state: ExtraState | None = None,
) -> TrainState:
    """Returns a new train state with the count, moments and other state of optax's state.

    The result takes the arrays of ``state``.
    """
    adam_template = _optax_template(tx, state.params)
    opt_state = like_template(opt_state, map_state(lambda _: adam_template, state.opt_state))
    trees.check_arrays(opt_state, name="opt_state")

    def converted(ours: DistributedState, theirs: Any) -> DistributedState:
        check_step_count("opt_state[0].count", theirs[0].count)
        check_counts(theirs)
        return _as_state(StateView(tx.config, state.params), state.params, theirs[0], ours)

    def copied(_: Any, theirs: Any) -> Any:
        return copy_to(theirs, NamedSharding(tx.config.mesh, P()))

    new = map_state(converted, state.opt_state, opt_state, others=copied)
    state = TrainState(_as_after(int(find_state(new).count), tx, state.params), new)
    if extra_state is not None:
        check_extra_state(extra_state, state.step)
        state = with_extra_state(state, tx, extra_state)
    return remember_params(state)


def _as_after(steps: int, tx: DistributedTransformation, params: Params) -> Params:
    """Params as they are after a number of steps: as received, from the first one on."""
    if steps == 0 or tx.config.policy.param_comm_dtype is None:
        return params
    schedule = tx.config.schedule_of(params)
    placed = jax.tree.map(lambda x: x.sharding, params)
    return jax.jit(functools.partial(round_to_comm_dtype, schedule), out_shardings=placed)(params)


_DTYPES = (*trees.STORAGE_DTYPES, np.float64)  # those that can be rounded to policy.mu_dtype


def _refuse_state(name: str, params: Params, call: str) -> None:
    """Raises TreeError if a state was passed as params: swapped, or a whole train state."""
    kinds = (TrainState, DistributedState, MainParamsState, optax.ScaleByAdamState, ExtraState)
    if found := [type(x).__name__ for x in trees.parts_of(params, kinds)]:
        raise TreeError(
            f"{name}: a state, not parameters: got {found[0]}, expected a tree of parameters. "
            f"Call {call}."
        )


def _as_state(
    view: StateView, params: Params, adam: optax.ScaleByAdamState, old: DistributedState
) -> DistributedState:
    """A distributed state with the count and the moments of optax's Adam."""
    arrays = {}
    for name in MOMENTS:
        moments, path = getattr(adam, name), f"opt_state[0].{name}"
        trees.check_same_shapes(moments, params, name=path, like_name="params")
        trees.check_dtypes(
            moments, name=path, allowed=_DTYPES, action="Use the real moments of Adam."
        )
        arrays[name] = view.from_host(name, [np.asarray(x) for x in jax.tree.leaves(moments)])
    return old._replace(count=copy_to(adam.count, old.count.sharding), **arrays)


def _optax_template(tx: DistributedTransformation, params: Params) -> Any:
    return jax.eval_shape(tx.config.algorithm.like_optax.init, params)
