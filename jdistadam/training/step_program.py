"""The program of a training step: the work of each device, and the arguments of its caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives, trees
from jdistadam.core.collectives import Axes
from jdistadam.distributed.state import DistributedState, StepResult, find_state
from jdistadam.distributed.step import check_not_transformed
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.distributed.verdict import poisoned
from jdistadam.training.early_updates import with_early_updates
from jdistadam.training.local_gradients import Forward, LocalResult, local_gradients, mean_loss
from jdistadam.training.loss import LossFunction, sum_over_devices
from jdistadam.training.partitioned import over_devices, rows_spec
from jdistadam.training.remembered import Leaves
from jdistadam.training.reordered import Ordered, unseen
from jdistadam.training.train_state import TrainState

_LAG = 4  # windows, while gradients are summed over devices: up to 134 MB in bfloat16


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The arguments of ``train_step`` that determine what a step takes and sends."""

    accumulate_steps: int
    batch_spec: Any
    report_nonfinite: bool


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A training step as a function ``(state, batch) -> (state, metrics)``, not jitted."""

    __name__ = "train_step"  # of the compiled program
    tx: DistributedTransformation
    loss_function: LossFunction
    options: StepOptions
    seen: Callable[[Ordered], None] = unseen  # called with its order

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``train_step`` but the loss and the optimizer, by name."""
        return vars(self.options) | self.loss_function.arguments

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of the batch."""
        spec = self.options.batch_spec
        return self.tx.config.parallel.batch_spec if spec is None else spec

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step."""
        tx = self.tx.bind(state.params)
        check_not_transformed("train_step", (state, batch))  # before loss_fn is
        specs = TrainState(tx.param_specs(state.params), tx.state_specs(), P(), P())
        run = over_devices(
            tx,
            dataclasses.replace(self, tx=tx)._on_a_device,
            specs=specs,
            batch_spec=self.batch_spec,
            result_specs=(rows_spec(tx.config, self.batch_spec), P()),
            seen=self.seen,
        )
        new, (aux, metrics) = run(state, batch)
        return new, ({"aux": aux} if self.loss_function.has_aux else {}) | metrics

    def _on_a_device(self, state: TrainState, batch: Any) -> tuple[TrainState, tuple[Any, Any]]:
        """Returns the new state, and auxiliary outputs, or None, with the metrics."""
        config = self.tx.config
        if not config.updates_early:
            return self._step(state, batch)
        lag = _LAG if config.parallel.num_devices > 1 else 1
        return with_early_updates(self._step, lag=lag, seen=self.seen)(state, batch)

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, tuple[Any, Any]]:
        tx, axes = self.tx, self.tx.config.parallel.data_axes
        scaling = find_state(state.opt_state).scaling
        forward = Forward.at(state, self.loss_function, tx, self.options.accumulate_steps)
        local = local_gradients(
            forward,
            accumulate_steps=self.options.accumulate_steps,
            batch=batch,
            model_state=state.model_state,
            loss_scale=None if scaling is None else scaling.loss_scale,
            report_nonfinite=self.options.report_nonfinite,
        )
        assert tx.bound is not None
        schedule = dataclasses.replace(tx.bound, order=local.order)
        result = tx.functions.local_step(schedule, local.grads, state.opt_state, state.params)
        model_state = _mean_over_devices(local.model_state, local.kept, axes)
        model_state = trees.keep_if(result.is_skipped, state.model_state, model_state)
        new = TrainState(result.params, result.opt_state, model_state, forward.next_rng)
        return new, (local.aux, self._metrics(local, result, scaling))

    def _metrics(self, local: LocalResult, result: StepResult, scaling: Any) -> dict[str, Any]:
        """The metrics of a step; ``scaling`` is that of the state before it."""
        loss = mean_loss(self.tx.config, local.loss, local.weight)
        loss = poisoned(result.is_other_layout, loss)
        new = find_state(result.opt_state)
        metrics = {
            "loss": loss,
            "grad_norm": new.grad_norm,
            "learning_rate": result.learning_rate,
            "skipped": _skipped_so_far(new),
            "loss_scale": jnp.float32(1) if scaling is None else scaling.loss_scale,
        }
        if new.guard is not None:
            metrics["skipped_spikes"] = new.guard.spikes
        metrics |= result.norms or {}
        if self.options.report_nonfinite:
            metrics["nonfinite"] = sum_over_devices(local.not_finite, self.tx)
        return metrics


def _skipped_so_far(state: DistributedState) -> jax.Array:
    """The number of steps skipped because of their gradients."""
    skipped = jnp.int32(0) if state.scaling is None else state.scaling.skipped
    guard = state.guard
    return skipped if guard is None else skipped + guard.spikes + guard.nonfinite


def as_sent(x: Any) -> jax.Array:
    """A leaf of the model state as devices send it to average it.

    Floats are at least float32; random keys are the words that they consist of.
    """
    x = trees.words_of(x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32) if is_float else None)


def _mean_over_devices(model_state: Any, kept: tuple[bool, ...], axes: Axes) -> Any:
    """Averages floats in float32, or float64; takes the maximum of integers, such as counters.

    Likewise for the words of random keys: they stay unchanged if all devices hold the same. The
    average of equal floats may differ from them, so those that the loss keeps are not averaged.
    """

    def mean(x: jax.Array, is_kept: bool) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            most = collectives.all_reduce_max(as_sent(x), axes)
            return trees.from_words(most, trees.impl_of_key(x))
        return x if is_kept else collectives.all_reduce_mean(as_sent(x), axes).astype(x.dtype)

    treedef: Any = jax.tree.structure(model_state)
    return treedef.unflatten(map(mean, jax.tree.leaves(model_state), kept))


def flattened(step: Any) -> Any:
    """A step of a train state whose params are ``Leaves`` in arguments and results."""

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        new, metrics = step(dataclasses.replace(state, params=state.params.tree), batch)
        params = Leaves(jax.tree.leaves(new.params), state.params.treedef)
        return dataclasses.replace(new, params=params), metrics

    return train_step
