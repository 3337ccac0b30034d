"""``distributed``: shards the state of an optimizer over a mesh and configures communication."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import arguments, collectives, trees
from jdistadam.core.algorithm import Algorithm
from jdistadam.core.guards import (
    GUARDS,
    DynamicLossScale,
    NormGuard,
    check_loss_scale,
    check_norm_guard,
)
from jdistadam.core.precision import MixedPrecisionPolicy, policy_of
from jdistadam.core.storage import MOMENT_NAMES
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed import bucket_leaves, model_axes
from jdistadam.distributed.checks import (
    check_arguments,
    check_ema_decay,
    parse_state_memory,
)
from jdistadam.distributed.config import DistributedConfig, global_specs
from jdistadam.distributed.flat_arrays import FLAT_ARRAYS, FlatCodes, fields_of
from jdistadam.distributed.global_arrays import place
from jdistadam.distributed.layers import as_layers
from jdistadam.distributed.mesh_axes import make_data_parallel
from jdistadam.distributed.norms import check_norms
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import DistributedState, StepResult
from jdistadam.distributed.state_view import StateView
from jdistadam.distributed.step import init_local
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.distributed.transport import choose_transport
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.errors import PolicyError


@arguments.hinted(max_norm="Write max_grad_norm in place of max_norm.")
def distributed(
    tx: FusedTransformation,
    *,
    mesh: Mesh,
    shard_axis: str | tuple[str, ...] = "data",
    replica_axis: str | tuple[str, ...] | None = None,
    sharding_strategy: str = "optim",
    outer_sharding_strategy: str = "no_shard",
    reshard_after_forward: bool = True,
    reshard_after_backward: Callable[[str], bool] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    max_grad_norm: float | None = None,
    loss_scale: float | DynamicLossScale | None = None,
    average_grads: bool = True,
    bucket_bytes: int = 32 << 20,
    param_specs: Any = None,
    communication: str = "auto",
    layers: Callable[[str], str | None] | None = None,
    ema_decay: float | None = None,
    norm_guard: NormGuard | None = None,
    norms: str | Callable[[str], str | None] | None = None,
    state_memory: str | Mapping[str, str] = "device",
    early_updates: bool | None = None,
) -> DistributedTransformation:
    r"""Shards the state of ``fused_adamw`` or ``fused_adam`` over a mesh, for data parallelism.

    With the default strategy each of :math:`N` devices keeps :math:`1/N` of the float32 main
    parameters, :math:`m` and :math:`v`. A step reduce-scatters the local gradients, updates the
    shard with the fused kernel and all-gathers the new parameters:

    .. math::

      \bar g = \frac1N \sum_r g_r, \qquad
      g = s \sum_r g_r, \qquad s = \frac1N \min\left(1, \frac{G}{\lVert \bar g \rVert}\right)

    with :math:`G` = ``max_grad_norm``, followed by the formula of ``tx``. The sum is in
    ``policy.grad_reduce_dtype`` (None: in the communication dtype). The kernel applies the float32
    scalar :math:`s`, which also contains the inverse of the loss scale.

    Memory and traffic of a device, for :math:`P` parameters and :math:`M` micro-batches:

    ============================ ======= ================= ======= =======================
    sharding_strategy            state   accumulated grads params  sent, times (N - 1) / N
    ============================ ======= ================= ======= =======================
    "no_shard" (DDP)             P       P                 P       grads twice
    "optim" (ZeRO-1)             P / N   P                 P       grads, params
    "optim_grads" (ZeRO-2)       P / N   P / N             P       grads M times, params
    "optim_grads_params" (FSDP)  P / N   P / N             P / N   grads M times, params
    reshard_after_forward=False  P / N   P                 P / N   grads, params
    ============================ ======= ================= ======= =======================

    Parameters for which ``reshard_after_backward`` is False are not sharded: P instead of P / N.

    Args:
      tx: ``fused_adamw(...)`` or ``fused_adam(...)``, also in ``inject_hyperparams``. It defines
        the formula and how moments are stored. If its main_params_dtype is unset, main parameters
        are float32; if its mu_dtype is None, the first moment is float32. A function for its mask
        or param_labels gets the shapes of unsharded params.
      mesh: The mesh, e.g. ``jax.make_mesh((8,), ("data",))``.
      shard_axis: The mesh axis, or a tuple of axes, outermost first, over which state is sharded
        and gradients are summed.
      replica_axis: Further axes that carry data, across which the shards are replicated (hybrid
        sharding). Gradients are summed over ``shard_axis`` first, then their shards over these.
      sharding_strategy: "no_shard". "optim": main parameters and moments are sharded (ZeRO-1).
        "optim_grads": every micro-batch's gradients are reduced immediately, and their shards are
        accumulated (ZeRO-2). "optim_grads_params": leaves of 16384 elements or more are sharded
        too, if the number of shards divides a dimension (ZeRO-3); see ``gather_params``.
      outer_sharding_strategy: "optim": state is sharded over ``replica_axis`` as well.
      reshard_after_forward: Under "optim_grads_params". True: ``layers`` of a scan are gathered one
        by one, again in the backward pass, and gradients are reduced in every micro-batch. False: a
        step gathers all parameters once, during the forward pass. It sums unsharded gradients over
        its micro-batches, and reduces them once. Devices still hold shards between steps. Both
        settings take the same states. See docs/gathering.md.
      reshard_after_backward: Under "optim_grads_params": a function of the path of a leaf, such as
        ``lambda path: "embed" not in path``. Where it is False, devices hold the whole leaf between
        steps. They gather it right after its update, concurrently with other updates. Choose the
        leaves that the model uses first, so that the others can be gathered meanwhile. With
        ``reshard_after_forward=False`` this costs no memory at the peak of a step. None: True for
        every leaf.
      policy: The dtypes in which values are stored and sent. None: float32 gradients and main
        parameters; parameters are sent in their own dtype.
      max_grad_norm: Clips the mean gradient to this global norm, as
        ``optax.clip_by_global_norm``. None: no clipping.
      loss_scale: The factor of the loss before it is differentiated, a number or a
        ``DynamicLossScale``. ``train_step`` applies it; in a custom training loop use
        ``scale_loss``. The order is unscale, norm, clip, step. If any device has a non-finite
        gradient, the step is skipped and counted, and changes no bit of params, moments and count.
        1.0: nothing is scaled, but such steps are skipped. None: they are not skipped.
      average_grads: Whether to average gradients over devices and micro-batches. If not, they are
        summed, with their weights if there are any.
      bucket_bytes: Upper limit of a bucket of packed small leaves, in bytes.
      param_specs: For models that are partitioned over the mesh's other axes: a tree of
        PartitionSpecs over these, or of NamedShardings, with None for leaves that are not sharded.
        It may be a prefix of params or a function of them. ``flax.linen.get_partition_spec`` and
        ``nnx.get_partition_spec`` return one. ``train_step`` leaves these axes to XLA. In your own
        ``jax.shard_map`` over all axes, a leaf that is not sharded over such an axis must have
        equal gradients along it. A leaf that names an axis of ``shard_axis`` differs along it, as
        experts do: the loss gets one part, and communicates with those that have the others. See
        docs/experts.md.
      communication: The transport of a step. "xla": XLA's collectives. "peer": the copy engines of
        GPUs copy from memory to memory. The GPUs (or virtual CPU devices) belong to one process, or
        to several processes of one host (docs/processes.md). In ``train_step`` the copies overlap
        the model and the updates. Raises if "peer" is not supported. "auto": "peer" on GPUs with
        fast links if it is supported, which requires ``grad_reduce_dtype=jnp.float32`` among
        others; else "xla". With float32 sums, both give the same bits. See docs/peer_memory.md.
      layers: For models that gather their layers themselves: a function of the path of a leaf, such
        as ``lambda path: "scan" if "layers" in path else None`` for ``params['layers']['w']``.
        "scan": the model scans over the first dimension of the leaf, its layers; shards are cut
        within each layer. "block": the model gathers the leaf before it uses it. None: all other
        leaves. Under "optim_grads_params" with ``reshard_after_forward``, ``train_step`` and
        ``eval_step`` pass selected leaves to ``loss_fn`` as shards. The model calls
        ``gather_params`` for each layer in its scan, or for one block at a time, best inside
        ``jax.checkpoint``. Under other strategies layers are not sharded. See docs/gathering.md.
      ema_decay: Keeps a moving average :math:`e` of the exact parameters :math:`p` (main
        parameters, if any): :math:`e_0 = p_0`, then in every applied step
        :math:`e_t = d e_{t-1} + (1 - d) p_t` with :math:`d` = ``ema_decay``, between 0 and 1.
        float32, sharded like the moments; ``ema_params`` returns it. See docs/evaluation.md.
      norm_guard: A ``NormGuard``. Steps whose gradient norm exceeds its limits are skipped and
        counted separately. Unlike non-finite steps, they do not change the loss scale.
      norms: Norms that the kernel of a step computes, in float32, in addition to ``grad_norm``.
        "total": ``param_norm`` of the new exact parameters :math:`p`, before they are rounded to be
        stored, and ``update_norm`` of what the step subtracts. "leaves": also ``grad_norm/<path>``,
        ``param_norm/<path>`` and ``update_norm/<path>`` of every leaf that is not frozen. A
        function of the path, such as ``lambda path: path.split("'")[1]``: also norms of groups of
        leaves, by the name that it returns; None for a leaf that counts only in the total.
        ``train_step`` returns the norms among its metrics, and ``step_with_norms`` in a custom
        training loop. See docs/recipes.md.
      state_memory: "device", or "pinned_host": main parameters, moments and the average stay in
        host memory. A dict (``{"mu": "pinned_host"}``) selects some of these arrays. Results have
        the same bits, but steps are slower. See docs/out_of_memory.md.
      early_updates: Whether ``train_step`` updates each parameter, and frees its gradient, as soon
        as the gradient is known, with the same bits. Not with ``max_grad_norm``, ``loss_scale`` or
        ``norm_guard``. None: for a state in host memory without these. See docs/out_of_memory.md.

    Returns:
      A ``DistributedTransformation``. Its ``step(grads, state, params)`` takes local gradients,
      not yet reduced, and the params as ``param_specs(params)`` places them.

    Raises:
      MeshError, PolicyError, HyperparameterError: An argument is out of range, or two contradict
        each other; ``tx`` cannot be distributed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = jda.distributed(jda.fused_adamw(1e-2), mesh=mesh, max_grad_norm=1.0)
      >>> state = jda.TrainState.create({"w": jnp.ones((3,))}, tx)
      >>> step = jda.train_step(lambda params, x: jnp.mean(x @ params["w"]), tx)
      >>> state, metrics = step(state, jnp.ones((jax.device_count(), 3)))
      >>> round(float(metrics["grad_norm"]), 4)
      1.7321

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020. NVIDIA Apex,
      ``DistributedFusedAdam``.
    """
    state_memory = dict(state_memory) if isinstance(state_memory, Mapping) else state_memory
    layers = as_layers(layers)
    options = {name: value for name, value in locals().items() if name != "tx"}
    algorithm = _algorithm_of(tx)
    if tx.distributed_by is not None:
        return tx.distributed_by(functools.partial(distributed, **options))
    assert algorithm is not None
    policy = policy_of(policy)
    check_arguments(
        max_grad_norm, bucket_bytes, average_grads, early_updates, reshard_after_backward
    )
    mu_dtype = algorithm.storage.float_dtype("mu")
    arguments.float_dtype("mu_dtype", mu_dtype, arguments.FLOATS, MOMENT_NAMES)
    main = algorithm.resolved_main_params(policy.main_params_dtype)
    policy = dataclasses.replace(policy, main_params_dtype=main.argument)
    parallel = make_data_parallel(
        mesh,
        shard_axis=shard_axis,
        replica_axis=replica_axis,
        strategy=sharding_strategy,
        outer_strategy=outer_sharding_strategy,
        reshard_after_forward=reshard_after_forward,
        has_param_specs=param_specs is not None,
    )
    if parallel.num_devices == 1:  # nothing is summed, so nothing is widened to the dtype of sums
        policy = dataclasses.replace(policy, grad_reduce_dtype=None)
    check_loss_scale(loss_scale)
    check_ema_decay(ema_decay)
    check_norm_guard(norm_guard)
    check_norms(norms)
    config = DistributedConfig(
        algorithm=algorithm,
        parallel=parallel,
        policy=policy,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        average_grads=average_grads,
        bucket_bytes=bucket_bytes,
        param_specs=param_specs,
        layers=layers,
        ema_decay=ema_decay,
        norm_guard=norm_guard,
        norms=norms,
        early_updates=early_updates,
        reshard_after_backward=reshard_after_backward,
    )
    on_host = parse_state_memory(state_memory, fields_of(config))
    config = dataclasses.replace(config, on_host=on_host)
    transport = choose_transport(
        communication,
        parallel,
        policy,
        updates_early=config.updates_early,
        param_specs=param_specs,
    )
    config = dataclasses.replace(config, transport=transport)
    _check_effects(config)
    specs = _state_specs(config)
    return DistributedTransformation.make(_Functions(config, specs), config, specs)


def _check_effects(config: DistributedConfig) -> None:
    """Raises PolicyError for an option that has no effect with the others."""
    parallel, comm = config.parallel, config.policy.param_comm_dtype
    shards, strategy = parallel.strategy != "no_shard", f"sharding_strategy={parallel.strategy!r}"
    waits = ("max_grad_norm", *(guard.option for guard in GUARDS))
    late = []
    if config.early_updates:
        pairs = [(name, getattr(config, name)) for name in waits]
        late = [f"{name}={x!r:.60}" for name, x in pairs if x is not None]
        late += [f"mesh axis {axis!r} of a model" for axis in parallel.tensor_axes]
    arguments.check_effects(
        (
            not (parallel.reshard_after_forward or parallel.shards_params),
            "reshard_after_forward: parameters are not sharded under this strategy: "
            f"got False with {strategy}, expected True, or sharding_strategy='optim_grads_params'. "
            "Pass sharding_strategy='optim_grads_params', or leave it out.",
        ),
        (
            config.reshard_after_backward is not None and not parallel.shards_params,
            "reshard_after_backward: parameters are not sharded under this strategy: "
            f"got a function with {strategy}, expected None, or "
            "sharding_strategy='optim_grads_params'. Leave it out.",
        ),
        (
            parallel.outer_strategy == "optim" and not (parallel.replica_axes and shards),
            "outer_sharding_strategy: 'optim' shards the optimizer state over replica_axis too: "
            f"got {strategy}, replica_axis={parallel.replica_axes or None}, "
            "expected a replica_axis and a sharding_strategy other than 'no_shard'. "
            "To shard over only one axis, make it the shard_axis.",
        ),
        (
            comm is not None and not shards,
            "param_comm_dtype: no parameters are communicated under this strategy: "
            f"got {comm} with {strategy}, expected None. "
            "Leave it at None, or choose a strategy that shards.",
        ),
        (
            bool(late),
            "early_updates: updates need all gradients first: "
            f"got early_updates=True with {''.join(late[:1])}, expected none of "
            f"{', '.join(waits)} and no model axes. Leave out one of the two.",
        ),
    )


def _algorithm_of(tx: Any) -> Algorithm | None:
    """The algorithm of an optimizer; None if ``inject_hyperparams`` keeps it in the state.

    Raises:
      PolicyError: It cannot be distributed.
    """
    if isinstance(tx, DistributedTransformation):
        what, action = "distributed already", "Pass the optimizer that it was made of."
    elif isinstance(tx, FusedTransformation) and not tx.is_as_made:
        what = "an optimizer whose functions were replaced, which nothing here would call"
        action = "Replace those of what jda.distributed returns."
    elif isinstance(tx, FusedTransformation) and tx.is_direction:
        what = "only the direction of Adam, which nothing multiplies by a learning rate"
        action = "Pass jda.chain(jda.scale_by_adam(...), jda.scale_by_learning_rate(...))."
    elif isinstance(tx, FusedTransformation):
        if tx.algorithm is not None or tx.distributed_by is not None:
            return tx.algorithm
        what = "not an optimizer by itself, but a chain or a wrapper"
        action = (
            "Put the chain around: jda.chain(before, jda.distributed(fused_adamw(...), ...)). "
            "For a clip pass max_grad_norm; for masked and partition pass fused_adamw param_labels "
            "and groups. "
            "For MultiSteps pass train_step accumulate_steps, for apply_if_finite loss_scale=1.0."
        )
    elif isinstance(tx, optax.GradientTransformation):
        what = "an optimizer of optax, which knows of no shards"
        action = (
            "Use fused_adamw in place of optax.adamw, and fused_adam in place of optax.adam. In "
            "place of optax.chain, pass max_grad_norm for optax.clip_by_global_norm, and put other "
            "parts before: jda.chain(before, jda.distributed(fused_adamw(...), ...))."
        )
    else:
        what, action = "not an optimizer", "Pass what fused_adamw(...) returns."
    raise PolicyError(
        f"distributed: {what}: got {getattr(tx, '__name__', type(tx).__name__)}, expected what "
        f"fused_adamw, fused_adam or inject_hyperparams of one of them returns. {action}"
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # by identity, as functions are
class _Functions:
    """The functions of a distributed optimizer without a chain."""

    config: DistributedConfig
    specs: DistributedState

    def init(self, schedule: Schedule, params: Params) -> DistributedState:
        """Makes the state; also works outside of shard_map."""
        config, layout = self.config, schedule.layout
        if not collectives.unbound(config.parallel.shard_axes):
            return model_axes.init(config, schedule, self.specs, params)
        specs = global_specs(config, layout, params)
        placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
        params = place(params, placed)
        is_large = bool(config.on_host) or bucket_leaves.are_many(layout)
        is_apart = is_large and not trees.is_traced(params)
        no_arrays: Any = dict.fromkeys(FLAT_ARRAYS)

        def local(params: Params) -> DistributedState:
            new = init_local(config, layout, params)
            return new._replace(**no_arrays) if is_apart else new

        make = compat.shard_map(
            local,
            mesh=config.mesh,
            in_specs=(specs,),
            out_specs=self.specs._replace(**no_arrays) if is_apart else self.specs,
        )
        state: DistributedState = jax.jit(make)(params)
        if not is_apart:
            return state
        # Arrays that may not fit on the device are made on the host and filled bucket by bucket,
        # and so are those of many leaves.
        view = StateView(config, params)
        return state._replace(**{name: view.begun(name, params) for name in view.fields})

    def local_step(
        self, schedule: Schedule, grads: Grads, state: Any, params: Params, **extra_args: Any
    ) -> StepResult:
        """Takes a step."""
        del extra_args
        return model_axes.step(self.config, schedule, self.specs, grads, state, params)

    def norm(self, schedule: Schedule, grads: Grads, state: Any) -> jax.Array:
        """The global norm of the mean gradient."""
        return model_axes.grad_norm(self.config, schedule, grads, state)


def _state_specs(config: DistributedConfig) -> DistributedState:
    """PartitionSpecs of the state."""
    flat: Any = config.parallel.state_spec
    everywhere: Any = P()
    guards = {
        x.field: x.kind(*(everywhere for _ in x.kind._fields)) for x, _ in config.active_guards
    }
    coded: Any = FlatCodes(flat, flat, flat)
    arrays = {
        name: coded if field.codec.is_coded else flat for name, field in fields_of(config).items()
    }
    return DistributedState(
        count=everywhere,
        grad_norm=everywhere,
        layout_digest=everywhere,
        key=everywhere if config.algorithm.storage.is_stochastic else None,
        **dict.fromkeys(FLAT_ARRAYS) | {"main_params": flat} | arrays,  # also if they are None
        **guards,
    )
