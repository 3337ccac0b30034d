"""What of a checkpoint is asked for: compared with its header first, read afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.storage import Read, Reader, cast
from jdistadam.core import trees
from jdistadam.errors import DtypeError, ShapeError, TreeError
from jdistadam.kernels import coded_leaves

Predicate = Callable[[str], bool]

# And "key": what another optimizer does not have.
_ALWAYS_OPTIONAL = ("grad_norm", "scaling.", "guard.")


class Request:
    """Compares what a template asks for with what a checkpoint has, and notes what to read.

    Raises TreeError, ShapeError or DtypeError for what is not there, or differs from the template.

    Attributes:
      reads: What ``read`` reads, in this order.
      values: By name, what ``take`` asked for and ``read`` has read.
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
        """Takes the mesh on which arrays are that have no place, and arguments of ``restore``."""
        self.entries, self.new, self._reader = reader.entries, new, reader
        self._mesh, self._cast, self._unused = mesh, cast, unused
        self._used: set[str] = set()
        self.reads: list[Read] = []
        self.values: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Returns whether the file has something, which is used then."""
        self._used.add(name)
        return name in self.entries

    def array(self, name: str, like: Any) -> bool:
        """Returns whether an array is in the file; if not, it may stay as the template has it."""
        key, words = _saved_form(like)
        if not self._has_shape(name, words.shape):
            return False
        self._check_dtype(name, name, words.dtype)
        saved = self.entries[name].key
        if saved == key:
            return True
        raise DtypeError(
            f"{self._reader.path}: {name}: random keys of another kind: got {saved or 'an array'}, "
            f"expected {key or 'an array'}. Make the template with keys of that kind."
        )

    def moment(self, name: str, like: Any) -> tuple[str, ...]:
        """Returns the names under which the file has a moment: one, or of codes and scales.

        None of them where the moment stays as the template has it. ``like``: as of floats.
        """
        if 0 in like.shape:
            return ()  # not saved: a distributed state has none of it
        names = f"{name}.codes", f"{name}.scales"
        if names[0] not in self.entries:
            return (name,) if self.array(name, like) else ()
        self._check_dtype(name, names[1], like.dtype)  # that of the decoded moment
        scales = jax.ShapeDtypeStruct((coded_leaves.num_scales(like.shape),), jnp.float32)
        saved = self.entries[names[0]].dtype  # of one format or of another one
        codes = jax.ShapeDtypeStruct(like.shape, saved)
        found = [self.array(*pair) for pair in zip(names, (codes, scales), strict=True)]
        return names if all(found) else ()

    def exact(self, name: str, like: Any, *, keeps_main: bool) -> str | None:
        """Returns the name under which the file has the exact value of a parameter.

        None where the parameter stays as the template has it. ``keeps_main``: whether the value is
        kept in float32 beside a parameter of 16 bits.
        """
        main = name.replace("params", "main_params", 1)
        source = main if self.has(main) else name
        if not self._has_shape(name, like.shape):
            return None
        self._check_dtype(name, source, jnp.float32 if keeps_main else like.dtype)
        return source

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises TreeError if the file has what was neither asked for nor is among ``ignored``."""
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

    def take(self, name: str, like: Any, source: str | None = None) -> None:
        """Notes to read an array into ``values``: placed like another one, in its dtype."""
        source = source or name
        key, dtype = self.entries[source].key, getattr(like, "dtype", self.entries[source].dtype)

        def use(arrays: list[jax.Array]) -> None:
            x = arrays.pop()
            self.values[name] = jax.random.wrap_key_data(x, impl=key) if key else cast(x, dtype)

        self.reads.append(Read([(source, self.place(like))], use))

    def place(self, like: Any) -> Sharding:
        """Returns where an array goes: as the template says, else everywhere on the mesh."""
        sharding = getattr(like, "sharding", None)
        if isinstance(sharding, Sharding) and not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return sharding
        if self._mesh is not None:
            return NamedSharding(self._mesh, P())
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def read(self) -> dict[str, Any]:
        """Reads all that was noted; returns ``values``."""
        self._reader.read(self.reads)
        return self.values

    def _has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the file has an array of this shape; raises unless it does or need not."""
        self._used.add(name)
        entry = self.entries.get(name)
        if entry is not None and entry.shape == tuple(shape):
            return True
        if self.new is not None and self.new(parts.path_of(name)):
            return False
        error = TreeError if entry is None else ShapeError
        what = "missing in the file" if entry is None else "has another shape in the file"
        got = f"{len(self.entries)} others" if entry is None else entry.shape
        raise error(
            f"{self._reader.path}: {name}: {what}: got {got}, expected shape {tuple(shape)}. "
            "Restore into the state that was saved, or name what begins anew with new=."
        )

    def _check_dtype(self, name: str, source: str, dtype: Any) -> None:
        """Raises DtypeError where a cast to the template's dtype would lose bits."""
        saved = self.entries[source].dtype
        floats = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, saved))
        if saved == dtype or self._cast or (floats and jnp.promote_types(dtype, saved) == dtype):
            return
        raise DtypeError(
            f"{self._reader.path}: {source}: a cast for {name} of the template would lose bits: "
            f"got {saved}, expected {jnp.dtype(dtype)}. "
            "Restore into that dtype or with main parameters, or pass cast=True."
        )


def _saved_form(like: Any) -> tuple[str | None, Any]:
    """The implementation of random keys, or None, and shape and dtype in which these are saved."""
    if not hasattr(like, "dtype"):
        return None, jax.eval_shape(lambda: jnp.asarray(like))
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return None, like
    name = jax.random.key_impl(like) if trees.is_key(like) else like.dtype._impl.name
    return str(name), jax.eval_shape(jax.random.key_data, like)
