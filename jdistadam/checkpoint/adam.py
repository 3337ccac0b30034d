"""Adam's moments and main parameters by parameter, in trees and in flat arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.core import collectives
from jdistadam.core.codecs import NOTHING, BlockCodes, Codec, codec_of, is_codes
from jdistadam.core.guards import Guard
from jdistadam.core.storage import MOMENTS, main_codec_of
from jdistadam.distributed.global_arrays import copy_to
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.main_params import sent_dtypes
from jdistadam.distributed.state_view import StateView
from jdistadam.drop_in.state import COMPARED
from jdistadam.errors import LayoutError
from jdistadam.kernels import sharded_codes


@dataclasses.dataclass
class Param:
    """A parameter of a state and its optimizer state."""

    name: str
    like: Any  # the parameter, or its shape; None if there are only moments
    place: Sharding
    exact_at: Sharding | None = None  # where its exact value is read; None: it has no moments
    # Shape, dtype as floats and sharding of each part of the state but main parameters.
    moments: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    kind: Codec = NOTHING  # which main parameter is kept for it
    main: Any = None  # the template's array with its main parameter
    sent: Any = None  # the dtype to which a step rounds it; None: it does not
    begin_as_params: frozenset[str] = frozenset()  # the moments that begin with the exact value


class TreeAdam:
    """Moments and main parameters in the state of one program; each parameter is a unit."""

    sections: tuple[str, ...] = (*MOMENTS, "main_params")

    def __init__(self, leaves: Sequence[parts.Leaf], place: Callable[[Any], Sharding]) -> None:
        """Takes the leaves of a template, and a function that returns an array's sharding."""
        self._place = place
        self._likes = {leaf.name: leaf.value for leaf in leaves if leaf.section}
        self._new: dict[str, Any] = {}
        of_params = (x for x in leaves if x.section in ("params", *MOMENTS))
        names = dict.fromkeys(x.name.replace(x.section, "params", 1) for x in of_params)
        self.units: list[tuple[Any, list[Param]]] = [(name, [self._param(name)]) for name in names]

    def _param(self, name: str) -> Param:
        like, moments = self._likes.get(name), {}
        for section in MOMENTS:
            if (x := self._like(section, name)) is not None:
                dtype, array = (jnp.float32, x.codes) if is_codes(x) else (x.dtype, x)
                place = self._place(array)
                moments[section] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)
        place, main = self._place(like), self._like("main_params", name)
        return Param(name, like, place, place, moments, main_codec_of(main), main)

    def _like(self, section: str, name: str) -> Any:
        return self._likes.get(name.replace("params", section, 1))

    def put(self, section: str, name: str, found: Sequence[Any]) -> None:
        """Stores the moment or the main parameter of a parameter."""
        like, (x,) = self._like(section, name), found
        if is_codes(like):
            x = BlockCodes(*sharded_codes.encoded(section, codec_of(like), x))
        new = jax.device_put(x, jax.tree.map(self._place, like))
        self._new[name.replace("params", section, 1)] = new

    def finished(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns all arrays by name: the template's, or zeros, if none was put."""

        def kept(x: Any) -> Any:
            is_shape = isinstance(x, jax.ShapeDtypeStruct)
            return jnp.zeros(x.shape, x.dtype, device=self._place(x)) if is_shape else x

        names = {x for x in self._likes if x.startswith(self.sections)} - self._new.keys()
        return {name: jax.tree.map(kept, self._likes[name]) for name in names} | self._new


class FlatAdam:
    """Moments and main parameters in a distributed state; each bucket is a unit.

    Frozen and empty parameters have no bucket: they are units with None.
    """

    def __init__(self, params: Any, state: Any, tx: Any, *, starts_anew: bool = False) -> None:
        """Takes a state, or its shapes, and whether all of it will be put."""
        self.view = StateView(tx.config, params)
        self.config, self.layout = tx.config, self.view.layout
        self.state, self._starts_anew = state, starts_anew
        # As files have them: main parameters last, also if the state has none.
        others = (name for name in self.view.fields if name != "main_params")
        self.sections = (*others, "main_params")
        config, kept = tx.config, self.view.fields
        as_params = frozenset(name for name, field in kept.items() if field.begins == "params")
        placed = jax.tree.leaves(tx.param_shardings(params))
        sent = sent_dtypes(config.schedule_of(params))
        named = zip(parts.leaves("params", params), placed, sent, strict=True)
        rest = {i: Param(x.name, x.value, at, sent=to) for i, (x, at, to) in enumerate(named)}
        self.units: list[tuple[Any, list[Param]]] = []
        for bucket in self.layout.buckets:
            mine = [rest.pop(i) for i in bucket.leaves]
            for param, sharding in zip(mine, self.view.form(bucket).shardings, strict=True):
                param.exact_at, param.begin_as_params = sharding, as_params
                for name in (name for name, field in kept.items() if field.has(bucket)):
                    if name == "main_params":
                        param.kind, param.main = kept[name].codec, state.main_params
                        continue
                    dtype = kept[name].dtype
                    like = jax.ShapeDtypeStruct(param.like.shape, dtype, sharding=sharding)
                    param.moments[name] = like
            self.units.append((bucket, mine))
        self.units += [(None, [param]) for param in rest.values()]

    @functools.cached_property
    def _new(self) -> dict[str, Any]:
        """The flat arrays: the template's if some of it may stay, else zeros."""
        new = {}
        for section in self.sections:
            if (like := getattr(self.state, section)) is None:
                continue
            is_shape = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like))
            if self._starts_anew or is_shape:
                new[section] = self.view.zeros(section)
            else:
                new[section] = copy_to(like, self.config.state_sharding(section))
        return new

    def put(self, section: str, bucket: Bucket, found: Sequence[Any]) -> None:
        """Stores a moment, or the main parameters, of a bucket's leaves; None: it stays."""
        flat = self._new[section]
        if any(x is None for x in found):
            old = self.view.extract(section, bucket, flat)
            found = [y if x is None else x for x, y in zip(found, old, strict=True)]
        self._new[section] = self.view.insert(section, bucket, flat, found)

    def finished(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the state under the name "", with ``values`` that the file may lack."""
        config, everywhere = self.config, NamedSharding(self.config.mesh, P())
        storage = config.algorithm.storage

        def saved(guard: Guard) -> Any:
            found = guard.kind(*(values.get(f"{guard.field}.{x}") for x in guard.kind._fields))
            return jax.tree.map(np.asarray, found) if jax.tree.leaves(found) else None

        scalars = self.view.scalars(values.get("grad_norm", 0), saved) | {
            "layout_digest": config.layout_digest(self.layout),
            "key": values.get("key", storage.key) if storage.is_stochastic else None,
        }
        placed = jax.device_put(copy_to(scalars, everywhere), everywhere)
        # On Explicit axes shardings come back in another spelling: device_put copies nothing.
        for section, flat in self._new.items():
            placed[section] = jax.device_put(flat, config.state_sharding(section))
        return {"": self.state._replace(count=values["count"], **placed)}


def check_leaves_follow(leaves: Sequence[parts.Leaf]) -> None:
    """Raises LayoutError if a param is not its float32 main parameter, which a restore takes.

    Compares the leaves that a step compares, to make gradients NaN: the smallest ones.
    """
    params = {leaf.name: leaf.value for leaf in leaves if leaf.section == "params"}
    mains = {
        leaf.name.replace("main_params", "params", 1): leaf.value
        for leaf in leaves
        if leaf.section == "main_params" and leaf.value.dtype == jnp.float32
    }
    compared = [name for name in mains if name in params and mains[name].size]
    for name in sorted(compared, key=lambda name: mains[name].size)[:COMPARED]:
        if not _follows(params[name], mains[name]):
            raise LayoutError(
                f"{name}: differs from its main parameter, which a restore takes, so that it would "
                "be lost: got another value, expected the main parameter of opt_state, rounded. "
                "Begin main parameters anew: opt_state._replace("
                "main_params=tx.init(params).main_params)."
            )


def _follows(param: Any, main: Any) -> bool:
    if np.shape(param) != np.shape(main):
        return False
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in (param, main)):
        return True  # the save raises
    param = jax.device_put(param, getattr(main, "sharding", None))
    return bool(_all_follow(param, main))


@jax.jit
def _all_follow(param: jax.Array, main: jax.Array) -> jax.Array:
    return jnp.all(collectives.follows(param, main))
