"""The arrays of a checkpoint, made from a state a few at a time."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.adam import FlatAdam, Param, check_leaves_follow
from jdistadam.checkpoint.parts import Entry
from jdistadam.checkpoint.storage import Contents, Group
from jdistadam.core import memory, trees
from jdistadam.core.codecs import NOTHING, codec_of
from jdistadam.core.guards import saved_loss_scale
from jdistadam.core.precision import is_sent_as_is
from jdistadam.core.storage import MOMENTS, main_codec_of
from jdistadam.distributed.flat_arrays import is_flat_codes
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.state import is_distributed_state
from jdistadam.errors import AgreementError, DtypeError, TreeError
from jdistadam.kernels.sharded_codes import encoded
from jdistadam.training.admission import admit_to_save
from jdistadam.training.agreement import check_agreement, later_limit

EXTRA = "extra"  # begins the names of an extra tree
_FLOAT32 = jnp.dtype(jnp.float32)
_MAX_BITS = 10_000  # of an extra integer: Python converts no texts of more than 4,300 digits


def contents_of(state: Any, tx: Any, extra: Extra | None) -> Contents:
    """Returns the contents of a checkpoint of a state and an extra tree; makes no large array yet.

    Raises TreeError or LayoutError for a state that cannot be saved, or not with this ``tx``.
    """
    fields = parts.fields_of(state)
    adam, flat = parts.adam_of(fields["opt_state"]), None
    params, opt_state = admit_to_save(state, fields["params"], fields["opt_state"], tx)
    fields |= {"params": params, "opt_state": opt_state}
    if is_distributed_state(adam):
        flat = FlatAdam(params, parts.adam_of(opt_state), tx)
    leaves = [leaf for field, tree in fields.items() for leaf in parts.leaves_of(field, tree)]
    kinds = {main_codec_of(leaf.value) for leaf in leaves if leaf.section == "main_params"}
    main = max(kinds, key=lambda x: x.name, default=NOTHING)  # a tree has them in one kind
    if flat is not None:
        main = tx.config.policy.main_params
    about: dict[str, Any] = {
        "count": int(trees.unboxed(adam.count)),
        "main_params": main.argument,
        "layout_identity": None if flat is None else tx.config.layout_text(flat.layout),
    }
    groups = list(_groups(leaves, flat, about["count"]))
    check_leaves_follow(leaves)
    if extra is not None:
        about["extra"] = extra.about
        groups += [_whole(name, x, key=extra.keys.get(name)) for name, x in extra.arrays.items()]
    parts.check_names(entry.name for group in groups for entry in group.entries)
    return Contents(groups, about)


def _groups(leaves: Sequence[parts.Leaf], flat: FlatAdam | None, count: int) -> Iterator[Group]:
    """All arrays of a state; bucket by bucket for a distributed optimizer."""
    params = {leaf.name: leaf.value for leaf in leaves if leaf.section == "params"}
    units = [] if flat is None else flat.units
    sent = {param.name: param.sent.name for _, unit in units for param in unit if param.sent}
    for name, x, keys, section, is_count, _was in leaves:
        if flat is not None and x is flat.state:
            yield from _of_flat(flat)
        elif section == "main_params":
            yield from _of_main(name, x, params)
        elif section in MOMENTS:
            both = parts.leaves(name, x)  # codes and scales
            yield from (_whole(y.name, y.value) for y in both if y.value.size)
        else:
            is_same = is_count and np.shape(x) == () and int(x) == count
            yield _whole(name, x, keys=keys, is_count=is_same, sent=sent.get(name))


def _of_flat(flat: FlatAdam) -> Iterator[Group]:
    config = flat.config
    scaling = saved_loss_scale(config.loss_scale, flat.state.scaling)
    state = flat.state._replace(scaling=scaling)
    for section in ("count", *parts.SCALARS):
        for leaf in parts.leaves(section, getattr(state, section)):
            yield _whole(leaf.name, leaf.value)
    for bucket, params in flat.units:
        for section in flat.sections if bucket is not None else ():
            # Main parameters that params have too, as float32 and sent whole, are not kept twice.
            is_sent_whole = is_sent_as_is(config.policy, bucket.dtype)
            is_in_params = bucket.dtype == jnp.float32 and is_sent_whole
            is_kept = section != "main_params" or (bucket.has_main and not is_in_params)
            if is_kept and getattr(state, section) is not None:
                yield _of_bucket(flat, bucket, params, section)


def _of_bucket(flat: FlatAdam, bucket: Bucket, params: list[Param], section: str) -> Group:
    """A bucket's part of a moment, in codes if it is coded, or its main parameters."""
    array = getattr(flat.state, section)
    codec = codec_of(array) if is_flat_codes(array) and bucket.is_coded else None

    def make() -> list[Any]:
        found = flat.view.extract(section, bucket, array)
        if codec is not None:
            return [x for leaf in found for x in encoded(section, codec, leaf)]
        if section == "main_params":
            return [_exact(param.like, x) for param, x in zip(params, found, strict=True)]
        return found

    entries: list[Entry] = []
    for param in params:
        name, shape = param.name.replace("params", section, 1), param.like.shape
        dtype = param.moments[section].dtype if section in param.moments else _FLOAT32
        if codec is None:
            entries.append(Entry(name, shape, dtype))
        else:
            entries.append(Entry(f"{name}.codes", shape, codec.dtype))
            entries.append(Entry(f"{name}.scales", (codec.num_scales(math.prod(shape)),), dtype))
    size = flat.layout.whole_size(bucket) if bucket.is_packed else bucket.shard_size
    return Group(entries, make, size * dtype.itemsize)


def _exact(param: Any, stored: Any) -> jax.Array:
    """The value of a main parameter; a remainder is only its low half."""
    if stored.dtype == jnp.float32:
        return stored
    return _join(jax.device_put(param, getattr(stored, "sharding", None)), stored)


@jax.jit
def _join(param: jax.Array, stored: jax.Array) -> jax.Array:
    return main_codec_of(stored).join(param, stored, jnp)


def _of_main(name: str, x: Any, params: dict[str, Any]) -> Iterator[Group]:
    """A main parameter of a state of one program."""
    param = params.get(name.replace("main_params", "params", 1))
    if param is None:
        raise TreeError(
            f"opt_state: {name}: a main parameter without a parameter of that path, "
            f"which no template could ask for: got {name}, expected that of one of "
            f"{len(params)} parameters, as {next(iter(params), 'none')}. Leave out optax.flatten. "
            "Of nnx pass params and opt_state both as they are, or both by nnx.as_pure."
        )
    if x.size and x.dtype == jnp.float32:
        yield _whole(name, x)
    elif x.size:
        yield Group([Entry(name, x.shape, _FLOAT32)], lambda: [_exact(param, x)], 4 * x.size)


def _whole(name: str, x: Any, key: str | None = None, **kwargs: Any) -> Group:
    """An array that is saved unchanged; random keys as their words."""
    if trees.is_key(x):
        x, key = jax.random.key_data(x), str(jax.random.key_impl(x))
    if not isinstance(x, jax.Array):
        x = _placed(name, x)
    entry = Entry(name, tuple(x.shape), jnp.dtype(x.dtype), key, **kwargs)
    part = x.sharding.shard_shape(x.shape)
    # orbax writes from devices.
    return Group([entry], lambda: [memory.from_host(x)], math.prod(part) * entry.dtype.itemsize)


def _placed(name: str, x: Any) -> jax.Array:
    """A number or numpy array as an array that all processes have."""
    if isinstance(x, jax.ShapeDtypeStruct) or not trees.is_number(x):
        raise TreeError(
            f"{name}: not an array: got {x!r}, expected a jax or numpy array, or a number. "
            "Leave it out of the state."
        )
    dtype = getattr(x, "dtype", None)
    # A copy: on a CPU, JAX may share memory with numpy arrays, which can change during the save.
    array = np.array(x, jax.eval_shape(lambda x: x, x).dtype)
    if dtype is not None and dtype != array.dtype:  # numpy's float64 equals None
        raise DtypeError(
            f"{name}: would lose bits: JAX has no such arrays without jax_enable_x64: got {dtype}, "
            f"expected {array.dtype}. Cast it."
        )
    devices = jax.devices() if jax.process_count() > 1 else jax.devices()[:1]
    everywhere = NamedSharding(Mesh(np.asarray(devices), "devices"), P())
    return jax.make_array_from_callback(array.shape, everywhere, lambda i: array[i])


class Extra(NamedTuple):
    """An extra tree: the header's entry of each leaf, and its arrays; numpy's as their bytes."""

    about: dict[str, dict[str, Any]]
    arrays: dict[str, Any]
    keys: dict[str, str]  # implementations of random keys that processes hold as their words


def agreed_extra(step: int | None, extra: Any) -> Extra | None:
    """Returns what is saved of an extra tree, once all processes are about to save the same.

    Raises TreeError for a leaf that cannot be saved, AgreementError if processes differ.
    """
    several = jax.process_count() > 1
    agree = functools.partial(check_agreement, "save", processes=range(jax.process_count()))
    try:
        found = None if extra is None else _of_extra(extra, is_local=several)
    except TreeError as error:
        if several:  # which the others hear, instead of waiting
            with contextlib.suppress(AgreementError):
                agree({EXTRA: f"{type(error).__name__}: {error}"}, limit=later_limit())
        raise
    if several:
        facts = {"step": str(step)} | _facts_of(found)
        agree(facts, limit=later_limit())
    return found


def _of_extra(extra: Any, *, is_local: bool) -> Extra:
    leaves = list(parts.leaves(EXTRA, extra, parts.is_value))
    about = {x.name: {"keys": x.keys} | described(x.name, x.value) for x in leaves}
    arrays, keys = dict[str, Any](), dict[str, str]()
    for name, x, *_ in leaves:
        if isinstance(x, np.ndarray | np.generic):
            arrays[name] = np.frombuffer(x.tobytes(), np.uint8)
        elif isinstance(x, jax.Array) and is_local and x.is_fully_addressable:
            if trees.is_key(x):
                keys[name], x = str(jax.random.key_impl(x)), jax.random.key_data(x)
            arrays[name] = np.asarray(x)
        elif isinstance(x, jax.Array):
            arrays[name] = x
    return Extra(about, arrays, keys)


def _facts_of(extra: Extra | None) -> dict[str, str]:
    """What processes must agree on: all leaves but global arrays."""
    if extra is None:
        return {EXTRA: "no extra"}
    facts = {EXTRA: ", ".join(extra.about)}
    for name, about in extra.about.items():
        said = {key: value for key, value in about.items() if key != "keys"}
        if isinstance(x := extra.arrays.get(name), np.ndarray):
            said["sha256"] = hashlib.sha256(x.tobytes()).hexdigest()
        facts[name] = f"{said} {extra.keys.get(name, '')}".strip()
    return facts


def described(name: str, x: Any) -> dict[str, Any]:
    """Returns the header's entry of a leaf of an extra tree: its kind, and a value, or a dtype."""
    # Not subclasses, such as masked arrays: only their numbers would come back.
    is_plain = type(x) in (np.ndarray, np.memmap) or isinstance(x, np.generic)
    if is_plain and not x.dtype.hasobject and not x.dtype.names:
        dtype = x.dtype.name if x.dtype.kind == "V" else x.dtype.str  # bfloat16 has only a name
        about = {"kind": "numpy", "dtype": dtype, "shape": list(x.shape)}
        return about | ({} if x.ndim else {"is_scalar": isinstance(x, np.generic)})
    if trees.is_concrete(x):
        return {"kind": "jax"}
    if type(x) in (bool, int, float, str, bytes) or parts.is_value(x):
        value = base64.b64encode(x).decode() if isinstance(x, bytes) else x
        if not isinstance(x, int) or x.bit_length() <= _MAX_BITS:
            return {"kind": type(x).__name__, "value": value}
    shown = f"a number of {x.bit_length()} bits" if isinstance(x, int) else f"{x!r:.60}"
    raise TreeError(
        f"{name}: nothing that a checkpoint holds: got {type(x).__name__} {shown}, expected "
        "a jax or numpy array of numbers or texts, bool, int, float, str, bytes or None. "
        "Save what it is made of, such as its state as bytes; outside of jitted functions."
    )
