"""A state put together again: what a template asks for, compared with a checkpoint, then read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.parts import FlatArrays
from jdistadam.checkpoint.request import Request
from jdistadam.checkpoint.storage import Read, cast
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

Made = dict[str, jax.Array | None]
"""Of one parameter: "params", and what is new in the sections of the state; None stays."""


@dataclasses.dataclass
class _Leaf:
    """A parameter and its moments in the template.

    Attributes:
      name: Name of the parameter.
      like: The parameter, or its shape; None where there are moments alone.
      place: Where the parameter goes.
      main_at: Where its exact value is read; None where it has no moments either.
      moments: By "mu", "nu" and "ema": what they are as floats, and where they are read.
      kind: Which main parameter is kept beside it.
      sent: The dtype to which a step rounds it; None where it does not.
    """

    name: str
    like: Any
    place: Sharding
    main_at: Sharding | None = None
    moments: dict[str, tuple[Any, Sharding]] = dataclasses.field(default_factory=dict)
    kind: Codec = NOTHING
    sent: Any = None


class _Tree:
    """Moments and main parameters in the state of one program; each leaf is a unit."""

    sections: tuple[str, ...] = (*parts.MOMENTS, "main_params")
    optional: tuple[str, ...] = ()

    def __init__(self, fields: dict[str, Any], adam: Any, place: Any) -> None:
        self._adam, self._place = adam, place
        main = parts.kept_main_params(fields["opt_state"])
        self._trees = {"mu": adam.mu, "nu": adam.nu, "main_params": main}
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
        """Takes the moment or the main parameter of a leaf."""
        like, (x,) = self._likes[section][name], found
        if is_codes(like):
            x = BlockCodes(*coded_leaves.encoded(section, codec_of(like), x))
        self._new[section][name] = jax.device_put(x, jax.tree.map(self._place, like))

    def finished(self, values: dict[str, Any]) -> tuple[Any, Any]:
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
        return self._adam._replace(count=values["count"], **trees), main


def _in_floats(like: Any, place: Any) -> tuple[Any, Sharding]:
    """Shape and dtype of a moment without codes, and where it is read."""
    if is_codes(like):
        return jax.ShapeDtypeStruct(like.shape, jnp.float32), place(like.codes)
    return like, place(like)


class _Flat:
    """Moments and main parameters in a distributed state; each bucket is a unit."""

    def __init__(self, fields: dict[str, Any], adam: Any, tx: Any, *, starts_anew: bool) -> None:
        params, self._config, self._adam = fields["params"], tx.config, adam
        self._arrays, self._starts_anew = FlatArrays(tx, params), starts_anew
        self._place = NamedSharding(tx.config.mesh, tx.config.parallel.state_spec)
        storage = tx.config.algorithm.storage
        dtypes = {part: storage.float_dtype(part) for part in parts.MOMENTS}
        if tx.config.ema_decay is not None:
            dtypes["ema"] = jnp.dtype(jnp.float32)
        self.sections = (*dtypes, "main_params")
        scalars: dict[str, Any] = {"scaling": LossScaleState, "guard": NormGuardState}
        names = [f"{part}.{x}" for part, kind in scalars.items() for x in kind._fields]
        self.optional = ("grad_norm", *names, *(("key",) if storage.is_stochastic else ()))
        specs = jax.tree.leaves(tx.param_specs(params), is_leaf=lambda x: isinstance(x, P))
        sent = sent_dtypes(tx.config.schedule(tx.config.tensor_local(params)))
        likes = parts.named("params", params).items()
        alone = {  # frozen, or without elements: no more than the parameter
            i: _Leaf(name, like, NamedSharding(tx.config.mesh, spec), sent=dtype)
            for i, ((name, like), spec, dtype) in enumerate(zip(likes, specs, sent, strict=True))
        }
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

    def finished(self, values: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the state; of ``values`` it takes what the file need not have."""
        config, everywhere = self._config, NamedSharding(self._config.mesh, P())

        def saved(part: str, kind: Any) -> Any:
            found = [values.get(f"{part}.{x}") for x in kind._fields]
            return None if all(x is None for x in found) else kind(*found)

        scale: Any = jax.tree.map(np.asarray, saved("scaling", LossScaleState))
        guard = saved("guard", NormGuardState)
        key = config.algorithm.storage.key
        scalars = {
            "grad_norm": values.get("grad_norm", np.float32(0)),
            "scaling": continued_loss_scale(config.loss_scale, scale),
            "guard": continued_norm_guard(config.norm_guard, guard),
            "layout_digest": config.layout_digest(self._arrays.layout),
            "key": values.get("key", key) if config.algorithm.storage.is_stochastic else None,
        }
        placed = jax.device_put(copy_to(scalars, everywhere), everywhere)
        # On Explicit axes shardings come back spelled in another way: device_put copies nothing.
        placed |= jax.device_put(self._new, self._place)
        return self._adam._replace(count=values["count"], **placed), None


class Restored:
    """The fields of a state like a template, compared with the header; ``read`` makes them."""

    def __init__(self, request: Request, fields: dict[str, Any], tx: Any) -> None:
        """Takes where to ask, the template, and the distributed optimizer."""
        self._request, self._fields = request, fields
        adam = parts.adam_of(fields["opt_state"])
        is_flat = is_distributed_state(adam)
        self._adam: Any = (
            _Flat(fields, adam, tx, starts_anew=request.new is None)
            if is_flat
            else _Tree(fields, adam, request.place)
        )
        self._params: dict[str, Any] = {}
        request.array("count", jax.ShapeDtypeStruct((), jnp.int32))
        request.take("count", None if is_flat else adam.count)
        for unit, leaves in self._adam.units:
            self._ask_unit(unit, leaves)
        for leaf in parts.other_leaves(fields):
            if leaf.is_count and not request.has(leaf.name):
                request.take(leaf.name, leaf.value, source="count")
            elif request.array(leaf.name, leaf.value):
                request.take(leaf.name, leaf.value)
            else:
                request.values[leaf.name] = _of_template(leaf.name, leaf.value)
        for name in filter(request.has, self._adam.optional):
            request.take(name, None)

    def read(self) -> dict[str, Any]:
        """Reads all; returns the fields of the state."""
        values = self._request.read()
        adam, main = self._adam.finished(values)
        new: dict[str, Any] = {}
        for name, field in self._fields.items():
            if name == "params":
                leaves = [self._params[path] for path in parts.named(name, field)]
            else:
                leaves = jax.tree.leaves(parts.rebuilt(name, field, values, adam, main))
            # Into the containers of the template, also boxes that the parts of a state had.
            new[name] = jax.tree.unflatten(jax.tree.structure(field), leaves)
        return new

    def _ask_unit(self, unit: Any, leaves: list[_Leaf]) -> None:
        """Asks for the leaves of a unit, which are read and put into the state together."""
        asked = [self._ask(leaf) for leaf in leaves]

        def use(arrays: list[jax.Array]) -> None:
            in_order = (arrays.pop(0) for _ in range(len(arrays)))
            made = [make(in_order) for _, make in asked]
            for leaf, new in zip(leaves, made, strict=True):
                self._params[leaf.name] = new.pop("params", None)
            for section in self._adam.sections:
                found = [new[section] for new in made if section in new]
                if any(x is not None for x in found):
                    self._adam.put(section, unit, found)

        self._request.reads.append(Read([one for wanted, _ in asked for one in wanted], use))

    def _ask(
        self, leaf: _Leaf
    ) -> tuple[list[tuple[str, Sharding]], Callable[[Iterator[jax.Array]], Made]]:
        """Compares a leaf with the header; returns what to read for it, and what uses that."""
        source = self._source_of(leaf)
        # Before the first step, and after reload_main_params, a parameter is not rounded as a step
        # rounds it to send it: the file knows.
        saved = self._request.entries.get(leaf.name)
        arrives = saved is not None and source is not None and leaf.sent is not None
        if saved is not None and arrives:
            arrives = (saved.dtype, saved.sent) == (leaf.like.dtype, leaf.sent.name)
        moments: dict[str, tuple[str, ...]] = {}
        wanted = [(source, leaf.main_at or leaf.place)] if source else []
        for section, (like, place) in leaf.moments.items():
            name = leaf.name.replace("params", section, 1)
            names: tuple[str, ...] = ()
            if section == "ema" and source is None:
                self._request.has(name)  # and not read: it stays as the template has it, as they do
            else:
                names = self._request.moment(name, like)
            scales = place
            if isinstance(place, NamedSharding):
                scales = NamedSharding(place.mesh, P())
            wanted += zip(names, (place, scales), strict=False)
            moments[section] = names
        wanted += [(leaf.name, leaf.place)] if arrives else []

        def make(arrays: Iterator[jax.Array]) -> Made:
            exact, made = next(arrays) if source else None, Made()
            for section, (like, place) in leaf.moments.items():
                found = [next(arrays) for _ in moments[section]]
                if section == "ema" and not found and exact is not None:
                    found = [exact]  # an average that the file lacks begins with the parameter
                made[section] = _floats(section, found, like.dtype, place) if found else None
            if leaf.kind.is_stored:
                made["main_params"] = None if exact is None else _stored(leaf.kind)(exact)
            if arrives:
                made["params"] = next(arrays)
            elif leaf.like is not None:
                sent = leaf.sent if int(self._request.values["count"]) else None
                made["params"] = _param(leaf, exact, sent)
            return made

        return wanted, make

    def _source_of(self, leaf: _Leaf) -> str | None:
        """The name under which the file has the exact value; None where the template's stays."""
        request, name, like = self._request, leaf.name, leaf.like
        if like is None:
            return None
        if leaf.main_at is None:
            source = name if request.array(name, like) else None
        else:
            source = request.exact(name, like, keeps_main=leaf.kind.is_stored)
        if source is None:
            _of_template(name, like)
        if source is None and leaf.kind.is_stored:
            _of_template(name, self._adam.main_of(name))
        return source


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
        param = copy_to(leaf.like, place)
    elif not exact.size or (exact.dtype, leaf.main_at or place, sent) == (dtype, place, None):
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
