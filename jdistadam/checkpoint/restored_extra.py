"""The tree beside a state put together again, from arrays and values of the header."""

from __future__ import annotations

import base64
from typing import Any

import jax
import numpy as np

from jdistadam.checkpoint import extra as extras
from jdistadam.checkpoint.restored import place_of
from jdistadam.checkpoint.storage import Reader
from jdistadam.errors import DtypeError, ShapeError, TreeError


def restored_extra(reader: Reader, like: Any) -> Any:
    """Returns the tree that a checkpoint has, in the structure of ``like`` or in dictionaries.

    Raises:
      TreeError, ShapeError, DtypeError: It has another tree than ``like``, or none.
    """
    saved = reader.extra
    if like is None:
        if not saved:
            raise _missing(reader, extras.NAME, "any, as of save(..., extra=tree)")
        leaves: dict[str, Any] = dict.fromkeys(saved)
    else:
        leaves = {leaf.name: leaf.value for leaf in extras.leaves(like)}
        _check_like(reader, leaves)
    names = [name for name in leaves if "value" not in saved[name]]
    places = [place_of(leaves[name] if "dtype" not in saved[name] else None) for name in names]
    found = dict(zip(names, reader.read(list(zip(names, places, strict=True))), strict=True))
    values = [_value(reader, name, found.get(name)) for name in leaves]
    if like is not None:
        treedef: Any = jax.tree.structure(like, is_leaf=extras.is_none)
        return treedef.unflatten(values)
    return _nested(reader, dict(zip(leaves, values, strict=True)))


def _check_like(reader: Reader, leaves: dict[str, Any]) -> None:
    """Raises unless a checkpoint has exactly these leaves, as they are."""
    for name, like in leaves.items():
        if name not in reader.extra:
            raise _missing(reader, name, _form(name, like))
        saved, asked = _saved_form(reader, name), _form(name, like)
        if saved != asked:
            error = ShapeError if saved[:2] == asked[:2] else DtypeError
            raise error(
                f"{reader.path}: {name}: differs from like: got {_text(saved)} in the file, "
                f"expected {_text(asked)}. Pass like as it was saved, or leave it out."
            )
    if rest := [name for name in reader.extra if name not in leaves]:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise TreeError(
            f"{reader.path}: {rest[0]}: in the file, and not in like: got {rest[0]}{more}, "
            "expected a tree that has all that was saved. "
            "Leave like out, and take what you need of the dictionaries."
        )


def _missing(reader: Reader, name: str, expected: Any) -> TreeError:
    expected = expected if isinstance(expected, str) else _text(expected)
    return TreeError(
        f"{reader.path}: {name}: not saved: got {', '.join(reader.extra)[:200] or 'no extra'}, "
        f"expected {expected}. Leave like out, and begin anew with what is not there."
    )


Form = tuple[str, str, tuple[int, ...]]
"""Kind, dtype and shape."""


def _form(name: str, like: Any) -> Form:
    """That of a leaf of ``like``, which may be the shape of a jax array."""
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return "jax", str(like.dtype), tuple(like.shape)
    return _form_of(extras.described(name, like))


def _saved_form(reader: Reader, name: str) -> Form:
    about = reader.extra[name]
    if about["kind"] != "jax":
        return _form_of(about)
    entry = reader.entries[name]
    if entry.key is None:
        return "jax", str(entry.dtype), entry.shape
    words = jax.ShapeDtypeStruct(entry.shape, entry.dtype)
    key = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=entry.key), words)
    return "jax", str(key.dtype), key.shape


def _form_of(about: dict[str, Any]) -> Form:
    return about["kind"], about.get("dtype", ""), tuple(about.get("shape", ()))


def _text(form: Form) -> str:
    kind, dtype, shape = form
    return f"{kind} {dtype} of shape {shape}" if dtype else kind


def _value(reader: Reader, name: str, found: Any) -> Any:
    """A leaf of what was read: an array, or None where the header has the value."""
    about, entry = reader.extra[name], reader.entries.get(name)
    if about["kind"] == "numpy":
        x = np.frombuffer(np.asarray(found).tobytes(), np.dtype(about["dtype"]))
        return x.reshape(about["shape"]).copy()[()]
    if about["kind"] == "bytes":
        return base64.b64decode(about["value"])
    if entry is None:
        return about["value"]
    return jax.random.wrap_key_data(found, impl=entry.key) if entry.key else found


def _nested(reader: Reader, values: dict[str, Any]) -> Any:
    """The values in dictionaries, or a single one."""
    if list(values) == [extras.NAME]:
        return values[extras.NAME]
    tree: dict[str, Any] = {}
    for name, value in values.items():
        keys = reader.extra[name]["keys"]
        if keys is None:
            raise TreeError(
                f"{reader.path}: {name}: not in dictionaries alone: its tree cannot be told from "
                "its path: got a list or a class, expected like=. "
                "Pass restore_extra(folder, like=tree)."
            )
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return tree
