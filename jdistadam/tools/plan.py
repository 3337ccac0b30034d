"""``plan``: the bytes that a device holds and sends in a training step, from shapes alone."""

from __future__ import annotations

import dataclasses
import math

import jax

from jdistadam.checkpoint import parts
from jdistadam.core import trees
from jdistadam.core.arguments import check_count
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.state import is_distributed_state
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.distributed.transport import Transport
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.training.planned import Plan, nbytes_of, plan_of


def plan(
    params: Params,
    tx: FusedTransformation,
    *,
    accumulate_steps: int = 1,
) -> Plan:
    r"""Returns the memory and traffic of a training step per device, before any array exists.

    With :math:`P` parameters on :math:`N` devices, float32 state and bfloat16 params, "optim" holds
    :math:`2 P + 12 P / N` bytes, and small leaves are padded.

    Args:
      params: Tree of global params, or of ``jax.ShapeDtypeStruct``, such as ``jax.eval_shape`` of
        the model's initialization.
      tx: A distributed optimizer, or ``fused_adamw`` and the like, whose plan has only what is
        held, in unsharded arrays. Its mesh may be larger than this machine if its devices come from
        ``jax.experimental.topologies``, or are virtual CPU devices. For these,
        ``communication="peer"`` plans what GPUs that reach each other's memory would hold and send.
      accumulate_steps: As passed to ``train_step``.

    Returns:
      A ``Plan``, in bytes per device; ``print`` also shows the largest part, and how to lower it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> p = plan({"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}, tx)
      >>> p.held["params"], p.held["mu"], p.bytes_sent
      (4194304, 4194304, 0)
    """
    check_count("accumulate_steps", accumulate_steps)
    if isinstance(tx, FusedTransformation) and not isinstance(tx, DistributedTransformation):
        return _plan_of_one_program(params, tx)
    check_distributed(tx)
    trees.check_dtypes(params, name="params")
    found = plan_of(tx.config, params, accumulate_steps=accumulate_steps)
    if is_distributed_state(tx.state_specs()):
        return found
    others = _bytes_of_others(jax.eval_shape(tx.init, params))
    return dataclasses.replace(found, held=found.held | others)


def _plan_of_one_program(params: Params, tx: FusedTransformation) -> Plan:
    """What ``fused_adamw`` holds, in whole arrays; how they are sharded is the program's."""
    trees.check_numbers(params, name="params")
    params = jax.eval_shape(lambda tree: tree, params)  # numbers, too, in the dtypes of jax
    held = {"params": nbytes_of(params)}
    for leaf in parts.leaves_of("opt_state", jax.eval_shape(tx.init, params)):
        name = leaf.section or ("others" if math.prod(leaf.value.shape) > 1 else "scalars")
        held[name] = held.get(name, 0) + nbytes_of(leaf.value)
    return Plan(
        held,
        sums=0,
        buffers={},
        collectives=(),
        communication=Transport("of the program around it"),
        not_counted="gradients, activations, temporary memory and the batch",
    )


def _bytes_of_others(opt_state: OptState) -> dict[str, int]:
    """The bytes of what a chain and ``inject_hyperparams`` add to a state, on every device."""
    added = [
        part
        for part in jax.tree.leaves(opt_state, is_leaf=is_distributed_state)
        if not is_distributed_state(part)
    ]
    return {"chain and hyperparameters": size} if (size := nbytes_of(added)) else {}
