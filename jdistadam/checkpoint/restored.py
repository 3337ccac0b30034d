"""Rebuilds a state: compares a template with a checkpoint, then reads its arrays."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.adam import FlatAdam, Param, TreeAdam
from jdistadam.checkpoint.parts import Entry
from jdistadam.checkpoint.storage import Read, Reader, Wanted, empty
from jdistadam.core import collectives, memory
from jdistadam.core.codecs import BLOCK, Codec
from jdistadam.core.storage import MOMENTS
from jdistadam.distributed.global_arrays import copy_to
from jdistadam.distributed.main_params import as_received
from jdistadam.distributed.state import is_distributed_state
from jdistadam.errors import DtypeError, ShapeError, TreeError
from jdistadam.kernels import sharded_codes

Predicate = Callable[[str], bool]


@dataclasses.dataclass
class Request:
    """Compares a template with a checkpoint, and records what to read, in order.

    Raises DtypeError for an array of another dtype; ``finish`` raises for those that the file lacks
    or has in another shape, so that one error counts all of them.
    """

    reader: Reader
    mesh: Any = None  # for arrays without a sharding
    cast: bool = False  # this and the next two: arguments of ``restore``
    new: Predicate | None = None
    unused: Predicate | None = None
    instead: str = ""  # advice in errors, in place of ``new`` and ``unused``
    used: set[str] = dataclasses.field(default_factory=set)
    namesakes: set[str] = dataclasses.field(default_factory=set)  # in the file, of other arrays
    lacking: dict[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)  # by path
    reads: list[Read] = dataclasses.field(default_factory=list)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was read, by name

    def find(
        self, name: str, like: Any, *, is_exact: bool = False, dtype: Any = None
    ) -> list[Entry]:
        """Returns the file's entries of an array; empty if it stays as in the template.

        One entry, or the codes and scales of a moment. With ``is_exact`` the exact value of a
        parameter: main parameters, if the file has them. ``dtype``: the dtype that must hold it;
        None: that of ``like``.
        """
        if not hasattr(like, "dtype"):
            like = jax.eval_shape(lambda: jnp.asarray(like))
        shapes = {name: like.shape}
        codes, scales = f"{name}.codes", f"{name}.scales"
        if name.startswith(MOMENTS) and {codes, scales} <= self.reader.entries.keys():
            shapes = {codes: like.shape, scales: (-(-math.prod(like.shape) // BLOCK),)}
        main = name.replace("params", "main_params", 1)
        if has_main := is_exact and main in self.reader.entries:
            self.used.add(main)
        found = [self._of_shape(x, shape) for x, shape in shapes.items()]
        if None in found:
            return []
        entries = [self.reader.entries[x] for x in ([main] if has_main else shapes)]
        self._check_dtype(name, entries[-1], dtype or like.dtype)  # scales have that of the floats
        return entries

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises if arrays are lacking, or the file has some neither used, ignored nor extra."""
        self._check_none_lacking()
        known = self.used | {*ignored} | {*self.reader.extra}
        if rest := [
            name
            for name, entry in self.reader.entries.items()
            if name not in known
            and not (entry.is_count or parts.is_scalar(entry))
            and not (self.unused is not None and self.unused(parts.path_of(name)))
        ]:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            condition = self._condition([parts.path_of(name) for name in rest])
            action = (
                "Restore into such a state, or name what may be left with "
                f"unused=lambda path: {condition}"
            )
            raise TreeError(
                f"{self.reader.path}: {rest[0]}: in the file, and not in the template: "
                f"got {rest[0]}{more}, expected a template that has all that was saved. "
                f"{self.instead or action}."
            )

    def take(self, name: str, like: Any, entry: Entry | None = None) -> None:
        """Records that an array is read into ``values``: placed like another one, in its dtype."""
        found, place = entry or self.reader.entries[name], self.place(like)

        def use(arrays: collections.deque[jax.Array]) -> None:
            x = _put(arrays.popleft(), place)  # a no-op, unless it is on the host
            if found.key is not None:
                self.values[name] = jax.random.wrap_key_data(x, impl=found.key)
            else:
                self.values[name] = _cast(x, getattr(like, "dtype", found.dtype))

        self.reads.append(Read([(found, memory.device_sharding(place))], use))

    def place(self, like: Any) -> Sharding:
        """Returns the sharding of an array: the template's, else replicated over the mesh."""
        sharding = getattr(like, "sharding", None)
        if isinstance(sharding, Sharding) and not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return sharding
        if self.mesh is not None:
            return NamedSharding(self.mesh, P())
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def stays(self, name: str, x: Any) -> Any:
        """Returns an array of the template that stays; raises TreeError if it is only a shape."""
        if not isinstance(x, jax.ShapeDtypeStruct) or self.lacking:
            return x
        raise TreeError(
            f"{name}: stays as the template has it, which has but its shape: got {x}, "
            "expected an array. Pass a state with values: TrainState.create(params, tx)."
        )

    def _of_shape(self, name: str, shape: tuple[int, ...]) -> Entry | None:
        """The file's entry of a name; None if it lacks it or has another shape."""
        entry = self._entry(name)
        if name not in self.namesakes:
            self.used.add(name)
        if entry is not None and entry.like.shape == tuple(shape):
            return entry
        path = parts.path_of(name)
        if self.new is None or not self.new(path):
            self.lacking.setdefault(path, (name, tuple(shape)))
        return None

    def _entry(self, name: str) -> Entry | None:
        return None if name in self.namesakes else self.reader.entries.get(name)

    def _check_none_lacking(self) -> None:
        """Raises TreeError or ShapeError for the first array that is lacking; names others too."""
        if not self.lacking:
            return
        first, *others = self.lacking
        name, shape = self.lacking[first]
        entry = self._entry(name)
        error = TreeError if entry is None else ShapeError
        what = "missing in the file" if entry is None else "has another shape in the file"
        got = f"{len(self.reader.entries)} others" if entry is None else entry.like.shape
        also, more = "", f" and {len(others) - 3} more" if len(others) > 3 else ""
        if others:
            names = ", ".join(self.lacking[path][0] for path in others[:3])
            also = f"Also missing or of another shape: {names}{more}. "
        action = (
            "Restore into the state that was saved, or name what begins anew with "
            f"new=lambda path: {self._condition(list(self.lacking))}"
        )
        raise error(
            f"{self.reader.path}: {name}: {what}: got {got}, expected shape {shape}. "
            f"{also}{self.instead or action}."
        )

    def _condition(self, paths: list[str]) -> str:
        """A condition in Python that holds for paths, or ten of them, and for no used ones."""
        found = {parts.path_of(x) for x in self.used} - {*paths}
        begin, end = paths[0], f"[{paths[0].rpartition('[')[2]}"
        while not all(path.startswith(begin) for path in paths):
            begin = begin.rpartition("[")[0]
        if begin and not any(path.startswith(begin) for path in found):
            return f"path.startswith({begin!r})"
        if all(path.endswith(end) for path in paths) and not any(x.endswith(end) for x in found):
            return f"path.endswith({end!r})"
        return f"path.startswith({tuple(dict.fromkeys(paths))[:10]!r})"

    def _check_dtype(self, name: str, entry: Entry, dtype: Any) -> None:
        """Raises DtypeError if a cast to the template's dtype would lose bits."""
        saved = entry.like.dtype
        if saved == dtype or self.lacking:
            return
        if any(jnp.issubdtype(x, jax.dtypes.prng_key) for x in (saved, dtype)):
            raise DtypeError(
                f"{self.reader.path}: {name}: random keys of another kind: got {saved}, "
                f"expected {dtype}. Make the template with keys of that kind."
            )
        floats = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, saved))
        if not self.cast and not (floats and jnp.promote_types(dtype, saved) == dtype):
            raise DtypeError(
                f"{self.reader.path}: {entry.name}: a cast for {name} of the template would lose "
                f"bits: got {saved}, expected {jnp.dtype(dtype)}. "
                "Restore into that dtype or with main parameters, or pass cast=True."
            )


def restored_leaves(request: Request, fields: dict[str, Any], tx: Any) -> list[Any]:
    """Returns the leaves of a state like a template: all are compared, then read."""
    every = [leaf for field, x in fields.items() for leaf in parts.leaves_of(field, x)]
    flat = next((leaf.value for leaf in every if is_distributed_state(leaf.value)), None)
    parts.check_names(leaf.name for leaf in every)
    entries = request.reader.entries
    request.namesakes = {
        x.name
        for x in every
        if x.name in entries and parts.is_scalar(x) != parts.is_scalar(entries[x.name])
    }
    if flat is None:
        adam: Any = TreeAdam(every, request.place)
    else:
        adam = FlatAdam(fields["params"], flat, tx, starts_anew=request.new is None)
        request.find("count", jax.ShapeDtypeStruct((), jnp.int32))
        request.take("count", None)
    for leaf in (x for x in every if not x.section and x.value is not flat):
        if leaf.is_count and leaf.name not in request.reader.entries:
            request.take(leaf.name, leaf.value, request.reader.entries["count"])
        elif leaf.was in request.reader.entries:
            request.used.add(leaf.was)
            request.take(leaf.name, leaf.value, request.reader.entries[leaf.was])
        elif request.find(leaf.name, leaf.value):
            request.take(leaf.name, leaf.value)
        else:
            request.values[leaf.name] = request.stays(leaf.name, leaf.value)
    for unit, params in adam.units:  # after the count, which they need
        _ask_unit(request, adam, unit, params)
    for name, entry in entries.items() if flat is not None else ():
        if parts.is_scalar(entry) and name not in request.used:
            request.take(name, None)
    request.finish()
    request.reader.read(request.reads)
    values = request.values | adam.finished(request.values)
    return [x for leaf in every for x in jax.tree.leaves(values[leaf.name])]


def _ask_unit(request: Request, adam: Any, unit: Any, params: list[Param]) -> None:
    """Requests the parameters of a unit, which are read and put into the state together."""
    asked = [_asked(request, param) for param in params]

    def use(arrays: collections.deque[jax.Array]) -> None:
        made = []
        for param, wanted in zip(params, asked, strict=True):
            found = {x: [arrays.popleft() for _ in entries] for x, entries in wanted.items()}
            made.append(_made(param, found, int(request.values["count"])))
            request.values[param.name] = made[-1].pop("params", None)
        for section in adam.sections:
            new = [of_param[section] for of_param in made if section in of_param]
            if any(x is not None for x in new):
                adam.put(section, unit, new)

    request.reads.append(Read([x for of in asked for some in of.values() for x in some], use))


def _asked(request: Request, param: Param) -> dict[str, list[Wanted]]:
    """Compares a parameter with the header; returns what is read for it.

    Its exact value, if it does not stay as in the template; its moments and average, in floats or
    in codes and scales; and "params", if the value that a step has sent is in the file.
    """
    name, like = param.name, param.like
    exact: list[Entry] = []
    if like is not None:
        kept = jnp.float32 if param.kind.is_stored else None  # whatever the dtype of the parameter
        exact = request.find(name, like, is_exact=param.exact_at is not None, dtype=kept)
        if not exact:
            request.stays(name, like)
            request.stays(name, param.main)
    asked: dict[str, list[Wanted]] = {"exact": [(x, param.exact_at or param.place) for x in exact]}
    for section, moment in param.moments.items():
        of_moment, place = name.replace("params", section, 1), moment.sharding
        everywhere = NamedSharding(place.mesh, P()) if isinstance(place, NamedSharding) else place
        entries: list[Entry] = []
        if section in param.begin_as_params and not exact:  # it stays as the parameter does
            request.used.add(of_moment)
        elif 0 not in moment.shape:  # a distributed state has no empty ones
            entries = request.find(of_moment, moment)
        asked[section] = list(zip(entries, (place, everywhere), strict=False))
    # Before the first step, and after reload_main_params, a parameter is not rounded as a step
    # rounds it to send it: the file records this.
    saved, sent = request.reader.entries.get(name), param.sent and param.sent.name
    if saved and exact and sent and (saved.dtype, saved.sent) == (like.dtype, sent):
        asked["params"] = [(saved, param.place)]
    return asked


def _made(param: Param, found: dict[str, list[jax.Array]], count: int) -> dict[str, Any]:
    """The new arrays of a parameter, by section, from those that were read; None: it stays."""
    exact = found["exact"][0] if found["exact"] else None
    made: dict[str, Any] = {}
    for section, moment in param.moments.items():
        arrays = found[section]
        if section in param.begin_as_params and not arrays and exact is not None:
            arrays = [exact]  # if it is missing, it begins with the parameter
        if len(arrays) > 1:  # codes and scales
            arrays = [jax.block_until_ready(sharded_codes.decoded(section, *arrays))]
        made[section] = None
        if arrays:
            made[section] = _put(_cast(arrays[0], moment.dtype), moment.sharding)
    if param.kind.is_stored:
        made["main_params"] = None if exact is None else _stored(param.kind, exact)
    if "params" in found:
        (made["params"],) = found["params"]
    elif param.like is not None:
        made["params"] = _rounded(param, exact, param.sent if count > 0 else None)
    return made


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    """An array in another dtype, with the same placement."""
    if array.dtype == dtype:
        return array
    return array.astype(dtype) if array.size else empty(array.shape, dtype, array.sharding)


def _put(array: jax.Array, place: Sharding) -> jax.Array:
    """``jax.device_put``, which takes a tenth of a millisecond also if an array is there."""
    return array if array.sharding == place else jax.device_put(array, place)


def _rounded(param: Param, exact: Any, sent: Any) -> Any:
    """A parameter from its exact value, rounded and placed; the template's if there is none."""
    dtype, place = param.like.dtype, param.place
    if exact is None:
        new = copy_to(param.like, place)
    elif not exact.size or (exact.dtype, param.exact_at or place, sent) == (dtype, place, None):
        new = _cast(exact, dtype)
    else:
        new = jax.block_until_ready(_rounder(param.kind, dtype, sent, place)(exact))
    return _put(new, place)  # equal, in the spelling of place


@functools.lru_cache(maxsize=4096)
def _rounder(kind: Codec, dtype: Any, sent: Any, place: Sharding) -> Any:
    """A program that makes a parameter from its exact value: rounded, sent and placed.

    [Note: one collective at a time]
    """

    def rounded(value: jax.Array) -> jax.Array:
        if kind.is_remainder:  # the low half of the value
            param: jax.Array = kind.split(value.astype(jnp.float32), dtype, jnp)[0]
        else:
            param = collectives.round_to(value, dtype)
        return as_received(param, sent)

    return jax.jit(rounded, out_shardings=place)


def _stored(kind: Codec, exact: jax.Array) -> jax.Array:
    """The stored main parameter of an exact value."""
    new: jax.Array = exact if exact.dtype == kind.dtype else _splitter(kind)(exact)
    return new


@functools.cache
def _splitter(kind: Codec) -> Any:
    """A program that makes the stored main parameter."""
    return jax.jit(lambda value: kind.split(value.astype(jnp.float32), jnp.bfloat16, jnp)[1])
