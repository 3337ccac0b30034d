"""What an optimizer has seen of params: their schedules, by the shapes that devices hold.

A layout is made of the shapes of unsharded params. Inside of ``jax.shard_map`` a device that holds
only shards of them sees other shapes. So ``init`` and ``param_specs``, which run outside and see
whole ones, note down here what the shards will look like, and what one layer of stacked ones will.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.types import Params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import BucketSchedule, Schedule
from jdistadam.errors import MeshError


class SeenParams:
    """The schedules of the params that one optimizer has seen. Each is made once."""

    def __init__(self, config: DistributedConfig) -> None:
        self._config = config
        self._schedules: dict[Any, Schedule] = {}  # by the shapes of unsharded params
        # Keys of unsharded params, by those of what devices hold, and of the same widened.
        self._held: dict[Any, list[Any]] = {}
        self._widened: dict[Any, list[Any]] = {}
        # By the shapes of one layer, then by the dimensions that are scattered, and the dtypes.
        self._layers: dict[Any, dict[Any, tuple[LayerLeaf | None, ...]]] = {}

    def share(self, other: SeenParams) -> None:
        """Knows from here on what an optimizer with the same layouts has seen, and the reverse."""
        self._schedules, self._layers = other._schedules, other._layers
        self._held, self._widened = other._held, other._widened

    def schedule_of_whole(self, whole: Params) -> Schedule:
        """Returns the schedule for unsharded params, arrays or shapes; remembers their shards."""
        key = _key(whole)
        if key not in self._schedules:
            schedule = self._config.schedule(whole)
            self._schedules[key] = schedule
            if self._config.parallel.shards_params:
                self._remember_shards(key, schedule, whole)
        return self._schedules[key]

    def schedule(self, params: Params, *, may_be_widened: bool = True) -> Schedule:
        """Returns the schedule for params as a device holds them inside of shard_map.

        Args:
          params: The params, arrays or shapes.
          may_be_widened: Whether they may also be what ``local_params`` returned, or gradients.

        Raises:
          MeshError: Shards of these shapes belong to no known params, or to several.
        """
        if not self._config.parallel.shards_params:
            return self.schedule_of_whole(params)
        key = _key(params)
        found = self._held.get(key, []) + (self._widened.get(key, []) if may_be_widened else [])
        known = list(dict.fromkeys(found))
        if not known and key in self._schedules:
            return self._schedules[key]  # gathered already
        if len(known) != 1:
            raise MeshError(
                "params",
                "shards of these shapes belong to no known params, or to several",
                got=f"{len(known)} params with such shards",
                expected="the params of one init, or of one param_specs",
                action="Call tx.init(params) or tx.param_specs(params) outside of shard_map "
                "first, with this tx; use one tx for each model and dtype.",
            )
        return self._schedules[known[0]]

    def layer(self, shards: Any) -> tuple[LayerLeaf | None, ...] | None:
        """Returns how to gather each leaf of one layer of stacked params.

        Of a leaf that is not scattered: None. In all None: this is not one layer of what was seen.

        Raises:
          MeshError: Two layers that are sharded in different ways look like this one.
        """
        known = list(self._layers.get(_key(shards), {}).values())
        if len(known) > 1:
            raise MeshError(
                "params",
                "one layer's shards of these shapes can be gathered in several ways",
                got=f"{len(known)} ways",
                expected="one",
                action="Gather a larger part of the layer at once, or use one tx per model.",
            )
        return known[0] if known else None

    def _remember_shards(self, key: Any, schedule: Schedule, whole: Params) -> None:
        """Notes what devices hold, and what the loss of train_step gets: stacked leaves alone."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(whole)]
        held, in_loss = list(shapes), list(shapes)
        widened, widened_in_loss = list(shapes), list(shapes)
        sharded: dict[int, BucketSchedule] = {}
        for entry in schedule.buckets:
            bucket = entry.bucket
            if not bucket.is_sharded_param:
                continue
            i, dtype = bucket.leaf, shapes[bucket.leaf].dtype
            held[i] = jax.ShapeDtypeStruct(bucket.inner_shape, dtype)
            widened[i] = held[i].update(dtype=self._config.differentiated_dtype(dtype))
            if bucket.num_layers is not None:
                sharded[i], in_loss[i], widened_in_loss[i] = entry, held[i], widened[i]
        treedef: Any = jax.tree.structure(whole)
        for table, forms in (
            (self._held, (held, in_loss)),
            (self._widened, (widened, widened_in_loss)),
        ):
            for form in forms:
                known = table.setdefault(_key(treedef.unflatten(form)), [])
                if key not in known:
                    known.append(key)
        for form in (in_loss, widened_in_loss):
            leaves = [
                _StackedLeaf(shape, _layer_leaf(sharded.get(i))) if leaf.is_stacked else None
                for i, (shape, leaf) in enumerate(zip(form, schedule.layout.leaves, strict=True))
            ]
            self._remember_layers(treedef.unflatten(leaves))

    def _remember_layers(self, stacked: Any) -> None:
        """Notes what one layer looks like; in the tree are None where leaves are not stacked."""
        for subtree in _subtrees(stacked):
            parts = jax.tree.leaves(subtree, is_leaf=lambda x: x is None)
            if parts and all(part is not None for part in parts):
                gathered = tuple(part.layer for part in parts)
                ways = tuple(
                    layer and (layer.dim, jnp.dtype(layer.schedule.bucket.dtype))
                    for layer in gathered
                )
                self._layers.setdefault(_key(subtree), {})[ways] = gathered


class LayerLeaf(NamedTuple):
    """How one layer of a stacked leaf is gathered.

    Attributes:
      dim: The dimension of the layer that is scattered.
      schedule: What its bucket sends for each layer.
    """

    dim: int
    schedule: BucketSchedule


def _layer_leaf(entry: BucketSchedule | None) -> LayerLeaf | None:
    """How a layer of a leaf with this schedule is gathered; None if it is not scattered."""
    return None if entry is None else LayerLeaf(entry.bucket.cut_dim - 1, entry)


class _StackedLeaf:
    """The shape of one layer of a stacked leaf, and how it is gathered."""

    def __init__(self, stacked: Any, layer: LayerLeaf | None) -> None:
        self.shape, self.dtype, self.layer = stacked.shape[1:], stacked.dtype, layer


def _subtrees(tree: Any) -> Iterator[Any]:
    """Yields a tree and all trees within it, leaves too."""
    yield tree
    one_level = jax.tree_util.default_registry.flatten_one_level(tree)
    for child in () if one_level is None else one_level[0]:
        yield from _subtrees(child)


def _key(tree: Any) -> Any:
    leaves = tuple((tuple(x.shape), jnp.dtype(x.dtype).name) for x in jax.tree.leaves(tree))
    return jax.tree.structure(tree), leaves
