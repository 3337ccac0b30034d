"""The header of a checkpoint: its contents, their form, and a checksum of each array.

One JSON file::

    {"sha256": "…", "header": {"format": "jdistadam checkpoint", "version": 1, "count": 100,
     "main_params": "float32", "layout_identity": "{…}", "written_by": {"jax": "0.11.2", …},
     "extra": {"extra['epoch']": {"keys": ["epoch"], "kind": "int", "value": 3}},
     "leaves": {"mu['w']": {"shape": [512, 64], "dtype": "float32", "sum": "0123456789abcdef"}}}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.errors import CheckpointError

FORMAT = "jdistadam checkpoint"
VERSION = 1  # increases when files of the same form would mean something else


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a checkpoint, under its name in parts.py."""

    name: str
    shape: tuple[int, ...]  # without padding
    dtype: Any
    key: str | None = None  # of random keys, the implementation: the array holds their words
    keys: tuple[str, ...] | None = None  # as in parts.Leaf
    is_count: bool = False  # a step counter equal to Adam's
    sent: str | None = None  # dtype to which a parameter was rounded to be sent
    sum: str | None = None  # its checksum, once it is in a file

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the saved array; for random keys those of the keys."""
        words = jax.ShapeDtypeStruct(self.shape, self.dtype)
        if self.key is None:
            return words
        key: Any = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=self.key), words)
        return jax.ShapeDtypeStruct(key.shape, key.dtype)


def header_text(about: dict[str, Any], entries: Sequence[Entry], sums: Sequence[str]) -> str:
    """Returns the text of the header, for the saved arrays and their checksums."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "written_by": _versions(),
        "leaves": {e.name: _leaf(e, x) for e, x in zip(entries, sums, strict=True)},
    }
    return json.dumps({"sha256": _digest(header), "header": header}, indent=1) + "\n"


def _leaf(entry: Entry, checksum: str) -> dict[str, Any]:
    said = vars(entry) | {"name": None, "dtype": entry.dtype.name, "sum": checksum}
    return {key: value for key, value in said.items() if value not in (None, False)}


def _entry(name: str, leaf: dict[str, Any]) -> Entry:
    keys = None if leaf.get("keys") is None else tuple(leaf["keys"])
    exact = {"shape": tuple(leaf["shape"]), "dtype": jnp.dtype(leaf["dtype"]), "keys": keys}
    return Entry(name, **leaf | exact)


def _digest(header: dict[str, Any]) -> str:
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = dict.fromkeys(("jdistadam", "jax", "orbax-checkpoint", "optax"), "unknown")
    for package in found:
        with contextlib.suppress(metadata.PackageNotFoundError):  # imported from a source tree
            found[package] = metadata.version(package)
    return found


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Returns the arrays of a checkpoint by name, and its entries of ``extra.py``.

    Raises:
      CheckpointError: The header is missing, damaged, or of another format or version.
    """
    expected, action = "a header", "Restore another step, or another folder."
    try:
        parsed = json.loads(path.read_text())
        values, digest = parsed["header"], parsed["sha256"]
        if values["format"] != FORMAT:
            what, got = "the header of something else", values["format"]
        elif _digest(values) != digest:
            what, got, expected = "damaged: its own checksum differs", _digest(values), digest
        elif values["version"] != VERSION:
            what, expected = "a checkpoint of another version", f"version {VERSION}"
            got = f"version {values['version']}, written by {values.get('written_by')}"
            action = "Read it with the release that wrote it, and save it with to_optax_state."
        else:
            return {k: _entry(k, x) for k, x in values["leaves"].items()}, values.get("extra", {})
    except FileNotFoundError:
        what, got = "missing: this is no checkpoint of jdistadam, or a part of one", "no file"
    except (OSError, ValueError, KeyError, TypeError) as error:
        what, got = "damaged, or of something else", f"{type(error).__name__}: {str(error)[:200]}"
    raise CheckpointError(f"{path!s}: {what}: got {got}, expected {expected}. {action}")
