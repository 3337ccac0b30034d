"""A distributed optimizer: its ``init`` and ``step``, and its configuration."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from jdistadam import compat
from jdistadam.core import collectives, trees
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed import host_memory, model_axes, shard
from jdistadam.distributed.accumulate import AccumulatedGrads
from jdistadam.distributed.checks import (
    check_equal_params,
    check_held,
    check_state,
)
from jdistadam.distributed.config import DistributedConfig, global_specs
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.mesh_axes import over_axes
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import Functions, StepResult, find_state
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.errors import MeshError, PolicyError


class DistributedTransformation(FusedTransformation):
    """``init`` and ``step`` over a mesh, and their configuration.

    ``train_step`` calls both for you. In a ``jax.shard_map`` of your own, over ``config.mesh``::

        def local_step(params, state, batch):  # batch: this device's part
            grads = jax.grad(loss)(jda.local_params(params, tx), batch)
            return tx.step(grads, state, params)

        specs = P(), tx.state_specs()
        step = jax.shard_map(local_step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)

    ``init`` also runs outside ``shard_map``. Under "optim_grads_params" devices hold shards of the
    params, and your own ``shard_map`` needs the optimizer that ``bind`` returns.

    ``update`` raises, because optax's wrappers, Flax's ``TrainState`` and ``nnx.Optimizer`` call
    it. Inside them each device would clip its own gradients, wait for devices that skip the step,
    or change params without the main parameters. ``unwrapped`` returns an optimizer whose
    ``update`` works, for code that calls it directly.
    """

    config: DistributedConfig
    specs: Any
    functions: Functions
    bound: Schedule | None  # of the params of bind; None: not bound

    @classmethod
    def make(
        cls,
        functions: Functions,
        config: DistributedConfig,
        specs: Any,
        bound: Schedule | None = None,
    ) -> DistributedTransformation:
        """Makes ``init`` and ``step``, with their configuration."""

        def init(params: Params) -> Any:
            trees.check_dtypes(params, name="params")
            if not collectives.unbound(config.parallel.shard_axes):
                params = shard.as_shards(params)
                schedule = self.schedule("init", params)
                held = model_axes.on_a_device(config, params)
                check_equal_params(config.parallel, schedule, params, held)
                return functions.init(schedule, params)
            trees.refuse_shapes(params, name="params")
            whole = config.tensor_local(params)
            schedule, bound = config.schedule(whole), self.bound
            if bound is not None and bound is not schedule:
                like_name = "the params of bind"
                trees.check_same_shapes(whole, bound.whole(), name="params", like_name=like_name)
                check_held(bound, whole)
            return functions.init(schedule, params)

        def step(grads: Grads, state: Any, params: Params, **extra_args: Any) -> tuple[Any, Any]:
            result = self._step(grads, state, params, **extra_args)
            return result.params, result.opt_state

        self: Any = cls(init, _update_raises, step)
        self.functions, self.config, self.specs = functions, config, specs
        self.bound = bound
        return self

    def _step(self, grads: Grads, state: Any, params: Params, **extra_args: Any) -> StepResult:
        trees.check_given(params)
        compat.refuse_empty_leaves(self.config.mesh, params)
        find_state(state)
        shards = shard.as_shards(params)
        schedule = self.schedule("step", shards)
        model_axes.check_own_region(self.config, schedule, shards)
        result = self.functions.local_step(schedule, grads, state, shards, **extra_args)
        return result._replace(params=shard.in_form_of(params, result.params))

    def unwrapped(self) -> optax.GradientTransformationExtraArgs:
        """Returns optax's pair of functions with an ``update`` that works; put nothing around it.

        For a ``jax.shard_map`` of your own that keeps ``update`` and ``optax.apply_updates``::

            opt = tx.unwrapped()

            def local_step(params, state, batch):
                grads = jax.grad(loss)(jda.local_params(params, tx), batch)
                updates, state = opt.update(grads, state, params)
                return optax.apply_updates(params, updates), state

        ``update`` takes the gradients that ``step`` takes. Every device must call it in every step,
        and nothing may change gradients before it or updates after it. Wrappers such as
        ``optax.chain``, ``MultiSteps`` or ``apply_if_finite`` break this rule undetected.

        Returns:
          ``init`` and ``update``. Updates are float32, so that ``optax.apply_updates`` returns
          exactly the parameters that ``step`` returns.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> from jax.sharding import PartitionSpec as P
          >>> mesh = jax.make_mesh((1,), ("data",))
          >>> tx = jda.distributed(jda.fused_adamw(1e-2, weight_decay=0.0), mesh=mesh)
          >>> params, opt = {"w": jnp.ones(3)}, tx.unwrapped()
          >>> specs = P(), tx.state_specs()
          >>> update = jax.shard_map(
          ...     lambda params, state: opt.update(jda.local_params(params, tx), state, params),
          ...     mesh=mesh, in_specs=specs, out_specs=specs)
          >>> updates, state = jax.jit(update)(params, opt.init(params))
          >>> round(float(updates["w"][0]), 4)
          -0.01
        """

        def update(
            grads: Grads, state: Any, params: Params = None, **extra: Any
        ) -> tuple[Any, Any]:
            # In float32, so that apply_updates gives exactly the 16-bit parameter.
            _, state, updates = self.step_with_updates(grads, state, params, **extra)
            return updates, state

        return optax.GradientTransformationExtraArgs(self.init, update)

    def step_with_norms(
        self, grads: Grads, state: Any, params: Params, **extra_args: Any
    ) -> tuple[Params, Any, dict[str, jax.Array]]:
        """Takes a step in a ``jax.shard_map`` of your own, and also returns its norms.

        Args:
          grads: Local gradients, or the result of ``accumulate``.
          state: The state.
          params: The params.
          **extra_args: Extra arguments of the transformations in a chain.

        Returns:
          The result of ``step``, and the norms that ``norms`` requests, by name. Each has shape (),
          float32, and is equal on all devices, so its PartitionSpec is ``P()``.

        Raises:
          PolicyError: The optimizer was made without ``norms``.
        """
        if self.config.norms is None:
            raise PolicyError(
                "step_with_norms: this optimizer computes no norms: got norms=None, "
                'expected "total", "leaves" or a function. Pass norms="total" to distributed.'
            )
        result = self._step(grads, state, params, **extra_args)
        return result.params, result.opt_state, result.norms or {}

    def bind(self, params: Params) -> DistributedTransformation:
        """Returns this optimizer bound to params, whose shapes it then knows in ``jax.shard_map``.

        A device that holds only shards sees neither their unsharded shapes nor which leaves are
        shards. Under "optim_grads_params" a ``jax.shard_map`` therefore needs a bound optimizer::

            opt = tx.bind(params)

            def local_step(params, state, batch):
                shards = jda.local_params(params, opt)
                grads = jax.grad(lambda p: loss(jda.gather_params(p, opt), batch))(shards)
                return opt.step(grads, state, params)

        ``train_step`` and ``TrainState.create`` bind the optimizer themselves.

        Args:
          params: Tree of arrays or ``jax.ShapeDtypeStruct``, in their form outside of shard_map.

        Returns:
          An optimizer with the same arguments, for these params only.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
          >>> opt = tx.bind({"w": jax.ShapeDtypeStruct((512, 64), jnp.float32)})
          >>> int(opt.init({"w": jnp.zeros((512, 64))}).count)  # others raise
          0
        """
        trees.check_dtypes(params, name="params")
        if not self.is_as_made:
            raise PolicyError(
                "bind: functions of this optimizer were replaced, and the result of bind would "
                "not call them: got the result of tx._replace, "
                "expected what distributed, chain or inject_hyperparams returned. "
                "Bind first, then replace functions of the result; train_step never calls these."
            )
        schedule = self.config.schedule_of(params)
        return self.make(self.functions, self.config, self.specs, schedule)

    def schedule(self, function: str, params: Params, name: str = "params") -> Schedule:
        """Returns the schedule of plain params in the form that a device holds, in shard_map.

        Args:
          function: The called function, for messages.
          params: The params, or gradients like them.
          name: "params", or what else they are.

        Raises:
          MeshError: Devices hold shards of them, and the optimizer is not bound.
          TreeError, ShapeError, DtypeError: It is bound to other params.
        """
        config = self.config
        trees.check_dtypes(params, name=name)
        if self.bound is None and config.parallel.shards_params:
            raise MeshError(
                f"{function}: called inside of jax.shard_map, where it cannot know which params "
                "are shards: got an optimizer that was not bound to params, "
                "expected opt = tx.bind(params), outside of the shard_map. "
                "Call opt.init, opt.step, opt.accumulate, local_params(params, opt) in it."
            )
        on_a_device = model_axes.on_a_device(config, params)
        if self.bound is None:
            return config.schedule(on_a_device)
        check_held(self.bound, on_a_device, may_be_whole=function == "init")
        return self.bound

    def state_specs(self, params: Params = None) -> Any:
        """Returns the PartitionSpecs of the state, for shard_map's in_specs and out_specs.

        Returns:
          A state of PartitionSpecs, the same for all params.
        """
        del params
        return self.specs

    def param_specs(self, params: Params) -> Any:
        """Returns the PartitionSpec of every parameter, for shard_map's in_specs and out_specs.

        Args:
          params: Tree of arrays or ``jax.ShapeDtypeStruct``, in their form outside of shard_map.

        Returns:
          A tree like ``params``. Under "optim_grads_params" large leaves are sharded over
          ``shard_axis``; leaves are also sharded as the argument ``param_specs`` says.
        """
        trees.check_dtypes(params, name="params")
        return global_specs(self.config, self.layout(params), params)

    def param_shardings(self, params: Params) -> Any:
        """Returns the NamedSharding of every parameter, for ``jax.device_put``.

        Args:
          params: Tree of arrays or ``jax.ShapeDtypeStruct``, in their form outside of shard_map.

        Returns:
          A tree like ``params`` of NamedShardings.
        """
        mesh = self.config.mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.param_specs(params))

    def state_shardings(self) -> Any:
        """Returns the NamedSharding of every array of the state, including its memory kind.

        Returns:
          A state of NamedShardings.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> mesh = jax.make_mesh((1,), ("data",))
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, state_memory="pinned_host")
          >>> tx.state_shardings().mu.memory_kind
          'pinned_host'
        """
        return host_memory.state_shardings(self.config, self.state_specs())

    def data_specs(self, specs: Any) -> Any:
        """Returns PartitionSpecs restricted to the axes that carry data.

        For a ``jax.shard_map`` over the data axes that leaves the axes of ``param_specs`` to XLA.
        ``init``, ``step``, ``accumulate`` and ``grad_norm`` also work in it::

            specs = tx.data_specs((tx.param_specs(params), tx.state_specs()))
            step = jax.shard_map(local_step, mesh=mesh, axis_names={"data"},
                                 in_specs=(*specs, P("data")), out_specs=specs)

        Args:
          specs: Tree of PartitionSpecs, such as ``param_specs(params)`` and ``state_specs()``.

        Returns:
          A tree like ``specs``, without the other axes.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> from jax.sharding import PartitionSpec as P
          >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, param_specs=P("model"))
          >>> tx.data_specs(tx.state_specs()).mu == P("data")
          True
        """
        axes = self.config.parallel.data_axes
        return jax.tree.map(lambda spec: over_axes(spec, axes), specs)

    def layout(self, params: Params) -> Layout:
        """Returns the position of each element of the state; ``print`` shows it as a table.

        Args:
          params: Tree of arrays or ``jax.ShapeDtypeStruct``, in their form outside of shard_map.

        Returns:
          The layout: buckets, and the leaves in each.

        Example:
          >>> import jax.numpy as jnp, jdistadam as jda
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
          >>> layout = tx.layout({"w": jax.ShapeDtypeStruct((512, 64), jnp.float32)})
          >>> layout.flat_size, layout.buckets[0].shard_shape
          (32768, (512, 64))
        """
        trees.check_dtypes(params, name="params")
        return self.config.schedule_of(params).layout

    def check_state(self, opt_state: OptState, params: Params) -> None:
        """Raises if a state has another layout than the one for these params; outside of jit.

        The layout depends on the paths, shapes and dtypes of the params, on ``param_labels`` that
        freeze leaves, on the number of shards, ``bucket_bytes`` and the kind of main parameters.
        ``train_step``, ``full_params``, ``to_optax_state`` and ``main_params`` call this
        themselves. A ``step`` in your own ``jax.shard_map`` cannot raise. There, a state of another
        layout makes the new params, moments and ``grad_norm`` NaN, and keeps its digest. Call this
        once after a restore.

        Args:
          opt_state: The state.
          params: Tree of global params, or of ``jax.ShapeDtypeStruct``.

        Raises:
          LayoutError: The layouts differ; the message says how.
          TreeError: ``opt_state`` is not the state of a distributed optimizer.
          MeshError: Arrays of the state were donated to a step.
        """
        check_state(self.config, find_state(opt_state), self.layout(params))

    def init_grads(self, params: Params) -> AccumulatedGrads:
        """Returns the accumulated gradients of no micro-batches, for ``accumulate``; in shard_map.

        Args:
          params: Tree of arrays, of which only shapes and dtypes matter. A bound optimizer ignores
            them.

        Returns:
          Sums of zeros, in ``policy.main_grads_dtype``.
        """
        schedule = self.bound or self.schedule("init_grads", shard.as_shards(params))
        return model_axes.init_grads(self.config, schedule)

    def accumulate(
        self, acc: AccumulatedGrads, grads: Grads, weight: Any = None
    ) -> AccumulatedGrads:
        r"""Adds one micro-batch's local gradients.

        Under "no_shard" and "optim", and with ``reshard_after_forward=False``, nothing is sent
        until ``step``. Otherwise each call reduces gradients over ``shard_axis`` and adds the
        resulting shard.

        ``step`` takes the result in place of gradients and uses the mean over all micro-batches
        of all devices, :math:`\sum_i w_i g_i / \sum_i w_i`.

        Args:
          acc: The result of ``init_grads`` or ``accumulate``.
          grads: This device's gradients, not reduced.
          weight: :math:`w_i` >= 0, a scalar, e.g. a number of tokens. None: 1. Gradients of weight
            zero do not count, whatever their values. If gradients are sent in float16, keep the
            weight near 1, because the weighted sum is sent.

        Returns:
          The new sums, in ``policy.main_grads_dtype``.

        Raises:
          TreeError, ShapeError, DtypeError: The gradients do not fit.
          MeshError: The gradients are already reduced.
        """
        return model_axes.accumulate(self.config, acc, grads, weight)

    def grad_norm(self, grads: Grads, state: Any = None) -> jax.Array:
        """Returns the global norm of the mean gradient before clipping, as ``step`` computes it.

        If a ``step`` in the same program takes the same gradients, XLA merges the communication of
        both. The norm that a step used is also in its new state, ``state.grad_norm``.

        Args:
          grads: Local gradients, or the result of ``accumulate``.
          state: The state. It affects the norm only in a ``chain``, or if it has a ``loss_scale``,
            by which gradients are divided.

        Returns:
          Shape (), float32; the same on all devices.
        """
        if isinstance(grads, AccumulatedGrads):
            schedule = self.config.schedule(grads.like_params())
        else:
            schedule = self.bound or self.schedule("grad_norm", grads, "grads")
        return self.functions.norm(schedule, grads, state)


def _update_raises(grads: Grads, state: Any, params: Params = None, **extra: Any) -> Any:
    """The ``update`` of a distributed optimizer, which cannot see the wrappers around it."""
    del grads, state, params, extra
    raise PolicyError(
        "update: cannot be called for a distributed optimizer, because what stands around it would "
        "see the gradients of one device, not yet summed, and change params without the main "
        "parameters: got a call of tx.update, directly or by optax.chain, a wrapper such as "
        "optax.MultiSteps, Flax's TrainState or nnx.Optimizer, expected jda.train_step, or tx.step "
        "in a jax.shard_map of your own. Use jda.chain in place of optax.chain, max_grad_norm to "
        "clip, accumulate_steps in place of MultiSteps, loss_scale in place of apply_if_finite. "
        "In Flax's TrainState, nnx.Optimizer or optax.chain use fused_adamw with a sharded state: "
        "docs/drop_in.md. If nothing stands around it: tx.unwrapped().update."
    )


def check_distributed(tx: Any) -> None:
    """Raises PolicyError unless ``tx`` is a distributed optimizer."""
    if not isinstance(tx, DistributedTransformation):
        raise PolicyError(
            f"tx: not a distributed optimizer: got {type(tx).__name__}, "
            "expected DistributedTransformation. "
            "Make it with distributed(fused_adamw(...), mesh=mesh). In place of optax.chain use "
            "jda.chain; in place of optax's wrappers use accumulate_steps, loss_scale or groups."
        )
