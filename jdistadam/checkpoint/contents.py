"""The arrays of a state as a checkpoint holds them, made from it a few at a time."""

from __future__ import annotations

import collections
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

from jdistadam.checkpoint import extra as extras
from jdistadam.checkpoint import parts
from jdistadam.checkpoint.folder import Entry
from jdistadam.checkpoint.parts import FlatArrays
from jdistadam.core import trees
from jdistadam.core.codecs import NOTHING, codec_of
from jdistadam.core.loss_scale import DynamicLossScale
from jdistadam.core.storage import main_codec_of
from jdistadam.distributed import host_memory
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import is_flat_codes
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.main_params import sent_dtypes
from jdistadam.distributed.state import is_distributed_state
from jdistadam.distributed.transformation import check_distributed
from jdistadam.errors import DtypeError, TreeError
from jdistadam.kernels import coded_leaves
from jdistadam.training.checks import is_known
from jdistadam.training.train_state import TrainState, check_params_follow, placed


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays that are made together: ``make`` returns those of ``entries``, in this order."""

    entries: tuple[Entry, ...]
    make: Callable[[], Sequence[jax.Array]]
    nbytes: int = 0  # of a device, which they take beside the state or as a part of it


@dataclasses.dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds."""

    groups: tuple[Group, ...]
    about: dict[str, Any]  # what the header says: the count, kind of main parameters, layout

    def filled(self) -> list[Group]:
        """Returns the groups without those of empty arrays, which orbax does not take."""
        return [g for g in self.groups if all(math.prod(entry.shape) for entry in g.entries)]


def contents_of(state: Any, tx: Any, extra: Any = None) -> Contents:
    """Returns what a checkpoint of a state and of a tree beside it holds; makes no array yet.

    Raises:
      TreeError: This is no state of one Adam.
      LayoutError: It is of another layout than that of ``tx``, or its params are not the rounded
        main parameters.
    """
    host_memory.check_memory(getattr(tx, "config", None), state=state)
    fields = parts.fields_of(state)
    adam = parts.adam_of(fields["opt_state"])
    if is_distributed_state(adam):
        checked = _checked(state, TrainState(fields["params"], fields["opt_state"]), tx)
        fields |= {"params": checked.params, "opt_state": checked.opt_state}
        adam = parts.adam_of(checked.opt_state)
        mesh = tx.config.mesh
        text = tx.config.layout_text(tx.layout(fields["params"]))
        main = tx.config.policy.main_params
    else:
        mesh, text = _mesh_of(fields["params"]), None
        kept = parts.kept_main_params(fields["opt_state"])
        found = {main_codec_of(x) for x in jax.tree.leaves(kept)}
        main = max(found, key=lambda x: x.name, default=NOTHING)
    count = int(adam.count)
    groups = [
        *_params(fields["params"], mesh, adam, tx),
        _whole("count", adam.count, mesh),
        *(_of_flat if text else _of_optax)(fields, adam, mesh, tx),
    ]
    for leaf in parts.other_leaves(fields):
        is_count = leaf.is_count and np.shape(leaf.value) == () and int(leaf.value) == count
        groups.append(_whole(leaf.name, leaf.value, mesh, keys=leaf.keys, is_count=is_count))
    about = {"count": count, "main_params": main.argument, "layout_identity": text}
    if extra is not None:
        about["extra"], arrays = extras.taken_apart(extra)
        groups += [_whole(name, x, mesh) for name, x in arrays.items()]
    names = collections.Counter(entry.name for group in groups for entry in group.entries)
    if twice := [name for name, times in names.items() if times > 1]:
        raise TreeError(
            f"{twice[0]}: two arrays of the state have this name in a checkpoint: "
            "got a field of that name, expected fields other than main_params, mu, nu, count, "
            "grad_norm, key, scaling, ema, guard, and extra beside extra=. Rename the field."
        )
    return Contents(tuple(groups), about)


def _checked(given: Any, state: TrainState, tx: Any) -> TrainState:
    """Returns a whole state of the layout of ``tx`` on its devices, of numpy arrays too."""
    check_distributed(tx)
    tx.check_state(state.opt_state, state.params)
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(state)):
        state = placed(state, tx)  # a copy
    if not (isinstance(given, TrainState) and is_known(given, jax.tree.leaves(given.params))):
        check_params_follow(state, tx)
    return state


def _params(params: Any, mesh: Mesh, adam: Any, tx: Any) -> Iterator[Group]:
    leaves = list(parts.leaves("params", params))
    sent: list[Any] = [None] * len(leaves)
    if is_distributed_state(adam):
        sent = sent_dtypes(tx.config.schedule(tx.config.tensor_local(params)))
    for leaf, dtype in zip(leaves, sent, strict=True):
        yield _whole(leaf.name, leaf.value, mesh, keys=leaf.keys, sent=dtype and dtype.name)


def _of_flat(fields: dict[str, Any], state: Any, mesh: Mesh, tx: Any) -> Iterator[Group]:
    """The state of a distributed optimizer: moments and main parameters bucket by bucket."""
    yield _whole("grad_norm", state.grad_norm, mesh)
    if state.key is not None:
        yield _whole("key", state.key, mesh)
    for name, x in state.scaling._asdict().items() if state.scaling is not None else ():
        # The counts of a constant scale say nothing; see extra_state.py.
        is_dynamic = isinstance(tx.config.loss_scale, DynamicLossScale)
        if is_dynamic or name not in ("growth_count", "hysteresis_count"):
            yield _whole(f"scaling.{name}", x, mesh)
    for name, x in state.guard._asdict().items() if state.guard is not None else ():
        yield _whole(f"guard.{name}", x, mesh)
    arrays, leaves = FlatArrays(tx, fields["params"]), list(parts.leaves("", fields["params"]))
    for bucket in arrays.layout.buckets:
        mine = {leaves[i].name: leaves[i].value for i in bucket.leaves}
        for section in (*parts.MOMENTS, "main_params", "ema"):
            is_kept = section != "main_params" or _has_main_of_its_own(tx.config, bucket)
            if is_kept and getattr(state, section) is not None:
                yield _of_bucket(arrays, bucket, mine, section, getattr(state, section))


def _of_bucket(
    arrays: FlatArrays, bucket: Bucket, params: dict[str, Any], section: str, flat: Any
) -> Group:
    """What a bucket has of a moment, in codes where it is in codes, or its main parameters."""
    codec = codec_of(flat) if is_flat_codes(flat) and bucket.is_coded else None
    is_float = section in parts.MOMENTS and not is_flat_codes(flat)
    dtype = flat.dtype if is_float else jnp.dtype(jnp.float32)

    def make() -> list[Any]:
        found = arrays.extract(bucket, section, flat)
        if codec is not None:
            return [x for leaf in found for x in coded_leaves.encoded(section, codec, leaf)]
        if section != "main_params" or flat.dtype == jnp.float32:
            return found
        pairs = zip(params.values(), found, strict=True)
        return [_join(jax.device_put(x, low.sharding), low) for x, low in pairs]

    entries: list[Entry] = []
    for path, x in params.items():
        name = f"{section}{path}"
        if codec is None:
            entries.append(Entry(name, x.shape, dtype))
        else:
            entries.append(Entry(f"{name}.codes", x.shape, codec.dtype))
            entries.append(Entry(f"{name}.scales", (coded_leaves.num_scales(x.shape),), dtype))
    size = arrays.layout.whole_size(bucket) if bucket.is_packed else bucket.shard_size
    return Group(tuple(entries), make, size * dtype.itemsize)


def _has_main_of_its_own(config: DistributedConfig, bucket: Bucket) -> bool:
    """Whether main parameters are kept, and the params do not say their values."""
    is_sent_whole = config.policy.param_comm_dtype in (None, bucket.dtype)
    return bucket.has_main and not (bucket.dtype == jnp.float32 and is_sent_whole)


@jax.jit
def _join(param: jax.Array, stored: jax.Array) -> jax.Array:
    joined: jax.Array = main_codec_of(stored).join(param, stored, jnp)
    return joined


def _of_optax(fields: dict[str, Any], adam: Any, mesh: Mesh, tx: Any) -> Iterator[Group]:
    """Moments and main parameters of the state of one program."""
    for section in parts.MOMENTS:
        for leaf in parts.leaves(section, getattr(adam, section)):
            if leaf.value.size:
                yield _whole(leaf.name, leaf.value, mesh)
    params = parts.named("main_params", fields["params"])
    main = parts.named("main_params", parts.kept_main_params(fields["opt_state"]))
    if strange := [name for name in main if name not in params]:
        raise TreeError(
            f"opt_state: {strange[0]}: a main parameter without a parameter of that path, "
            f"which no template could ask for: got {len(main)} of them, expected those of "
            f"{len(params)} parameters, as {next(iter(params), 'none')}. Leave out optax.flatten. "
            "Of nnx pass params and opt_state both as they are, or both by nnx.as_pure."
        )
    for name, x in main.items():
        if x.dtype == jnp.float32 and x.size:
            yield _whole(name, x, mesh)
        elif x.size:
            make = functools.partial(lambda p, x: [_join(p, x)], params[name], x)
            yield Group((Entry(name, x.shape, jnp.dtype(jnp.float32)),), make, 4 * x.size)


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
            f"{name}: not an array: got {x!r}, expected a jax or numpy array, or a number. "
            "Leave it out of the state."
        )
    dtype = getattr(x, "dtype", None)
    # A copy: on a CPU, JAX may share the memory of numpy arrays, which change while they are saved.
    array = np.array(x, jax.eval_shape(lambda x: x, x).dtype)
    if dtype is not None and dtype != array.dtype:  # numpy's float64 equals None
        raise DtypeError(
            f"{name}: would lose bits: JAX has no such arrays without jax_enable_x64: got {dtype}, "
            f"expected {array.dtype}. Cast it."
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
