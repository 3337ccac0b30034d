"""The distributed step on one device; runs inside ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistadam.core import collectives, trees
from jdistadam.core.collectives import make_primitive
from jdistadam.core.guards import LossScaleState
from jdistadam.core.hyperparameters import coefficient
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed import host_memory, packing
from jdistadam.distributed.accumulate import summed_gradients
from jdistadam.distributed.average import with_next_ema
from jdistadam.distributed.checks import check_inside, check_options, check_step
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import fields_of, types_of_arrays
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.main_params import begun_shard
from jdistadam.distributed.norms import norm_and_finite, norms_of
from jdistadam.distributed.parts_of_gradients import added
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import DistributedState, StepResult, find_state
from jdistadam.distributed.update import ShardUpdate, update_shards
from jdistadam.distributed.verdict import Verdict
from jdistadam.errors import PolicyError, TreeError
from jdistadam.kernels.parts import Parts


def init_local(config: DistributedConfig, layout: Layout, params: Params) -> DistributedState:
    """This device's shard of the initial state; ``params`` are whole, or shards."""
    arrays = types_of_arrays(config, layout)
    axes, storage = config.parallel.cut_axes, config.algorithm.storage
    for name, field in fields_of(config).items():
        if arrays[name] is None:  # no parameter has it
            continue
        if field.begins == "params":
            check_not_transformed("init", params)
            arrays[name] = begun_shard(config, layout, field, params)
        else:  # varying over the axes, as shards are, for the type checker of shard_map
            zeros = jax.tree.map(jnp.zeros_like, arrays[name])
            arrays[name] = jax.tree.map(lambda x: collectives.to_varying(x, axes), zeros)
    new = DistributedState(
        count=jnp.zeros((), jnp.int32),
        grad_norm=jnp.zeros((), jnp.float32),
        layout_digest=jnp.asarray(config.layout_digest(layout)),
        key=storage.key if storage.is_stochastic else None,
        **arrays,
        **{guard.field: guard.new(value) for guard, value in config.active_guards},
    )
    return host_memory.to_state_memory(config, new)


def step_local(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Grads,
    state: DistributedState,
    params: Params,
) -> StepResult:
    """One step on one device: reduction, norm, kernel, all-gather.

    With a state of another layout the coefficients are NaN and the step is never skipped.
    Parameters, moments and norm then become NaN, and the state keeps its digest.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: Local gradients, or the result of ``accumulate``.
      state: The state.
      params: The params in the form that this device holds.
    """
    check_inside(config.parallel, "step")
    check_not_transformed("step", (grads, state, params))
    host_memory.check_memory(config, grads=grads, opt_state=state, params=params)
    layout = schedule.layout
    check_step(config, layout, state)
    leaves: list[Any] = jax.tree.leaves(params)
    done, verdict = _updated(config, schedule, grads, state, leaves)
    new = leaves_of_buckets(layout, done.gathered)
    if config.policy.param_comm_dtype is not None:
        # Rounding for sending would change params that a skipped step must leave unchanged.
        new = {i: trees.keep_if(verdict.is_skipped, leaves[i], leaf) for i, leaf in new.items()}
    for i, leaf in new.items():
        leaves[i] = leaf  # frozen and empty leaves stay unchanged
    is_skipped = verdict.is_skipped
    new_state = done.state._replace(
        count=trees.keep_if(is_skipped, state.count, optax.safe_increment(state.count)),
        grad_norm=verdict.facts.norm,
        **verdict.next_guards(config, state),
    )
    return StepResult(
        schedule.treedef.unflatten(leaves),
        with_next_ema(config, layout, new_state, done.shards, is_skipped),
        is_skipped,
        verdict.facts.is_other_layout,
        coefficient("learning_rate", config.algorithm.hyper.learning_rate, state.count),
        norms_of(config, layout, done.squares, verdict),
    )


def _updated(
    config: DistributedConfig,
    schedule: Schedule,
    grads: Grads,
    state: DistributedState,
    leaves: list[Any],
) -> tuple[ShardUpdate, Verdict]:
    """Reduction, norm, kernels, and gathers."""
    layout, scaling = schedule.layout, state.scaling
    summed = summed_gradients(config, schedule, grads)
    summed, tiles = added(config, schedule, summed, scaling, all_of_them=config.takes_norm_first)
    is_late = any(isinstance(x, Parts) for x in summed.arrays)
    norm, found_inf = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    if not is_late:
        norm, found_inf = norm_and_finite(config, layout, summed, scaling, tiles)
    verdict = Verdict.of(config, layout, state, summed, norm, found_inf)
    done = update_shards(
        config,
        schedule,
        verdict.scalars,
        grads=summed.arrays,
        state=state,
        params=leaves,
    )
    if is_late:
        tiles = [x if known is None else known for known, x in zip(tiles, done.tiles, strict=True)]
        norm, _ = norm_and_finite(config, layout, summed, scaling, tiles)
        verdict = verdict.with_norm(norm)
    return done, verdict


def scaling_of(config: DistributedConfig, state: Any) -> LossScaleState | None:
    """The loss scale of a state, which may be a chain's; None without ``loss_scale``."""
    if config.loss_scale is None:
        return None
    if state is None:
        raise TreeError(
            "grad_norm: needs the state, because the gradients were multiplied by its loss scale: "
            "got None, expected tx.grad_norm(grads, opt_state). Pass the state."
        )
    check_options(config, find_state(state))
    return find_state(state).scaling


def grad_norm_local(
    config: DistributedConfig, schedule: Schedule, grads: Grads, scaling: LossScaleState | None
) -> jax.Array:
    """The global norm of the mean gradient, reduced as a step over XLA reduces it."""
    check_inside(config.parallel, "grad_norm")
    summed = summed_gradients(config, schedule, grads)
    summed, tiles = added(config, schedule, summed, scaling)
    return norm_and_finite(config, schedule.layout, summed, scaling, tiles)[0]


def leaves_of_buckets(layout: Layout, arrays: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """Returns the content of all buckets by leaf index."""
    leaves: dict[int, jax.Array] = {}
    for bucket, x in zip(layout.buckets, arrays, strict=True):
        leaves.update(packing.leaves_of_bucket(layout, bucket, x))
    return leaves


def check_not_transformed(function: str, tree: Any) -> None:
    """Raises PolicyError if ``jax.vmap`` or a derivative runs over an array of ``tree``.

    Inside a jit such an array looks like any other, but JAX calls the rule of a primitive. Its
    results are unused, so the compiled program does not contain it.
    """
    # JAX takes a key for used that is passed to a primitive it does not know.
    leaves = (x for x in jax.tree.leaves(tree) if not trees.is_key(x))
    _passed_p.bind(*leaves, function=function)


def _batched(leaves: Any, dims: Any, *, function: str) -> Any:
    sizes = {x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None}
    if function == "gather_params":
        raise PolicyError(
            f"{function}: copies over peer memory cannot run under jax.vmap: got vmap over "
            f"{', '.join(map(str, sizes))}, expected one layer or block at a time. "
            'Use jax.lax.scan or jax.lax.map over the layers, or communication="xla".'
        )
    raise PolicyError(
        f"{function}: a distributed optimizer cannot run under jax.vmap: got vmap over "
        f"{', '.join(map(str, sizes))}, expected one model, on all devices of the mesh. "
        "Step ensembles and sweeps with jax.vmap(fused_adamw(...).step)."
    )


def _jvp(leaves: Any, tangents: Any, *, function: str) -> Any:
    del tangents
    raise PolicyError(
        f"{function}: a distributed optimizer cannot be differentiated: got a derivative with "
        f"respect to some of {len(leaves)} arrays, expected only a use of its values. "
        "Differentiate "
        "fused_adamw(...).step, or put jax.lax.stop_gradient around what this one takes."
    )


_passed_p = make_primitive(
    "jdistadam_passed",
    lambda *leaves, function: list(leaves),
    lambda *leaves, function: list(leaves),
    batched=_batched,
    jvp=_jvp,
)
