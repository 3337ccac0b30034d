"""How arrays move between the shardings that XLA gives them and those of their moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding

from jdistadam.core import collectives

Arrays = Sequence[Any]
DimAxes = list[tuple[str, ...]]
"""The mesh axes that cut each dimension of an array, the most significant one first."""


class Step(NamedTuple):
    """A change of an array's sharding along one mesh axis."""

    op: str  # "slice", "all_to_all" or "all_gather"
    axis: str
    source: int  # the dimension that the axis cuts before; -1: none
    target: int  # the dimension that the axis cuts afterwards; -1: none


class Route(NamedTuple):
    """How an array moves between Shardy's sharding and the sharding of its moments."""

    sharding: Sharding  # what XLA is told
    steps: tuple[Step, ...]  # the steps that the devices then take themselves


def routes_of(kind: Arrays, moment_shardings: Sequence[Sharding], *, inward: bool) -> list[Route]:
    """The routes of all arrays of a kind, if any, to their moments or back."""
    routes = []
    for x, of_moment in zip(kind, moment_shardings, strict=False):
        ends = (x.sharding, of_moment) if inward else (of_moment, x.sharding)
        steps = _steps(x.shape, *ends)
        routes.append(Route(x.sharding if steps else of_moment, steps))
    return routes


def _steps(shape: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[Step, ...]:
    """Steps that bring an array from one sharding to another; () if XLA does it as well.

    XLA slices, gathers and permutes well. But if an axis moves to another dimension it may gather
    the whole array, as jaxlib 0.11 does between the shardings of Shardy and those that a partition
    rule returns.
    """
    if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
        return ()
    now, goal = (dim_axes(x, len(shape)) for x in (source, target))
    sizes = source.mesh.shape
    if not (divides(shape, now, sizes) and divides(shape, goal, sizes)):
        return ()
    if any(a[: len(b)] != b[: len(a)] for a, b in zip(now, goal, strict=True)):
        return ()
    steps: list[Step] = []
    while now != goal:
        steps.append(step := _next_step(now, goal))
        if step.source >= 0:
            now[step.source] = now[step.source][:-1]
        if step.target >= 0:
            now[step.target] += (step.axis,)
    simple = len({x.op for x in steps}) == 1 and steps[0].op != "all_to_all"
    return () if simple else tuple(steps)


def dim_axes(sharding: NamedSharding, rank: int) -> DimAxes:
    """Returns the axes of more than one device that cut each dimension."""
    names = map(collectives.axes_in, (*sharding.spec, *(None,) * (rank - len(sharding.spec))))
    return [tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1) for axes in names]


def divides(shape: tuple[int, ...], dim_axes: DimAxes, sizes: Any) -> bool:
    """Whether every dimension is cut into equal parts."""
    pairs = zip(shape, dim_axes, strict=True)
    return all(n % math.prod(sizes[axis] for axis in axes) == 0 for n, axes in pairs)


def _next_step(now: DimAxes, goal: DimAxes) -> Step:
    """The cheapest next step: steps that shrink shards come first, steps that grow them last.

    In each dimension one list of axes is a prefix of the other.
    """
    missing = [y[len(x) : len(x) + 1] for x, y in zip(now, goal, strict=True)]
    for d, axes in enumerate(missing):
        if axes and not any(axes[0] in x for x in now):
            return Step("slice", axes[0], -1, d)
    surplus = [d for d, axes in enumerate(now) if len(axes) > len(goal[d])]
    for d in surplus:
        if (axes := now[d][-1:]) in missing:
            return Step("all_to_all", axes[0], d, missing.index(axes))
    return Step("all_gather", now[surplus[0]][-1], surplus[0], -1)


def along(mesh: Mesh, routes: Sequence[Route], kind: Arrays) -> tuple[jax.Array, ...]:
    """Takes the route steps of all arrays of a kind."""
    return tuple(_moved(mesh, *pair) for pair in zip(routes, kind, strict=True))


def _moved(mesh: Mesh, route: Route, x: jax.Array) -> jax.Array:
    """Takes the steps of a route on one device's shard."""
    for op, axis, source, target in route.steps:
        n = mesh.shape[axis]
        if op == "slice":
            size = x.shape[target] // n
            start = collectives.axis_index((axis,)) * size
            x = lax.dynamic_slice_in_dim(x, start, size, target)
        elif op == "all_gather":
            x = collectives.all_gather(x, (axis,), dim=source, to="varying")
        else:
            stacked = jnp.stack(jnp.split(x, n, target))
            pieces = collectives.all_to_all(stacked, axis, dim=0)
            x = jnp.concatenate([pieces[i] for i in range(n)], source)
    return x
