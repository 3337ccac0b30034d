"""Dtypes that are given as arguments: which can be used; and how a float32 is stored in one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.arguments import shown
from jdistadam.errors import PolicyError

FLOATS = ("float32", "bfloat16", "float16")
"""Names of the dtypes that the kernel reads and writes."""


def float_dtype(
    name: str, value: Any, known: tuple[str, ...] = FLOATS, also: tuple[str, ...] = ()
) -> jnp.dtype:
    """Returns a dtype that is one of ``known``; or raises PolicyError, which names ``also`` too."""
    dtype = _dtype(value)
    if dtype is None or dtype.name not in known:
        raise PolicyError(
            f"{name}: not a dtype that can be used: "
            f"got {shown(value)}, expected {', '.join(known + also)}. "
            f"Pass one of these, e.g. jnp.bfloat16.{_of_an_array(name, value)}"
        )
    return dtype


def check_supported(name: str, value: Any, supported: tuple[str | None, ...]) -> None:
    """Raises PolicyError unless a dtype is one that works in this version."""
    dtype = None if value is None else _dtype(value)
    got = dtype.name if dtype is not None else None if value is None else shown(value)
    if got not in supported:
        raise PolicyError(
            f"{name}: not supported in this version: got {got}, "
            f"expected {' or '.join(map(str, supported))}. "
            f"Leave {name.rsplit('.')[-1]} at its default.{_of_an_array(name, value)}"
        )


def _of_an_array(name: str, value: Any) -> str:
    """What to do where ``optax.inject_hyperparams`` made an array of a dtype."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        f" If optax.inject_hyperparams made the array, pass it static_args={name!r}, or use "
        "jda.inject_hyperparams."
    )


def _dtype(value: Any) -> jnp.dtype | None:
    """The dtype that ``value`` names; None for what is none, such as an array."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return None
    try:
        return jnp.dtype(value)
    except TypeError:
        return None


def store(x: Any, dtype: Any, xp: Any) -> Any:
    """Rounds float32 once to ``dtype``, ties to even; every NaN becomes the positive quiet NaN."""
    return xp.where(xp.isnan(x), xp.asarray(np.nan, xp.float32), x).astype(dtype)
