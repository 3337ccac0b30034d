"""The program of a training step: what each device does, and what of it is shared."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, trees
from jdistadam.core.varying import Axes
from jdistadam.distributed.accumulate import mean_factor
from jdistadam.distributed.gather_params import gather_params, local_params
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.param_specs import over_axes
from jdistadam.distributed.peer_step import sending_ahead
from jdistadam.distributed.state import StepResult, find_state
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.training.local_gradients import LocalResult, local_gradients
from jdistadam.training.loss_function import LossFunction
from jdistadam.training.nonfinite import sum_over_devices
from jdistadam.training.partitioned import over_data_axes
from jdistadam.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What ``train_step`` was given that decides what a step takes and sends."""

    accumulate_steps: int
    batch_spec: Any
    report_nonfinite: bool


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A training step as a function ``(state, batch) -> (state, metrics)``, not jitted."""

    tx: DistributedTransformation
    loss_function: LossFunction
    options: StepOptions

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of the batch."""
        given = self.options.batch_spec
        return self.tx.config.parallel.batch_spec if given is None else given

    def __call__(
        self, state: TrainState, batch: Any, *, is_verified: bool
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step; ``is_verified`` says that the layout of the state was compared before."""
        specs = TrainState(self.tx.param_specs(state.params), self.tx.state_specs(), P(), P())

        def on_a_device(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
            return self._on_a_device(state, batch, is_verified)

        if self.tx.config.has_model_axes:
            return over_data_axes(
                self.tx,
                on_a_device,
                specs=specs,
                batch_spec=self.batch_spec,
                metrics_specs=self._metrics_specs(),
            )(state, batch)
        # Without vma checks: gradients of replicated params stay local, and models may use
        # primitives (Pallas, scans from a zero carry) that the check does not accept.
        return compat.shard_map(
            on_a_device,
            mesh=self.tx.config.mesh,
            in_specs=(specs, self.batch_spec),
            out_specs=(specs, self._metrics_specs()),
        )(state, batch)

    def _on_a_device(
        self, state: TrainState, batch: Any, is_verified: bool
    ) -> tuple[TrainState, dict[str, Any]]:
        tx, axes = self.tx, self.tx.config.parallel.data_axes
        rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
        scaling = find_state(state.opt_state).scaling
        params = state.params
        if tx.config.parallel.shards_params:  # stacked leaves stay shards
            params = gather_params(local_params(params, tx), tx)
        local = local_gradients(
            self.loss_function,
            tx,
            accumulate_steps=self.options.accumulate_steps,
            params=params,
            batch=batch,
            model_state=state.model_state,
            rng=step_rng,
            loss_scale=None if scaling is None else scaling.loss_scale,
            report_nonfinite=self.options.report_nonfinite,
        )
        with sending_ahead(self.options.accumulate_steps == 1):
            result = tx.local_step(
                local.grads, state.opt_state, state.params, is_verified=is_verified
            )
        model_state = _mean_over_devices(local.model_state, axes)
        model_state = trees.keep_if(result.is_skipped, state.model_state, model_state)
        new = TrainState(result.params, result.opt_state, model_state, rng)
        return new, self._metrics(local, result, scaling)

    def _metrics(self, local: LocalResult, result: StepResult, scaling: Any) -> dict[str, Any]:
        """What a step reports; ``scaling`` is that of the state before it."""
        config = self.tx.config
        loss = collectives.all_reduce(local.loss, config.parallel.data_axes)
        loss = loss * mean_factor(config, local.weight)[0]
        if result.is_other_layout is not None:
            loss = jnp.where(result.is_other_layout, jnp.nan, loss)
        new = find_state(result.opt_state)
        metrics = {
            "loss": loss,
            "grad_norm": new.grad_norm,
            "learning_rate": result.learning_rate,
            "skipped": jnp.int32(0) if new.scaling is None else new.scaling.skipped,
            "loss_scale": jnp.float32(1) if scaling is None else scaling.loss_scale,
        }
        if self.options.report_nonfinite:
            metrics["nonfinite"] = sum_over_devices(local.not_finite, self.tx)
        return metrics | ({"aux": local.aux} if self.loss_function.has_aux else {})

    def _metrics_specs(self) -> dict[str, P]:
        names = ["loss", "grad_norm", "learning_rate", "skipped", "loss_scale"]
        names += ["nonfinite"] if self.options.report_nonfinite else []
        specs = dict.fromkeys(names, P())
        if self.loss_function.has_aux:
            parallel, rows = self.tx.config.parallel, self.batch_spec
            if self.tx.config.has_model_axes:
                rows = over_axes(rows, parallel.data_axes)
            specs["aux"] = _leading_spec(parallel, rows)
        return specs


def _leading_spec(parallel: DataParallel, batch_spec: P) -> P:
    """PartitionSpec of what has one row for each device, in the order of the batch's rows."""
    first = batch_spec[0] if len(batch_spec) else None
    axes = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    axes += tuple(axis for axis in parallel.data_axes if axis not in axes)
    return P(axes if len(axes) > 1 else axes[0])


def _mean_over_devices(model_state: Any, axes: Axes) -> Any:
    """Averages floats in float32; of whole numbers, such as counters, takes the largest.

    So too of the words of random keys: they stay as they are where all devices hold the same.
    """

    def mean(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            words = collectives.all_reduce_max(jax.random.key_data(x), axes)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return collectives.all_reduce_mean(x, axes)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return collectives.all_reduce_max(x, axes)
        return collectives.all_reduce_mean(x.astype(jnp.float32), axes).astype(x.dtype)

    return jax.tree.map(mean, model_state)
