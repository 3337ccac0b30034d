"""``eval_step``: the loss of a state on a batch; ``full_params``: its unsharded parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives, trees
from jdistadam.core.arguments import out_of_range
from jdistadam.core.trees import Params
from jdistadam.distributed.accumulate import valid_weight
from jdistadam.distributed.global_arrays import brought
from jdistadam.distributed.layout_text import differs
from jdistadam.distributed.main_params import round_to_comm_dtype
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import find_state
from jdistadam.distributed.state_view import StateView
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import PolicyError
from jdistadam.kernels import native
from jdistadam.training.admission import Gate, check_layout
from jdistadam.training.local_gradients import Forward, mean_loss
from jdistadam.training.loss import LossFunction
from jdistadam.training.partitioned import over_devices, rows_spec
from jdistadam.training.train_state import TrainState
from jdistadam.training.train_step import check_program, options_for


@dataclasses.dataclass(frozen=True)
class EvalProgram:
    """An evaluation as a function ``(state, batch) -> (loss, aux)``, not jitted."""

    __name__ = "eval_step"  # of the compiled program
    tx: DistributedTransformation
    loss_function: LossFunction
    batch_spec: P

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``eval_step`` but the loss and the optimizer, by name."""
        return {"batch_spec": self.batch_spec} | self.loss_function.arguments

    def __call__(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Evaluates; ``opt_state`` is None if the layout of the state was compared before."""
        tx = self.tx.bind(state.params)
        run = over_devices(
            tx,
            dataclasses.replace(self, tx=tx)._on_a_device,
            specs=TrainState(tx.param_specs(state.params), P(), P(), P()),
            batch_spec=self.batch_spec,
            result_specs=(P(), rows_spec(self.tx.config, self.batch_spec)),
        )
        _, (loss, aux) = run(dataclasses.replace(state, opt_state=None), batch)
        if state.opt_state is not None:
            expected = self.tx.config.layout_digest(self.tx.layout(state.params))
            is_other = differs(find_state(state.opt_state).layout_digest, expected)
            loss = jnp.where(is_other, jnp.nan, loss)
        return loss, aux

    def _on_a_device(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Returns the state as well; the program does not: XLA would drop it."""
        key = None if state.rng is None else jax.random.clone(state.rng)  # it is used again
        forward = Forward.at(dataclasses.replace(state, rng=key), self.loss_function, self.tx)
        out = forward.output(0, batch, state.model_state)(forward.params)
        weight = None if out.weight is None else valid_weight(out.weight)
        loss = mean_loss(self.tx.config, out.weighted_loss, weight)
        return state, (loss, jax.tree.map(jnp.atleast_1d, out.aux))


class EvalStep:
    """The result of ``eval_step``: call it with ``(state, batch)``, also inside a program.

    Attributes:
      tx: The optimizer.
    """

    def __init__(
        self, program: EvalProgram, batch_spec: Any, compiler_options: dict[str, Any]
    ) -> None:
        self._program, self._given_options = program, compiler_options
        self.tx = program.tx
        self._gate = Gate(program, batch_spec, self._lower, donates=False)

    @functools.cached_property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options by name for compiling a call, as in ``TrainStep``."""
        return options_for(self.tx.config, accumulate_steps=1) | self._given_options

    @functools.cached_property
    def _jitted(self) -> Any:
        return jax.jit(self._program, compiler_options=self.compiler_options or None)

    def __call__(
        self, state: TrainState, batch: Any, *, params: str = "params"
    ) -> tuple[jax.Array, Any]:
        """Returns ``(loss, aux)``. Donates nothing and leaves the state unchanged.

        Inside a program a state cannot be inspected; the loss of a state of another layout is NaN.
        Several processes compare their programs before the first evaluation, and wait for each
        other before later ones.

        Args:
          state: A train state.
          batch: The batch.
          params: "params", or "ema" to evaluate the moving average that ``ema_decay`` keeps,
            rounded to the dtypes of the params.

        Returns:
          The loss, shape (), float32, and ``aux``, as ``eval_step`` says.

        Raises:
          HyperparameterError: ``params`` is neither of the two.
          PolicyError: The optimizer keeps no average.
          AgreementError: The processes do not all run the same program, or one is missing.
          LayoutError: The state has another layout.
          MeshError: The state is sharded over another mesh, in host memory, or was donated.
        """
        if not isinstance(params, str) or params not in ("params", "ema"):
            got = params if isinstance(params, str) else type(params).__name__
            raise out_of_range("params", got, '"params" or "ema"')
        if params == "ema":
            average = _rounded_average(state, self.tx)
            state = TrainState(average, state.opt_state, state.model_state, state.rng)
        admitted = self._gate.admit(state, batch)
        if admitted.digest is None:  # whole, also if nothing else is jitted
            return jax.jit(self._program)(admitted.state, admitted.batch)
        return native.call(self._jitted, _without_optimizer(admitted.state), admitted.batch)

    def _lower(self, state: TrainState, batch: Any) -> Any:
        return self._jitted.lower(_without_optimizer(state), batch)


def _without_optimizer(state: TrainState) -> TrainState:
    """The state as the program gets it if its layout was compared."""
    return TrainState(state.params, None, state.model_state, state.rng)


def eval_step(
    loss_fn: Callable[..., Any],
    tx: DistributedTransformation,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    batch_spec: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> EvalStep:
    """Makes a jitted evaluation from the loss of ``train_step`` and a distributed optimizer.

    The forward pass is the one of ``train_step`` with one micro-batch per device, for every
    strategy. ``loss_fn`` gets the same params (stacked layers as shards to gather in a scan), and
    the same operations compute the loss. Without a backward pass, XLA may fuse a mean differently,
    which can change its last bit, as with ``jax.jit``. Nothing is donated, and the state stays
    unchanged. Make the evaluation once, and call it with every batch.

    As in training, ``loss_fn`` also gets the state's ``model_state`` and ``rng``. A new
    ``model_state`` is dropped. ``rng`` is the key of the next training step, so two calls return
    the same. With ``state.replace(rng=None)``, ``loss_fn`` gets no ``rng``. If it then leaves out
    dropout, it needs no other argument for evaluation.

    Args:
      loss_fn: As for ``train_step``.
      tx: The distributed optimizer.
      has_aux: Whether ``loss_fn`` returns auxiliary outputs in addition to the loss.
      weighted: Whether ``loss_fn`` returns a weight with the loss.
      batch_spec: PartitionSpec of the batch. None: leading dimension over all data axes.
      compiler_options: XLA options for this program; they override the defaults.

    Returns:
      ``evaluate(state, batch) -> (loss, aux)``. The loss is the mean over all devices, shape (),
      float32. ``aux`` is None without has_aux. Otherwise it has the outputs of all devices,
      concatenated along the leading dimension in the order of the rows of the batch. If predictions
      have one row per example, there is a row for each example of the whole batch, sharded like the
      batch. Scalars become one number per device, as in ``train_step``, to be averaged or added.

    Raises:
      ShapeError, TreeError, DtypeError: On use, if the batch does not divide, or ``loss_fn``
        returns something else.
      PolicyError: On use, if the loss was already summed over the devices.
      MeshError: As for ``train_step``.
      LayoutError: On use, if the state has another layout.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-2), mesh=jax.make_mesh((2,), ("data",)))
      >>> def loss_fn(params, batch):
      ...     predicted = batch["x"] * params["w"]
      ...     return jnp.mean(jnp.square(predicted - batch["y"])), predicted
      >>> state = jda.TrainState.create({"w": jnp.full((), 3.0)}, tx)
      >>> evaluate = jda.eval_step(loss_fn, tx, has_aux=True)
      >>> loss, predicted = evaluate(state, {"x": jnp.arange(4.0), "y": jnp.ones(4)})
      >>> float(loss), predicted.tolist()
      (23.5, [0.0, 3.0, 6.0, 9.0])
    """
    check_program(tx, batch_spec, compiler_options)
    spec = tx.config.parallel.batch_spec if batch_spec is None else batch_spec
    program = EvalProgram(tx, LossFunction(loss_fn, has_aux, weighted), spec)
    return EvalStep(program, batch_spec, compiler_options or {})


def full_params(state: TrainState, tx: DistributedTransformation) -> Any:
    """Returns the unsharded parameters that the next forward pass uses, in their dtype.

    Every device gets all of them, except along dimensions that ``param_specs`` shards over tensor
    axes. If devices hold shards and ``policy.param_comm_dtype`` is set, the forward pass gathers
    parameters rounded to this dtype, and these are returned. ``main_params`` and ``to_optax_state``
    return the exact values, and ``save`` writes them.

    Under "no_shard", "optim" and "optim_grads" these are the state's own arrays, which the next
    step donates. Copy them to keep them longer: ``jax.tree.map(jnp.copy, full_params(state, tx))``.
    All processes must call this.

    Returns:
      A tree like ``state.params``.

    Raises:
      LayoutError: The state has another layout than that of ``tx``.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
      >>> kept = jax.tree.map(jnp.copy, full_params(state, tx))
      >>> state, _ = jda.train_step(lambda params, x: params["w"] @ x, tx)(state, jnp.ones(3))
      >>> kept["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    check_layout(state, tx)
    config = tx.config
    if not config.parallel.shards_params:
        return state.params
    specs = config.tensor_specs(state.params)
    placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
    is_rounded = config.policy.param_comm_dtype is not None
    schedule = config.schedule_of(state.params) if is_rounded else None
    # One function for all calls, compiled once.
    return jax.jit(_gathered, static_argnums=0, out_shardings=placed)(schedule, state.params)


def _rounded_average(state: TrainState, tx: DistributedTransformation) -> Any:
    """The moving average in the dtypes of the params, also where XLA would skip the rounding."""
    average = ema_params(state, tx)
    return jax.tree.map(lambda x, p: collectives.round_to(x, p.dtype), average, state.params)


def ema_params(state: TrainState, tx: DistributedTransformation) -> Any:
    r"""Returns the moving average of the parameters that ``ema_decay`` keeps.

    .. math::

      e_0 = p_0, \qquad e_t = d e_{t-1} + (1 - d) p_t

    with :math:`d` = ``ema_decay`` and the exact parameters :math:`p_t` after step :math:`t`: main
    parameters, if any. Skipped steps do not count. The first parameters have the weight
    :math:`d^t`, without bias correction. Frozen parameters are their own average. All processes
    must call this, and it works inside a program.

    Args:
      state: A train state made with ``tx``.
      tx: The distributed optimizer.

    Returns:
      A tree like ``state.params`` in float32, with the same placement: sharded if devices hold
      shards of the params.

    Raises:
      PolicyError: ``tx`` has no ``ema_decay``.
      TreeError: The state has no average.
      LayoutError: The state has another layout than that of ``tx``.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = jda.distributed(jda.fused_adamw(1e-1), mesh=mesh, ema_decay=0.75)
      >>> state = jda.TrainState.create({"w": jnp.zeros(3)}, tx)
      >>> state, _ = jda.train_step(lambda params, x: params["w"] @ x, tx)(state, jnp.ones(3))
      >>> round(float(state.params["w"][0]), 4), round(float(ema_params(state, tx)["w"][0]), 4)
      (-0.1, -0.025)
    """
    check_distributed(tx)
    if tx.config.ema_decay is None:
        raise PolicyError(
            "ema_params: this optimizer keeps no average: got ema_decay=None, expected a number. "
            "Make it with distributed(..., ema_decay=0.999)."
        )
    check_layout(state, tx)
    view, ema = StateView(tx.config, state.params), find_state(state.opt_state).ema
    if not trees.is_traced(ema):
        ema = brought(ema, [tx.config.state_sharding("ema")], exactly=False)
    # Copies, also of frozen leaves: the next step donates the state's own arrays.
    leaves = [jnp.array(x, jnp.float32) for x in jax.tree.leaves(state.params)]
    for bucket in view.layout.buckets:
        for i, x in zip(bucket.leaves, view.extract("ema", bucket, ema), strict=True):
            leaves[i] = x
    average = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
    return jax.tree.map(_at, average, tx.param_shardings(state.params))


def _at(x: jax.Array, place: NamedSharding) -> jax.Array:
    return collectives.constrain(x, place) if trees.is_traced(x) else jax.device_put(x, place)


def _gathered(schedule: Schedule | None, params: Params) -> Any:
    """Params as the forward pass gets them: rounded if a schedule is given."""
    return (
        params if schedule is None else round_to_comm_dtype(schedule, params, before_forward=True)
    )
