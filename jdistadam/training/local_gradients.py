"""Local gradients of one device, over one or several micro-batches; inside ``jax.shard_map``."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, trees
from jdistadam.distributed.accumulate import weighted
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import ShapeError
from jdistadam.training.loss_function import LossFunction, LossOutput, refuse_summed_loss
from jdistadam.training.nonfinite import leaves_not_finite


class LocalResult(NamedTuple):
    """What one device found in its part of the batch."""

    grads: Any  # a tree like params, or AccumulatedGrads
    loss: jax.Array  # shape (), float32: the weighted sum over micro-batches
    weight: Any  # shape (), float32: the sum of weights; None: 1
    model_state: Any
    aux: Any  # every leaf with a leading dimension of micro-batches
    not_finite: Any = None  # shape (leaves,), bool: in any micro-batch; None unless asked for


def local_gradients(
    loss_fn: LossFunction,
    tx: DistributedTransformation,
    accumulate_steps: int,
    params: Any,
    batch: Any,
    model_state: Any,
    rng: Any,
    loss_scale: Any = None,
    report_nonfinite: bool = False,
) -> LocalResult:
    """Differentiates the loss of this device's part of the batch, micro-batch by micro-batch.

    With a ``loss_scale``, the gradients are those of the loss times the scale. The model state
    passes from one micro-batch to the next; ``rng`` is folded with the device and the micro-batch.
    """
    if rng is not None:
        rng = jax.random.fold_in(rng, collectives.axis_index(tx.config.parallel.data_axes))

    def differentiate(i: Any, batch: Any, model_state: Any) -> tuple[LossOutput, Any]:
        def loss_and_output(params: Any) -> tuple[jax.Array, LossOutput]:
            key = None if rng is None else jax.random.fold_in(rng, i)
            out = loss_fn(params, batch, model_state, key)
            return out.loss if loss_scale is None else out.loss * loss_scale, out

        if tx.config.parallel.num_devices > 1:
            axes = tx.config.parallel.data_axes
            refuse_summed_loss(lambda params: loss_and_output(params)[1].loss, params, axes)
        (_, out), grads = jax.value_and_grad(loss_and_output, has_aux=True)(params)
        return out, grads

    def look(grads: Any) -> Any:
        return leaves_not_finite(grads) if report_nonfinite else None

    def body(carry: Any, i_and_batch: tuple[Any, Any]) -> tuple[Any, Any]:
        acc, loss, model_state, found = carry
        i, batch = i_and_batch
        out, grads = differentiate(i, batch, model_state)
        acc = tx.accumulate(acc, grads, out.weight)
        loss += out.loss if out.weight is None else weighted(out.loss, out.weight)
        found = None if found is None else found | look(grads)
        return (acc, loss, _like(model_state, out.model_state), found), out.aux

    if accumulate_steps == 1:
        out, grads = differentiate(0, batch, model_state)
        new_state = _like(model_state, out.model_state)
        aux = jax.tree.map(lambda x: jnp.asarray(x)[None], out.aux)
        if out.weight is None:
            return LocalResult(grads, out.loss, None, new_state, aux, look(grads))
        acc = tx.accumulate(tx.init_grads(params), grads, out.weight)
        loss = weighted(out.loss, out.weight)
        return LocalResult(acc, loss, acc.weight, new_state, aux, look(grads))
    batches = _split(batch, accumulate_steps)
    found = jnp.zeros(len(jax.tree.leaves(params)), jnp.bool_) if report_nonfinite else None
    carry = (tx.init_grads(params), jnp.zeros((), jnp.float32), model_state, found)
    (acc, loss, model_state, found), aux = jax.lax.scan(
        body, carry, (jnp.arange(accumulate_steps), batches)
    )
    if not loss_fn.weighted:  # known while compiling, and the same on all devices
        acc = dataclasses.replace(acc, weight=np.float32(accumulate_steps))
    return LocalResult(acc, loss, acc.weight, model_state, aux, found)


def _like(old: Any, new: Any) -> Any:
    """Keeps the dtypes of a model state, which a step must not change."""

    def like(old: Any, new: Any) -> Any:
        is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
        return new if is_key else jnp.asarray(new).astype(old.dtype)

    return jax.tree.map(like, old, new)


def _split(batch: Any, accumulate_steps: int) -> Any:
    """Cuts the leading dimension into micro-batches."""

    def split(path: str, x: Any) -> Any:
        if not x.ndim or x.shape[0] % accumulate_steps:
            raise ShapeError(
                path,
                "a device's part does not divide into micro-batches",
                got=x.shape,
                expected=f"a leading dimension that is a multiple of {accumulate_steps}",
                action="Change the batch size or accumulate_steps.",
            )
        return x.reshape(accumulate_steps, x.shape[0] // accumulate_steps, *x.shape[1:])

    leaves = [
        split(path, x)
        for path, x in zip(trees.paths(batch, "batch"), jax.tree.leaves(batch), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)
