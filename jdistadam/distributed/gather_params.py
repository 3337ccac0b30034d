"""Parameters for a loss: local to a device, and gathered, with local or summed gradients.

[Note: widened shards] JAX gives a gradient the dtype of its parameter. For a bfloat16 shard, the
float32 sum of gradients that ``gather_params`` computes would be rounded. Shards are therefore
widened before they are differentiated, to a dtype that also holds the sums, and rounded back before
they are sent. Both are exact. The widened copy exists while the loss is differentiated, in float32
4 / N bytes per parameter. Over peer memory, ``train_step`` widens one layer of a loop at a time
(training/overlap.py).

[Note: weights before the sum] The gradients of scanned layers are summed over devices inside the
backward pass, so a device's weight must be applied there. But a backward pass can only use values
from its forward pass, and ``loss_fn`` returns the weight at the end. ``train_step`` therefore
traces ``loss_fn`` once before, and runs only what the weight depends on. Each ``Shard`` carries the
weight to the ``gather_params`` that ``loss_fn`` calls, as an operand: functions with derivatives of
their own, loops and JAX's caches must not close over a traced value. The gradient of an expert is a
sum over devices, too: if there are any, the weight multiplies the loss instead.

[Note: one block at a time] In an unrolled model only XLA's scheduler decides when a block's
parameters are gathered and its gradients summed. It delays the gradients of parameters, because no
other block waits for them, and keeps the activations that they need as long as memory lasts. With
``after``, a gather waits for activations. In the backward pass, the gradient of these activations
waits for the sum of the block's gradients, because a zero that depends on that sum is added to it.
If ``after`` is the input of the previous block, the gather and the sum each overlap one other
block. Compiled for eight H200s, a GPT with 1.3e9 parameters takes less temporary memory this way
than in a scan. Over peer memory ``train_step`` orders gathers itself, two blocks ahead in both
passes; a gather that waits for a recomputed block could only start with that block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import collectives, jaxprs, trees
from jdistadam.core.trees import Params
from jdistadam.distributed import communication, model_axes
from jdistadam.distributed.accumulate import weighted
from jdistadam.distributed.checks import check_inside
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import Schedule, phases_of_shard
from jdistadam.distributed.shard import Shard, as_shards, is_shard, leaves_of, refuse_unmarked
from jdistadam.distributed.step import check_not_transformed
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.kernels import copies


def local_params(params: Params, tx: DistributedTransformation) -> Any:
    """Marks params as this device's own; called before ``jax.grad``, inside ``jax.shard_map``.

    Inside ``jax.shard_map(check_vma=True)``, JAX sums the gradient of a replicated array over the
    devices. Gradients with respect to the result of this function stay local, as ``tx.step`` needs
    them.

    Under "optim_grads_params" it also puts each shard of a parameter into a ``Shard``, a pytree
    node that ``gather_params`` turns into a plain array. It widens shards to a dtype that holds the
    sums of their gradients (float32, unless ``policy`` sums in 16 bits), so that sums are not
    rounded before ``tx.step``. ``gather_params`` rounds the shards back before it sends them. In
    float32 the widened copy takes 4 / N bytes per parameter. ``step`` takes params in either form,
    and returns them in the same form.

    Args:
      params: All params, as this device has them.
      tx: The optimizer; under "optim_grads_params" the result of ``bind``.

    Returns:
      A tree like ``params``, with a ``Shard`` in place of each shard.

    Raises:
      MeshError: Called outside shard_map, or without the optimizer of ``bind``.
    """
    check_distributed(tx)
    config, axes = tx.config, tx.config.parallel.data_axes
    check_inside(config.parallel, "local_params", over_data_only=True)
    if config.parallel.shards_params and not any(map(is_shard, leaves_of(params))):
        params = _with_shards(config, tx.schedule("local_params", params), params)
    return jax.tree.map(lambda x: collectives.to_varying(x, axes), params)


def _with_shards(config: DistributedConfig, schedule: Schedule, params: Params) -> Any:
    """Params with their shards marked and widened: [Note: widened shards]."""
    leaves: list[Any] = jax.tree.leaves(params)
    specs = jax.tree.leaves(config.tensor_specs(params))
    for entry in schedule.buckets:
        if entry.bucket.is_sharded_param:
            i, dtype = entry.bucket.leaf, config.differentiated_dtype(entry.bucket.dtype)
            value = jnp.asarray(leaves[i]).astype(dtype)
            leaves[i] = Shard.of_bucket(entry.bucket, value, specs[i])
    return schedule.treedef.unflatten(leaves)


def stored_params(params: Any, tx: DistributedTransformation) -> Any:
    """Returns params as a device has them between steps: the inverse of ``local_params``.

    Each ``Shard`` becomes a plain array in the dtype of the parameter, for ``jax.shard_map`` with
    ``out_specs=tx.param_specs(params)``. Call it at the end of a program of several steps.

    Args:
      params: The result of ``local_params``, or of a ``step`` with it.
      tx: The optimizer.

    Returns:
      A tree of plain arrays like the argument of ``local_params``.
    """
    axes = tx.config.parallel.data_axes

    def stored(x: Any) -> Any:
        return x if is_shard(x) else collectives.to_invariant(x, axes)

    return as_shards(jax.tree.map(stored, params, is_leaf=is_shard))


def gather_params(shards: Any, tx: DistributedTransformation, after: Any = None) -> Any:
    r"""Gathers sharded parameters over ``shard_axis``; inside ``jax.shard_map``.

    Under "optim_grads_params" it gathers the shards that ``local_params`` marks. Otherwise it
    returns its argument, so a model need not know the strategy. Leaves other than ``Shard`` are
    returned unchanged, and so are whole stacks of layers: a layer is gathered when a scan or an
    index selects it. Shards are sent in ``policy.param_comm_dtype``. The gradient with respect to a
    shard is this device's part of

    .. math:: \sum_r g_r

    summed over ``shard_axis`` as the policy says. ``step`` takes such gradients, and gradients with
    respect to whole leaves. In a custom training loop, with ``opt = tx.bind(params)``::

        shards = jda.local_params(params, opt)
        grads = jax.grad(lambda p: loss(jda.gather_params(p, opt)))(shards)

    In an unrolled model, under ``train_step`` with ``layers`` that are "block"::

        @functools.partial(jax.checkpoint, policy=jda.remat_policy)
        def block(params, x, before):
            return apply(jda.gather_params(params, tx, after=before), x)

        before = x
        for params in blocks:
            x, before = block(params, x, before), x

    The gather of the next block then overlaps this one's forward pass, and starts no earlier. In a
    model that scans over stacked layers::

        @functools.partial(jax.checkpoint, policy=jda.remat_policy, prevent_cse=False)
        def body(x, layer):
            return block(jda.gather_params(layer, tx), x), None

        x, _ = jax.lax.scan(body, x, params["layers"])

    Only two or three layers' parameters are then unsharded at a time. On GPUs ``train_step``
    compiles loops in which gathering the next layer and reducing the previous layer's gradients
    overlap this layer. ``prevent_cse=False``, which is safe inside a scan, allows this in the
    backward pass too. ``train_step`` passes stacked leaves to ``loss_fn`` as ``local_params``
    returns them. With ``weighted``, a layer's gradients are weighted before they are summed.

    With ``reshard_after_forward=False`` it gathers all params, including stacks, and returns a
    layer of a gathered stack unchanged. In a custom training loop, gather once per step, before
    differentiation and for all micro-batches. ``accumulate`` needs gradients of these params::

        whole = jda.gather_params(jda.local_params(params, opt), opt)
        grads = jax.grad(loss)(whole, batch)
        params, state = opt.step(grads, state, params)

    Args:
      shards: The result of ``local_params``, or any part of that tree; or one layer of it.
      tx: The optimizer.
      after: Activations, such as the input of the previous block. The gather starts only when they
        are computed. In the backward pass, their gradient waits until the gradients of ``shards``
        are reduced ([Note: one block at a time]). None: XLA decides, and may keep many blocks of an
        unrolled model in memory. Has no effect in ``train_step`` over peer memory, where blocks are
        always gathered shortly before their use.

    Returns:
      The unsharded params, on every device, in their own dtypes.

    Raises:
      MeshError: Called outside shard_map, or with all params before ``local_params``.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "gather_params", over_data_only=True)
    is_in_loss = _in_loss.value  # of train_step, which marks all shards
    if tx.config.parallel.shards_params and not is_in_loss:
        refuse_unmarked(tx.bound, shards)

    def gathered(x: Any) -> Any:
        return _gathered_shard(tx.config, x) if is_shard(x) and not x.is_stack else x

    trees.check_numbers(after, name="after")
    after = [jnp.asarray(x) for x in jax.tree.leaves(after)]
    after = [x for x in after if jnp.issubdtype(x.dtype, jnp.inexact)]
    is_ordered = is_in_loss and tx.config.transport.is_peer  # by train_step
    if after and any(map(is_shard, leaves_of(shards))) and not is_ordered:
        shards = _after(shards, after)
    return jax.tree.map(gathered, shards, is_leaf=is_shard)


@jax.custom_vjp
def _after(shards: Any, after: Any) -> Any:
    """Shards, available only after ``after``: [Note: one block at a time]."""
    return jax.lax.optimization_barrier((shards, after))[0]


def _after_forward(shards: Any, after: Any) -> tuple[Any, Any]:
    return _after(shards, after), after


def _after_backward(after: Any, cotangents: Any) -> tuple[Any, Any]:
    nothing = jax.tree.map(lambda x: -jnp.zeros_like(x), after)  # -0 + x is x, also for x = -0
    return jax.lax.optimization_barrier((cotangents, nothing))


_after.defvjp(_after_forward, _after_backward)


def gathered_before_loss(shards: Any, tx: DistributedTransformation) -> Any:
    """Gathers all params except those that the model gathers; ``tx`` is bound to them."""
    assert tx.bound is not None
    leaves, may_stay = leaves_of(shards), tx.config.parallel.gathers_layers
    for i, known in enumerate(tx.bound.layout.leaves):
        stays = may_stay and known.layers is not None
        if is_shard(leaves[i]) and not stays:
            leaves[i] = _gathered_shard(tx.config, leaves[i])
    return tx.bound.treedef.unflatten(leaves)


_in_loss = jax.make_user_context(False)


def in_loss() -> Any:
    """Returns the context of a loss in ``train_step``, which marks all shards in its params."""
    return _in_loss(True)


def remat_policy(primitive: Any, *_: Any, **params: Any) -> bool:
    """Says what ``jax.checkpoint`` saves; results of ``gather_params`` are gathered again.

    It saves results that take time to compute: those of matrix products, convolutions, reductions,
    custom calls, random bits. Elementwise operations are computed again where the backward pass
    uses their results, because memory is slower than such arithmetic, and has no room for all of
    them. Operations that only move or convert are, too, so no gathered parameter stays in memory
    from the forward to the backward pass::

        body = jax.checkpoint(body, policy=jda.remat_policy, prevent_cse=False)  # in a scan

    Returns:
      Whether to save the results of this operation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=remat_policy)
      >>> jax.grad(lambda w: f(w, jnp.ones((1, 2))).sum())(jnp.zeros((2, 2))).tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """
    is_copy = params.get("target_name") in (copies.START, copies.WAIT)
    return primitive.name not in _COMPUTED_AGAIN and not is_copy


# Moves may be between a gather and its first use. If they were saved, they would keep a whole
# parameter in memory.
_COMPUTED_AGAIN = jaxprs.GATHERS | jaxprs.MOVES | jaxprs.ELEMENTWISE


def _gathered_shard(config: DistributedConfig, shard: Shard) -> jax.Array:
    """Gathers one leaf, or one layer of a stacked one."""
    parallel = config.parallel.without(collectives.axes_of(shard.spec))
    dim = len(shard.shape) + shard.dim
    size = shard.value.size * parallel.size(parallel.shard_axes)
    gather_phase, reduce_phase = phases_of_shard(
        parallel, config.policy, size, shard.dtype, config.transport
    )
    run = model_axes.on_each_shard(config, shard.spec)
    # JAX keeps the functions below: they must not hold the traced value.
    dtype, held_dtype, has_probe = shard.dtype, shard.value.dtype, shard.probe is not None
    operands = shard.value, shard.weight, shard.probe
    del shard

    def whole(x: jax.Array) -> Any:
        if config.transport.is_peer:
            check_not_transformed("gather_params", x)
        return communication.gather_parameters(gather_phase, x, dim, to="varying")

    def part_of_sum(x: jax.Array) -> Any:
        return communication.sum_gradients([reduce_phase], x, dim)

    @jax.custom_vjp
    def gather(value: jax.Array, weight: Any, probe: Any) -> jax.Array:
        own = value.astype(dtype)  # exact: [Note: widened shards]
        # Typed as varying. Otherwise JAX would sum the gradient of every use over the devices.
        return run(whole, own)

    def forward(value: jax.Array, weight: Any, probe: Any) -> tuple[jax.Array, Any]:
        return gather(value, weight, probe), weight

    def backward(weight: Any, cotangent: jax.Array) -> tuple[jax.Array, Any, Any]:
        is_nonfinite = ~jnp.all(jnp.isfinite(cotangent)) if has_probe else None
        if weight is not None:
            cotangent = weighted(cotangent.astype(jnp.float32), weight)
        summed = run(part_of_sum, cotangent).astype(held_dtype)
        of_weight = None if weight is None else jnp.zeros_like(weight)
        return summed, of_weight, None if is_nonfinite is None else jnp.float32(is_nonfinite)

    gather.defvjp(forward, backward)
    return gather(*operands)
