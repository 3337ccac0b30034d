"""A whole training step: local gradients, distributed optimizer, metrics, in one jitted program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import collectives, trees
from jdistadam.accumulation import mean_factor
from jdistadam.config import check_count
from jdistadam.distributed_checks import check_inside, check_placement
from jdistadam.distributed_step import find_state
from jdistadam.distributed_transformation import DistributedTransformation
from jdistadam.errors import ShapeError, describe
from jdistadam.gather import gather_params
from jdistadam.micro_batches import LossFunction, local_gradients
from jdistadam.nonfinite import sum_over_devices
from jdistadam.train_state import TrainState, check_distributed

# XLA's own limit of 30 MiB counts shards: it merges most models into one collective that begins
# when the last gradient is ready. This is large enough for bandwidth and leaves work to overlap.
_GPU_COMPILER_OPTIONS = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 256 << 20,
    "xla_gpu_all_gather_combine_threshold_bytes": 256 << 20,
}


def local_params(params: Any, tx: DistributedTransformation) -> Any:
    """Marks replicated params as different on each device, BEFORE ``jax.grad``.

    Inside ``jax.shard_map(check_vma=True)`` the gradient of a replicated array is summed over the
    devices on the way; of the array that this returns, it stays local, as ``tx.step`` needs it.
    """
    check_inside(tx.config.parallel, "local_params")
    axes = tx.config.parallel.data_axes
    return jax.tree.map(lambda x: collectives.to_varying(x, axes), params)


def shard_batch(batch: Any, tx: DistributedTransformation, batch_spec: Any = None) -> Any:
    """Places a batch on the mesh, its leading dimension split over the devices.

    Arrays that lie there already are returned as they are. With several processes, each passes the
    part that its own devices get.

    Args:
      batch: Tree of arrays whose leading dimension divides by the number of devices.
      tx: A distributed optimizer.
      batch_spec: PartitionSpec of all leaves. None: the leading dimension over all axes that carry
        data.

    Raises:
      ShapeError: A leaf has no leading dimension, or one that does not divide.
    """
    config = tx.config
    spec = config.parallel.batch_spec if batch_spec is None else batch_spec
    sharding = NamedSharding(config.mesh, spec)
    num_local = max(1, config.parallel.num_devices // jax.process_count())

    def place(path: str, x: Any) -> Any:
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        x = np.asarray(x) if not isinstance(x, jax.Array) else x
        if batch_spec is None and (x.ndim == 0 or x.shape[0] % num_local):
            raise ShapeError(
                describe(
                    path,
                    "leading dimension does not divide by the number of devices",
                    got=x.shape,
                    expected=f"a multiple of {num_local}",
                    action="Change the batch size, or drop the remainder.",
                )
            )
        if jax.process_count() > 1:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))
        return jax.device_put(x, sharding)

    leaves = [
        place(path, x)
        for path, x in zip(trees.paths(batch, "batch"), jax.tree.leaves(batch), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What ``train_step`` was given that decides what a step takes and sends."""

    accumulate_steps: int
    batch_spec: Any
    report_nonfinite: bool


class TrainStep:
    """What ``train_step`` returns: call it with ``(state, batch)``.

    Attributes:
      tx: The optimizer.
      options: What else it was made with.
    """

    def __init__(self, jitted: Any, tx: DistributedTransformation, options: StepOptions) -> None:
        self._jitted = jitted
        self.tx = tx
        self.options = options

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step. ``state`` is donated: use the returned one from here on.

        Raises:
          MeshError: The state is sharded over another mesh.
        """
        check_placement(self.tx.config, find_state(state.opt_state))
        return self._jitted(state, shard_batch(batch, self.tx, self.options.batch_spec))

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers for arrays or ``jax.ShapeDtypeStruct`` with shardings, as ``jax.jit(f).lower``."""
        shapes = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)]
        if not any(shapes):
            batch = shard_batch(batch, self.tx, self.options.batch_spec)
        return self._jitted.lower(state, batch)


def train_step(
    loss_fn: Callable[..., Any],
    tx: DistributedTransformation,
    *,
    accumulate_steps: int = 1,
    has_aux: bool = False,
    batch_spec: Any = None,
    report_nonfinite: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    r"""Makes a jitted training step from a loss and a distributed optimizer.

    The loss of a step is the mean over the micro-batches of all devices, and so is its gradient:

    .. math::

      L = \frac{\sum_i w_i \ell_i}{\sum_i w_i}

    with :math:`w_i = 1` unless ``loss_fn`` returns weights, as it should where parts of the batch
    hold different numbers of valid tokens. The weights are constants of the differentiation.

    Args:
      loss_fn: ``loss_fn(params, batch)`` gets the part of the batch that belongs to one micro-batch
        of one device. It returns the scalar ``loss``, or ``(loss, weight)``. If the state has a
        ``model_state``, it gets it by this keyword and returns ``(loss, model_state)``; if the
        state has an ``rng``, it gets by this keyword a key of its own. With has_aux it returns one
        thing more at the end: ``(loss, aux)`` or ``(loss, model_state, aux)``; in these, too,
        ``loss`` may be the pair ``(loss, weight)``.
      tx: A distributed optimizer.
      accumulate_steps: Number of micro-batches into which each device cuts its part of the batch.
        Under "no_shard" and "optim" gradients are summed on the device in
        ``policy.main_grads_dtype`` and sent once; else every micro-batch's are sent, and the shards
        summed.
      has_aux: Whether ``loss_fn`` returns something to report beside the loss.
      batch_spec: PartitionSpec of the batch. None: leading dimension over ``shard_axis``. The
        leading dimension is devices x micro-batches x examples, in this order.
      report_nonfinite: Whether to look in every gradient for values that are not finite, which
        reads all of them once more.
      compiler_options: XLA options for this program, over the ones chosen here.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The state is donated. Metrics: the scalars
      ``loss``, ``grad_norm`` (global norm of the mean gradient before clipping and without the
      loss scale), ``skipped`` (steps skipped so far) and ``loss_scale`` (of this step); with
      report_nonfinite ``nonfinite``, for ``nonfinite_paths``; with has_aux ``aux``, every leaf with
      a leading dimension of devices x micro-batches.

    Raises:
      HyperparameterError: accumulate_steps is not a positive whole number.
      ShapeError, TreeError, DtypeError: On use, where the batch does not divide, or ``loss_fn``
        returns something else.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> tx = jda.distributed_fused_adamw(1e-2, mesh=jax.make_mesh((1,), ("data",)))
      >>> def loss_fn(params, batch):
      ...     weight = jnp.sum(batch["valid"])
      ...     return jnp.sum(params["w"] * batch["x"] * batch["valid"]) / weight, weight
      >>> step = jda.train_step(loss_fn, tx, accumulate_steps=2)
      >>> batch = {"x": jnp.array([1.0, 2.0, 3.0, 4.0]), "valid": jnp.array([1.0, 1.0, 1.0, 0.0])}
      >>> state = jda.TrainState.create({"w": jnp.ones(())}, tx)
      >>> state, metrics = step(state, batch)
      >>> float(metrics["loss"])
      2.0
    """
    check_distributed(tx)
    check_count("accumulate_steps", accumulate_steps)
    config = tx.config
    parallel = config.parallel
    spec = parallel.batch_spec if batch_spec is None else batch_spec
    loss_function = LossFunction(loss_fn, has_aux)

    def local_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
        scaling = find_state(state.opt_state).scaling
        local = local_gradients(
            loss_function,
            tx,
            accumulate_steps,
            gather_params(state.params, tx) if parallel.shards_params else state.params,
            batch,
            state.model_state,
            step_rng,
            None if scaling is None else scaling.loss_scale,
            report_nonfinite,
        )
        params, opt_state = tx.local_step(local.grads, state.opt_state, state.params)
        model_state = _mean_over_devices(local.model_state, parallel.data_axes)
        total = collectives.all_reduce(local.loss, parallel.data_axes)
        new = find_state(opt_state)
        metrics = {
            "loss": total * mean_factor(config, local.weight),
            "grad_norm": new.grad_norm,
            "skipped": jnp.int32(0) if new.scaling is None else new.scaling.skipped,
            "loss_scale": jnp.float32(1) if scaling is None else scaling.loss_scale,
        }
        if report_nonfinite:
            metrics["nonfinite"] = sum_over_devices(local.not_finite, tx)
        metrics |= {"aux": local.aux} if has_aux else {}
        return TrainState(params, opt_state, model_state, rng), metrics

    names = ["loss", "grad_norm", "skipped", "loss_scale"]
    names += ["nonfinite"] if report_nonfinite else []
    metrics_specs: dict[str, Any] = dict.fromkeys(names, P())
    metrics_specs |= {"aux": parallel.batch_spec} if has_aux else {}

    # Without vma checks: gradients of replicated params stay local, and models may use primitives
    # (Pallas, scans from a zero carry) that the check does not accept.
    def sharded(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        specs = TrainState(tx.param_specs(state.params), tx.state_specs(), P(), P())
        return collectives.shard_map(
            local_step,
            mesh=config.mesh,
            in_specs=(specs, spec),
            out_specs=(specs, metrics_specs),
        )(state, batch)

    on_gpu = config.mesh.devices.flat[0].platform in ("gpu", "cuda")
    for_xla = (_GPU_COMPILER_OPTIONS if on_gpu else {}) | (compiler_options or {})
    jitted = jax.jit(sharded, donate_argnums=0, compiler_options=for_xla or None)
    return TrainStep(jitted, tx, StepOptions(accumulate_steps, batch_spec, report_nonfinite))


def _mean_over_devices(model_state: Any, axes: collectives.Axes) -> Any:
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
