"""Files in the safetensors format as nested dictionaries, by the package of this name.

A file has a flat dictionary of tensors, and one of strings, the metadata. Here names are paths with
``/`` between the keys of nested dictionaries. Parts without arrays, such as ``param_groups``, are
JSON in the metadata under their paths.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jdistadam.errors import CheckpointError, DtypeError, TreeError

_DTYPES = {
    "BOOL": np.dtype(np.bool_), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16), "F32": np.dtype(np.float32), "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
}  # fmt: skip


_RESERVED = "__metadata__"  # the format's own name beside those of tensors


def _package() -> Any:
    """Returns the module ``safetensors``; imports ``safetensors.numpy``, too."""
    try:
        package = importlib.import_module("safetensors")
        importlib.import_module("safetensors.numpy")
        if not hasattr(package.safe_open, "offset_keys"):
            raise ImportError(f"{package.__version__} is too old")
    except ImportError as error:
        raise CheckpointError(
            "safetensors: needed for files of the safetensors format, and cannot be imported: "
            f"got {type(error).__name__}: {error}, expected safetensors >= 0.6.2. "
            'Run pip install "jdistadam[interop]".'
        ) from error
    return package


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the nested dictionary in a file in the safetensors format.

    Arrays are read-only memory maps of the file: bytes are read on use. Keys are strings, even if
    they were numbers, and so are positions in lists that contain arrays.

    Args:
      path: The file. Values of its metadata are JSON, or otherwise strings.

    Returns:
      The dictionary, with numpy arrays.

    Raises:
      TreeError: The file is not in this format, or is damaged.
      DtypeError: A tensor has a dtype that is not supported.
      CheckpointError: The package safetensors is not installed.
    """
    where, package = os.fspath(path), _package()
    try:
        with package.safe_open(where, "np") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            tensors = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
            metadata = file.metadata() or {}
    except (package.SafetensorError, OverflowError) as error:
        raise _damaged(where, error) from None
    tree: dict[str, Any] = {}
    for key, text in metadata.items():
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text  # such as the "pt" that other writers add
        except (RecursionError, ValueError) as error:  # nested too deeply, too many digits
            raise _damaged(f"{where}: {key}", f"{error} in its JSON") from None
        _insert(tree, key, value, where)
    # get_tensor would copy. Tensors follow the header without gaps; its length comes first.
    data = np.memmap(where, np.uint8, "r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, (code, shape) in tensors.items():
        if code not in _DTYPES:
            raise DtypeError(
                f"{where}: {name}: dtype is not supported: got {code}, "
                f"expected {', '.join(_DTYPES)}. Convert it before it is written."
            )
        end = begin + _DTYPES[code].itemsize * math.prod(shape)
        try:
            array = np.asarray(data[begin:end]).view(_DTYPES[code]).reshape(shape)
        except (ValueError, OverflowError) as error:  # such as (0, 2**63)
            raise _damaged(f"{where}: {name}", f"shape {shape}: {error}") from None
        _insert(tree, name, array, where)
        begin = end
    return tree


def _damaged(where: str, got: Any) -> TreeError:
    return TreeError(
        f"{where}: not a file of the safetensors format, or damaged: got {got}, "
        "expected a header in JSON, and the bytes of all tensors in it. "
        "Write it anew, with write_safetensors or with the package safetensors."
    )


def _insert(tree: dict[str, Any], path: str, value: Any, where: str) -> None:
    *folders, last = path.split("/")
    for key in folders:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            break
    if not isinstance(tree, dict) or last in tree:
        raise TreeError(
            f"{where}: {path}: stands where another entry does: got {path}, "
            "expected paths of which none is the beginning of another. Rename it."
        )
    tree[last] = value


def write_safetensors(path: str | os.PathLike[str], tree: Mapping[str, Any]) -> None:
    """Writes nested dictionaries and lists of arrays, numbers and strings.

    Args:
      path: The file; it is replaced.
      tree: The later result of ``read_safetensors``. Keys must not contain ``/``.

    Raises:
      TreeError: A key cannot be a part of a path, or a value is neither an array nor JSON.
      DtypeError: The format lacks the dtype of an array.
      CheckpointError: The package safetensors is not installed.

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
        if not _is_array(value):
            try:
                metadata[name] = json.dumps(value)
            except TypeError as error:
                raise TreeError(
                    f"{name}: cannot be written: got {error}, expected an array, a number, "
                    "a string, or dictionaries and lists of them. Convert it, or leave it out."
                ) from None
            continue
        arrays[name] = np.asarray(value, order="C")  # bytes are written in memory order
        if arrays[name].dtype not in _DTYPES.values():
            raise DtypeError(
                f"{name}: dtype is not one of the safetensors format: got {arrays[name].dtype}, "
                f"expected {', '.join(_DTYPES)}. Convert it."
            )
    _package().numpy.save_file(arrays, os.fspath(path), metadata or None)


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic | jax.Array)


def _has_array(x: Any) -> bool:
    if isinstance(x, Mapping | list | tuple):
        return any(map(_has_array, x.values() if isinstance(x, Mapping) else x))
    return _is_array(x)


def _entries(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields arrays, and the largest parts without arrays, by path."""
    seen = set[str]()
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if "/" in str(key) or not str(key) or (f"{path}{key}" == _RESERVED and _is_array(value)):
            raise TreeError(
                f"{path}{key!r}: cannot be a part of a path: got {key!r}, "
                f"expected a key without '/', and not {_RESERVED!r}. Rename it."
            )
        if str(key) in seen:
            raise TreeError(
                f"{path}{key!r}: two keys are written alike: got {key!r} beside another key with "
                f"the text {str(key)!r}, expected different texts. Rename one."
            )
        seen.add(str(key))
        if not _is_array(value) and _has_array(value):
            yield from _entries(f"{path}{key}/", value)
        else:
            yield f"{path}{key}", value
