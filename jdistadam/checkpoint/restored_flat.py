"""The state of a distributed optimizer put together again, bucket by bucket."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import flat_arrays, parts
from jdistadam.checkpoint.restored import Restored
from jdistadam.checkpoint.storage import Reader, cast
from jdistadam.checkpoint.wanted import Wanted
from jdistadam.core import collectives, trees
from jdistadam.core.loss_scale import LossScaleState, continued_loss_scale
from jdistadam.core.main_params import MainParams
from jdistadam.distributed.flat_moments import is_flat_codes
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.main_params import sent_dtypes
from jdistadam.distributed.moment_codes import new_moment
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.kernels import coded_leaves
from jdistadam.training.placement import copy_to


@dataclasses.dataclass
class _Flats:
    """The flat arrays that are being filled."""

    main_params: Any
    mu: Any
    nu: Any


class RestoredFlat(Restored):
    """The fields of a state with a distributed optimizer; first ``look``, then ``read``."""

    def __init__(
        self,
        reader: Reader,
        wanted: Wanted,
        fields: dict[str, Any],
        tx: DistributedTransformation,
    ) -> None:
        """Takes where to read, how to compare, the template, and the optimizer."""
        super().__init__(reader, wanted, fields, tx.config.mesh)
        self._tx, self._config, params = tx, tx.config, fields["params"]
        self._layout = tx.layout(params)
        schedule = tx.config.schedule(tx.config.tensor_local(params))
        self._sent = sent_dtypes(schedule)
        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        self._specs = jax.tree.leaves(tx.config.tensor_specs(params), is_leaf=is_spec)
        placed = jax.tree.leaves(tx.param_specs(params), is_leaf=is_spec)
        self._places = [NamedSharding(tx.config.mesh, spec) for spec in placed]
        self._everywhere = NamedSharding(tx.config.mesh, P())
        self._names, self._shapes = list(self.params), list(self.params.values())
        self._paths = trees.paths(params, "")
        self._sources: dict[str, str | None] = {}
        self._saved: dict[str, bool] = {}
        self._in_file: dict[str, tuple[str, ...]] = {}  # names in the file
        self._params: list[Any] = [None] * len(self._names)

    def look_at_adam(self) -> None:
        """Compares params, moments, main parameters and the loss scale."""
        in_buckets = {i: bucket for bucket in self._layout.buckets for i in bucket.leaves}
        for i, (name, like) in enumerate(self.params.items()):
            bucket = in_buckets.get(i)
            if bucket is None:  # frozen, or without elements: no more than the parameter
                self._saved[name] = self.wanted.array(name, like)
                continue
            self._sources[name] = self.wanted.exact(name, like, keeps_main=bucket.has_main)
            for section in parts.MOMENTS:
                dtype = self._config.algorithm.storage.float_dtype(section)
                shape = jax.ShapeDtypeStruct(like.shape, dtype)
                moment = f"{section}{self._paths[i]}"
                self._in_file[moment] = self.wanted.moment(moment, shape)

    def read_adam(self) -> tuple[list[Any], Any, Any]:
        """Reads them; returns the params and the state."""
        layout, policy = self._layout, self._config.policy
        main, config = policy.main_params.stored_dtype, self._config
        flats = _Flats(
            flat_arrays.zeros(config, layout.main_size, main) if layout.main_size else None,
            new_moment(config, layout, "mu"),
            new_moment(config, layout, "nu"),
        )
        count = self.count()
        requests = [one for bucket in layout.buckets for one in self._requests(bucket)]
        found = self.reader.read(requests, max(map(self._bytes, layout.buckets), default=0))
        for bucket in layout.buckets:
            values = dict(zip(self._requests(bucket), found, strict=False))
            self._fill_moments(bucket, flats, values)
            self._fill_params(bucket, flats, values, int(count))
        self._read_frozen()
        return self._params, self._state(flats, count), None

    def _bytes(self, bucket: Bucket) -> int:
        size = self._layout.whole_size(bucket) if bucket.is_packed else bucket.shard_size
        return size * 12

    def _requests(self, bucket: Bucket) -> list[tuple[str, Sharding]]:
        """What is read for a bucket, and where it goes."""
        requests: list[tuple[str, Sharding]] = []
        for i, place in self._placed(bucket):
            name = self._sources[self._names[i]]
            requests += [(name, place)] if name is not None else []
            for moment in self._moments_of(i):
                requests += zip(self._in_file[moment], (place, self._everywhere), strict=False)
            if self._arrives_as_saved(i):
                requests.append((self._names[i], self._places[i]))
        return requests

    def _fill_moments(self, bucket: Bucket, flats: _Flats, values: dict[Any, jax.Array]) -> None:
        for k, section in enumerate(parts.MOMENTS):
            flat, old = getattr(flats, section), getattr(self.adam, section)
            dtype = self._config.algorithm.storage.float_dtype(section)
            leaves = []
            for j, (i, place) in enumerate(self._placed(bucket)):
                x = self._moment_in_file(self._moments_of(i)[k], section, place, values)
                if x is None and isinstance(jax.tree.leaves(old)[0], jax.ShapeDtypeStruct):
                    x = jnp.zeros(self._shapes[i].shape, dtype, device=place)
                elif x is None:
                    x = self._moment_of_template(bucket, old, section)[j]
                leaves.append(x.astype(dtype))
            setattr(flats, section, self._with_moment(bucket, flat, section, leaves))

    def _fill_params(
        self, bucket: Bucket, flats: _Flats, values: dict[Any, jax.Array], count: int
    ) -> None:
        """Params, rounded as a step rounds them, and the main parameters beside them."""
        kind = self._config.policy.main_params if bucket.has_main else MainParams.NONE
        mains = []
        for j, (i, place) in enumerate(self._placed(bucket)):
            source, like = self._sources[self._names[i]], self._shapes[i]
            exact = values[source, place] if source else self._exact_of_template(bucket, i, j)
            arrived = values.get((self._names[i], self._places[i]))
            if source is None:
                self._params[i] = self._copy(self.of_template(self._names[i], like), i)
            elif self._arrives_as_saved(i) and arrived is not None:
                self._params[i] = arrived
            else:
                sent = self._sent[i] if count else None
                rounded = _rounder(kind, like.dtype, sent, self._places[i])
                param = jax.block_until_ready(rounded(exact))
                self._params[i] = jax.device_put(param, self._places[i])  # the same, spelled so
            if bucket.has_main:
                mains.append(_stored(kind)(exact))
        if bucket.has_main:
            flats.main_params = self._insert(bucket, flats.main_params, mains)

    def _exact_of_template(self, bucket: Bucket, i: int, j: int) -> jax.Array:
        """The value of a parameter that the file lacks: that of the template."""
        param = self.of_template(self._names[i], self._shapes[i])
        place = self._placed(bucket)[j][1]
        param = jax.block_until_ready(_rounder(MainParams.NONE, param.dtype, None, place)(param))
        if not bucket.has_main:
            return param
        stored = self._extract(bucket, self.adam.main_params)[j]
        kind = self._config.policy.main_params
        joined: jax.Array = jax.jit(lambda p, s: kind.join(p, s, jnp))(param, stored)
        return joined

    def _read_frozen(self) -> None:
        """Reads the params that are in no bucket."""
        left = [i for i, x in enumerate(self._params) if x is None]
        saved = [i for i in left if self._saved[self._names[i]]]
        found = self.reader.read([(self._names[i], self._places[i]) for i in saved])
        for i, x in zip(saved, found, strict=True):
            self._params[i] = cast(x, self._shapes[i].dtype)
        for i in set(left) - set(saved):
            self._params[i] = self._copy(self.of_template(self._names[i], self._shapes[i]), i)

    def _state(self, flats: _Flats, count: jax.Array) -> Any:
        config = self._config
        everywhere = self._everywhere
        scaling: Any = continued_loss_scale(config.loss_scale, self._saved_scale())
        norm: Any = np.float32(0)
        if self.wanted.has("grad_norm"):
            (norm,) = self.reader.read([("grad_norm", everywhere)])
        scalars = norm, scaling, config.layout_digest(self._layout), self._key()
        norm, scaling, digest, key = jax.device_put(copy_to(scalars, everywhere), everywhere)
        # On Explicit axes shardings come back spelled in another way: device_put copies nothing.
        place = NamedSharding(config.mesh, config.parallel.state_spec)
        placed = jax.device_put(vars(flats), place)
        return self.adam._replace(
            count=count,
            **placed,
            grad_norm=norm,
            layout_digest=digest,
            scaling=scaling,
            key=key,
        )

    def _key(self) -> Any:
        """The seed in the file; that of the optimizer where there is none."""
        storage = self._config.algorithm.storage
        if not storage.is_random or not self.wanted.has("key"):
            return storage.key if storage.is_random else None
        return self.reader.read([("key", NamedSharding(self._config.mesh, P()))])[0]

    def _saved_scale(self) -> LossScaleState | None:
        """The loss scale in the file; of a constant one without its counts."""
        everywhere = NamedSharding(self._config.mesh, P())
        names = [n for n in LossScaleState._fields if self.wanted.has(f"scaling.{n}")]
        if not names:
            return None
        found = self.reader.read([(f"scaling.{n}", everywhere) for n in names])
        values: Any = dict.fromkeys(LossScaleState._fields)
        return LossScaleState(
            **values | {n: np.asarray(x) for n, x in zip(names, found, strict=True)}
        )

    def _arrives_as_saved(self, i: int) -> bool:
        """Whether a parameter is read, rather than rounded as a step rounds it to send it.

        Before the first step, and after ``reload_main_params``, it is not rounded: the file knows.
        """
        name, sent = self._names[i], self._sent[i]
        entry = self.reader.entries.get(name)
        return (
            entry is not None
            and sent is not None
            and (entry.dtype, entry.sent) == (self._shapes[i].dtype, sent.name)
            and self._sources.get(name) is not None
        )

    def _copy(self, param: Any, i: int) -> Any:
        return jax.device_put(copy_to(param, self._places[i]), self._places[i])

    def _placed(self, bucket: Bucket) -> list[tuple[int, NamedSharding]]:
        """The leaves of a bucket, and how their arrays are placed while they are moved."""
        shardings = flat_arrays.shardings_of(self._config, self._layout, bucket, self._specs)
        return list(zip(bucket.leaves, shardings, strict=True))

    def _moments_of(self, i: int) -> list[str]:
        return [f"{section}{self._paths[i]}" for section in parts.MOMENTS]

    def _moment_in_file(
        self, moment: str, section: str, place: Sharding, values: dict[Any, jax.Array]
    ) -> jax.Array | None:
        """A moment as it was read, as floats; None where it was not."""
        names = self._in_file[moment]
        if not names:
            return None
        if len(names) == 1:
            return values[names[0], place]
        codes, scales = values[names[0], place], values[names[1], self._everywhere]
        moment = jax.block_until_ready(coded_leaves.decoded(section, codes, scales))
        return jax.device_put(moment, place)  # the same, spelled so

    def _moment_of_template(self, bucket: Bucket, old: Any, name: str) -> list[jax.Array]:
        if not is_flat_codes(old):
            return self._extract(bucket, old)
        args = self._config, self._layout, bucket, self._specs
        return flat_arrays.extract_decoded(*args, old, name)

    def _with_moment(self, bucket: Bucket, flat: Any, name: str, leaves: list[jax.Array]) -> Any:
        if not is_flat_codes(flat):
            return self._insert(bucket, flat, leaves)
        args = self._config, self._layout, bucket, self._specs
        return flat_arrays.insert_encoded(*args, flat, name, leaves)

    def _extract(self, bucket: Bucket, flat: Any) -> list[jax.Array]:
        return flat_arrays.extract(self._config, self._layout, bucket, self._specs, flat)

    def _insert(self, bucket: Bucket, flat: Any, leaves: list[jax.Array]) -> jax.Array:
        return flat_arrays.insert(self._config, self._layout, bucket, self._specs, flat, leaves)


@functools.lru_cache(maxsize=4096)
def _rounder(kind: MainParams, dtype: Any, sent: Any, place: NamedSharding) -> Any:
    """A program that makes a parameter of its exact value: rounded, sent and placed.

    [Note: one collective at a time]
    """

    def rounded(value: jax.Array) -> jax.Array:
        if kind is MainParams.REMAINDER16:
            param: jax.Array = kind.split(value.astype(jnp.float32), dtype, jnp)[0]
        else:
            param = collectives.round_to(value, dtype)
        return param if sent is None else collectives.round_to(param, sent).astype(dtype)

    return jax.jit(rounded, out_shardings=place)


@functools.cache
def _stored(kind: MainParams) -> Any:
    """A program that makes what is kept beside a parameter, of its exact value."""
    return jax.jit(lambda value: kind.split(value.astype(jnp.float32), jnp.bfloat16, jnp)[1])
