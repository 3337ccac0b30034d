"""A tree of the user's that is saved with a state, such as the position of a data iterator.

jax arrays are saved like those of a state, numpy arrays of any dtype as their bytes, and Python
values in the header. Each is restored as the type that it was.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.restored import Request
from jdistadam.checkpoint.storage import Reader
from jdistadam.core import trees
from jdistadam.errors import DtypeError, ShapeError, TreeError
from jdistadam.training.checks import check_agreement

NAME = "extra"
_VALUES = (bool, int, float, str, bytes, type(None))

# The header's entry of each leaf by name: its kind, its keys, and a value or a numpy dtype.
About = dict[str, dict[str, Any]]


def taken_apart(extra: Any) -> tuple[About, dict[str, Any]]:
    """Returns the header's entry of a tree, and the arrays by name, numpy's as bytes.

    Raises TreeError for a leaf that cannot be saved, AgreementError if processes differ.
    """
    about: About = {}
    arrays: dict[str, Any] = {}
    for leaf in parts.leaves(NAME, extra, _is_none):
        about[leaf.name] = {"keys": leaf.keys} | _described(leaf.name, leaf.value)
        if isinstance(leaf.value, np.ndarray | np.generic):
            arrays[leaf.name] = np.frombuffer(leaf.value.tobytes(), np.uint8)
        elif isinstance(leaf.value, jax.Array):
            is_local = jax.process_count() > 1 and leaf.value.is_fully_addressable
            is_local = is_local and not trees.is_key(leaf.value)
            arrays[leaf.name] = np.asarray(leaf.value) if is_local else leaf.value
    if jax.process_count() > 1 and about:
        check_agreement(dict(_facts(about, arrays)), range(jax.process_count()))
    return about, arrays


def _is_none(x: Any) -> bool:
    return x is None  # a leaf, not an empty subtree


def _described(name: str, x: Any) -> dict[str, Any]:
    """The header's entry of a leaf; only the kind for a jax array."""
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.hasobject and not x.dtype.names:
        dtype = x.dtype.name if x.dtype.kind == "V" else x.dtype.str  # bfloat16 has only a name
        return {"kind": "numpy", "dtype": dtype, "shape": list(x.shape)}
    if isinstance(x, jax.Array) and not trees.is_traced(x):
        return {"kind": "jax"}
    if type(x) in _VALUES:
        value = base64.b64encode(x).decode() if isinstance(x, bytes) else x
        return {"kind": type(x).__name__, "value": value}
    raise TreeError(
        f"{name}: nothing that a checkpoint holds: got {type(x).__name__} {x!r:.60}, expected "
        "a jax or numpy array of numbers or texts, bool, int, float, str, bytes or None. "
        "Save what it is made of, such as its state as bytes; outside of jitted functions."
    )


def _facts(about: About, arrays: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What all processes must agree on; skips global arrays."""
    yield NAME, ", ".join(about)
    for name, leaf in about.items():
        x = arrays.get(name)
        said = {key: value for key, value in leaf.items() if key != "keys"}
        if isinstance(x, np.ndarray):
            said["sha256"] = hashlib.sha256(x.tobytes()).hexdigest()
        yield name, str(said)


def restored_extra(reader: Reader, like: Any) -> Any:
    """Returns the saved tree, in the structure of ``like`` or in dictionaries."""
    saved = reader.extra
    if like is None and not saved:
        raise _missing(reader, NAME, "any, as of save(..., extra=tree)")
    leaves: dict[str, Any] = dict.fromkeys(saved)
    if like is not None:
        leaves = {leaf.name: leaf.value for leaf in parts.leaves(NAME, like, _is_none)}
        _check_like(reader, leaves)
    request = Request(reader)
    for name in (name for name in leaves if "value" not in saved[name]):
        request.take(name, leaves[name] if saved[name]["kind"] == "jax" else None)
    found = request.read()
    values = {name: _value(saved[name], found.get(name)) for name in leaves}
    if like is not None:
        treedef: Any = jax.tree.structure(like, is_leaf=_is_none)
        return treedef.unflatten(values.values())
    keys = {name: about["keys"] for name, about in saved.items()}
    names = parts.nested(keys, reader.path, NAME)
    return jax.tree.map(values.get, names)


def _value(about: dict[str, Any], found: Any) -> Any:
    """A restored leaf: an array, or the header's value."""
    if about["kind"] == "numpy":
        x = np.frombuffer(np.asarray(found).tobytes(), np.dtype(about["dtype"]))
        return x.reshape(about["shape"]).copy()[()]
    if about["kind"] == "bytes":
        return base64.b64decode(about["value"])
    return about.get("value", found)


def _check_like(reader: Reader, leaves: dict[str, Any]) -> None:
    """Raises unless a checkpoint has exactly these leaves, of the same kinds and shapes."""
    for name, like in leaves.items():
        is_jax = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
        asked = _text({"kind": "jax"} if is_jax else _described(name, like), like)
        if name not in reader.extra:
            raise _missing(reader, name, asked)
        entry = reader.entries.get(name)
        saved = _text(reader.extra[name], entry and entry.like)
        if saved != asked:
            error = ShapeError if saved.split(" of ")[0] == asked.split(" of ")[0] else DtypeError
            raise error(
                f"{reader.path}: {name}: differs from like: got {saved} in the file, "
                f"expected {asked}. Pass like as it was saved, or leave it out."
            )
    if rest := [name for name in reader.extra if name not in leaves]:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise TreeError(
            f"{reader.path}: {rest[0]}: in the file, and not in like: got {rest[0]}{more}, "
            "expected a tree that has all that was saved. "
            "Leave like out, and take what you need of the dictionaries."
        )


def _missing(reader: Reader, name: str, expected: str) -> TreeError:
    return TreeError(
        f"{reader.path}: {name}: not saved: got {', '.join(reader.extra)[:200] or 'no extra'}, "
        f"expected {expected}. Leave like out, and begin anew with what is not there."
    )


def _text(about: dict[str, Any], like: Any) -> str:
    """Kind, dtype and shape of a leaf; for a jax array those of ``like``."""
    if about["kind"] == "jax":
        return f"jax {like.dtype} of shape {tuple(like.shape)}"
    if about["kind"] == "numpy":
        return f"numpy {about['dtype']} of shape {tuple(about['shape'])}"
    return str(about["kind"])
