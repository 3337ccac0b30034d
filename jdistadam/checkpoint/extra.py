"""What is saved beside a state: a tree of the user's, such as the position of a data iterator.

jax arrays are saved as those of a state are, numpy arrays as their bytes, of whichever dtype, and
Python's values in the header. Each comes back as what it was.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jdistadam.checkpoint import parts
from jdistadam.core import trees
from jdistadam.errors import TreeError
from jdistadam.training.checks import check_agreement

NAME = "extra"
_VALUES = (bool, int, float, str, bytes, type(None))

About = dict[str, dict[str, Any]]
"""What the header says of each leaf by name: its kind, its keys, and a value or a numpy dtype."""


def taken_apart(extra: Any) -> tuple[About, dict[str, Any]]:
    """Returns what the header says of a tree, and the arrays by name, numpy's as bytes.

    Raises:
      TreeError: A leaf is neither an array nor a value of Python, or is traced.
      AgreementError: Processes have other values.
    """
    about: About = {}
    arrays: dict[str, Any] = {}
    for leaf in leaves(extra):
        about[leaf.name] = {"keys": leaf.keys} | described(leaf.name, leaf.value)
        if isinstance(leaf.value, np.ndarray | np.generic):
            arrays[leaf.name] = np.frombuffer(leaf.value.tobytes(), np.uint8)
        elif isinstance(leaf.value, jax.Array):
            is_local = jax.process_count() > 1 and leaf.value.is_fully_addressable
            is_local = is_local and not trees.is_key(leaf.value)
            arrays[leaf.name] = np.asarray(leaf.value) if is_local else leaf.value
    if jax.process_count() > 1 and about:
        check_agreement(dict(_facts(about, arrays)), range(jax.process_count()))
    return about, arrays


def leaves(extra: Any) -> Iterator[parts.Leaf]:
    """Yields the leaves with their names; None is one."""
    return parts.leaves(NAME, extra, is_none)


def is_none(x: Any) -> bool:
    """For trees in which None is a leaf."""
    return x is None


def described(name: str, x: Any) -> dict[str, Any]:
    """What the header says of a leaf; of a jax array and of its shape its kind alone."""
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.hasobject and not x.dtype.names:
        dtype = x.dtype.name if x.dtype.kind == "V" else x.dtype.str  # bfloat16 has but a name
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
    """What all processes must say of a tree; of arrays of all processes, nothing."""
    yield NAME, ", ".join(about)
    for name, leaf in about.items():
        x = arrays.get(name)
        said = {key: value for key, value in leaf.items() if key != "keys"}
        if isinstance(x, np.ndarray):
            said["sha256"] = hashlib.sha256(x.tobytes()).hexdigest()
        yield name, str(said)
