"""Over which mesh axes an array may differ, as the types of ``jax.shard_map`` say."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

Axes = tuple[str, ...]
"""Names of mesh axes."""


def to_varying(x: Any, axes: Axes) -> Any:
    """Marks ``x`` as different on each device, for the types of ``shard_map(check_vma=True)``."""
    varying = varying_axes(x)
    if varying is None:
        return x
    missing = tuple(axis for axis in axes if axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_together(tree: Any) -> Any:
    """Marks every leaf as varying over all axes over which any of them varies.

    A foreign call takes the types of its results from one operand: it must know of all others.
    """
    axes = frozenset().union(*(varying_axes(x) or () for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: to_varying(x, tuple(sorted(axes))), tree) if axes else tree


def unbound(axes: Axes) -> Axes:
    """Returns those axes that this code does not run inside a shard_map over."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in manual)


def varying_axes(x: Any) -> frozenset[str] | None:
    """Returns the axes over which ``x`` may differ; None where the types do not track it."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return None if manual is None else frozenset(manual.varying)
