"""The header of a checkpoint: what it holds, in which form, with a checksum of each array.

One JSON file, ``header.json``, written after the arrays and before the checkpoint gets its name::

    {"sha256": "…", "header": {"format": "jdistadam checkpoint", "version": 1, "count": 100,
     "main_params": "float32", "layout_identity": "{…}", "written_by": {"jax": "0.11.2", …},
     "leaves": {"mu['w']": {"shape": [512, 64], "dtype": "float32", "sum": "0123456789abcdef"}}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jdistadam.checkpoint.contents import Contents, Entry
from jdistadam.errors import CheckpointError

FORMAT = "jdistadam checkpoint"
VERSION = 1
"""Grows whenever files of the same form would mean something else."""

FILE = "header.json"


class Header:
    """What a checkpoint says about itself."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        """Takes the parts of the header in the file ``path``."""
        self.path = path
        self.count: int = values["count"]
        self.main_params: str | None = values["main_params"]
        self.layout_text: str | None = values["layout_identity"]
        self.written_by: dict[str, str] = values["written_by"]
        self.sums: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        for name, leaf in values["leaves"].items():
            self.sums[name] = leaf["sum"]
            self.entries[name] = Entry(
                name,
                tuple(leaf["shape"]),
                jnp.dtype(leaf["dtype"]),
                leaf.get("key"),
                None if leaf.get("keys") is None else tuple(leaf["keys"]),
                leaf.get("is_count", False),
                leaf.get("sent"),
            )


def text_of(contents: Contents, sums: Sequence[str]) -> str:
    """Returns the text of the file, for what is saved and the checksums in the same order."""
    entries = [entry for group in contents.groups for entry in group.entries]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "count": contents.count,
        "main_params": contents.main_params,
        "layout_identity": contents.layout_text,
        "written_by": _versions(),
        "leaves": {e.name: _leaf(e) | {"sum": s} for e, s in zip(entries, sums, strict=True)},
    }
    return json.dumps({"sha256": _digest(header), "header": header}, indent=1) + "\n"


def read(path: Path) -> Header:
    """Reads a header.

    Raises:
      CheckpointError: It is missing, damaged, or of another format or version.
    """
    try:
        parsed = json.loads(path.read_text())
        values, digest = parsed["header"], parsed["sha256"]
        is_ours = values["format"] == FORMAT
    except FileNotFoundError:
        raise _error(
            path, "missing: this is no checkpoint of jdistadam, or a part of one", "no file"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _error(path, "damaged, or of something else", _short(error)) from None
    if not is_ours:
        raise _error(path, "the header of something else", values["format"])
    if _digest(values) != digest:
        raise _error(path, "damaged: its own checksum differs", _digest(values), digest)
    if values["version"] != VERSION:
        raise CheckpointError(
            str(path),
            "a checkpoint of another version",
            got=f"version {values['version']}, written by {values.get('written_by')}",
            expected=f"version {VERSION}",
            action="Read it with the release that wrote it, and save it with to_optax_state.",
        )
    return Header(path, values)


def _leaf(entry: Entry) -> dict[str, Any]:
    leaf: dict[str, Any] = {"shape": list(entry.shape), "dtype": jnp.dtype(entry.dtype).name}
    optional = {"key": entry.key, "keys": entry.keys, "is_count": entry.is_count or None}
    optional["sent"] = entry.sent
    return leaf | {name: value for name, value in optional.items() if value is not None}


def _digest(header: dict[str, Any]) -> str:
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in ("jdistadam", "jax", "orbax-checkpoint", "optax"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # imported from a source tree
            found[package] = "unknown"
    return found


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _error(path: Path, what: str, got: str, expected: str = "a header") -> CheckpointError:
    return CheckpointError(
        str(path),
        what,
        got=got,
        expected=expected,
        action="Restore another step, or another folder.",
    )
