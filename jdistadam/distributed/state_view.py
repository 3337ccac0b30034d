"""The flat arrays of a distributed state by parameter, outside of ``jax.shard_map``.

``flat_arrays.Field`` describes what a flat array holds, and the layout where. One is made and
taken apart in two ways, because there are two ways to run:

- inside of shard_map, ``step.init_local`` begins all of one device;
- in programs over global arrays, a few leaves at a time, so that none ever exists twice:
  ``extract`` and ``insert``, for checkpoints, optax's form, and states that are large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdistadam import compat
from jdistadam.core.codecs import NOTHING, Codec
from jdistadam.core.guards import Guard, continued
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed import bucket_leaves, flat_arrays
from jdistadam.distributed.config import DistributedConfig, global_specs
from jdistadam.distributed.flat_arrays import fields_of, is_flat_codes
from jdistadam.distributed.global_arrays import compiled, copy_of, fetch, is_at, place
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.main_params import begun_shard
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
        self.layout = config.schedule_of(params).layout
        self._shapes: list[Any] = jax.tree.leaves(params)
        self._tensor_specs: list[Any] = jax.tree.leaves(config.tensor_specs(params))

    def form(self, bucket: Bucket) -> bucket_leaves.Form:
        """Returns the form of a bucket, which has the shardings of its leaves."""
        return bucket_leaves.form_of(self.config, self.layout, bucket, self._tensor_specs)

    # In programs over global arrays, bucket by bucket.

    @compiled
    def zeros(self, name: str) -> Any:
        """Returns the flat array of a field on all devices, filled with zeros."""
        return flat_arrays.zeros(self.config, self.layout, name)

    @compiled
    def extract(self, name: str, bucket: Bucket, flat: Any) -> list[jax.Array]:
        """Returns the leaves of a bucket, in the order of ``bucket.leaves``; float32 for codes."""
        offset = bucket.offset
        with jax.transfer_guard_host_to_device("allow"):  # of numbers of rows
            if is_flat_codes(flat):
                flat, offset = flat_arrays.decoded_shards(self.config, bucket, name, flat), 0
            return bucket_leaves.extracted(self.form(bucket), flat, offset)

    def insert(self, name: str, bucket: Bucket, flat: Any, leaves: Sequence[Any]) -> Any:
        """Returns a flat array, which is donated, with the leaves of a bucket, as stored."""
        return self._inserted(self.form(bucket), name, bucket, flat, leaves)

    @compiled
    def _inserted(
        self, form: bucket_leaves.Form, name: str, bucket: Bucket, flat: Any, leaves: Sequence[Any]
    ) -> Any:
        with jax.transfer_guard_host_to_device("allow"):  # of numbers of rows
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
        flat = self.begun(name, params)
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

    def begun(self, name: str, params: Params) -> Any:
        """Returns the flat array with which a field begins; None if no parameter has it."""
        config, field = self.config, self.fields[name]
        if flat_arrays.types_of_arrays(config, self.layout)[name] is None:
            return None
        if field.begins == "zeros" or not any(map(field.has, self.layout.buckets)):
            return self.zeros(name)
        if name in config.on_host or bucket_leaves.are_many(self.layout):
            return self._filled(name, jax.tree.leaves(params), field.codec)

        def local(tree: Params) -> Any:
            return begun_shard(config, self.layout, field, tree)

        specs, flat = global_specs(config, self.layout, params), config.parallel.state_spec
        mapped = compat.shard_map(local, mesh=config.mesh, in_specs=(specs,), out_specs=flat)
        return jax.jit(mapped)(params)

    def scalars(self, grad_norm: Any, saved: Callable[[Guard], Any]) -> dict[str, Any]:
        """Returns the small fields with which a state continues, on the host.

        Args:
          grad_norm: The last norm.
          saved: Returns the saved state of a guard; None: it was not saved.
        """
        guards = self.config.active_guards
        continuing = {x.field: continued(x, value, saved(x)) for x, value in guards}
        return {"grad_norm": np.float32(grad_norm)} | continuing

    # On the host.

    def to_host(self, name: str, flat: Any) -> list[np.ndarray]:
        """Returns the leaves of a field as numpy arrays.

        They are as stored, float32 for codes, and zero if the field lacks them. If processes share
        the mesh, all call this.
        """
        field, wanted = self.fields[name], self.config.state_sharding(name)

        def placed(x: Any) -> Any:
            return x if is_at(x, wanted, exactly=False) else jax.device_put(fetch(x), wanted)

        flat = jax.tree.map(placed, flat)
        leaves = [np.zeros(x.shape, field.dtype) for x in self._shapes]
        for bucket in filter(field.has, self.layout.buckets):
            for i, x in zip(bucket.leaves, self.extract(name, bucket, flat), strict=True):
                leaves[i] = copy_of(x)
        return leaves

    def from_host(self, name: str, leaves: Sequence[np.ndarray]) -> Any:
        """Returns the flat array of a field: the inverse of ``to_host``, in its dtype."""
        with np.errstate(over="ignore"):  # to infinity, as in JAX
            stored = [x.astype(self.fields[name].dtype, copy=False) for x in leaves]
        flat = jax.device_put(self._filled(name, stored), self.config.state_sharding(name))
        return jax.block_until_ready(flat)  # the leaves may change afterwards

    def _filled(self, name: str, leaves: Sequence[Any], codec: Codec = NOTHING) -> Any:
        """A flat array with some leaves, put in bucket by bucket.

        With a codec they are exact values, which it splits; otherwise they are as stored.
        """
        flat = self.zeros(name)
        for bucket in filter(self.fields[name].has, self.layout.buckets):
            form = dataclasses.replace(self.form(bucket), codec=codec)
            placed = place([leaves[i] for i in bucket.leaves], form.shardings)
            flat = self._inserted(form, name, bucket, flat, placed)
        return flat
