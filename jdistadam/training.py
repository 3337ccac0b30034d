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
from jdistadam.distributed import DistributedTransformation, step_local
from jdistadam.errors import ShapeError, describe

# XLA's own limit of 30 MiB counts shards: it merges most models into one collective that begins
# when the last gradient is ready. This is large enough for bandwidth and leaves work to overlap.
_GPU_COMPILER_OPTIONS = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 256 << 20,
    "xla_gpu_all_gather_combine_threshold_bytes": 256 << 20,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state, as ``train_step`` takes and returns them."""

    params: Any
    opt_state: Any

    @classmethod
    def create(cls, params: Any, tx: DistributedTransformation) -> TrainState:
        """Copies ``params`` onto the mesh and makes the optimizer state.

        The state owns its arrays: train_step donates them, and the caller's stay valid.

        Args:
          params: Tree of float32, bfloat16 or float16 arrays (jax or numpy).
          tx: A distributed optimizer.

        Raises:
          DtypeError: A leaf has another dtype.
        """
        trees.check_dtypes(params, name="params")
        replicated = NamedSharding(tx.config.mesh, P())
        # device_put may hand out the caller's own buffer as the replica of its device, also with
        # may_alias=False; the outputs of a jitted copy are never shared with its inputs.
        placed = jax.device_put(params, replicated)
        owned = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(placed)
        return cls(owned, tx.init(owned))


def full_params(state: TrainState, tx: DistributedTransformation) -> Any:
    """Returns the whole parameters, in the dtype the model computes with."""
    del tx  # under strategy "optim" every device holds them
    return state.params


def local_params(params: Any, tx: DistributedTransformation) -> Any:
    """Marks replicated params as different on each device, BEFORE ``jax.grad``.

    Inside ``jax.shard_map(check_vma=True)`` the gradient of a replicated array is summed over the
    devices on the way; of the array that this returns, it stays local, as ``tx.step`` needs it.
    """
    return jax.tree.map(lambda x: jax.lax.pcast(x, tx.config.shard_axis, to="varying"), params)


def shard_batch(batch: Any, tx: DistributedTransformation, batch_spec: Any = None) -> Any:
    """Places a batch on the mesh, its leading dimension split over the devices.

    Arrays that lie there already are returned as they are. With several processes, each passes the
    part that its own devices get.

    Args:
      batch: Tree of arrays whose leading dimension divides by the number of devices.
      tx: A distributed optimizer.
      batch_spec: PartitionSpec of all leaves. None: the leading dimension over ``shard_axis``.

    Raises:
      ShapeError: A leaf has no leading dimension, or one that does not divide.
    """
    config = tx.config
    sharding = NamedSharding(
        config.mesh, P(config.shard_axis) if batch_spec is None else batch_spec
    )
    num_local = max(1, config.num_shards // jax.process_count())

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


class TrainStep:
    """What ``train_step`` returns: call it with ``(state, batch)``."""

    def __init__(self, jitted: Any, tx: DistributedTransformation, batch_spec: Any) -> None:
        self._jitted = jitted
        self._tx = tx
        self._batch_spec = batch_spec

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step. ``state`` is donated: use the returned one from here on."""
        return self._jitted(state, shard_batch(batch, self._tx, self._batch_spec))

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers for arrays or ``jax.ShapeDtypeStruct`` with shardings, as ``jax.jit(f).lower``."""
        return self._jitted.lower(state, batch)


def train_step(
    loss_fn: Callable[..., jax.Array],
    tx: DistributedTransformation,
    *,
    batch_spec: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """Makes a jitted training step from a loss and a distributed optimizer.

    Args:
      loss_fn: ``loss_fn(params, batch)`` returns the scalar loss of the part of the batch that one
        device holds, without communicating. The loss of the step is the mean over the devices.
      tx: A distributed optimizer.
      batch_spec: PartitionSpec of the batch. None: leading dimension over ``shard_axis``.
      compiler_options: XLA options for this program, over the ones chosen here.

    Returns:
      ``step(state, batch) -> (state, metrics)`` with the scalars ``loss`` (mean over devices) and
      ``grad_norm`` (global norm of the mean gradient before clipping). The state is donated.

    Example:
      See ``distributed_fused_adamw``.
    """
    config = tx.config
    spec = P(config.shard_axis) if batch_spec is None else batch_spec

    def local_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        params, opt_state = step_local(config, grads, state.opt_state, state.params)
        mean_loss = collectives.all_reduce_mean(loss.astype(jnp.float32), config.shard_axis)
        return TrainState(params, opt_state), {"loss": mean_loss, "grad_norm": opt_state.grad_norm}

    state_specs = TrainState(P(), tx.state_specs())
    # Without vma checks: gradients of replicated params stay local, and models may use primitives
    # (Pallas, scans from a zero carry) that the check does not accept.
    sharded = collectives.shard_map(
        local_step, mesh=config.mesh, in_specs=(state_specs, spec), out_specs=(state_specs, P())
    )
    on_gpu = config.mesh.devices.flat[0].platform in ("gpu", "cuda")
    options = (_GPU_COMPILER_OPTIONS if on_gpu else {}) | (compiler_options or {})
    return TrainStep(
        jax.jit(sharded, donate_argnums=0, compiler_options=options or None), tx, batch_spec
    )
