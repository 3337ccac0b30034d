"""A state put together again: what every one has, and the state of optax's Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.storage import Reader, cast
from jdistadam.checkpoint.wanted import Wanted
from jdistadam.core.codecs import BlockCodes, is_codes
from jdistadam.core.main_params import MainParams
from jdistadam.errors import TreeError
from jdistadam.kernels import coded_leaves


class Restored:
    """The fields of a state like a template; first ``look``, then ``read``."""

    def __init__(self, reader: Reader, wanted: Wanted, fields: dict[str, Any], mesh: Any) -> None:
        """Takes where to read, how to compare, the template, and the mesh of what has no place."""
        self.reader, self.wanted, self.fields = reader, wanted, fields
        self.params = parts.named("params", fields["params"])
        self.adam = parts.adam_of(fields["opt_state"])
        self._mesh = mesh
        self._others = {leaf.name: leaf for leaf in parts.other_leaves(fields)}
        self._is_saved: dict[str, bool] = {}

    def look(self) -> None:
        """Compares all with the header; reads nothing.

        Raises:
          TreeError, ShapeError, DtypeError: Something is missing in the file, or differs.
        """
        self.wanted.array("count", jax.ShapeDtypeStruct((), jnp.int32))
        self.look_at_adam()
        for name, leaf in self._others.items():
            counts = leaf.is_schedule_count or name == "step"
            if counts and not self.wanted.has(name):
                continue  # the count of Adam
            self._is_saved[name] = self.wanted.array(name, leaf.value)

    def read(self) -> dict[str, Any]:
        """Reads all; returns the fields of the state."""
        params, adam, main = self.read_adam()
        others = self.others([name for name, saved in self._is_saved.items() if saved])
        values = dict(zip([n for n, saved in self._is_saved.items() if saved], others, strict=True))
        for name, leaf in self._others.items():
            if name not in values:
                is_new = name in self._is_saved
                values[name] = (
                    self.of_template(name, leaf.value) if is_new else self.count(leaf.value)
                )
        new = {
            name: parts.rebuilt(name, tree, values, adam, main)
            for name, tree in self.fields.items()
            if name != "params"
        }
        treedef: Any = jax.tree.structure(self.fields["params"])
        in_order = {name: new.get(name) for name in self.fields}
        return in_order | {"params": treedef.unflatten(params)}

    def others(self, names: Sequence[str]) -> list[Any]:
        """Reads arrays that are in the state as they are saved, and random keys."""
        likes = [self._others[n].value if n in self._others else None for n in names]
        found = self.reader.read(
            [(name, self.place(like)) for name, like in zip(names, likes, strict=True)]
        )
        new = []
        for name, like, x in zip(names, likes, found, strict=True):
            key = self.reader.entries[name].key
            dtype = getattr(like, "dtype", x.dtype)
            new.append(jax.random.wrap_key_data(x, impl=key) if key else cast(x, dtype))
        return new

    def count(self, like: Any = None) -> jax.Array:
        """Reads the number of steps, placed like a part of the template."""
        (found,) = self.reader.read([("count", self.place(like))])
        return found

    def place(self, like: Any) -> Sharding:
        """Where an array is placed: as the template says, else everywhere on the mesh."""
        sharding = getattr(like, "sharding", None)
        if isinstance(sharding, Sharding) and not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return sharding
        if self._mesh is not None:
            return NamedSharding(self._mesh, P())
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def of_template(self, name: str, x: Any) -> Any:
        """Returns what stays as the template has it; raises TreeError if that is but a shape."""
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        raise TreeError(
            name,
            "stays as the template has it, which has but its shape",
            got=x,
            expected="an array",
            action="Pass a state with values: TrainState.create(params, tx).",
        )

    def look_at_adam(self) -> None:
        """Compares params, moments and main parameters."""
        self._main = parts.named("params", parts.kept_main_params(self.fields["opt_state"]))
        self._sources = {
            name: self.wanted.exact(name, x, keeps_main=name in self._main)
            for name, x in self.params.items()
        }
        self._moments = {
            section: {
                name: self.wanted.moment(name, _as_floats(x))
                for name, x in parts.moments(section, getattr(self.adam, section)).items()
            }
            for section in parts.MOMENTS
        }

    def read_adam(self) -> tuple[list[Any], Any, Any]:
        """Reads them; returns the params, Adam's state and main parameters."""
        sources = {name: source for name, source in self._sources.items() if source}
        found = self.reader.read(
            [(source, self.place(self.params[name])) for name, source in sources.items()]
        )
        exact = dict(zip(sources, found, strict=True))
        kept = parts.kept_main_params(self.fields["opt_state"])
        params, main = [], []
        for name, like in self.params.items():
            if name not in exact:
                params.append(self.of_template(name, like))
                if name in self._main:
                    main.append(self.of_template(name, self._main[name]))
                continue
            kind = MainParams.of(self._main.get(name))
            param, stored = _split(exact[name], kind, like.dtype)
            params.append(param)
            if name in self._main:
                main.append(stored)
        treedef: Any = jax.tree.structure(kept)
        new = {section: self._read_moments(section) for section in parts.MOMENTS}
        adam = self.adam._replace(count=self.count(self.adam.count), **new)
        return params, adam, None if kept is None else treedef.unflatten(main)

    def _read_moments(self, section: str) -> Any:
        tree = getattr(self.adam, section)
        likes = parts.moments(section, tree)
        requests = [
            (name, place)
            for moment, x in likes.items()
            for name, place in zip(
                self._moments[section][moment], self._moment_places(x), strict=False
            )
        ]
        found = self.reader.read(requests)
        values = dict(zip([name for name, _ in requests], found, strict=True))
        treedef: Any = jax.tree.structure(tree, is_leaf=is_codes)
        return treedef.unflatten(
            self._moment(section, like, [values[n] for n in self._moments[section][name]])
            for name, like in likes.items()
        )

    def _moment_places(self, like: Any) -> tuple[Sharding, Sharding]:
        """Where codes are read to, or floats, and where the scales of codes."""
        if is_codes(like):
            return self.place(like.codes), self.place(like.scales)
        place = self.place(like)
        if not isinstance(place, NamedSharding):
            return place, place
        return place, NamedSharding(place.mesh, P())

    def _moment(self, section: str, like: Any, found: Sequence[jax.Array]) -> Any:
        """A moment as the template has it, of what was read."""
        if not found:

            def kept(x: Any) -> Any:
                if not isinstance(x, jax.ShapeDtypeStruct):
                    return x
                return jnp.zeros(x.shape, x.dtype, device=self.place(x))

            return jax.tree.map(kept, like)
        if is_codes(like):
            if len(found) == 2 and found[0].dtype != like.codes.dtype:  # of another format
                found = [coded_leaves.decoded(section, *found)]
            if len(found) == 1:
                floats = found[0].astype(jnp.float32)
                found = coded_leaves.encoded(section, like.codec, floats)
            return jax.device_put(BlockCodes(*found), jax.tree.map(self.place, like))
        if len(found) == 1:
            return found[0].astype(like.dtype)
        leaf = coded_leaves.decoded(section, *found).astype(like.dtype)
        return jax.device_put(leaf, self.place(like))


def _as_floats(like: Any) -> Any:
    return jax.ShapeDtypeStruct(like.shape, jnp.float32) if is_codes(like) else like


def _split(value: jax.Array, kind: MainParams, dtype: Any) -> tuple[Any, Any]:
    """The parameter of an exact value, and what is kept beside it."""
    if not kind.is_kept:
        return cast(value, dtype), None
    split = jax.jit(lambda x: kind.split(x.astype(jnp.float32), dtype, jnp))
    param, stored = split(value)
    return param, stored
