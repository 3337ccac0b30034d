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

from jdistadam import collectives, reference, trees
from jdistadam.accumulation import mean_factor
from jdistadam.config import MixedPrecisionPolicy, check_count, float_dtype
from jdistadam.distributed_checks import check_inside, check_placement
from jdistadam.distributed_step import find_state, is_distributed_state, main_shard
from jdistadam.distributed_transformation import DistributedTransformation
from jdistadam.errors import MeshError, ShapeError, describe
from jdistadam.gather import gather_params
from jdistadam.micro_batches import LossFunction, local_gradients
from jdistadam.nonfinite import sum_over_devices

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
    model_state: Any = None
    rng: Any = None

    @classmethod
    def create(
        cls,
        params: Any,
        tx: DistributedTransformation,
        *,
        param_dtypes: Any = None,
        model_state: Any = None,
        rng: Any = None,
    ) -> TrainState:
        """Copies what it is given onto the mesh and makes the optimizer state.

        The state owns its arrays: train_step donates them, and the caller's stay valid. Main
        parameters are kept where they differ from the parameters in dtype or in sharding: always
        on several devices, on one device for 16-bit parameters.

        Args:
          params: Tree of float32, bfloat16 or float16 arrays (jax or numpy).
          tx: A distributed optimizer.
          param_dtypes: Dtype in which the model computes, or a tree of them; the main parameters
            begin as ``params`` are. So a model in bfloat16 begins with float32 values between those
            that bfloat16 has; begun on them, it does not move at all until the first small updates
            add up to half the distance to the next. None: the dtypes of ``params``.
          model_state: Tree of arrays that the loss reads and renews without a gradient, such as
            batch statistics. After each step floats are averaged over the devices; of whole
            numbers, such as counters, the largest is kept.
          rng: ``jax.random.key`` for dropout and the like. None: the loss gets none.

        Raises:
          DtypeError: A leaf has another dtype.
        """
        _check_distributed(tx)
        trees.check_dtypes(params, name="params")
        dtypes = _dtypes_of(params, param_dtypes)
        mesh = tx.config.mesh
        replicated = NamedSharding(mesh, P())
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), tx.param_specs(params))
        params = own(params, placed)
        model_state, rng = own((model_state, rng), replicated)
        rounded = _rounded(tx.config.policy, params, dtypes)
        opt_state = jax.tree.map(  # what a chain keeps besides may be the caller's too
            lambda part: part if is_distributed_state(part) else own(part, replicated),
            tx.init(rounded),
            is_leaf=is_distributed_state,
        )
        if param_dtypes is not None:
            opt_state = _with_main_params(tx, opt_state, rounded, params)
        return cls(rounded, opt_state, model_state, rng)


def own(tree: Any, sharding: Any) -> Any:
    """Returns copies placed as ``sharding`` says, which no one else holds, with definite types.

    ``device_put`` may hand out the caller's own buffer as the replica of its device, also with
    may_alias=False; the results of a jitted copy are never shared with its arguments. A Python
    number would come back from a step as another type, and compile the step again.
    """

    def copy(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jnp.copy(x) if is_key else jax.lax.convert_element_type(jnp.copy(x), x.dtype)

    return jax.jit(lambda tree: jax.tree.map(copy, tree))(jax.device_put(tree, sharding))


def _check_distributed(tx: Any) -> None:
    if not isinstance(tx, DistributedTransformation):
        raise MeshError(
            describe(
                "tx",
                "not a distributed optimizer",
                got=type(tx).__name__,
                expected="DistributedTransformation",
                action="Make it with distributed_fused_adamw or distributed_fused_adam.",
            )
        )


def _dtypes_of(params: Any, dtypes: Any) -> Any:
    """Returns a tree of dtypes like params, from None, one dtype or such a tree."""
    if dtypes is None:
        return jax.tree.map(lambda x: x.dtype, params)
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(dtypes)):
        dtypes = jax.tree.map(lambda _: dtypes, params)
    trees.check_same_structure(dtypes, params, name="param_dtypes", like_name="params")
    return jax.tree.map(lambda dtype: float_dtype("param_dtypes", dtype), dtypes)


def _rounded(policy: MixedPrecisionPolicy, params: Any, dtypes: Any) -> Any:
    """Params in the dtypes in which the model computes."""

    def rounded(x: Any, dtype: Any) -> Any:
        if policy.keeps_remainders and dtype == jnp.bfloat16 and x.dtype == jnp.float32:
            return reference.split(x, jnp.bfloat16, jnp)[0]  # the half that fits a remainder
        return x.astype(dtype)

    return jax.tree.map(rounded, params, dtypes)


def _with_main_params(tx: DistributedTransformation, opt_state: Any, params: Any, main: Any) -> Any:
    """Gives a new state the main parameters ``main`` in place of the widened ``params``."""
    config = tx.config
    layout = config.layout(config.tensor_local(params))
    if not layout.main_size:
        return opt_state
    shard = collectives.shard_map(
        lambda tree: main_shard(config, layout, jax.tree.leaves(tree)),
        mesh=config.mesh,
        in_specs=(tx.param_specs(params),),
        out_specs=config.parallel.state_spec,
    )
    flat = jax.jit(shard)(main)
    return jax.tree.map(
        lambda part: part._replace(main_params=flat) if is_distributed_state(part) else part,
        opt_state,
        is_leaf=is_distributed_state,
    )


def full_params(state: TrainState, tx: DistributedTransformation) -> Any:
    """Returns the whole parameters, in the dtype the model computes with.

    Every device gets them, but for what ``param_specs`` shards over tensor axes.
    """
    config = tx.config
    if not config.parallel.shards_params:
        return state.params
    specs = config.tensor_specs(state.params)
    placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
    return jax.jit(lambda x: x, out_shardings=placed)(state.params)


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


class TrainStep:
    """What ``train_step`` returns: call it with ``(state, batch)``."""

    def __init__(self, jitted: Any, tx: DistributedTransformation, batch_spec: Any) -> None:
        self._jitted = jitted
        self._tx = tx
        self._batch_spec = batch_spec

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step. ``state`` is donated: use the returned one from here on.

        Raises:
          MeshError: The state is sharded over another mesh.
        """
        check_placement(self._tx.config, find_state(state.opt_state))
        return self._jitted(state, shard_batch(batch, self._tx, self._batch_spec))

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers for arrays or ``jax.ShapeDtypeStruct`` with shardings, as ``jax.jit(f).lower``."""
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
    _check_distributed(tx)
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
    options = (_GPU_COMPILER_OPTIONS if on_gpu else {}) | (compiler_options or {})
    return TrainStep(
        jax.jit(sharded, donate_argnums=0, compiler_options=options or None), tx, batch_spec
    )


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
