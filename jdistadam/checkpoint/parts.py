"""What the states of training that are saved and restored consist of, and what it is called.

A state is a tree with ``params`` and ``opt_state``: a TrainState of this package or of Flax, or a
dictionary. Its arrays have names of which a part says what they are and the rest where::

    params['w']         a parameter, in the dtype of the model
    main_params['w']    its exact value, where params do not say it
    mu['w'], nu['w']    its moments; in codes mu['w'].codes and mu['w'].scales
    ema['w']            the average of its exact values
    count               steps taken
    key                 the seed of random bits
    opt_state[0].x      what transforms of a chain keep; any other field: model_state['mean'], rng

The state of a distributed optimizer and the one of ``optax.adamw`` have the same names, so that
one is restored from the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, memory, trees
from jdistadam.core.codecs import is_codes
from jdistadam.distributed import flat_moments, param_specs
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import is_flat_codes
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout
from jdistadam.distributed.packing import shard_of
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.state import MainParamsState
from jdistadam.errors import TreeError

MOMENTS = ("mu", "nu")
_ADAM = (DistributedState, optax.ScaleByAdamState)


class Leaf(NamedTuple):
    """An array of a state that has a name of its own.

    Attributes:
      name: Its name in a checkpoint.
      value: The array, or its shape.
      keys: The keys that lead to it from the field, if all are names in dictionaries; else None.
      is_count: Whether it is a step counter beside that of Adam: of a schedule, or of Flax.
    """

    name: str
    value: Any
    keys: tuple[str, ...] | None
    is_count: bool = False


def fields_of(state: Any) -> dict[str, Any]:
    """Returns the fields of a state by name.

    Raises:
      TreeError: It has no ``params`` and ``opt_state``.
    """
    children, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    fields = {_name_of(path): child for path, child in children}
    if not {"params", "opt_state"} <= fields.keys():
        raise TreeError(
            f"state: has no params and opt_state: got {type(state).__name__} "
            f"with {sorted(fields) or 'no fields'}, expected a TrainState, "
            "or a dictionary with these two. Pass {'params': params, 'opt_state': opt_state}."
        )
    return fields


def _name_of(path: Any) -> str:
    key = path[0] if path else None
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", ""))))


def adam_of(opt_state: Any) -> Any:
    """Returns the DistributedState or ScaleByAdamState in the state of an optimizer.

    Raises:
      TreeError: There is none, or more than one.
    """
    parts = jax.tree.leaves(opt_state, is_leaf=_is(_ADAM))
    found = [part for part in parts if isinstance(part, _ADAM)]
    if len(found) != 1:
        raise TreeError(
            f"opt_state: not the state of one Adam: got {type(opt_state).__name__} with "
            f"{len(found)} of them, expected that of a distributed optimizer, of fused_adamw or "
            "of optax.adamw, or of a chain with one. Use one optimizer: a distributed one takes "
            "groups. What optax joins of several, as in multi_transform, orbax saves by itself."
        )
    adam = found[0]
    if isinstance(adam, DistributedState):
        return adam
    mu, nu = map(trees.codes_inside, (adam.mu, adam.nu))  # with the names of params
    return adam._replace(count=trees.unboxed(adam.count), mu=mu, nu=nu)


def kept_main_params(opt_state: Any) -> Any:
    """Returns the main parameters in the state of an optimizer of one program, or None."""
    parts = jax.tree.leaves(opt_state, is_leaf=_is(MainParamsState))
    return next((part.main_params for part in parts if isinstance(part, MainParamsState)), None)


def other_leaves(fields: dict[str, Any]) -> Iterator[Leaf]:
    """Yields what is neither a parameter nor of Adam: of chains, and of the other fields."""
    rest = [(name, tree) for name, tree in fields.items() if name != "params"]
    for leaf in (leaf for name, tree in rest for leaf in leaves(name, tree, _is_part)):
        if isinstance(leaf.value, MainParamsState):
            yield from other_leaves({leaf.name: leaf.value.inner})
        elif _is_schedule(leaf.value):
            yield Leaf(leaf.name, leaf.value.count, None, is_count=True)
        elif not isinstance(leaf.value, _ADAM):
            yield leaf._replace(is_count=leaf.name == "step")


def rebuilt(name: str, tree: Any, others: dict[str, Any], adam: Any, main: Any) -> Any:
    """Returns a field like ``tree`` with other values.

    With ``others`` by the names of ``other_leaves``, ``adam`` in place of the DistributedState or
    ScaleByAdamState, and ``main`` as the main parameters of a MainParamsState.
    """

    def value(leaf: Leaf) -> Any:
        if isinstance(leaf.value, MainParamsState):
            return MainParamsState(main, rebuilt(leaf.name, leaf.value.inner, others, adam, None))
        if isinstance(leaf.value, _ADAM):
            return adam
        found = others[leaf.name]
        return leaf.value._replace(count=found) if _is_schedule(leaf.value) else found

    treedef: Any = jax.tree.structure(tree, is_leaf=_is_part)
    return treedef.unflatten(map(value, leaves(name, tree, _is_part)))


def leaves(section: str, tree: Any, is_leaf: Any = None) -> Iterator[Leaf]:
    """Yields the leaves of a tree with their names."""
    for path, x in trees.leaves_with_path(tree, is_leaf):
        names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        keys = tuple(name for name in names if isinstance(name, str))
        name = f"{section}{jax.tree_util.keystr(path)}"
        yield Leaf(name, x, keys if len(keys) == len(path) else None)


def named(section: str, tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name; those in codes are one."""
    return {leaf.name: leaf.value for leaf in leaves(section, tree, is_codes)}


def path_of(name: str) -> str:
    """Returns the path of a parameter, from the name of what belongs to it; else the name itself.

    Example:
      >>> path_of("main_params['w']"), path_of("opt_state[0].mu['w']")
      ("params['w']", "opt_state[0].mu['w']")
    """
    for section in ("main_params", *MOMENTS):
        rest = name.removeprefix(section)
        if rest != name and (not rest or rest[0] in "[."):
            return f"params{rest}"
    return name


def _is_schedule(x: Any) -> bool:
    """Whether this is what optax keeps for a schedule, of the learning rate or weight decay."""
    return getattr(x, "_fields", None) == ("count",)


def _is_part(x: Any) -> bool:
    return isinstance(x, (*_ADAM, MainParamsState)) or _is_schedule(x)


def _is(kinds: Any) -> Any:
    return lambda x: isinstance(x, kinds)


# Between the flat arrays of a distributed state and arrays of the shapes of leaves, by bucket.
#
# An array that is scattered where it is keeps its shards: nothing is sent. The leaves of a packed
# bucket are gathered, as one of them may be on several devices; a bucket is small.
#
# [Note: one collective at a time]
# Virtual CPU devices share a pool of threads. Of two programs with collectives that are started one
# after the other, and need nothing of each other, each can get a part of the threads and wait
# forever for the devices that have none. So whoever starts such a program waits for it.


@dataclasses.dataclass(frozen=True)
class _Form:
    """All that the two programs of a bucket depend on; buckets of one form share them."""

    mesh: Mesh
    state_axes: tuple[str, ...]
    state_spec: P
    is_packed: bool
    shard_shape: tuple[int, ...]
    padding: int
    starts: tuple[int, ...]  # of leaves in a packed bucket, and where the last one ends
    shapes: tuple[tuple[int, ...], ...]  # of the parts of leaves that a tensor-parallel part has
    specs: tuple[P, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shard_shape)

    @property
    def num_rows(self) -> int:
        """A shard in rows of ALIGNMENT: counted so, 32 bits hold every offset."""
        return -(-self.size // ALIGNMENT)


class FlatArrays:
    """What a distributed state has in flat arrays, as arrays of the shapes of leaves."""

    def __init__(self, tx: DistributedTransformation, params: Any) -> None:
        """Takes the optimizer and its params, or their shapes."""
        self.config: DistributedConfig = tx.config
        self.layout: Layout = tx.layout(params)
        specs = self.config.tensor_specs(params)
        self._specs: list[P] = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))

    def places(self, bucket: Bucket) -> list[NamedSharding]:
        """Returns how the leaves of a bucket are placed by ``extract``, and for ``insert``."""
        return [NamedSharding(self.config.mesh, spec) for spec in self._form(bucket).specs]

    def new(self, section: str) -> Any:
        """Returns "mu", "nu", "main_params" or "ema", all zero; None where there are none."""
        if section == "ema":
            size = self.layout.flat_size
            return flat_moments.zeros(self.config, jax.ShapeDtypeStruct((size,), jnp.float32))
        if section != "main_params":
            return flat_moments.new_moment(self.config, self.layout, section)
        size, dtype = self.layout.main_size, self.config.policy.main_params.dtype
        types = jax.ShapeDtypeStruct((size,), dtype) if size else None
        return flat_moments.zeros(self.config, types)

    def extract(self, bucket: Bucket, section: str, flat: Any) -> list[jax.Array]:
        """Returns the leaves of a bucket, in the order of ``bucket.leaves``; of codes float32."""
        offset = bucket.offset
        if is_flat_codes(flat):
            flat, offset = flat_moments.decoded_shards(self.config, bucket, section, flat), 0
        leaves: list[jax.Array] = _extractor(self._form(bucket))(flat, offset // ALIGNMENT)
        # [Note: one collective at a time]
        return jax.block_until_ready(leaves) if bucket.is_packed else leaves

    def insert(self, bucket: Bucket, section: str, flat: Any, leaves: Sequence[jax.Array]) -> Any:
        """Puts leaves of a bucket, float32 for codes, into flat arrays, which are donated."""
        put = _inserter(self._form(bucket))
        if not is_flat_codes(flat):
            return put(flat, bucket.offset // ALIGNMENT, list(leaves))
        empty = self._zeros(-(-bucket.shard_size // ALIGNMENT) * ALIGNMENT, jnp.float32)
        shards = put(empty, 0, list(leaves))
        return flat_moments.with_shards(self.config, bucket, section, flat, shards)

    def _zeros(self, size: int, dtype: Any) -> jax.Array:
        """A flat array of zeros, of ``size`` elements on each device."""
        parallel = self.config.parallel
        total = size * parallel.num_shards * parallel.size(parallel.tensor_axes)
        sharding = NamedSharding(self.config.mesh, parallel.state_spec)
        flat: jax.Array = jax.jit(lambda: jnp.zeros((total,), dtype), out_shardings=sharding)()
        return flat

    def _form(self, bucket: Bucket) -> _Form:
        parallel, layout = self.config.parallel, self.layout
        mine = [self._specs[i] for i in bucket.leaves]
        if not bucket.is_packed:
            mine = [param_specs.with_axes(mine[0], bucket.cut_dim, parallel.state_axes)]
        return _Form(
            mesh=self.config.mesh,
            state_axes=parallel.state_axes,
            state_spec=parallel.state_spec,
            is_packed=bucket.is_packed,
            shard_shape=bucket.shard_shape,
            padding=bucket.padding,
            starts=tuple(bucket.starts(layout.leaves[i].size for i in bucket.leaves)),
            shapes=tuple(layout.leaves[i].shape for i in bucket.leaves),
            specs=tuple(mine),
        )


@functools.lru_cache(maxsize=4096)
def _extractor(form: _Form) -> Any:
    def local(flat: jax.Array, row: jax.Array) -> list[jax.Array]:
        shard = memory.cut_lines(flat, row, form.num_rows, ALIGNMENT)[: form.size]
        if not form.is_packed:
            return [shard.reshape(form.shard_shape)]
        whole = collectives.all_gather(shard, form.state_axes, dim=0, to="varying")
        return [
            whole[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(form.starts, form.shapes, strict=False)
        ]

    return jax.jit(
        compat.shard_map(
            local,
            mesh=form.mesh,
            in_specs=(form.state_spec, P()),
            out_specs=list(form.specs),
        )
    )


@functools.lru_cache(maxsize=4096)
def _inserter(form: _Form) -> Any:
    def local(flat: jax.Array, row: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        if form.is_packed:
            whole = jnp.zeros((form.starts[-1] + form.padding,), flat.dtype)
            for start, x in zip(form.starts, leaves, strict=False):
                whole = lax.dynamic_update_slice_in_dim(whole, x.reshape(-1), start, 0)
            num_shards = whole.size // form.size
            index = collectives.axis_index(form.state_axes)
            shard = shard_of(whole, index, num_shards, 0)
        else:
            shard = leaves[0].reshape(-1)
        gap = jnp.zeros((form.num_rows * ALIGNMENT - form.size,), flat.dtype)
        rows = jnp.concatenate([shard, gap])
        return memory.put_lines(flat, rows, row, ALIGNMENT)

    mapped = compat.shard_map(
        local,
        mesh=form.mesh,
        in_specs=(form.state_spec, P(), list(form.specs)),
        out_specs=form.state_spec,
    )
    return jax.jit(mapped, donate_argnums=0)
