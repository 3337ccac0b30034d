"""The forward pass and the gradients of one device over micro-batches; inside ``jax.shard_map``.

[Note: last micro-batch] Micro-batches run in a loop. If their gradients are summed on the device
and sent once, the last one runs after the loop, where XLA can overlap its backward pass with the
sums over devices, or with the transfer of a state in host memory. It is compiled a second time.

[Note: vectors behind a barrier] If a vector, such as the scale of a norm, is an argument of the
program, XLA for GPUs fuses its product with activations into each matrix product that takes the
result: forward, and for the gradient of the weights. It then multiplies more than once, and cannot
leave the matrix product to cuBLAS as it is. Behind a barrier the vector is no argument, and its
product is computed once, in the kernel of the norm.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, trees
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed import model_axes
from jdistadam.distributed.accumulate import AccumulatedGrads, mean_factor, weighted
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.gather_params import (
    gathered_before_loss,
    in_loss,
    local_params,
)
from jdistadam.distributed.shard import is_shard, leaves_of, with_notes
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import ShapeError
from jdistadam.training.loss import (
    LossFunction,
    LossOutput,
    leaves_not_finite,
    refuse_lone_parts,
    refuse_summed_loss,
)
from jdistadam.training.traced_gradients import with_order, without_effects
from jdistadam.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Forward:
    """The loss of this device's micro-batches at the params of a state.

    Attributes:
      loss_fn: The loss.
      tx: The optimizer, bound to the params.
      params: The arguments of the loss, by which it is differentiated: unsharded, except that
        params that the model gathers have the type ``Shard``.
      rng: The key of the step; None if the state has none.
      next_rng: The key of the next state.
      first: The place of this device's first micro-batch among those of all devices.
    """

    loss_fn: LossFunction
    tx: DistributedTransformation
    params: Params
    rng: Any
    next_rng: Any
    first: Any

    @classmethod
    def at(
        cls,
        state: TrainState,
        loss_fn: LossFunction,
        tx: DistributedTransformation,
        accumulate_steps: int = 1,
    ) -> Forward:
        """Makes it from this device's part of a state."""
        parallel = tx.config.parallel
        next_rng = rng = None
        if state.rng is not None:
            next_rng, rng = jax.random.split(state.rng)
        params = state.params
        if parallel.shards_params:  # params that the model gathers stay shards
            params = gathered_before_loss(local_params(params, tx), tx)
        if parallel.is_on_gpu:  # [Note: vectors behind a barrier]
            params = jax.tree.map(_no_argument, params, is_leaf=is_shard)
        first = collectives.axis_index(parallel.data_axes) * accumulate_steps
        return cls(loss_fn, tx, params, rng, next_rng, first)

    def output(self, i: Any, batch: Any, model_state: Any) -> Callable[[Params], LossOutput]:
        """Returns the loss function's output for micro-batch ``i``, as a function of the params.

        Raises:
          PolicyError: The loss is already summed over the devices.
        """

        def output(params: Params) -> LossOutput:
            # One number for device and micro-batch: where fold_in is XOR, as in "unsafe_rbg",
            # two in turn would give (0, 1) and (1, 0) the same key.
            key = None if self.rng is None else jax.random.fold_in(self.rng, self.first + i)
            with in_loss():
                return self.loss_fn(params, batch, model_state, key)

        parallel = self.tx.config.parallel
        if parallel.num_devices > 1:
            refuse_summed_loss(lambda p: output(p).loss, self.params, parallel.data_axes)
            assert self.tx.bound is not None
            leaves = self.tx.bound.layout.leaves
            split = {x.path: parallel.splitting(x.tensor_axes) for x in leaves if x.split > 1}
            refuse_lone_parts(lambda p: output(p).loss, self.params, split)
        return output


def _no_argument(x: Any) -> Any:
    is_vector = not is_shard(x) and x.ndim < 2
    return jax.lax.optimization_barrier(x) if is_vector else x


def mean_loss(config: DistributedConfig, loss: jax.Array, weight: Any) -> jax.Array:
    """The mean of all devices' losses, by the weights that ``mean_factor`` takes."""
    total = collectives.all_reduce(loss, config.parallel.data_axes)
    return total * mean_factor(config, weight)[0]


class LocalResult(NamedTuple):
    """The results of one device for its part of the batch."""

    grads: Grads  # a tree like params, or AccumulatedGrads
    loss: jax.Array  # shape (), float32: the weighted sum over micro-batches
    weight: Any  # shape (), float32: the sum of weights; None: 1
    model_state: Any
    aux: Any  # every leaf with a leading dimension of micro-batches
    not_finite: Any = None  # shape (leaves,), bool: in any micro-batch; None unless asked for
    order: tuple[int, ...] = ()  # of the leaves, as their gradients are known; () if unknown
    kept: tuple[bool, ...] = ()  # for each leaf of the model state, whether the loss returns it


def local_gradients(
    forward: Forward,
    *,
    accumulate_steps: int,
    batch: Any,
    model_state: Any,
    loss_scale: Any = None,
    report_nonfinite: bool = False,
) -> LocalResult:
    """Differentiates the loss of this device's part of the batch, one micro-batch at a time.

    With a ``loss_scale``, gradients are those of the loss times the scale. The model state passes
    from one micro-batch to the next.
    """
    gradient = _Gradient(forward, loss_scale, report_nonfinite)
    if accumulate_steps == 1:
        return _of_one_batch(gradient, batch, model_state)
    batches = _split(batch, accumulate_steps)
    return _of_micro_batches(gradient, batches, accumulate_steps, model_state)


class _MicroBatch(NamedTuple):
    """The results of differentiating one micro-batch."""

    out: LossOutput
    grads: Grads
    not_finite: Any  # shape (leaves,), bool; None unless asked for
    order: tuple[int, ...]  # of the leaves, as their gradients are known; () if unknown
    kept: tuple[bool, ...]  # for each leaf of the model state, whether the loss returns it


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The gradient of a loss at fixed params, as a function of the batch."""

    forward: Forward
    loss_scale: Any
    report_nonfinite: bool

    def __call__(
        self, i: Any, batch: Any, model_state: Any, *, is_in_loop: bool = False
    ) -> _MicroBatch:
        """Differentiates micro-batch ``i``."""
        params, config = self.forward.params, self.forward.tx.config
        output, weight = self.forward.output(i, batch, model_state), None
        weighted_in = self.weighted_in
        if weighted_in is not None:  # [Note: weights before the sum]
            weight = without_effects(lambda params: output(params).weight, params)
        of_shards = jnp.float32(weight != 0) if weighted_in == "loss" else weight

        def loss_and_output(params: Params) -> tuple[jax.Array, LossOutput]:
            out = output(params)
            loss = weighted(out.loss, weight) if weighted_in == "loss" else out.loss
            return loss if self.loss_scale is None else loss * self.loss_scale, out

        def differentiate(params: Params) -> tuple[Any, Grads]:
            noted = with_notes(params, of_shards, self.report_nonfinite)
            if weighted_in == "loss":
                noted = self._each(noted, _without_weight, lambda x: x)
            (_, out), grads = jax.value_and_grad(loss_and_output, has_aux=True)(noted)
            not_finite = leaves_not_finite(grads) if self.report_nonfinite else None
            return (out, not_finite), with_notes(grads, None, has_probe=False)

        is_ordered = config.updates_early or config.transport.is_peer
        order = tuple[int, ...]()
        if is_ordered and weight is None and not is_in_loop:
            ((out, not_finite), grads), order = with_order(differentiate, params)
        else:
            (out, not_finite), grads = differentiate(params)
        out = out if weight is None else out._replace(weight=weight)
        if not_finite is not None and out.weight is not None:
            is_split = np.asarray(self._are_split(), np.bool_)
            not_finite &= (out.weight != 0) | is_split  # such a micro-batch does not count
        if weighted_in == "loss":
            grads = self._without_padding(grads, weight)
        pairs = zip(*map(jax.tree.leaves, (model_state, out.model_state)), strict=True)
        kept = tuple(old is new for old, new in pairs)
        new_state = _like(model_state, out.model_state)
        out = out._replace(model_state=new_state)
        return _MicroBatch(out, grads, not_finite, order, kept)

    def _are_split(self) -> list[bool]:
        """For each leaf whether its gradient is of the data of several devices, as for experts."""
        bound = self.forward.tx.bound
        assert bound is not None
        return [leaf.split > 1 for leaf in bound.layout.leaves]

    @property
    def weighted_in(self) -> str | None:
        """Where gradients get their weight, if not when they are accumulated."""
        if not self.forward.loss_fn.weighted:
            return None
        if any(self._are_split()):
            return "loss"
        return "gather" if any(map(is_shard, leaves_of(self.forward.params))) else None

    def _without_padding(self, grads: Grads, weight: Any) -> Any:
        """Weighted gradients; those of this device's data alone do not count at weight zero."""

        def one(x: Any) -> Any:
            return x if is_shard(x) else jnp.where(weight == 0, 0, x).astype(x.dtype)

        return self._each(grads, lambda x: x, one)

    def _each(self, tree: Any, of_split: Callable[[Any], Any], of_others: Any) -> Any:
        """A tree with one function of the leaves that are split, and another one of all others."""
        treedef: Any = jax.tree.structure(tree, is_leaf=is_shard)
        pairs = zip(leaves_of(tree), self._are_split(), strict=True)
        return treedef.unflatten(of_split(x) if split else of_others(x) for x, split in pairs)

    def add(self, acc: AccumulatedGrads, batch: _MicroBatch) -> AccumulatedGrads:
        """Adds the gradients of a micro-batch with its weight."""
        return model_axes.accumulate(
            self.forward.tx.config,
            acc,
            batch.grads,
            batch.out.weight,
            weighted_in=self.weighted_in,
        )


def _without_weight(x: Any) -> Any:
    return dataclasses.replace(x, weight=None) if is_shard(x) else x


def _of_one_batch(gradient: _Gradient, batch: Any, model_state: Any) -> LocalResult:
    result = gradient(0, batch, model_state)
    out, grads = result.out, result.grads
    if out.weight is not None:
        forward = gradient.forward
        grads = gradient.add(forward.tx.init_grads(forward.params), result)
    return LocalResult(
        grads=grads,
        loss=out.weighted_loss,
        weight=None if out.weight is None else grads.weight,
        model_state=out.model_state,
        aux=jax.tree.map(lambda x: jnp.asarray(x)[None], out.aux),
        not_finite=result.not_finite,
        order=result.order,
        kept=result.kept,
    )


def _of_micro_batches(
    gradient: _Gradient, batches: Any, accumulate_steps: int, model_state: Any
) -> LocalResult:
    tx, params = gradient.forward.tx, gradient.forward.params
    last, kept = accumulate_steps - 1, tuple[bool, ...]()

    def add(carry: Any, i: Any, batches: Any, **options: Any) -> tuple[Any, _MicroBatch]:
        nonlocal kept
        acc, loss, model_state, not_finite = carry
        result = gradient(i, jax.tree.map(lambda x: x[i], batches), model_state, **options)
        kept = result.kept  # the same for all
        acc = gradient.add(acc, result)
        loss += result.out.weighted_loss
        not_finite = None if not_finite is None else not_finite | result.not_finite
        return (acc, loss, result.out.model_state, not_finite), result

    def in_loop(carry: Any, i: Any) -> tuple[Any, Any]:
        carry, result = add(carry, i, batches, is_in_loop=True)
        return carry, result.out.aux

    num_leaves = len(jax.tree.leaves(params))
    not_finite = jnp.zeros(num_leaves, jnp.bool_) if gradient.report_nonfinite else None
    carry = (tx.init_grads(params), jnp.zeros((), jnp.float32), model_state, not_finite)
    is_last_apart, order = _runs_last_apart(tx.config), tuple[int, ...]()
    carry, aux = jax.lax.scan(in_loop, carry, jnp.arange(accumulate_steps - is_last_apart))
    if is_last_apart:  # the barrier: activations of the last one do not exist during the loop
        carry, result = add(*jax.lax.optimization_barrier((carry, last, batches)))
        order = result.order
        ends = jax.tree.map(lambda x: jnp.asarray(x)[None], result.out.aux)
        aux = jax.tree.map(lambda x, end: jnp.concatenate([x, end]), aux, ends)
    acc, loss, model_state, not_finite = carry
    if not gradient.forward.loss_fn.weighted:  # known at compile time, and the same on all devices
        acc = dataclasses.replace(acc, weight=np.float32(accumulate_steps))
    return LocalResult(
        grads=acc,
        loss=loss,
        weight=acc.weight,
        model_state=model_state,
        aux=aux,
        not_finite=not_finite,
        order=order,
        kept=kept,
    )


def _runs_last_apart(config: DistributedConfig) -> bool:
    """Whether the last micro-batch runs after the loop: [Note: last micro-batch]."""
    parallel = config.parallel
    return config.updates_early or (parallel.num_devices > 1 and not parallel.shards_grads)


def _like(old: Any, new: Any) -> Any:
    """Keeps the dtypes of a model state, which a step must not change."""

    def like(old: Any, new: Any) -> Any:
        return new if trees.is_key(old) else jnp.asarray(new).astype(old.dtype)

    return jax.tree.map(like, old, new)


def _split(batch: Any, accumulate_steps: int) -> Any:
    """Splits the leading dimension into micro-batches."""

    def split(path: str, x: Any) -> Any:
        if not x.ndim or x.shape[0] % accumulate_steps:
            raise ShapeError(
                f"{path}: a device's part does not divide into micro-batches: got {x.shape}, "
                f"expected a leading dimension that is a multiple of {accumulate_steps}. "
                "Change the batch size or accumulate_steps."
            )
        return x.reshape(accumulate_steps, x.shape[0] // accumulate_steps, *x.shape[1:])

    leaves = itertools.starmap(split, trees.named_leaves(batch, "batch"))
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)
