"""A state put together again: what a template asks for, compared with a checkpoint, then read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.parts import FlatArrays
from jdistadam.checkpoint.request import Request
from jdistadam.checkpoint.storage import Reader, cast
from jdistadam.core import collectives
from jdistadam.core.codecs import NOTHING, BlockCodes, Codec, codec_of, is_codes
from jdistadam.core.loss_scale import LossScaleState, continued_loss_scale
from jdistadam.core.norm_guard import NormGuardState, continued_norm_guard
from jdistadam.core.storage import main_codec_of
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.main_params import sent_dtypes
from jdistadam.distributed.state import is_distributed_state
from jdistadam.errors import TreeError
from jdistadam.kernels import coded_leaves
from jdistadam.training.placement import copy_to


@dataclasses.dataclass
class _Leaf:
    """A parameter and its moments in the template, and the names under which the file has them.

    Attributes:
      name: Name of the parameter.
      like: The parameter, or its shape; None where there are moments alone.
      place: Where the parameter goes.
      main_at: Where its exact value is read; None where it has no moments either.
      moments: By "mu", "nu" and "ema": what they are as floats, and where they are read.
      kind: Which main parameter is kept beside it.
      sent: The dtype to which a step rounds it; None where it does not.
      source: The name of its exact value; None where the template's stays.
      arrives: Whether the parameter itself is read, too.
      found: The names of the moments: of each one, or of codes and scales, or none.
    """

    name: str
    like: Any
    place: Sharding
    main_at: Sharding | None = None
    moments: dict[str, tuple[Any, Sharding]] = dataclasses.field(default_factory=dict)
    kind: Codec = NOTHING
    sent: Any = None
    source: str | None = None
    arrives: bool = False
    found: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def at(self) -> Sharding:
        """Where its value is read."""
        return self.main_at or self.place

    def requests(self) -> Iterator[tuple[str, Sharding]]:
        """Yields what is read for it, and where it goes; scales of codes go everywhere."""
        if self.source:
            yield self.source, self.at
        for section, (_, place) in self.moments.items():
            scales = place
            if isinstance(place, NamedSharding):
                scales = NamedSharding(place.mesh, P())
            yield from zip(self.found[section], (place, scales), strict=False)
        if self.arrives:
            yield self.name, self.place


def place_of(like: Any, mesh: Any = None) -> Sharding:
    """Returns where an array goes: as the template says, else everywhere on the mesh."""
    sharding = getattr(like, "sharding", None)
    if isinstance(sharding, Sharding) and not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return sharding
    if mesh is not None:
        return NamedSharding(mesh, P())
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


class _Tree:
    """Moments and main parameters in the state of one program; each leaf is a unit."""

    sections = (*parts.MOMENTS, "main_params")

    def __init__(self, fields: dict[str, Any], adam: Any, place: Any) -> None:
        self._adam, self._place = adam, place
        self._kept = parts.kept_main_params(fields["opt_state"])
        self._trees = {"mu": adam.mu, "nu": adam.nu, "main_params": self._kept}
        self._likes = {part: parts.named("params", tree) for part, tree in self._trees.items()}
        self._new: dict[str, dict[str, Any]] = {part: {} for part in self._trees}
        self.units: list[tuple[Any, list[_Leaf]]] = []
        params = parts.named("params", fields["params"])
        for name in dict.fromkeys([*params, *self._likes["mu"], *self._likes["nu"]]):
            moments = {
                part: _in_floats(self._likes[part][name], place)
                for part in parts.MOMENTS
                if name in self._likes[part]
            }
            kind, at = main_codec_of(self.main_of(name)), place(params.get(name))
            self.units.append((name, [_Leaf(name, params.get(name), at, at, moments, kind)]))

    def main_of(self, name: str) -> Any:
        """Returns what the template has of the main parameter of a parameter."""
        return self._likes["main_params"].get(name)

    def put(self, section: str, name: str, found: Sequence[Any]) -> None:
        """Takes the moment or the main parameter of a leaf, if it is there."""
        like, (x,) = self._likes[section][name], found
        if is_codes(like):
            x = BlockCodes(*coded_leaves.encoded(section, codec_of(like), x))
        self._new[section][name] = jax.device_put(x, jax.tree.map(self._place, like))

    def finished(self, count: jax.Array, optional: Any) -> tuple[Any, Any]:
        """Returns Adam's state and the main parameters; what was not put is the template's."""

        def kept(x: Any) -> Any:
            is_shape = isinstance(x, jax.ShapeDtypeStruct)
            return jnp.zeros(x.shape, x.dtype, device=self._place(x)) if is_shape else x

        trees = {}
        for section, tree in self._trees.items():
            treedef: Any = jax.tree.structure(tree, is_leaf=is_codes)
            new = self._new[section]
            trees[section] = treedef.unflatten(
                new[name] if name in new else jax.tree.map(kept, like)
                for name, like in self._likes[section].items()
            )
        main = trees.pop("main_params")
        return self._adam._replace(count=count, **trees), main


def _in_floats(like: Any, place: Any) -> tuple[Any, Sharding]:
    """Shape and dtype of a moment without codes, and where it is read."""
    if is_codes(like):
        return jax.ShapeDtypeStruct(like.shape, jnp.float32), place(like.codes)
    return like, place(like)


class _Flat:
    """Moments and main parameters in a distributed state; each bucket is a unit."""

    def __init__(self, fields: dict[str, Any], adam: Any, tx: Any, *, starts_anew: bool) -> None:
        params, self._config, self._adam = fields["params"], tx.config, adam
        self._arrays = FlatArrays(tx, params)
        self._place = tx.config.state_sharding
        self._starts_anew = starts_anew
        has_average = tx.config.ema_decay is not None
        self.sections = (*parts.MOMENTS, "main_params", *(("ema",) if has_average else ()))
        storage = tx.config.algorithm.storage
        dtypes = {part: storage.float_dtype(part) for part in parts.MOMENTS}
        dtypes |= {"ema": jnp.dtype(jnp.float32)} if has_average else {}
        specs = jax.tree.leaves(tx.param_specs(params), is_leaf=lambda x: isinstance(x, P))
        sent = sent_dtypes(tx.config.schedule(tx.config.tensor_local(params)))
        leaves = [
            _Leaf(name, like, NamedSharding(tx.config.mesh, spec), sent=dtype)
            for (name, like), spec, dtype in zip(
                parts.named("params", params).items(), specs, sent, strict=True
            )
        ]
        alone = dict(enumerate(leaves))  # frozen, or without elements: no more than the parameter
        self.units: list[tuple[Any, list[_Leaf]]] = []
        for bucket in self._arrays.layout.buckets:
            mine = [alone.pop(i) for i in bucket.leaves]
            for leaf, place in zip(mine, self._arrays.places(bucket), strict=True):
                leaf.main_at = place
                leaf.kind = tx.config.policy.main_params if bucket.has_main else NOTHING
                for part, dtype in dtypes.items():
                    leaf.moments[part] = jax.ShapeDtypeStruct(leaf.like.shape, dtype), place
            self.units.append((bucket, mine))
        self.units += [(None, [leaf]) for leaf in alone.values()]

    @functools.cached_property
    def _new(self) -> dict[str, Any]:
        """The flat arrays: those of the template, if something of it may stay; else zeros."""
        new = {}
        for part in self.sections:
            like = getattr(self._adam, part)
            is_shape = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like))
            is_zero = self._starts_anew or is_shape
            new[part] = self._arrays.new(part) if is_zero else copy_to(like, self._place)
        return new

    def main_of(self, name: str) -> Any:
        """Returns what the template has of main parameters."""
        return self._adam.main_params

    def put(self, section: str, bucket: Bucket, found: Sequence[Any]) -> None:
        """Takes what was found of a moment, or of the main parameters, of a bucket's leaves."""
        flat = self._new[section]
        if any(x is None for x in found):
            old = self._arrays.extract(bucket, section, flat)
            found = [y if x is None else x for x, y in zip(found, old, strict=True)]
        self._new[section] = self._arrays.insert(bucket, section, flat, found)

    def finished(self, count: jax.Array, optional: Any) -> tuple[Any, Any]:
        """Returns the state; ``optional`` reads what the file may lack."""
        config, everywhere = self._config, NamedSharding(self._config.mesh, P())
        scale: Any = {name: optional(f"scaling.{name}") for name in LossScaleState._fields}
        is_saved = any(x is not None for x in scale.values())
        scaling: Any = continued_loss_scale(
            config.loss_scale,
            LossScaleState(**jax.tree.map(np.asarray, scale)) if is_saved else None,
        )
        guard: Any = NormGuardState(*(optional(f"guard.{x}") for x in NormGuardState._fields))
        guard = continued_norm_guard(config.norm_guard, None if guard.mean is None else guard)
        norm, key = optional("grad_norm"), config.algorithm.storage.key
        if config.algorithm.storage.is_stochastic and (saved := optional("key")) is not None:
            key = saved
        scalars = {
            "grad_norm": np.float32(0) if norm is None else norm,
            "scaling": scaling,
            "guard": guard,
            "layout_digest": config.layout_digest(self._arrays.layout),
            "key": key if config.algorithm.storage.is_stochastic else None,
        }
        placed = jax.device_put(copy_to(scalars, everywhere), everywhere)
        # On Explicit axes shardings come back spelled in another way: device_put copies nothing.
        placed |= jax.device_put(self._new, self._place)
        return self._adam._replace(count=count, **placed), None


class Restored:
    """The fields of a state like a template; first ``look``, then ``read``."""

    def __init__(self, reader: Reader, request: Request, fields: dict[str, Any], tx: Any) -> None:
        """Takes where to read, how to compare, the template, and the distributed optimizer."""
        self._reader, self._wanted, self._fields = reader, request, fields
        adam = parts.adam_of(fields["opt_state"])
        is_flat = is_distributed_state(adam)
        self._placed = functools.partial(place_of, mesh=tx.config.mesh if is_flat else None)
        self._count = None if is_flat else adam.count
        self._adam: Any = (
            _Flat(fields, adam, tx, starts_anew=request.new is None)
            if is_flat
            else _Tree(fields, adam, self._placed)
        )
        self._others = {leaf.name: leaf for leaf in parts.other_leaves(fields)}
        self._is_saved: dict[str, bool] = {}

    def look(self) -> None:
        """Compares all with the header; reads nothing."""
        request = self._wanted
        request.array("count", jax.ShapeDtypeStruct((), jnp.int32))
        for leaf in (leaf for _, leaves in self._adam.units for leaf in leaves):
            if leaf.main_at is None:
                leaf.source = leaf.name if request.array(leaf.name, leaf.like) else None
            elif leaf.like is not None:
                leaf.source = request.exact(leaf.name, leaf.like, keeps_main=leaf.kind.is_stored)
            for section, (like, _) in leaf.moments.items():
                name = leaf.name.replace("params", section, 1)
                if section == "ema" and leaf.source is None:
                    request.has(name)  # and not read: it stays as the template has it, as they do
                    leaf.found[section] = ()
                else:
                    leaf.found[section] = request.moment(name, like)
            # Before the first step, and after reload_main_params, a parameter is not rounded as a
            # step rounds it to send it: the file knows.
            saved = self._reader.entries.get(leaf.name)
            if saved is not None and leaf.source and leaf.sent is not None:
                leaf.arrives = (saved.dtype, saved.sent) == (leaf.like.dtype, leaf.sent.name)
        for name, leaf in self._others.items():
            if not leaf.is_count or request.has(name):  # else the count of Adam
                self._is_saved[name] = request.array(name, leaf.value)

    def read(self) -> dict[str, Any]:
        """Reads all; returns the fields of the state."""
        count = self._read_count(self._count)
        params = self._read_units(int(count))
        adam, main = self._adam.finished(count, self._optional)
        saved = [name for name, is_saved in self._is_saved.items() if is_saved]
        values = dict(zip(saved, self.others(saved), strict=True))
        for name, leaf in self._others.items():
            if name not in self._is_saved:
                values[name] = self._read_count(leaf.value)
            elif name not in values:
                values[name] = _of_template(name, leaf.value)
        treedef: Any = jax.tree.structure(self._fields["params"])
        in_order = (params[name] for name in parts.named("params", self._fields["params"]))
        return {
            name: parts.rebuilt(name, tree, values, adam, main)
            if name != "params"
            else treedef.unflatten(in_order)
            for name, tree in self._fields.items()
        }

    def others(self, names: Sequence[str]) -> list[Any]:
        """Reads arrays that are in the state as they are saved, and random keys."""
        likes = [self._others[n].value if n in self._others else None for n in names]
        places = map(self._placed, likes)
        new = []
        found = self._reader.read(list(zip(names, places, strict=True)))
        for name, like, x in zip(names, likes, found, strict=True):
            key = self._reader.entries[name].key
            dtype = getattr(like, "dtype", x.dtype)
            new.append(jax.random.wrap_key_data(x, impl=key) if key else cast(x, dtype))
        return new

    def _read_count(self, like: Any) -> jax.Array:
        return next(self._reader.read([("count", self._placed(like))]))

    def _optional(self, name: str) -> jax.Array | None:
        if not self._wanted.has(name):
            return None
        return next(self._reader.read([(name, self._placed(None))]))

    def _read_units(self, count: int) -> dict[str, Any]:
        """Reads params, moments and main parameters, unit by unit; returns the params."""
        params: dict[str, Any] = {}
        requests = [
            [one for leaf in leaves for one in leaf.requests()] for _, leaves in self._adam.units
        ]
        sizes = [sum(map(self._reader.nbytes, unit)) for unit in requests]
        found = self._reader.read([one for unit in requests for one in unit], max(sizes, default=0))
        for unit, leaves in self._adam.units:
            new: dict[str, list[Any]] = {part: [] for part in self._adam.sections}
            for leaf in leaves:
                exact = next(found) if leaf.source else None
                for part, (like, place) in leaf.moments.items():
                    x = [next(found) for _ in leaf.found[part]]
                    if part == "ema" and not x and exact is not None:
                        x = [exact]  # an average that the file lacks begins with the parameter
                    new[part].append(_floats(part, x, like.dtype, place) if x else None)
                if leaf.arrives:
                    params[leaf.name] = next(found)
                elif leaf.like is not None:
                    params[leaf.name] = _param(leaf, exact, leaf.sent if count else None)
                if leaf.kind.is_stored:
                    new["main_params"].append(None if exact is None else _stored(leaf.kind)(exact))
                    if exact is None:
                        _of_template(leaf.name, self._adam.main_of(leaf.name))
            for part, values in new.items():
                if any(x is not None for x in values):
                    self._adam.put(part, unit, values)
        return params


def _of_template(name: str, x: Any) -> Any:
    """Returns what stays as the template has it; raises TreeError if that is but a shape."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    raise TreeError(
        f"{name}: stays as the template has it, which has but its shape: got {x}, "
        "expected an array. Pass a state with values: TrainState.create(params, tx)."
    )


def _floats(section: str, found: Sequence[jax.Array], dtype: Any, place: Sharding) -> jax.Array:
    """A moment as it was read, or in codes and scales, as floats."""
    x = found[0]
    if len(found) > 1:
        x = jax.block_until_ready(coded_leaves.decoded(section, *found))
    return jax.device_put(cast(x, dtype), place)


def _param(leaf: _Leaf, exact: Any, sent: Any) -> Any:
    """A parameter of its exact value, rounded and placed; that of the template without one."""
    dtype, place = leaf.like.dtype, leaf.place
    if exact is None:
        param = copy_to(_of_template(leaf.name, leaf.like), place)
    elif not exact.size or (exact.dtype, leaf.at, sent) == (dtype, place, None):
        param = cast(exact, dtype)
    else:
        param = jax.block_until_ready(_rounder(leaf.kind, dtype, sent, place)(exact))
    return jax.device_put(param, place)  # the same, spelled so


@functools.lru_cache(maxsize=4096)
def _rounder(kind: Codec, dtype: Any, sent: Any, place: Sharding) -> Any:
    """A program that makes a parameter of its exact value: rounded, sent and placed.

    [Note: one collective at a time]
    """

    def rounded(value: jax.Array) -> jax.Array:
        if kind.is_remainder:  # a part of the value
            param: jax.Array = kind.split(value.astype(jnp.float32), dtype, jnp)[0]
        else:
            param = collectives.round_to(value, dtype)
        return param if sent is None else collectives.round_to(param, sent).astype(dtype)

    return jax.jit(rounded, out_shardings=place)


@functools.cache
def _stored(kind: Codec) -> Any:
    """A program that makes what is kept beside a parameter, of its exact value."""
    return jax.jit(lambda value: kind.split(value.astype(jnp.float32), jnp.bfloat16, jnp)[1])
