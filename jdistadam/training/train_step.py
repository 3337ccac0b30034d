"""``train_step``: a whole training step, jitted, the checks before it runs, and its XLA options.

[Note: pipelined loops] If a scan gathers one layer at a time, an iteration of the loop needs its
parameters at its start, and has its gradients at its end, so neither collective overlaps anything.
XLA's options therefore gather the next layer, and reduce the previous one, in the neighbouring
iterations (``pipeline_all_gather``; reductions are pipelined by default). They also unroll the loop
by two, so that values carried between iterations are never copied, and start collectives as soon as
their operands are known. On two H200s this took 1.09 times the forward and backward pass instead of
1.13, for one more layer of parameters in memory. ``jax.checkpoint`` hides the gathers of the
backward pass behind a barrier unless it has ``prevent_cse=False``, which is enough in a scan.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdistadam.core.arguments import check_count, check_flag
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import MERGED_BYTES
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import HyperparameterError
from jdistadam.kernels import native
from jdistadam.training.admission import Gate
from jdistadam.training.loss import LossFunction
from jdistadam.training.out_of_memory import check_memory
from jdistadam.training.partitioned import check_model_axes
from jdistadam.training.placement import check_batch_spec
from jdistadam.training.reordered import Ordered
from jdistadam.training.step_program import StepOptions, StepProgram, flattened
from jdistadam.training.train_state import TrainState

_MERGED = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": MERGED_BYTES,
    "xla_gpu_all_gather_combine_threshold_bytes": MERGED_BYTES,
}
# If gathers were merged, all sharded parameters would be gathered before the forward pass starts.
# Separate gathers each start a few operations before their first use.
_GATHERS_APART = {"xla_gpu_all_gather_combine_threshold_bytes": 1}
# For a model that gathers block by block. If gathers were merged, several blocks would be gathered
# at once, and their gradients kept until the last one is known.
_BLOCKS_APART = dict.fromkeys(_MERGED, 1)
# Windows of a state in host memory are updated during the backward pass, as soon as their gradients
# are summed.
_FEWER_MERGED = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 64 << 20}
_PIPELINED = {
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


_OTHER_NAMES = {  # of an option in jaxlib 0.10, and since
    "xla_gpu_pipeline_all_gather": "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_all_gather": "xla_gpu_pipeline_all_gather",
}


def options_for(config: DistributedConfig, accumulate_steps: int) -> dict[str, Any]:
    """Options for the training step of an optimizer; empty if its devices are not GPUs.

    Raises:
      TreeError: They depend on ``layers``, and no params are known yet.
    """
    if not config.parallel.is_on_gpu:
        return {}
    wanted, parallel = dict[str, Any](), config.parallel
    if "scan" in config.kinds_of_layers and not config.transport.is_peer:
        wanted |= _PIPELINED
    # A loop over micro-batches starts after all parameters have arrived.
    gathers_once = parallel.shards_params and not parallel.reshard_after_forward
    separate = dict[str, Any]()
    if gathers_once and accumulate_steps == 1:
        separate = _GATHERS_APART
    elif "block" in config.kinds_of_layers:
        separate = _BLOCKS_APART
    elif config.updates_early:
        separate = _FEWER_MERGED
    known = {name: x for name, x in wanted.items() if _is_known(name, x, config.mesh)}
    known_as = known.keys() | {_OTHER_NAMES.get(name) for name in known}
    if lost := [name for name in wanted if name not in known_as]:
        _warn_of_lost(*lost)
    return _MERGED | separate | known


@functools.cache  # once for a process
def _warn_of_lost(*names: str) -> None:
    warnings.warn(
        f"train_step: this XLA does not know {', '.join(names)}: results are the same, but "
        "collectives of scanned layers may not overlap the layers, and steps take longer. "
        "Use a version of jdistadam for this JAX, or an older JAX.",
        stacklevel=2,
    )


@functools.cache
def _is_known(name: str, value: Any, mesh: Mesh) -> bool:
    """Whether this XLA knows the option and the value, which only compiling tells."""
    # For the whole mesh: a process cannot compile only for another one's device.
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):  # nothing else in this program causes it
            raise
        return False
    return True


class TrainStep:
    """The result of ``train_step``: call it with ``(state, batch)``.

    It may also be called inside a program, under ``jax.jit``, ``jax.lax.scan`` over batches,
    ``jax.eval_shape`` or ``jax.make_jaxpr``. There it becomes a part of that program; JAX takes
    compiler options only for the outermost jitted function::

        run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches),
                      donate_argnums=0, compiler_options=step.compiler_options)

    Attributes:
      tx: The optimizer.
      options: The other arguments of ``train_step``.
    """

    def __init__(self, program: StepProgram, compiler_options: dict[str, Any]) -> None:
        self._step, self._given_options = program, compiler_options
        self._has_warned = self._has_ended = False
        self.tx = program.tx
        self.options = program.options
        self._gate = Gate(program, program.options.batch_spec, self.lower, donates=True)

    @functools.cached_property
    def compiler_options(self) -> dict[str, Any]:
        """XLA options by name for compiling a call. Options that you passed override the defaults.

        Empty on CPU if you passed none. If the model gathers ``layers``, make the state first.
        """
        return options_for(self.tx.config, self.options.accumulate_steps) | self._given_options

    @functools.cached_property
    def _jitted(self) -> Any:
        return self._jit(flattened(self._step))

    @functools.cached_property
    def _jitted_as_called(self) -> Any:
        return self._jit(self._step)

    def _jit(self, program: Any) -> Any:
        return jax.jit(program, donate_argnums=0, compiler_options=self.compiler_options or None)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step. ``state`` is donated, so use only the returned state afterwards.

        A state that this step did not return is checked first: it must have the layout of the
        optimizer, and its params must be the rounded main parameters. An array that the state holds
        twice, or shares with the batch, is copied, because it cannot be donated. Inside a program
        nothing can be checked. There, a state of another layout makes loss, norm and the new state
        NaN, and the new state keeps its digest.

        Several processes compare, once, the programs that they are about to run. The first call
        waits for its result, so that too little memory raises here; later ones do not wait.

        Returns:
          The new state, and the metrics by name, as ``train_step`` lists them.

        Raises:
          AgreementError: The processes do not all run the same program.
          LayoutError: The state has another layout, or its params were changed.
          MeshError: The state is sharded over another mesh, or in host memory.
          OutOfMemoryError: A device has too little memory.
        """
        admitted = self._gate.admit(state, batch)
        if admitted.digest is None:
            self._warn_of_lost_options()
            return self._step(admitted.state, admitted.batch)
        try:
            new, metrics = native.call(self._run, admitted.state, admitted.batch)
        except jax.errors.JaxRuntimeError as error:
            steps = self.options.accumulate_steps
            check_memory(error, self.tx.config, admitted.state.params.tree, steps)
            raise
        return self._gate.returned(new, admitted.digest), metrics

    def _run(self, state: TrainState, batch: Any) -> Any:
        """Runs the program. Waits for the first step, which raises here if memory is too small."""
        results = self._jitted(state, batch)
        if not self._has_ended:
            jax.block_until_ready(results[1])
            self._has_ended = True
        return results

    def _warn_of_lost_options(self) -> None:
        """Warns, once, that the options of a step do not reach the program that contains it."""
        on_gpu = self.tx.config.parallel.is_on_gpu and self.tx.config.mesh.size > 1
        if on_gpu and self.compiler_options and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "train_step: traced into another program, whose compiler options apply: without "
                "the options of the step, XLA merges its collectives into a few, and it may take "
                "a third longer. Pass jax.jit(..., compiler_options=step.compiler_options).",
                stacklevel=3,
            )

    def order(self, state: Any, batch: Any) -> str:
        """Returns what a step does, in order: a line for each copy, wait, product and update.

        Copies over peer memory, and early updates, run beside the model because the step is
        evaluated in this order. The compiled program keeps it, but for starts that do not depend on
        a wait before them. Look at it first when a step is slow: the products between the start of
        a copy and its wait hide the copy. Without both, XLA orders the program, and there are no
        lines.

        Args:
          state: A train state, or its shapes.
          batch: A batch, or its shapes.

        Returns:
          The lines. Steps of loops are indented. A name is that of the parameter, or the scopes of
          the model, as in a profile; then come dtype and shape of the result.

        Example:
          >>> import jdistadam as jda
          >>> mesh = jax.make_mesh((2,), ("data",))
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, communication="peer",
          ...                      policy=jda.MixedPrecisionPolicy(grad_reduce_dtype="float32"))
          >>> step = jda.train_step(lambda params, x: jnp.sum(x @ params["w"]), tx)
          >>> state = TrainState.shapes({"w": jax.ShapeDtypeStruct((512, 64), jnp.float32)}, tx)
          >>> print(step.order(state, jnp.ones((4, 512))))
          product forward float32[2,64]
          product backward float32[64,512]
          start exchange of 0.0655 MB: w float32[1,256,64]
          wait for w float32[1,256,64]
          update float32[512,64]
          start gather of 0.131 MB: w float32[512,64]
          wait for w float32[512,64]
        """
        orders = list[Ordered]()
        batch = self._gate.admit_types(state, batch)
        jax.eval_shape(dataclasses.replace(self._step, seen=orders.append), state, batch)
        return "\n".join(orders[-1].lines) if orders else ""

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers for arrays or ``jax.ShapeDtypeStruct`` with shardings, as ``jax.jit(f).lower``.

        Args:
          state: A train state, or its shapes.
          batch: A batch, or its shapes.

        Returns:
          The lowered program, a ``jax.stages.Lowered``.
        """
        batch = self._gate.admit_types(state, batch)
        return self._jitted_as_called.lower(state, batch)


def train_step(
    loss_fn: Callable[..., Any],
    tx: DistributedTransformation,
    *,
    accumulate_steps: int = 1,
    has_aux: bool = False,
    weighted: bool = False,
    batch_spec: Any = None,
    report_nonfinite: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    r"""Makes a jitted training step from a loss and a distributed optimizer.

    The loss of a step is the mean over the micro-batches of all devices, as is its gradient:

    .. math::

      L = \frac{\sum_i w_i \ell_i}{\sum_i w_i}

    with loss :math:`\ell_i` and weight :math:`w_i` of micro-batch :math:`i`. :math:`w_i = 1` unless
    ``weighted``; use it if parts of the batch hold different numbers of valid tokens. Weights are
    constants in the differentiation. A micro-batch of weight zero does not count, even if its loss
    or gradients are non-finite: it changes no floats of the model state, and is not reported. If
    all weights are zero, the loss is 0 and the step changes only ``rng`` and ``grad_norm``, like a
    skipped one. A weight that is NaN or negative makes the loss and the gradients NaN. Gradients of
    scanned layers are weighted in the backward pass, before they are summed, so the weight is
    computed beforehand. The operations of ``loss_fn`` on which it depends run twice, which costs
    little if it depends only on the batch. Callbacks and prints run once, unless the weight depends
    on their results.

    With a ``loss_scale``, a step is skipped if a gradient is non-finite; with a ``norm_guard``, if
    the norm exceeds its limits. A skipped step leaves params, main parameters, mu, nu, count,
    ``model_state`` and the states of a chain bitwise unchanged. It changes ``rng``, the loss scale,
    ``skipped`` and ``grad_norm``.

    Args:
      loss_fn: ``loss_fn(params, batch)`` gets unsharded params and one micro-batch of one device,
        and returns the scalar ``loss``, or with ``weighted`` the pair ``(loss, weight)``. Under
        "optim_grads_params" with ``reshard_after_forward``, it gets the leaves that ``layers``
        selects as shards, for ``gather_params``; they are float32 if gradients are summed in
        float32. It needs no collective: a ``pmean`` of the loss is a no-op, a plain ``psum``
        raises. If the state has a ``model_state``, it gets it by this keyword and returns
        ``(loss, model_state)``. If the state has an ``rng``, it gets a key of its own by this
        keyword. If the optimizer has ``param_specs``, XLA partitions the function over the axes
        that carry no data. Write it as for ``jax.jit``, with ``jax.lax.with_sharding_constraint``
        if that helps or, on Explicit axes, with the shardings that its types need. With has_aux it
        returns auxiliary outputs at the end: ``(loss, aux)`` or ``(loss, model_state, aux)``. With
        ``weighted``, ``loss`` in these is the pair ``(loss, weight)``.
      tx: A distributed optimizer.
      accumulate_steps: Number of micro-batches into which each device cuts its part of the batch,
        along the leading dimension, whichever dimension ``batch_spec`` shards. Under "no_shard" and
        "optim", and with ``reshard_after_forward=False``, gradients are summed on the device in
        ``policy.main_grads_dtype`` and sent once. Otherwise the gradients of every micro-batch are
        sent, and their shards summed.
      has_aux: Whether ``loss_fn`` returns auxiliary outputs in addition to the loss.
      weighted: Whether ``loss_fn`` returns a weight with the loss. If not, a returned pair raises,
        because its second value is usually a metric, which needs ``has_aux``.
      batch_spec: PartitionSpec of the batch. None: leading dimension over all data axes. The
        leading dimension is devices x micro-batches x examples, in this order.
      report_nonfinite: Whether to check every gradient for non-finite values, which reads all of
        them once more.
      compiler_options: XLA options for this program; they override the defaults.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The state is donated. Metrics are the scalars
      ``loss``, ``grad_norm`` (global norm of the mean gradient, or of the sum if the optimizer has
      ``average_grads=False``, before clipping and without the loss scale), ``learning_rate`` (of
      this step, without those of groups), ``skipped`` (steps skipped so far) and ``loss_scale`` (of
      this step); with a ``norm_guard`` ``skipped_spikes`` (skipped steps whose norm was finite and
      exceeded its limits); with ``norms`` the requested ones (``grad_norm/<name>`` is defined like
      ``grad_norm``); with report_nonfinite ``nonfinite``, for ``nonfinite_paths``; with has_aux
      ``aux``, every leaf with a leading dimension of devices x micro-batches, in the order of the
      rows of the batch.

    Raises:
      HyperparameterError: accumulate_steps is not a positive integer.
      ShapeError, TreeError, DtypeError: On use, if the batch does not divide, or ``loss_fn``
        returns something else.
      PolicyError: On use, if the loss was already summed over the devices.
      MeshError: Some axes of the mesh are Explicit and some Auto, and the model is partitioned over
        them; on use, if the loss names an axis that is left to XLA.
      LayoutError: On use, if the state has another layout, or its params were changed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-2), mesh=jax.make_mesh((1,), ("data",)))
      >>> def loss_fn(params, batch):
      ...     weight = jnp.sum(batch["valid"])
      ...     return jnp.sum(params["w"] * batch["x"] * batch["valid"]) / weight, weight
      >>> step = jda.train_step(loss_fn, tx, accumulate_steps=2, weighted=True)
      >>> batch = {"x": jnp.array([1.0, 2.0, 3.0, 4.0]), "valid": jnp.array([1.0, 1.0, 1.0, 0.0])}
      >>> state = jda.TrainState.create({"w": jnp.ones(())}, tx)
      >>> state, metrics = step(state, batch)
      >>> float(metrics["loss"])
      2.0
    """
    check_program(tx, batch_spec, compiler_options)
    check_count("accumulate_steps", accumulate_steps)
    check_flag("report_nonfinite", report_nonfinite)
    options = StepOptions(accumulate_steps, batch_spec, report_nonfinite)
    program = StepProgram(tx, LossFunction(loss_fn, has_aux, weighted), options)
    return TrainStep(program, compiler_options or {})


def check_program(tx: Any, batch_spec: Any, options: Any) -> None:
    """Raises unless a program of a step can be made with these arguments.

    Args:
      tx: Must be a distributed optimizer; its mesh must be able to run a step.
      batch_spec: A PartitionSpec over it, or None.
      options: XLA's options: a dict, or None.
    """
    check_distributed(tx)
    check_batch_spec(tx.config.parallel.batch_spec if batch_spec is None else batch_spec, tx)
    check_model_axes(tx.config)
    if options is not None and not isinstance(options, dict):
        raise HyperparameterError(
            f"compiler_options: not a dict: got {options!r}, expected a dict of XLA's options by "
            'name. Pass e.g. {"xla_gpu_enable_latency_hiding_scheduler": True}.'
        )
