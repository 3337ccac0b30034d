"""The arrays of a state as a checkpoint holds them, made from it a few at a time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import flat_arrays, parts
from jdistadam.core import trees
from jdistadam.core.codecs import Codec
from jdistadam.core.loss_scale import DynamicLossScale
from jdistadam.core.main_params import MainParams
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import is_flat_codes
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.main_params import sent_dtypes
from jdistadam.distributed.state import DistributedState, is_distributed_state
from jdistadam.distributed.transformation import check_distributed
from jdistadam.errors import DtypeError, TreeError
from jdistadam.kernels import coded_leaves
from jdistadam.training.state_memory import is_known
from jdistadam.training.train_state import TrainState, check_params_follow, placed


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
      name: Its name; see parts.py.
      shape: Its shape, without padding.
      dtype: Its dtype.
      key: Of random keys the implementation, else None; the array holds their words then.
      keys: As in ``parts.Leaf``.
      is_count: Whether it is a step counter equal to that of Adam.
      sent: Of a parameter that was rounded to be sent, the name of the dtype; else None.
      sum: Its checksum, once it is in a file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    key: str | None = None
    keys: tuple[str, ...] | None = None
    is_count: bool = False
    sent: str | None = None
    sum: str | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays that are made together.

    Attributes:
      entries: What they are.
      make: Returns them, in this order.
      nbytes: What they take on a device: beside the state, or as a part of it.
    """

    entries: tuple[Entry, ...]
    make: Callable[[], Sequence[jax.Array]]
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds.

    Attributes:
      groups: The arrays.
      count: Steps taken.
      layout_text: The text of the layout; None without a distributed optimizer.
      main_params: The kind of main parameters, by its name.
    """

    groups: tuple[Group, ...]
    count: int
    layout_text: str | None
    main_params: str | None

    def filled(self) -> list[Group]:
        """Returns the groups without those of arrays that have no elements, which orbax refuses."""
        return [g for g in self.groups if all(math.prod(entry.shape) for entry in g.entries)]


def contents_of(state: Any, tx: Any) -> Contents:
    """Returns what a checkpoint of a state holds; makes no array yet.

    Raises:
      TreeError: This is no state of one Adam.
      LayoutError: It is of another layout than that of ``tx``, or its params are not the rounded
        main parameters.
    """
    trees.check_memory(state=state)
    fields = parts.fields_of(state)
    adam = parts.adam_of(fields["opt_state"])
    if is_distributed_state(adam):
        checked = _checked(state, TrainState(fields["params"], fields["opt_state"]), tx)
        fields |= {"params": checked.params, "opt_state": checked.opt_state}
        adam = parts.adam_of(checked.opt_state)
        mesh = tx.config.mesh
        text = tx.config.layout_text(tx.layout(fields["params"]))
        kind = tx.config.policy.main_params.value
    else:
        mesh, text = _mesh_of(fields["params"]), None
        kept = parts.kept_main_params(fields["opt_state"])
        kinds = {MainParams.of(x) for x in jax.tree.leaves(kept)} or {MainParams.NONE}
        kind = max(kind.value or "" for kind in kinds) or None
    count = int(adam.count)
    groups = [*_params(fields["params"], mesh, adam, tx), *_scalars(adam, tx, mesh)]
    if is_distributed_state(adam):
        groups += _of_flat(tx, fields["params"], adam)
    else:
        groups += _of_optax(fields, adam, mesh)
    for leaf in parts.other_leaves(fields):
        is_count = _is_count(leaf, count)
        groups.append(_whole(leaf.name, leaf.value, mesh, keys=leaf.keys, is_count=is_count))
    _check_names(groups)
    return Contents(tuple(groups), count, text, kind)


def _checked(given: Any, state: TrainState, tx: Any) -> TrainState:
    """Returns a state on its devices, of numpy arrays too.

    Raises unless it is whole, of the layout of ``tx``, and its params are what it says.
    """
    check_distributed(tx)
    tx.check_state(state.opt_state, state.params)
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(state)):
        state = placed(state, tx)  # a copy
    if not (isinstance(given, TrainState) and is_known(given, jax.tree.leaves(given.params))):
        check_params_follow(state, tx)
    return state


def _params(params: Any, mesh: Mesh, adam: Any, tx: Any) -> Iterator[Group]:
    named = list(parts.with_keys("params", params))
    sent = [None] * len(named)
    if is_distributed_state(adam):
        schedule = tx.config.schedule(tx.config.tensor_local(params))
        sent = [dtype and dtype.name for dtype in sent_dtypes(schedule)]
    for (name, x, keys), dtype in zip(named, sent, strict=True):
        yield _whole(name, x, mesh, keys=keys, sent=dtype)


def _scalars(adam: Any, tx: Any, mesh: Mesh) -> Iterator[Group]:
    yield _whole("count", adam.count, mesh)
    if not isinstance(adam, DistributedState):
        return
    yield _whole("grad_norm", adam.grad_norm, mesh)
    if adam.key is not None:
        yield _whole("key", adam.key, mesh)
    if adam.scaling is not None:
        is_dynamic = isinstance(tx.config.loss_scale, DynamicLossScale)
        for name, x in adam.scaling._asdict().items():
            # The counts of a constant scale say nothing; see extra_state.py.
            if is_dynamic or name not in ("growth_count", "hysteresis_count"):
                yield _whole(f"scaling.{name}", x, mesh)


def _of_flat(tx: Any, params: Any, state: DistributedState) -> Iterator[Group]:
    """Moments and main parameters of a distributed state, bucket by bucket."""
    config: DistributedConfig = tx.config
    layout: Layout = tx.layout(params)
    specs = jax.tree.leaves(config.tensor_specs(params), is_leaf=lambda x: isinstance(x, P))
    leaves = jax.tree.leaves(params)
    names = trees.paths(params, "")
    for bucket in layout.buckets:
        wanted: dict[str, Any] = {"mu": state.mu, "nu": state.nu}
        if bucket.has_main and not _is_function_of_params(config, bucket.dtype):
            wanted["main_params"] = state.main_params
        for section, flat in wanted.items():
            if is_flat_codes(flat):
                args = config, layout, bucket, specs, flat, section
                named = [(f"{section}{names[i]}", leaves[i].shape) for i in bucket.leaves]
                make = functools.partial(flat_arrays.extract_decoded, *args)
                yield _of_moment(named, bucket, flat.codec, make)
                continue
            dtype = jnp.dtype(jnp.float32) if section == "main_params" else flat.dtype
            entries = tuple(
                Entry(f"{section}{names[i]}", leaves[i].shape, dtype) for i in bucket.leaves
            )
            make = functools.partial(flat_arrays.extract, config, layout, bucket, specs, flat)
            if section == "main_params" and config.policy.main_params is MainParams.REMAINDER16:
                make = functools.partial(_joined, make, [leaves[i] for i in bucket.leaves])
            size = layout.whole_size(bucket) if bucket.is_packed else bucket.shard_size
            yield Group(entries, make, size * dtype.itemsize)


def _of_moment(
    named: Sequence[tuple[str, tuple[int, ...]]],
    bucket: Bucket,
    codec: Codec,
    make: Callable[[], Any],
) -> Group:
    """A bucket of a moment in codes: codes and scales of each leaf, or float32."""
    f32 = jnp.dtype(jnp.float32)
    nbytes = 4 * bucket.shard_size
    if not bucket.is_coded:
        return Group(tuple(Entry(name, shape, f32) for name, shape in named), make, nbytes)
    entries = []
    for name, shape in named:
        entries.append(Entry(f"{name}.codes", shape, codec.dtype))
        entries.append(Entry(f"{name}.scales", (coded_leaves.num_scales(shape),), f32))

    def coded() -> list[jax.Array]:
        section = named[0][0][:2]
        return [x for leaf in make() for x in coded_leaves.encoded(section, codec, leaf)]

    return Group(tuple(entries), coded, nbytes)


def _is_function_of_params(config: DistributedConfig, dtype: Any) -> bool:
    """Whether params of a dtype say the value of their main parameters."""
    sent = config.policy.param_comm_dtype
    return bool(dtype == jnp.float32) and sent in (None, dtype)


def _joined(make: Callable[[], Any], params: Sequence[jax.Array]) -> list[jax.Array]:
    """Remainders and the params beside them as float32, where the remainders are."""
    lows = make()
    highs = [jax.device_put(x, low.sharding) for x, low in zip(params, lows, strict=True)]
    return [_join(high, low) for high, low in zip(highs, lows, strict=True)]


@jax.jit
def _join(param: jax.Array, stored: jax.Array) -> jax.Array:
    joined: jax.Array = MainParams.of(stored).join(param, stored, jnp)
    return joined


def _of_optax(fields: dict[str, Any], adam: Any, mesh: Mesh) -> Iterator[Group]:
    """Moments and main parameters of the state of one program."""
    for section in parts.MOMENTS:
        for name, x in parts.named(section, getattr(adam, section)).items():
            if x.size:
                yield _whole(name, x, mesh)
    params = parts.named("main_params", fields["params"])
    main = parts.named("main_params", parts.kept_main_params(fields["opt_state"]))
    _check_main_names(main, params)
    for name, x in main.items():
        if x.dtype == jnp.float32 and x.size:
            yield _whole(name, x, mesh)
        elif x.size:
            make = functools.partial(lambda p, x: [_join(p, x)], params[name], x)
            yield Group((Entry(name, x.shape, jnp.dtype(jnp.float32)),), make, 4 * x.size)


def _check_main_names(main: dict[str, Any], params: dict[str, Any]) -> None:
    """Raises TreeError for a main parameter that is not that of one parameter."""
    if strange := [name for name in main if name not in params]:
        raise TreeError(
            f"opt_state: {strange[0]}",
            "a main parameter without a parameter of that path, which no template could ask for",
            got=f"{len(main)} of them",
            expected=f"those of {len(params)} parameters, as {next(iter(params), 'none')}",
            action="Leave out optax.flatten. Of nnx pass params and opt_state both as they are, or "
            "both by nnx.as_pure.",
        )


def _is_count(leaf: parts.Leaf, count: int) -> bool:
    """Whether a leaf is a step counter, of a schedule or of Flax, that agrees with Adam's."""
    if not (leaf.is_schedule_count or leaf.name == "step"):
        return False
    return np.shape(leaf.value) == () and int(leaf.value) == count


def _whole(name: str, x: Any, mesh: Mesh, **kwargs: Any) -> Group:
    """An array that a state has as it is; of random keys the words."""
    if trees.is_key(x):
        key = str(jax.random.key_impl(x))
        words = jax.eval_shape(jax.random.key_data, x)
        entry = Entry(name, words.shape, jnp.dtype(words.dtype), key, **kwargs)
        return Group((entry,), lambda: [jax.random.key_data(x)])
    if not isinstance(x, jax.Array):
        x = _placed(name, x, mesh)
    entry = Entry(name, tuple(x.shape), jnp.dtype(x.dtype), **kwargs)
    part = x.sharding.shard_shape(x.shape)
    return Group((entry,), lambda: [x], math.prod(part) * entry.dtype.itemsize)


def _placed(name: str, x: Any, mesh: Mesh) -> jax.Array:
    """A number or numpy array on every device."""
    if isinstance(x, jax.ShapeDtypeStruct) or not trees.is_number(x):
        raise TreeError(
            name,
            "not an array",
            got=repr(x),
            expected="a jax or numpy array, or a number",
            action="Leave it out of the state.",
        )
    dtype = getattr(x, "dtype", None)
    # A copy: on a CPU, JAX may share the memory of numpy arrays, which change while they are saved.
    array = np.array(x, jax.eval_shape(lambda x: x, x).dtype)
    if dtype is not None and dtype != array.dtype:  # numpy's float64 equals None
        raise DtypeError(
            name,
            "would lose bits: JAX has no such arrays without jax_enable_x64",
            got=dtype,
            expected=array.dtype,
            action="Cast it.",
        )
    sharding = NamedSharding(mesh, P())
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def _mesh_of(params: Any) -> Mesh:
    """A mesh for what is not on devices yet, of all devices that the params are on."""
    for x in jax.tree.leaves(params):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    devices = jax.devices() if jax.process_count() > 1 else jax.devices()[:1]
    return Mesh(np.asarray(devices), ("devices",))


def _check_names(groups: Sequence[Group]) -> None:
    seen: set[str] = set()
    for name in (entry.name for group in groups for entry in group.entries):
        if name in seen:
            raise TreeError(
                name,
                "two arrays of the state have this name in a checkpoint",
                got="a field of that name",
                expected="fields other than main_params, mu, nu, count, grad_norm, key, scaling",
                action="Rename the field.",
            )
        seen.add(name)
