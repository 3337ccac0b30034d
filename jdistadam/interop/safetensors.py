"""Files of the safetensors format, read and written without the package of this name.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of each tensor, and ``__metadata__``, a dictionary of strings), and the tensors. It holds a
flat dictionary; here names are paths with ``/`` between the keys of nested ones, and what has no
array in it, such as ``param_groups``, is JSON in the metadata under its path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jdistadam.errors import DtypeError, TreeError

_DTYPES: dict[str, np.dtype[Any]] = {  # in the order in which the package writes tensors
    "U64": np.dtype(np.uint64), "I64": np.dtype(np.int64), "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32), "U32": np.dtype(np.uint32), "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
    "U16": np.dtype(np.uint16), "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the nested dictionary in a file of the safetensors format.

    Arrays are mapped to the file, read-only: their bytes are read where they are used. Keys are
    strings, also those that were numbers, and so are positions of lists with arrays in them.

    Args:
      path: The file. A name of a tensor such as ``state/0/exp_avg`` is a path in the dictionary,
        and so is a key of the metadata, whose value is JSON, or else a string.

    Raises:
      TreeError: It is no such file.
      DtypeError: A tensor has a dtype that is not supported.
    """
    where = os.fspath(path)
    header, start = _header(where)
    data = np.memmap(where, np.uint8, "r") if os.path.getsize(where) else np.zeros(0, np.uint8)
    tree: dict[str, Any] = {}
    for key, text in header.pop(_METADATA, {}).items():
        _insert(tree, key, _decoded(text), where)
    for name, info in header.items():
        _insert(tree, name, _tensor(f"{where}: {name}", info, data[start:]), where)
    return tree


def _header(path: str) -> tuple[dict[str, Any], int]:
    """Returns the header of a file, and where the tensors begin."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > os.path.getsize(path):
                raise ValueError(f"a header of {length} bytes")
            return dict(json.loads(file.read(length))), 8 + length
    except ValueError as error:
        raise TreeError(
            path,
            "not a file of the safetensors format",
            got=error,
            expected="the length of a header, and the header, in JSON",
            action="Write it with write_safetensors, or with the package safetensors.",
        ) from None


def _tensor(where: str, info: Mapping[str, Any], data: np.ndarray) -> np.ndarray:
    dtype = _DTYPES.get(info["dtype"])
    if dtype is None:
        raise DtypeError(
            where,
            "dtype is not supported",
            got=info["dtype"],
            expected=", ".join(_DTYPES),
            action="Convert it before it is written.",
        )
    begin, end = info["data_offsets"]
    if not 0 <= begin <= end <= len(data) or end - begin != dtype.itemsize * np.prod(
        info["shape"], dtype=np.int64
    ):
        raise TreeError(
            where,
            "is outside of the file, or has not the bytes of its shape",
            got=f"bytes {begin} to {end} of {len(data)}",
            expected=f"{dtype} of shape {info['shape']}",
            action="Write the file anew: it is damaged.",
        )
    return np.asarray(data[begin:end]).view(dtype).reshape(info["shape"])


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # such as the "pt" that others write


def _insert(tree: dict[str, Any], path: str, value: Any, where: str) -> None:
    *folders, last = path.split("/")
    for key in folders:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            break
    if not isinstance(tree, dict) or last in tree:
        raise TreeError(
            f"{where}: {path}",
            "stands where another entry does",
            got=path,
            expected="paths of which none is the beginning of another",
            action="Rename it.",
        )
    tree[last] = value


def write_safetensors(path: str | os.PathLike[str], tree: Mapping[str, Any]) -> None:
    """Writes nested dictionaries and lists of arrays, numbers and strings.

    Args:
      path: The file; it is replaced.
      tree: What ``read_safetensors`` will return. Keys must not contain ``/``.

    Raises:
      TreeError: A key cannot be a part of a path, or a value is neither an array nor JSON.
      DtypeError: An array has a dtype that the format has not.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = f"{folder}/state.safetensors"
      ...     write_safetensors(file, {"state": {0: {"exp_avg": np.ones(2)}}, "betas": (0.9, 0.99)})
      ...     read_safetensors(file)
      {'betas': [0.9, 0.99], 'state': {'0': {'exp_avg': array([1., 1.])}}}
    """
    arrays: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for name, value in _entries("", tree):
        if _is_array(value):
            arrays[name] = _writable(name, value)
        else:
            metadata[name] = _encoded(name, value)
    # In the package's own order: wide dtypes first, so that all are aligned.
    order = list(_DTYPES.values())
    names = sorted(arrays, key=lambda name: (order.index(arrays[name].dtype), name))
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + arrays[name].nbytes
        info = {"dtype": _NAMES[arrays[name].dtype], "shape": list(arrays[name].shape)}
        header[name] = info | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(arrays[name].tobytes())


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic | jax.Array)


def _has_array(x: Any) -> bool:
    if isinstance(x, Mapping | list | tuple):
        return any(map(_has_array, x.values() if isinstance(x, Mapping) else x))
    return _is_array(x)


def _entries(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields arrays, and the largest parts without any, by their paths."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        if "/" in str(key) or not str(key):
            raise TreeError(
                f"{path}{key!r}",
                "cannot be a part of a path",
                got=repr(key),
                expected="a key without '/'",
                action="Rename it.",
            )
        if not _is_array(value) and _has_array(value):
            yield from _entries(f"{path}{key}/", value)
        else:
            yield f"{path}{key}", value


def _writable(name: str, x: Any) -> np.ndarray:
    array = np.asarray(x)
    if array.dtype not in _NAMES:
        raise DtypeError(
            name,
            "dtype is not one of the safetensors format",
            got=array.dtype,
            expected=", ".join(_DTYPES),
            action="Convert it.",
        )
    return array


def _encoded(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise TreeError(
            name,
            "cannot be written",
            got=error,
            expected="an array, a number, a string, or dictionaries and lists of them",
            action="Convert it, or leave it out.",
        ) from None
