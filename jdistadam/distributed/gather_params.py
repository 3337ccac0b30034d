"""Parameters as a loss takes them: local to a device, and whole, with local or summed gradients.

[Note: widened shards] JAX gives a gradient the dtype of what it belongs to. That of a bfloat16
shard would round the float32 sum that ``gather_params`` makes of gradients. So shards are widened
before they are differentiated, to a dtype that holds the sums too, and rounded to their own before
they are sent; both are exact. It costs a copy of the shards while the loss is differentiated: in
float32 4 / N bytes per parameter. A zero of that shape beside each shard would cost as much, and
change the tree that the loss sees.

[Note: weights before the sum] The gradients of scanned layers are summed over devices inside of the
backward pass, so a device's weight must be applied there. But a backward pass can use only what its
forward pass knew, and ``loss_fn`` returns the weight at the end. So ``train_step`` calls
``loss_fn`` once more, before, for the weight alone: XLA keeps of this what the weight depends on.
``gather_params``, which ``loss_fn`` calls, finds the weight in a context of JAX's own kind, a part
of the keys of JAX's caches: nothing that was traced with another weight is used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import varying
from jdistadam.core.types import Params
from jdistadam.distributed import model_axes, transport
from jdistadam.distributed.accumulate import weighted
from jdistadam.distributed.checks import check_inside
from jdistadam.distributed.schedule import BucketSchedule
from jdistadam.distributed.seen_params import LayerLeaf
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed


def local_params(params: Params, tx: DistributedTransformation) -> Any:
    """Marks params as this device's own; called before ``jax.grad``, inside ``jax.shard_map``.

    Inside ``jax.shard_map(check_vma=True)`` the gradient of a replicated array is summed over the
    devices on the way; of the array that this returns, it stays local, as ``tx.step`` needs it.

    Under "optim_grads_params" it also widens the shards of parameters to a dtype that holds the
    sums of their gradients, float32 unless ``policy`` says that these have 16 bits: so a gradient
    is not rounded between its sum and ``tx.step``. ``gather_params`` rounds the shards back before
    they are sent. In float32 that copy takes 4 / N bytes per parameter.

    Raises:
      MeshError: Called outside of shard_map, or the shapes of these shards are not known.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "local_params", over_data_alone=True)
    axes = tx.config.parallel.data_axes
    leaves: list[Any] = list(jax.tree.leaves(params))
    if tx.config.parallel.shards_params:
        on_a_device, _ = model_axes.each_leaf(tx.config, params)
        held = jax.tree.leaves(on_a_device)
        for entry in tx.seen.schedule(on_a_device).buckets:
            bucket = entry.bucket
            if bucket.is_sharded_param and held[bucket.leaf].shape == bucket.inner_shape:
                dtype = tx.config.differentiated_dtype(bucket.dtype)
                leaves[bucket.leaf] = jnp.asarray(leaves[bucket.leaf]).astype(dtype)
    treedef: Any = jax.tree.structure(params)
    return treedef.unflatten(varying.to_varying(x, axes) for x in leaves)


def gather_params(shards: Any, tx: DistributedTransformation) -> Any:
    r"""Gathers sharded parameters over ``shard_axis``; inside ``jax.shard_map``.

    For "optim_grads_params"; else it returns what it is given, so that a model need not know the
    strategy. Leaves that are not sharded are returned as they are, and so are stacked ones, unless
    ``shards`` is one layer of them inside of ``jax.lax.scan``. Shards are sent in
    ``policy.param_comm_dtype``. The gradient with respect to a shard is this device's part of

    .. math:: \sum_r g_r

    summed over ``shard_axis`` as the policy says; ``step`` takes it as it is, and gradients with
    respect to the whole leaf likewise. It has the dtype of the shard, so differentiate by what
    ``local_params`` returns, whose shards are wide enough for it. In a custom training loop::

        grads = jax.grad(lambda p: loss(jda.gather_params(p, tx)))(jda.local_params(params, tx))

    In a model that scans over stacked layers, also under ``train_step``::

        @functools.partial(jax.checkpoint, policy=jda.remat_policy, prevent_cse=False)
        def body(x, layer):
            return block(jda.gather_params(layer, tx), x), None

        x, _ = jax.lax.scan(body, x, params["layers"])

    so that two or three layers' parameters are whole at a time: on GPUs ``train_step`` compiles
    loops such that the next layer is gathered, and the last layer's gradients are reduced, while
    this layer is computed. ``prevent_cse=False``, which is safe inside of a scan, lets XLA do this
    in the backward pass too. ``train_step`` hands stacked leaves to ``loss_fn`` as ``local_params``
    returns them; with ``weighted``, a layer's gradients are multiplied by the weight before they
    are summed.

    With ``reshard_after_forward=False`` it gathers all params, stacked ones too, and a layer of
    those is returned as it is. In a custom training loop gather once per step, before they are
    differentiated; micro-batches share what was gathered, and ``accumulate`` takes no others::

        whole = jda.local_params(jda.gather_params(params, tx), tx)
        grads = jax.grad(loss)(whole, batch)
        params, state = tx.step(grads, state, params)

    Args:
      shards: The params as this device holds them, or as ``local_params`` returned them; or one
        layer of stacked params: any part of the tree of which all leaves are stacked.
      tx: The optimizer. ``tx.init`` or ``tx.param_specs`` must have seen the params.

    Returns:
      The unsharded params, on every device, in their own dtypes.

    Raises:
      MeshError: Called outside of shard_map, or the shapes of these shards are not known.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "gather_params", over_data_alone=True)
    if not tx.config.parallel.shards_params:
        return shards
    leaves: list[Any] = list(jax.tree.leaves(shards))
    on_a_device, run = model_axes.each_leaf(tx.config, shards)
    layer = tx.seen.layer(on_a_device)
    if layer is not None:
        weight = _weight_of_layers()
        for i, leaf in enumerate(layer):
            if leaf is not None:
                leaves[i] = _gather_leaf(leaf, leaves[i], weight, run(i))
    else:
        for i, entry in _sharded_leaves(tx, on_a_device).items():
            leaf = LayerLeaf(entry.bucket.cut_dim, entry)
            leaves[i] = _gather_leaf(leaf, leaves[i], None, run(i))
    return jax.tree.unflatten(jax.tree.structure(shards), leaves)


class LayerWeight:
    """The weight of one micro-batch, while its loss is traced: [Note: weights before the sum].

    Attributes:
      weight: Shape (), float32.
      is_used: Whether a layer was gathered, so that its gradients will be weighted.
    """

    def __init__(self, weight: Any) -> None:
        self.weight: Any = weight
        self.is_used = False


_layer_weight = jax.make_user_context(None)


@contextlib.contextmanager
def weighting_layers(weight: Any) -> Iterator[LayerWeight]:
    """Has ``gather_params`` multiply the gradients of layers by a weight before it sums them."""
    current = LayerWeight(weight)
    with _layer_weight(current):
        yield current
    current.weight = None  # JAX's caches keep their keys: not the traced program too


def _weight_of_layers() -> Any:
    current = _layer_weight.value
    if current is None:
        return None
    current.is_used = True
    return current.weight


def remat_policy(primitive: Any, *_: Any, **__: Any) -> bool:
    """Says what ``jax.checkpoint`` saves; what ``gather_params`` returned is re-gathered.

    Saved is what costs time to compute: products, reductions, exponentials, custom calls. What
    only moves or converts is done again, so that no gathered parameter stays in memory from the
    forward to the backward pass::

        body = jax.checkpoint(body, policy=jda.remat_policy, prevent_cse=False)  # in a scan

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=remat_policy)
      >>> jax.grad(lambda w: f(w, jnp.ones((1, 2))).sum())(jnp.zeros((2, 2))).tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """
    return primitive.name not in _GATHERED_AGAIN


# The collective itself, and what may be between it and the first use: saved, these would keep a
# whole parameter alive.
_GATHERED_AGAIN = frozenset(
    "all_gather all_gather_invariant pvary pcast reduce_precision optimization_barrier name "
    "convert_element_type bitcast_convert_type reshape squeeze expand_dims transpose "
    "broadcast_in_dim slice concatenate copy custom_vjp_call jit".split()
)


def _sharded_leaves(tx: DistributedTransformation, shards: Any) -> dict[int, BucketSchedule]:
    """Which leaves of all params to gather at once, and how."""
    leaves, gathered = jax.tree.leaves(shards), {}
    for entry in tx.seen.schedule(shards).buckets:
        bucket = entry.bucket
        is_scanned = bucket.num_layers is not None  # gathered layer by layer
        if bucket.is_sharded_param and not is_scanned:
            if leaves[bucket.leaf].shape == bucket.inner_shape:
                gathered[bucket.leaf] = entry
    return gathered


def _gather_leaf(
    leaf: LayerLeaf,
    shard: jax.Array,
    weight: Any,
    run: Callable[..., jax.Array],
) -> jax.Array:
    """Gathers one leaf; ``run(f, x)`` is ``f(x)``, manual over all axes of the mesh."""
    dim, entry = leaf

    def whole(x: jax.Array) -> Any:
        return transport.gather_parameters(entry.gather, x, dim, to="varying")

    def part_of_sum(x: jax.Array) -> Any:
        return transport.sum_gradients([entry.reduce], x, dim)

    @jax.custom_vjp
    def gather(shard: jax.Array, weight: Any) -> jax.Array:
        own = shard.astype(entry.bucket.dtype)  # exact: [Note: widened shards]
        # Typed as varying: otherwise types would have every use of it summed over the devices.
        return run(whole, own)

    def forward(shard: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
        return gather(shard, weight), weight

    def backward(weight: Any, cotangent: jax.Array) -> tuple[jax.Array, Any]:
        if weight is not None:
            cotangent = weighted(cotangent.astype(jnp.float32), weight)
        summed = run(part_of_sum, cotangent)
        return summed.astype(shard.dtype), None if weight is None else jnp.zeros_like(weight)

    gather.defvjp(forward, backward)
    return gather(shard, weight)
