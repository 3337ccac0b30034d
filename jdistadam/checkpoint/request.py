"""What of a checkpoint is asked for, compared with its header before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.storage import Reader
from jdistadam.core import trees
from jdistadam.errors import DtypeError, ShapeError, TreeError
from jdistadam.kernels import coded_leaves

# And "key": what another optimizer does not have.
_ALWAYS_OPTIONAL = ("grad_norm", "scaling.", "guard.")


class Request:
    """Compares what a template asks for with what a checkpoint has, and notes what is used.

    Raises TreeError, ShapeError or DtypeError for what is not there, or differs from the template.
    """

    def __init__(
        self,
        head: Reader,
        *,
        cast: bool = False,
        new: Callable[[str], bool] | None = None,
        unused: Callable[[str], bool] | None = None,
    ) -> None:
        """Takes the header and the arguments of ``restore``."""
        self.head = head
        self.new, self._cast, self._unused = new, cast, unused
        self._used: set[str] = set()

    def array(self, name: str, like: Any) -> bool:
        """Returns whether an array is in the file; if not, it may stay as the template has it."""
        key, words = _saved_form(like)
        if not self._has_shape(name, words.shape):
            return False
        self._check_dtype(name, name, words.dtype)
        saved = self.head.entries[name].key
        if saved == key:
            return True
        raise DtypeError(
            f"{self.head.path}: {name}: random keys of another kind: got {saved or 'an array'}, "
            f"expected {key or 'an array'}. Make the template with keys of that kind."
        )

    def moment(self, name: str, like: Any) -> tuple[str, ...]:
        """Returns the names under which the file has a moment: one, or of codes and scales.

        None of them where the moment stays as the template has it. ``like``: as of floats.
        """
        if 0 in like.shape:
            return ()  # not saved: a distributed state has none of it
        names = f"{name}.codes", f"{name}.scales"
        if names[0] not in self.head.entries:
            return (name,) if self.array(name, like) else ()
        self._check_dtype(name, names[1], like.dtype)  # that of the decoded moment
        scales = jax.ShapeDtypeStruct((coded_leaves.num_scales(like.shape),), jnp.float32)
        saved = self.head.entries[names[0]].dtype  # of one format or of another one
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

    def has(self, name: str) -> bool:
        """Returns whether the file has something, which is used then."""
        self._used.add(name)
        return name in self.head.entries

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises TreeError if the file has what was neither asked for nor is among ``ignored``."""
        self._used.update(ignored)
        rest = [
            name
            for name, entry in self.head.entries.items()
            if name not in self._used
            and not (entry.is_count or name == "key" or name.startswith(_ALWAYS_OPTIONAL))
            and not (self._unused is not None and self._unused(parts.path_of(name)))
        ]
        if rest:
            raise self.unexpected(rest)

    def unexpected(self, names: list[str]) -> TreeError:
        """Returns the error about arrays that the template has no place for."""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return TreeError(
            f"{self.head.path}: {names[0]}: in the file, and not in the template: "
            f"got {names[0]}{more}, expected a template that has all that was saved. "
            "Restore into such a state, or name what may be left with unused=."
        )

    def _has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the file has an array of this shape; raises unless it does or need not."""
        self._used.add(name)
        entry = self.head.entries.get(name)
        if entry is not None and entry.shape == tuple(shape):
            return True
        if self.new is not None and self.new(parts.path_of(name)):
            return False
        error = TreeError if entry is None else ShapeError
        what = "missing in the file" if entry is None else "has another shape in the file"
        got = f"{len(self.head.entries)} others" if entry is None else entry.shape
        raise error(
            f"{self.head.path}: {name}: {what}: got {got}, expected shape {tuple(shape)}. "
            "Restore into the state that was saved, or name what begins anew with new=."
        )

    def _check_dtype(self, name: str, source: str, dtype: Any) -> None:
        """Raises DtypeError where a cast to the template's dtype would lose bits."""
        saved = self.head.entries[source].dtype
        if saved == dtype or self._cast or _holds(dtype, saved):
            return
        raise DtypeError(
            f"{self.head.path}: {source}: a cast for {name} of the template would lose bits: "
            f"got {saved}, expected {jnp.dtype(dtype)}. "
            "Restore into that dtype or with main parameters, or pass cast=True."
        )


def _holds(dtype: Any, other: Any) -> bool:
    """Whether every value of another float dtype is one of a dtype."""
    floats = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, other))
    return bool(floats and jnp.promote_types(dtype, other) == dtype)


def _saved_form(like: Any) -> tuple[str | None, Any]:
    """The implementation of random keys, or None, and shape and dtype in which these are saved."""
    if not hasattr(like, "dtype"):
        return None, jax.eval_shape(lambda: jnp.asarray(like))
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return None, like
    name = jax.random.key_impl(like) if trees.is_key(like) else like.dtype._impl.name
    return str(name), jax.eval_shape(jax.random.key_data, like)
