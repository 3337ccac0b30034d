"""Rebuilds a state: compares a template with a checkpoint, then reads its arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.adam import FlatAdam, Param, TreeAdam
from jdistadam.checkpoint.header import Entry
from jdistadam.checkpoint.storage import Read, Reader, Wanted, cast
from jdistadam.core import collectives
from jdistadam.core.codecs import Codec
from jdistadam.distributed.state import is_distributed_state
from jdistadam.errors import DtypeError, ShapeError, TreeError
from jdistadam.kernels import sharded_quantized_adam as coded_leaves
from jdistadam.training.placement import copy_to

Predicate = Callable[[str], bool]

# And "key", which other optimizers lack.
_ALWAYS_OPTIONAL = ("grad_norm", "scaling.", "guard.")


class Request:
    """Compares a template with a checkpoint, and records what to read.

    Raises TreeError, ShapeError or DtypeError for arrays that are missing or differ from the
    template. ``reads`` is what ``read`` reads, in this order; the arrays of ``take`` are in
    ``values`` afterwards.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        mesh: Any = None,
        cast: bool = False,
        new: Predicate | None = None,
        unused: Predicate | None = None,
    ) -> None:
        """Takes the mesh for arrays without a sharding, and the arguments of ``restore``."""
        self.entries, self.new, self._reader = reader.entries, new, reader
        self._mesh, self._cast, self._unused = mesh, cast, unused
        self._used: set[str] = set()
        self.reads: list[Read] = []
        self.values: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Returns whether the file has an array, and marks it as used."""
        self._used.add(name)
        return name in self.entries

    def array(self, name: str, like: Any) -> Entry | None:
        """Returns the file's entry of an array; None if it stays as in the template."""
        if not hasattr(like, "dtype"):
            like = jax.eval_shape(lambda: jnp.asarray(like))
        entry = self._of_shape(name, like.shape)
        if entry is None:
            return None
        dtypes = entry.like.dtype, like.dtype
        if not any(jnp.issubdtype(x, jax.dtypes.prng_key) for x in dtypes):
            self._check_dtype(name, entry, like.dtype)
        elif dtypes[0] != dtypes[1]:
            raise DtypeError(
                f"{self._reader.path}: {name}: random keys of another kind: got {dtypes[0]}, "
                f"expected {dtypes[1]}. Make the template with keys of that kind."
            )
        return entry

    def moment(self, name: str, like: Any) -> list[Entry]:
        """Returns the entries of a moment like one of floats: those of floats, or codes and scales.

        Empty if it stays as in the template.
        """
        if 0 in like.shape:
            return []  # not saved: a distributed state lacks it
        codes, scales = (self.entries.get(f"{name}.{part}") for part in ("codes", "scales"))
        if codes is None or scales is None:
            entry = self.array(name, like)
            return [] if entry is None else [entry]
        self._check_dtype(name, scales, like.dtype)  # the dtype of the decoded moment
        blocks = coded_leaves.num_scales(like.shape)
        found = self._of_shape(codes.name, like.shape), self._of_shape(scales.name, (blocks,))
        return [codes, scales] if all(found) else []

    def exact(self, name: str, like: Any, *, keeps_main: bool) -> Entry | None:
        """Returns the file's entry of the exact value of a parameter.

        None if the parameter stays as in the template. ``keeps_main``: whether the value is kept in
        float32 in addition to a 16-bit parameter.
        """
        main = name.replace("params", "main_params", 1)
        source = main if self.has(main) else name
        if self._of_shape(name, like.shape) is None:
            return None
        entry = self.entries[source]
        self._check_dtype(name, entry, jnp.float32 if keeps_main else like.dtype)
        return entry

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises TreeError if the file has arrays that are neither used nor in ``ignored``."""
        self._used.update(ignored)
        rest = [
            name
            for name, entry in self.entries.items()
            if name not in self._used
            and not (entry.is_count or name == "key" or name.startswith(_ALWAYS_OPTIONAL))
            and not (self._unused is not None and self._unused(parts.path_of(name)))
        ]
        if rest:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise TreeError(
                f"{self._reader.path}: {rest[0]}: in the file, and not in the template: "
                f"got {rest[0]}{more}, expected a template that has all that was saved. "
                "Restore into such a state, or name what may be left with unused=."
            )

    def take(self, name: str, like: Any, entry: Entry | None = None) -> None:
        """Records that an array is read into ``values``: placed like another one, in its dtype."""
        found = entry or self.entries[name]

        def use(arrays: list[jax.Array]) -> None:
            if found.key is not None:
                self.values[name] = jax.random.wrap_key_data(arrays[0], impl=found.key)
            else:
                self.values[name] = cast(arrays[0], getattr(like, "dtype", found.dtype))

        self.reads.append(Read([(found, self.place(like))], use))

    def place(self, like: Any) -> Sharding:
        """Returns the sharding of an array: the template's, else replicated over the mesh."""
        sharding = getattr(like, "sharding", None)
        if isinstance(sharding, Sharding) and not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return sharding
        if self._mesh is not None:
            return NamedSharding(self._mesh, P())
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def read(self) -> dict[str, Any]:
        """Reads everything recorded; returns ``values``."""
        self._reader.read(self.reads)
        return self.values

    def _of_shape(self, name: str, shape: tuple[int, ...]) -> Entry | None:
        """The file's entry of a name; raises if its shape differs and must not."""
        self._used.add(name)
        entry = self.entries.get(name)
        if entry is not None and entry.like.shape == tuple(shape):
            return entry
        if self.new is not None and self.new(parts.path_of(name)):
            return None
        error = TreeError if entry is None else ShapeError
        what = "missing in the file" if entry is None else "has another shape in the file"
        got = f"{len(self.entries)} others" if entry is None else entry.like.shape
        raise error(
            f"{self._reader.path}: {name}: {what}: got {got}, expected shape {tuple(shape)}. "
            "Restore into the state that was saved, or name what begins anew with new=."
        )

    def _check_dtype(self, name: str, entry: Entry, dtype: Any) -> None:
        """Raises DtypeError if a cast to the template's dtype would lose bits."""
        saved = entry.dtype
        floats = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, saved))
        if saved == dtype or self._cast or (floats and jnp.promote_types(dtype, saved) == dtype):
            return
        raise DtypeError(
            f"{self._reader.path}: {entry.name}: a cast for {name} of the template would lose "
            f"bits: got {saved}, expected {jnp.dtype(dtype)}. "
            "Restore into that dtype or with main parameters, or pass cast=True."
        )


# For one parameter: "params", and the new sections of the state; None stays as it was.
Made = dict[str, jax.Array | None]


class Restored:
    """The fields of a state like a template, compared with the header; ``read`` reads them."""

    def __init__(self, request: Request, fields: dict[str, Any], tx: Any) -> None:
        """Takes the request, the template, and the distributed optimizer."""
        self._request, self._fields = request, fields
        self._leaves = {name: list(parts.leaves_of(name, x)) for name, x in fields.items()}
        leaves = [leaf for of_field in self._leaves.values() for leaf in of_field]
        flat = next((leaf.value for leaf in leaves if is_distributed_state(leaf.value)), None)
        self._adam: Any = (
            TreeAdam(leaves, request.place)
            if flat is None
            else FlatAdam(fields["params"], flat, tx, starts_anew=request.new is None)
        )
        if flat is not None:
            request.array("count", jax.ShapeDtypeStruct((), jnp.int32))
            request.take("count", None)
        for leaf in leaves:
            if not leaf.section and leaf.value is not flat:
                self._ask_other(leaf)
        for unit, params in self._adam.units:  # after the count, which they need
            self._ask_unit(unit, params)
        for name in filter(request.has, self._adam.optional):
            request.take(name, None)

    def _ask_other(self, leaf: parts.Leaf) -> None:
        """Requests an array that the state has as it is saved."""
        request = self._request
        if leaf.is_count and not request.has(leaf.name):
            request.take(leaf.name, leaf.value, request.entries["count"])
        elif request.array(leaf.name, leaf.value):
            request.take(leaf.name, leaf.value)
        else:
            request.values[leaf.name] = _of_template(leaf.name, leaf.value)

    def read(self) -> dict[str, Any]:
        """Reads everything; returns the fields of the state."""
        values = self._request.read()
        values |= self._adam.finished(values)
        return {
            name: jax.tree.unflatten(
                jax.tree.structure(field),
                [x for leaf in self._leaves[name] for x in jax.tree.leaves(values[leaf.name])],
            )
            for name, field in self._fields.items()
        }

    def _ask_unit(self, unit: Any, params: list[Param]) -> None:
        """Requests the parameters of a unit, which are read and put into the state together."""
        asked = [self._ask(param) for param in params]

        def use(arrays: list[jax.Array]) -> None:
            in_order = (arrays.pop(0) for _ in range(len(arrays)))
            made = [make(in_order) for _, make in asked]
            for param, new in zip(params, made, strict=True):
                self._request.values[param.name] = new.pop("params", None)
            for section in self._adam.sections:
                found = [new[section] for new in made if section in new]
                if any(x is not None for x in found):
                    self._adam.put(section, unit, found)

        self._request.reads.append(Read([one for wanted, _ in asked for one in wanted], use))

    def _ask(self, param: Param) -> tuple[list[Wanted], Callable[[Iterator[jax.Array]], Made]]:
        """Compares a parameter with the header; returns what to read, and the function using it."""
        exact = self._exact_entry(param)
        moments = {x: self._moment_entries(param, x, exact is None) for x in param.moments}
        wanted: list[Wanted] = [(exact, param.main_at or param.place)] if exact else []
        for section, (_, place) in param.moments.items():
            wanted += zip(moments[section], (place, _everywhere(place)), strict=False)
        # Before the first step, and after reload_main_params, a parameter is not rounded as a step
        # rounds it to send it: the file records this.
        saved, sent = self._request.entries.get(param.name), param.sent and param.sent.name
        arrives = False
        if saved and exact and sent and (saved.dtype, saved.sent) == (param.like.dtype, sent):
            arrives = True
            wanted.append((saved, param.place))
        return wanted, functools.partial(self._made, param, exact is not None, moments, arrives)

    def _made(
        self,
        param: Param,
        has_exact: bool,
        moments: dict[str, list[Entry]],
        arrives: bool,
        arrays: Iterator[jax.Array],
    ) -> Made:
        """The new arrays of a parameter, from those that were read."""
        exact, made = next(arrays) if has_exact else None, Made()
        for section, (like, place) in param.moments.items():
            found = [next(arrays) for _ in moments[section]]
            if section == "ema" and not found and exact is not None:
                found = [exact]  # a missing average begins with the parameter
            made[section] = _floats(section, found, like.dtype, place) if found else None
        if param.kind.is_stored:
            made["main_params"] = None if exact is None else _stored(param.kind)(exact)
        if arrives:
            made["params"] = next(arrays)
        elif param.like is not None:
            is_sent = int(self._request.values["count"]) > 0
            made["params"] = _rounded(param, exact, param.sent if is_sent else None)
        return made

    def _moment_entries(self, param: Param, section: str, stays: bool) -> list[Entry]:
        """The entries of a moment or an average, which stays if the parameter does."""
        name = param.name.replace("params", section, 1)
        if section == "ema" and stays:
            self._request.has(name)  # marks it as used without reading it
            return []
        return self._request.moment(name, param.moments[section][0])

    def _exact_entry(self, param: Param) -> Entry | None:
        """The entry of a parameter's exact value; None if the template's stays."""
        request, name, like = self._request, param.name, param.like
        if like is None:
            return None
        if param.main_at is None:
            entry = request.array(name, like)
        else:
            entry = request.exact(name, like, keeps_main=param.kind.is_stored)
        if entry is None:
            _of_template(name, like)
            _of_template(name, self._adam.main_of(name) if param.kind.is_stored else None)
        return entry


def _everywhere(place: Sharding) -> Sharding:
    """A replicated sharding, for the scales of codes."""
    return NamedSharding(place.mesh, P()) if isinstance(place, NamedSharding) else place


def _of_template(name: str, x: Any) -> Any:
    """Returns an array of the template that stays; raises TreeError if it is only a shape."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    raise TreeError(
        f"{name}: stays as the template has it, which has but its shape: got {x}, "
        "expected an array. Pass a state with values: TrainState.create(params, tx)."
    )


def _floats(section: str, found: Sequence[jax.Array], dtype: Any, place: Sharding) -> jax.Array:
    """A moment as floats, read as floats or as codes and scales."""
    x = found[0]
    if len(found) > 1:
        x = jax.block_until_ready(coded_leaves.decoded(section, *found))
    return jax.device_put(cast(x, dtype), place)


def _rounded(param: Param, exact: Any, sent: Any) -> Any:
    """A parameter from its exact value, rounded and placed; the template's if there is none."""
    dtype, place = param.like.dtype, param.place
    if exact is None:
        new = copy_to(param.like, place)
    elif not exact.size or (exact.dtype, param.main_at or place, sent) == (dtype, place, None):
        new = cast(exact, dtype)
    else:
        new = jax.block_until_ready(_rounder(param.kind, dtype, sent, place)(exact))
    return jax.device_put(new, place)  # equal, in the spelling of place


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
        return param if sent is None else collectives.round_to(param, sent).astype(dtype)

    return jax.jit(rounded, out_shardings=place)


@functools.cache
def _stored(kind: Codec) -> Any:
    """A program that makes the stored main parameter from the exact value."""
    return jax.jit(lambda value: kind.split(value.astype(jnp.float32), jnp.bfloat16, jnp)[1])
