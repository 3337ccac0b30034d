"""The flat arrays of a distributed state by parameter, outside of ``jax.shard_map``.

``flat_arrays.Field`` describes what a flat array holds, and the layout where. One is made and
taken apart in three ways, because there are three ways to run:

- inside of shard_map, ``step.init_local`` begins all of one device;
- in programs over global arrays, a few leaves at a time, so that none ever exists twice:
  ``extract`` and ``insert``, for checkpoints and for states that are large;
- on the host, a whole one at once: ``to_host`` and ``from_host``, for optax's form.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdistadam import compat
from jdistadam.core.codecs import BLOCK
from jdistadam.core.guards import Guard, continued
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed import bucket_leaves, flat_arrays, packing
from jdistadam.distributed.config import DistributedConfig, global_specs
from jdistadam.distributed.flat_arrays import fields_of, is_flat_codes
from jdistadam.distributed.global_arrays import fetch
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.main_params import begun_shard
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.state import map_state


class StateView:
    """The fields of states of one optimizer for params of one layout.

    Args:
      config: The configuration of the optimizer.
      params: Tree of global params, or of their shapes.

    Attributes:
      config: The configuration.
      layout: The layout of the params.
      fields: Those that are flat arrays, by name.
    """

    def __init__(self, config: DistributedConfig, params: Params) -> None:
        self.config, self.fields = config, fields_of(config)
        self.layout = config.schedule(config.tensor_local(params)).layout
        self._shapes: list[Any] = jax.tree.leaves(params)
        self._tensor_specs: list[Any] = jax.tree.leaves(config.tensor_specs(params))

    def form(self, bucket: Bucket) -> bucket_leaves.Form:
        """Returns the form of a bucket, which has the shardings of its leaves."""
        return bucket_leaves.form_of(self.config, self.layout, bucket, self._tensor_specs)

    # In programs over global arrays, bucket by bucket.

    def zeros(self, name: str) -> Any:
        """Returns the flat array of a field on all devices, filled with zeros."""
        return flat_arrays.zeros(self.config, self.layout, name)

    def extract(self, name: str, bucket: Bucket, flat: Any) -> list[jax.Array]:
        """Returns the leaves of a bucket, in the order of ``bucket.leaves``; float32 for codes."""
        offset = bucket.offset
        if is_flat_codes(flat):
            flat, offset = flat_arrays.decoded_shards(self.config, bucket, name, flat), 0
        return bucket_leaves.extracted(self.form(bucket), flat, offset)

    def insert(self, name: str, bucket: Bucket, flat: Any, leaves: Sequence[Any]) -> Any:
        """Returns a flat array, which is donated, with the leaves of a bucket, as stored."""
        return self._inserted(self.form(bucket), name, bucket, flat, leaves)

    def _inserted(
        self, form: bucket_leaves.Form, name: str, bucket: Bucket, flat: Any, leaves: Sequence[Any]
    ) -> Any:
        if is_flat_codes(flat):
            shards = bucket_leaves.inserted(form, None, 0, leaves)
            return flat_arrays.with_shards(self.config, bucket, name, flat, shards)
        return bucket_leaves.inserted(form, flat, bucket.offset, leaves)

    def with_begun(self, name: str, opt_state: OptState, params: Params) -> Any:
        """Returns a state with a field that begins with params; unchanged if it has no such field.

        Args:
          name: The name of the field.
          opt_state: The state, or that of a chain.
          params: Tree of global arrays like the params, in float32 or a dtype that converts exactly
            to it.
        """
        if name not in self.fields:
            return opt_state
        flat = self._begun(name, params)
        return map_state(lambda state: state._replace(**{name: flat}), opt_state)

    def with_exact_values(self, opt_state: OptState, exact: Params, params: Params) -> Any:
        """Returns a state whose fields begin with the exact values of params.

        Args:
          opt_state: The state, or that of a chain.
          exact: Tree of global arrays with the exact values, if main parameters are kept.
          params: Tree of global arrays with the params, which are exact if none are.
        """
        begin = exact if "main_params" in self.fields else params
        for name, field in self.fields.items():
            if field.begins == "params":
                opt_state = self.with_begun(name, opt_state, begin)
        return opt_state

    def _begun(self, name: str, params: Params) -> Any:
        config, field = self.config, self.fields[name]
        buckets = [bucket for bucket in self.layout.buckets if field.has(bucket)]
        if not buckets:
            has_none = flat_arrays.types_of_arrays(config, self.layout)[name] is None
            return None if has_none else self.zeros(name)
        if name in config.on_host or bucket_leaves.are_many(self.layout):
            return self._begun_by_buckets(name, buckets, params)

        def local(tree: Params) -> Any:
            return begun_shard(config, field, buckets, jax.tree.leaves(tree))

        specs, flat = global_specs(config, self.layout, params), config.parallel.state_spec
        mapped = compat.shard_map(local, mesh=config.mesh, in_specs=(specs,), out_specs=flat)
        return jax.jit(mapped)(params)

    def _begun_by_buckets(self, name: str, buckets: Sequence[Bucket], params: Params) -> Any:
        """A flat array that begins with params, one bucket at a time: it may be on the host."""
        flat, leaves = self.zeros(name), jax.tree.leaves(params)
        for bucket in buckets:
            form = dataclasses.replace(self.form(bucket), codec=self.fields[name].codec)
            placed = jax.device_put([leaves[i] for i in bucket.leaves], form.shardings)
            flat = self._inserted(form, name, bucket, flat, placed)
        return flat

    def scalars(self, grad_norm: Any, saved: Callable[[Guard], Any]) -> dict[str, Any]:
        """Returns the small fields with which a state continues, on the host.

        Args:
          grad_norm: The last norm.
          saved: Returns the saved state of a guard; None: it was not saved.
        """
        guards = self.config.active_guards
        continuing = {x.field: continued(x, value, saved(x)) for x, value in guards}
        return {"grad_norm": np.float32(grad_norm)} | continuing

    # On the host, all leaves at once.

    def to_host(self, name: str, flat: Any) -> list[np.ndarray]:
        """Returns the leaves of a field, put together from all devices.

        They are as stored, float32 for codes, and zero if the field lacks them. If processes share
        the mesh, all call this.
        """
        by_device = self._decoded(name, flat) if is_flat_codes(flat) else fetch(flat)
        by_device = by_device.reshape(*self._sizes, -1)
        leaves = [np.zeros(x.shape, by_device.dtype) for x in self._shapes]
        for shard in self._model_shards():
            local = packing.leaves_of_flat(shard.layout, shard.of(by_device))
            for i, where in shard.slices.items():
                leaves[i][where] = local[i]
        return leaves

    def from_host(self, name: str, leaves: Sequence[np.ndarray]) -> Any:
        """Returns the flat array of a field: the inverse of ``to_host``, in its dtype."""
        field, parallel = self.fields[name], self.config.parallel
        by_device = np.zeros((*self._sizes, self.layout.flat_size), field.dtype)
        for shard in self._model_shards():
            local = [x[shard.slices[i]] if i in shard.slices else x for i, x in enumerate(leaves)]
            packing.put_leaves(shard.layout, local, shard.of(by_device))
        if not field.codec.is_coded:
            return jax.device_put(by_device.reshape(-1), self.config.state_sharding(name))
        sharding, coded = NamedSharding(self.config.mesh, parallel.state_spec), self.zeros(name)
        floats = by_device.reshape(math.prod(self._sizes), self.layout.flat_size)
        for bucket in self.layout.buckets:
            end = bucket.offset + -(-bucket.shard_size // BLOCK) * BLOCK
            shards = jax.device_put(floats[:, bucket.offset : end].reshape(-1), sharding)
            coded = flat_arrays.with_shards(self.config, bucket, name, coded, shards)
        return coded

    def _decoded(self, name: str, coded: Any) -> np.ndarray:
        """The flat array of floats that codes replace, of all devices."""
        devices = self.config.parallel.size(self.config.parallel.cut_axes)
        floats = np.zeros((devices, self.layout.flat_size), np.float32)
        for bucket in self.layout.buckets:
            shards = fetch(flat_arrays.decoded_shards(self.config, bucket, name, coded))
            shards = shards.reshape(devices, -1)
            floats[:, bucket.offset : bucket.offset + shards.shape[1]] = shards
        return floats

    @property
    def _sizes(self) -> list[int]:
        """Devices along each axis that cuts a flat array."""
        return [self.config.mesh.shape[axis] for axis in self.config.parallel.cut_axes]

    def _model_shards(self) -> Iterator[_ModelShard]:
        """The shards into which axes cut leaves before their state is sharded.

        Leaves that other data axes split are cut by other axes, so their shards are apart.
        """
        mesh, cut_axes = self.config.mesh, self.config.parallel.cut_axes
        of_axes = dict[DataParallel, list[Bucket]]()
        for bucket in self.layout.buckets:
            parallel = self.config.parallel.without(bucket.tensor_axes)
            of_axes.setdefault(parallel, []).append(dataclasses.replace(bucket, split=1))
        for parallel, buckets in of_axes.items():
            layout = Layout(parallel.num_shards, self.layout.leaves, tuple(buckets))
            axes = [axis for axis in cut_axes if axis not in parallel.state_axes]
            for index in np.ndindex(*(mesh.shape[axis] for axis in axes)):
                at = dict(zip(axes, index, strict=True))
                device = mesh.devices[tuple(at.get(axis, 0) for axis in mesh.axis_names)]
                slices = {
                    i: NamedSharding(mesh, self._tensor_specs[i]).devices_indices_map(
                        self._shapes[i].shape
                    )[device]
                    for bucket in buckets
                    for i in bucket.leaves
                }
                devices = tuple(at.get(axis, slice(None)) for axis in cut_axes)
                yield _ModelShard(layout, devices, slices)


class _ModelShard(NamedTuple):
    """One of the shards into which axes cut leaves, and the devices that share its state.

    Attributes:
      layout: The layout of this shard alone.
      devices: The indices of these devices along the axes that cut a flat array.
      slices: Where the shard is in each leaf of the layout.
    """

    layout: Layout
    devices: tuple[int | slice, ...]
    slices: dict[int, tuple[slice, ...]]

    def of(self, by_device: np.ndarray) -> np.ndarray:
        """A view of these devices' rows of an array with a dimension for each axis."""
        return by_device[self.devices]
