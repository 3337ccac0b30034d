"""A shard of a parameter, inside a program.

Outside programs, params are plain global arrays. Inside ``jax.shard_map``, ``local_params`` puts
each shard into a ``Shard``, and ``gather_params`` turns it into a plain array. The gradient with
respect to a ``Shard`` is a ``Shard`` too, because JAX gives gradients the tree structure of their
parameters. Types, not shapes, show which arrays are shards and which gradients are summed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives, trees
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.schedule import Schedule
from jdistadam.errors import MeshError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "weight", "probe"],
    meta_fields=["dim", "ndim", "dtype", "spec"],
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """What this device has of a parameter, or of the sum of its gradients over ``shard_axis``.

    A pytree node around an array. ``jax.tree.map`` and norms over leaves get the values and the
    shape of the shard. Neither name nor shape is static in the node, so equal layers have equal
    tree structures. Dimensions are counted from the end, so they are the same in a stack of layers,
    in one layer and under ``jax.vmap``.

    Attributes:
      value: The array. For a parameter it has the dtype of the gradients, and ``step`` and
        ``gather_params`` round it to ``dtype`` ([Note: widened shards]).
      dim: The dimension that is cut, from the end: -1 is the last one.
      ndim: The number of dimensions of one gathered array. A stack of layers has more.
      dtype: The dtype of the parameter.
      spec: How tensor axes cut those dimensions.
      weight: Only while ``train_step`` differentiates a loss with weights: this device's weight, by
        which ``gather_params`` multiplies gradients before it sums them; one for each layer.
      probe: Only with ``report_nonfinite``: a zero for each layer. Its gradient is the number of
        this device's gradients with a non-finite value, which their sum over devices does not tell.
    """

    value: Any
    dim: int
    ndim: int
    dtype: Any
    spec: P
    weight: Any = None
    probe: Any = None

    @classmethod
    def of_bucket(cls, bucket: Bucket, value: jax.Array, spec: P) -> Shard:
        """Marks this device's shard of a bucket's only leaf, which tensor axes cut by ``spec``."""
        ndim = value.ndim - (bucket.num_layers is not None)
        entries = (list(spec) + [None] * (value.ndim - len(spec)))[value.ndim - ndim :]
        dim, dtype = bucket.cut_dim - value.ndim, jnp.dtype(bucket.dtype)
        return cls(value, dim, ndim, dtype, P(*entries))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return self.value.shape

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of layers that are gathered separately."""
        return len(self.shape) > self.ndim

    def __jax_array__(self, *_: Any) -> NoReturn:
        """Raises TypeError: a shard is not the parameter."""
        raise TypeError(self._misused)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises AttributeError, for methods of arrays."""
        raise AttributeError(f"'Shard' has no attribute {name!r}. It is " + self._misused)

    @property
    def _misused(self) -> str:
        return (
            f"a shard of a parameter, {self.dtype}{list(self.shape)}, is used as if it were the "
            "whole parameter: gather it first, with jdistadam.gather_params(params, tx), or "
            "leave the shard_map with jdistadam.stored_params(params, tx)."
        )


for _name in ("add", "sub", "mul", "matmul", "truediv", "pow"):
    setattr(Shard, f"__{_name}__", Shard.__jax_array__)
    setattr(Shard, f"__r{_name}__", Shard.__jax_array__)
for _name in ("neg", "getitem"):
    setattr(Shard, f"__{_name}__", Shard.__jax_array__)


def with_notes(params: Params, weight: Any, has_probe: bool) -> Any:
    """Params whose shards have this weight, unless it is None, and a probe, if wanted."""

    def one(x: Any) -> Any:
        if not is_shard(x):
            return x
        layers = x.shape[: len(x.shape) - x.ndim]
        of_weight = None if weight is None else jnp.broadcast_to(weight, layers)
        probe = jnp.zeros(layers, jnp.float32) if has_probe else None
        return dataclasses.replace(x, weight=of_weight, probe=probe)

    return jax.tree.map(one, params, is_leaf=is_shard)


def is_shard(x: Any) -> bool:
    """Whether this node of a tree is a ``Shard``."""
    return isinstance(x, Shard)


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves of a tree, with each ``Shard`` as one leaf."""
    return jax.tree.leaves(tree, is_leaf=is_shard)


def plain(tree: Any) -> Any:
    """Returns a tree with the arrays of its shards."""
    return jax.tree.map(lambda x: x.value if is_shard(x) else x, tree, is_leaf=is_shard)


def as_shards(params: Any) -> Any:
    """Returns plain params in their own dtypes, as a device has them between steps."""

    def held(x: Any) -> Any:
        return x.value.astype(x.dtype) if is_shard(x) else x

    return jax.tree.map(held, params, is_leaf=is_shard)


def in_form_of(like: Any, tree: Any) -> Any:
    """Returns a tree of plain arrays, with ``Shard`` wherever ``like`` has one.

    Other leaves then have the types that ``local_params`` gives them, for shard_map's checks.
    """
    if not any(map(is_shard, leaves_of(like))):
        return tree

    def wrap(like: Any, x: Any) -> Any:
        if not is_shard(like):
            return collectives.to_varying(x, tuple(collectives.varying_axes(like)))
        return dataclasses.replace(like, value=x.astype(like.value.dtype))

    return jax.tree.map(wrap, like, tree, is_leaf=is_shard)


def refuse_sums(grads: Grads, what: str, action: str) -> None:
    """Raises MeshError if a gradient is a ``Shard``, which is already the sum over devices."""
    for path, x in zip(trees.paths(plain(grads), "grads"), leaves_of(grads), strict=True):
        if is_shard(x):
            raise MeshError(
                f"{path}: already summed over the devices{what}: got a shard of shape {x.shape}, "
                f"expected this device's own gradient of the whole parameter. {action}"
            )


def refuse_unmarked(schedule: Schedule | None, params: Params) -> None:
    """Raises MeshError if shards are, or may be, plain arrays, as far as params are known.

    Args:
      schedule: The schedule of the params to which the optimizer is bound.
      params: All of them, or a subtree.
    """
    if any(map(is_shard, leaves_of(params))):
        return
    leaves: list[Any] = jax.tree.leaves(params)
    if schedule is None and leaves:
        raise MeshError(
            "gather_params: no shard among these params: "
            "got plain arrays, and an optimizer that was not bound to params, "
            "expected what local_params(params, opt) returns, with opt = tx.bind(params). "
            "Call local_params first. If you pass opt in place of tx, parts without shards are "
            "allowed too."
        )
    if schedule is None or jax.tree.structure(params) != schedule.treedef:
        return
    for bucket in schedule.layout.buckets:
        leaf = schedule.layout.leaves[bucket.leaf] if bucket.is_sharded_param else None
        if leaf is not None and leaves[bucket.leaf].shape == bucket.inner_shape != leaf.shape:
            raise MeshError(
                f"{leaf.path}: not marked as a shard: got an array of shape {bucket.inner_shape}, "
                "expected what local_params(params, opt) returns. "
                "Call gather_params(local_params(params, opt), opt)."
            )
