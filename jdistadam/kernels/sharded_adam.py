"""The kernel under plain ``jax.jit`` over several devices, ``jax.vmap`` and differentiation.

By default, XLA gathers every operand of a custom call. This module tells XLA that the step is
elementwise, and how to partition it: each leaf is updated in the sharding of its first moment, so
moments are never sent. Results have the sharding of the arrays that they replace, whatever the
sharding of the gradients. Inside ``jax.shard_map`` or on one device the kernel is called directly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives
from jdistadam.core.collectives import CalledPrimitive, make_primitive
from jdistadam.errors import PolicyError
from jdistadam.kernels import adam as kernel
from jdistadam.kernels import native
from jdistadam.kernels.adam import Operands, Results, Scalars, Spec
from jdistadam.kernels.reference import KINDS, SquaresRequest

_MADE = ("params", "mu", "nu", "out")  # the results that replace arrays
Arrays = Sequence[Any]
DimAxes = list[tuple[str, ...]]
"""The mesh axes that cut each dimension of an array, the most significant one first."""


def _adam_on_shards(
    spec: Spec, with_squares: bool, scalars: Scalars, operands: Operands, out_like: Arrays
) -> Results:
    """Like kernel.adam, for leaves with any sharding.

    Gradients, params, second moments and remainders are resharded like the first moments.
    ``spec.flat`` must be empty: a flat array has no dimension that belongs to a leaf.
    Dimensions of members may be sharded too: each device takes the rows of its own members.

    Args:
      spec: As for the kernel.
      with_squares: Whether to sum the squares of each leaf.
      scalars: The same on all devices.
      operands: The leaves, resharded like their first moments as far as types know it.
      out_like: Arrays with the sharding that ``out`` takes.

    Returns:
      The kernel's results, not yet resharded like the arrays that they replace.
    """
    shardings = tuple(map(sharding_of, operands.mu))
    ranks = tuple(x.ndim for x in operands.mu)
    partitioned = _partitioned(spec, ranks, kernel.member_dims(scalars), with_squares)
    return native.unfused(partitioned((out_like, shardings), scalars, operands.unfused()))


def reshard_like(arrays: Arrays, models: Arrays) -> tuple[Any, ...]:
    """Reshards arrays like ``models``, as far as types know it: those of an Explicit mesh do."""
    shardings = [jax.typeof(model).sharding for model in models]
    return tuple(reshard_as(*pair) for pair in zip(arrays, shardings, strict=False))


def reshard_as(x: Any, sharding: Any) -> Any:
    """Reshards an array, as far as types know it."""
    is_placed = sharding.mesh.empty or jax.typeof(x).sharding.spec == sharding.spec
    return x if is_placed else jax.reshard(x, sharding)


def sharding_of(moment: Any) -> Any:
    """Passes a moment only for its sharding, which the gradients take."""
    (kept,) = _sharding_of_p.bind(moment)
    return kept


# The moment's sharding as Shardy sees it, for the gradients to take: shardings pass through it
# forward only. The moment itself would draw a loop's carry of gradients to its own sharding.
_sharding_of_p = make_primitive(
    "jdistadam_sharding_of",
    lambda x: [x],
    lambda x: [x],
    lowering=lambda ctx, x: [sdy.PropagationBarrierOp(x, sdy.PropagationDirection.FORWARD).result],
)


@functools.lru_cache(maxsize=256)
def _partitioned(spec: Spec, ranks: tuple[int, ...], member_dims: int, with_squares: bool) -> Any:
    """The kernel with one more argument that passes only shardings."""

    @custom_partitioning
    def adam_step(placed: Any, scalars: Scalars, operands: Operands) -> Results:
        del placed
        request = SquaresRequest.of_leaves(operands.grads) if with_squares else None
        return kernel.adam(spec, scalars, operands, request)

    def partition(mesh: Mesh, arg_shapes: Any, result_shapes: Results) -> Any:
        placed, _, operands = arg_shapes
        moment_shardings, members = _with_equal_members(mesh, operands.mu, member_dims)
        inward = [_routes(kind, moment_shardings, inward=True) for kind in operands]
        made = result_shapes[: len(_MADE)]
        outward = [_routes(kind, moment_shardings, inward=False) for kind in made]
        cut = axes_of_squares(operands.mu, moment_shardings) if with_squares else []
        # New params that are gathered: one call would have XLA gather them all after it.
        is_gathered = any(_grows(kind, moment_shardings) for kind in made)
        calls = _calls(operands.mu) if is_gathered else [range(len(operands.mu))]

        def lower_fn(placed: Any, scalars: Scalars, operands: Operands) -> Results:
            del placed
            moved = Operands(*map(functools.partial(_along, mesh), inward, operands))
            with collectives.no_mesh() if with_squares else contextlib.nullcontext():
                parts = [_of_some(spec, scalars, moved, leaves, with_squares) for leaves in calls]
                squares = None
                if with_squares:
                    here = jnp.concatenate([x.squares for x in parts])
                    squares = squares_of_all(mesh, here, cut)
            results = [itertools.chain(*(x[i] for x in parts)) for i in range(len(_MADE))]
            placed_results = map(functools.partial(_along, mesh), outward, results)
            return Results(*placed_results)._replace(squares=squares)

        replicated = NamedSharding(mesh, P())
        arg_shardings = (
            jax.tree.map(lambda x: x.sharding, placed),
            Scalars(NamedSharding(mesh, members), replicated, replicated),
            Operands(*(tuple(x.sharding for x in kind) for kind in inward)),
        )
        results = Results(*(tuple(x.sharding for x in kind) for kind in outward))
        if with_squares:
            results = results._replace(squares=replicated)
        return mesh, lower_fn, results, arg_shardings

    # The members of the coefficients are resharded like those of the moments afterwards.
    rows = (*(f"b{d}" for d in range(member_dims)), "r", "c")
    rule = sharding_rule(spec.mode, ranks, (rows, (), ()), ("r", "c"), with_squares=with_squares)
    adam_step.def_partition(partition=partition, sharding_rule=rule)
    return adam_step


_BYTES_A_CALL = 256 << 20  # of first moments, before they are cut


def _calls(mu: Arrays) -> list[range]:
    """The leaves of each kernel call, in order: few enough that gathers overlap other calls."""
    starts, filled = [0], 0
    for i, x in enumerate(mu):
        nbytes = x.size * x.dtype.itemsize
        if filled and filled + nbytes > _BYTES_A_CALL:
            starts.append(i)
            filled = 0
        filled += nbytes
    return list(map(range, starts, [*starts[1:], len(mu)]))


def _of_some(
    spec: Spec, scalars: Scalars, operands: Operands, leaves: range, with_squares: bool
) -> Results:
    """The kernel's results for some of the leaves."""
    own = dataclasses.replace(spec, groups=tuple(spec.groups[i] for i in leaves))
    some = Operands(*(tuple(kind[i] for i in leaves) if kind else () for kind in operands))
    return kernel.adam(
        own, scalars, some, SquaresRequest.of_leaves(some.grads) if with_squares else None
    )


def axes_of_squares(moments: Arrays, shardings: Sequence[Sharding]) -> list[set[str]]:
    """The axes that cut each leaf, for ``squares_of_all``; raises if parts differ in size."""

    def axes_of(shape: tuple[int, ...], sharding: Sharding) -> set[str]:
        if sharding.is_fully_replicated:
            return set()
        if isinstance(sharding, NamedSharding):
            by_dim = dim_axes(sharding, len(shape))
            if _divides(shape, by_dim, sharding.mesh.shape):
                return set(itertools.chain(*by_dim))
        raise PolicyError(
            f"step_with_norms: does not support this sharding: got shape {shape}, sharded as "
            f"{sharding}, expected a NamedSharding into equal parts. "
            "Use step, and optax.global_norm."
        )

    pairs = zip(moments, shardings, strict=True)
    return [axes_of(x.shape, sharding) for x, sharding in pairs]


def squares_of_all(mesh: Mesh, squares: jax.Array, cut: Sequence[set[str]]) -> jax.Array:
    """Sums the squares of leaves, shape (leaves, 3), over devices.

    Of devices with the same part, the first one counts: that is, along axes that do not cut it.
    """
    axes: tuple[str, ...] = mesh.axis_names
    is_mine = [collectives.axis_index(tuple(x for x in axes if x not in own)) == 0 for own in cut]
    return collectives.all_reduce(jnp.where(jnp.stack(is_mine)[:, None], squares, 0), axes)


def _grows(kind: Arrays, moment_shardings: Sequence[Sharding]) -> bool:
    """Whether results of a kind, if any, are sharded less than their moments."""

    def size(x: Any, sharding: Sharding) -> int:
        return math.prod(sharding.shard_shape(x.shape))

    pairs = zip(kind, moment_shardings, strict=False)
    return any(size(x, of_moment) < size(x, x.sharding) for x, of_moment in pairs)


def _with_equal_members(mesh: Mesh, mu: Arrays, member_dims: int) -> tuple[list[Sharding], P]:
    """The shardings of the moments, and the one sharding of all their members.

    A device needs the coefficients of its own members. If leaves disagree about those, every device
    takes all members.
    """
    shardings = [x.sharding for x in mu]
    if not member_dims:
        return shardings, P()
    whole = (None,) * member_dims
    members = {(*x.spec, *whole)[:member_dims] for x in shardings}
    if len(members) == 1:
        return shardings, P(*members.pop())
    return [NamedSharding(mesh, P(*whole, *x.spec[member_dims:])) for x in shardings], P()


def sharding_rule(
    mode: str,
    ranks: Sequence[int],
    scalars: Any,
    replicated: Any,
    coded: Sequence[str] = (),
    *,
    with_squares: bool = False,
) -> SdyShardingRule:
    """Each kind of array shares factors only with the results that replace it.

    Args:
      mode: The mode of the step.
      ranks: Of the leaves.
      scalars: The factors of the operands before the leaves.
      replicated: Those of them that must be the same on all devices.
      coded: The moments that have scales: "m" or "n".
      with_squares: Whether sums of squares follow, which every device gets.
    """

    def leaves(kind: str) -> Any:
        mapping: list[tuple[str, ...]] = []
        for i, rank in enumerate(ranks):
            mapping.append(tuple(f"{kind}{i}d{d}" for d in range(rank)))
            mapping += [(f"{kind}{i}s",)] if kind in coded else []
        return tuple(mapping)

    grads, params, mu, nu = map(leaves, ("g", "p", "m", "n"))
    # Updates are added to params; every other `out` has its own arrays that give its sharding.
    out = params if mode == "update" else leaves("o")
    remainders = out if mode == "step_split" else ()
    new_params = () if mode == "update" else params
    new_out = () if mode == "step" else out
    return SdyShardingRule(
        operand_mappings=out + grads + scalars + grads + params + mu + nu + remainders,
        result_mappings=new_params + mu + nu + new_out + (("q", "k"),) * with_squares,
        need_replication_factors=replicated,
    )


class _Step(NamedTuple):
    """A change of an array's sharding along one mesh axis."""

    op: str  # "slice", "all_to_all" or "all_gather"
    axis: str
    source: int  # the dimension that the axis cuts before; -1: none
    target: int  # the dimension that the axis cuts afterwards; -1: none


class _Route(NamedTuple):
    """How an array moves between Shardy's sharding and the sharding of its moments."""

    sharding: Sharding  # what XLA is told
    steps: tuple[_Step, ...]  # the steps that the devices then take themselves


def _routes(kind: Arrays, moment_shardings: Sequence[Sharding], *, inward: bool) -> list[_Route]:
    """The routes of all arrays of a kind, if any, to their moments or back."""
    routes = []
    for x, of_moment in zip(kind, moment_shardings, strict=False):
        ends = (x.sharding, of_moment) if inward else (of_moment, x.sharding)
        steps = _steps(x.shape, *ends)
        routes.append(_Route(x.sharding if steps else of_moment, steps))
    return routes


def _steps(shape: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[_Step, ...]:
    """Steps that bring an array from one sharding to another; () if XLA does it as well.

    XLA slices, gathers and permutes well. But if an axis moves to another dimension it may gather
    the whole array, as jaxlib 0.11 does between the shardings of Shardy and those that a partition
    rule returns.
    """
    if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
        return ()
    now, goal = (dim_axes(x, len(shape)) for x in (source, target))
    sizes = source.mesh.shape
    if not (_divides(shape, now, sizes) and _divides(shape, goal, sizes)):
        return ()
    if any(a[: len(b)] != b[: len(a)] for a, b in zip(now, goal, strict=True)):
        return ()
    steps: list[_Step] = []
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
    entries = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    names = [(x,) if isinstance(x, str) else tuple(x or ()) for x in entries]
    return [tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1) for axes in names]


def _divides(shape: tuple[int, ...], dim_axes: DimAxes, sizes: Any) -> bool:
    pairs = zip(shape, dim_axes, strict=True)
    return all(n % math.prod(sizes[axis] for axis in axes) == 0 for n, axes in pairs)


def _next_step(now: DimAxes, goal: DimAxes) -> _Step:
    """The cheapest next step: steps that shrink shards come first, steps that grow them last.

    In each dimension one list of axes is a prefix of the other.
    """
    missing = [y[len(x) : len(x) + 1] for x, y in zip(now, goal, strict=True)]
    for d, axes in enumerate(missing):
        if axes and not any(axes[0] in x for x in now):
            return _Step("slice", axes[0], -1, d)
    surplus = [d for d, axes in enumerate(now) if len(axes) > len(goal[d])]
    for d in surplus:
        if (axes := now[d][-1:]) in missing:
            return _Step("all_to_all", axes[0], d, missing.index(axes))
    return _Step("all_gather", now[surplus[0]][-1], surplus[0], -1)


def _along(mesh: Mesh, routes: Sequence[_Route], kind: Arrays) -> tuple[jax.Array, ...]:
    """Takes the route steps of all arrays of a kind."""
    return tuple(_moved(mesh, *pair) for pair in zip(routes, kind, strict=True))


def _moved(mesh: Mesh, route: _Route, x: jax.Array) -> jax.Array:
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


# The step under ``jax.vmap`` and under differentiation.
#
# ``vmap`` over many members makes one kernel call of one kernel call: arrays get a leading
# dimension of members, and so do coefficients that differ between members. The derivative is that
# of the formula in jax.numpy; the values remain the kernel's.


def adam(
    spec: Spec,
    scalars: Scalars,
    operands: Operands,
    out_like: Sequence[Any] | None = None,
    *,
    with_squares: bool = False,
) -> Results:
    """Like kernel.adam, for leaves with any sharding; supports batching and differentiation.

    Args:
      spec: As for the kernel; nothing is flat, and there is one contribution.
      scalars: The same on all devices. ``inv_scale`` and ``found_inf`` are the same for all members
        too, and constants in a derivative.
      operands: The leaves.
      out_like: In mode "step_and_cast", arrays with the sharding that ``out`` takes.
      with_squares: Whether to sum the squares of each leaf; then it is not batched, and not
        differentiated.

    Returns:
      The kernel's results. New params, moments and remainders have the sharding of the old ones,
      updates that of the params.
    """
    if not operands.grads:
        empty = jnp.zeros((0, len(KINDS)), jnp.float32) if with_squares else None
        return kernel.adam(spec, scalars, operands)._replace(squares=empty)
    scalars, operands = collectives.vary_together((scalars, operands))
    models = operands._replace(out=operands.out or out_like or operands.params)
    args = (scalars, Operands(*(reshard_like(x, operands.mu) for x in operands)), models.out)
    step = functools.partial(_adam_on_shards, spec, with_squares)
    treedef = jax.tree.structure(args)
    results = _step(step, *args, spec=spec, treedef=treedef, with_squares=with_squares)
    made = Results(*map(reshard_like, results[: len(_MADE)], models[1:]))
    return made._replace(squares=results.squares)


def _batched(
    leaves: Any, dims: Any, *, call: Any, spec: Spec, treedef: Any, with_squares: bool
) -> tuple[Any, Any]:
    """One step for all members.

    Leaves shared by all members are repeated, because one call has one size per leaf. Coefficients
    are repeated only if they already have a dimension of other members: a leaf has its dimensions
    of members in the same order.
    """
    del call  # it is for one member
    (size,) = {x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None}

    def with_members(x: Any, dim: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    rows, inv_scale, found_inf = leaves[:3]
    if with_squares:
        raise _no_norms(f"jax.vmap over {size}")
    if dims[1] is not None or dims[2] is not None:
        raise PolicyError(
            "step: cannot be skipped for some members only: got jax.vmap over "
            f"{size} of a step that a wrapper may skip, expected the same decision for all. "
            "Use optax's own MultiSteps or apply_if_finite, whose update runs the kernel."
        )
    if dims[0] is not None or kernel.member_dims(Scalars(rows, inv_scale, found_inf)):
        rows = with_members(rows, dims[0])
    arrays = [with_members(*pair) for pair in zip(leaves[3:], dims[3:], strict=True)]
    leaves = (rows, inv_scale, found_inf, *arrays)
    results = jax.tree.leaves(adam(spec, *jax.tree.unflatten(treedef, leaves)))
    return results, [0] * len(results)


def _no_norms(got: str) -> PolicyError:
    return PolicyError(
        f"step_with_norms: not supported here: got {got}, expected a step of one model, without "
        "derivatives. Use step, and optax.global_norm."
    )


def _jvp(
    leaves: Any, tangents: Any, *, spec: Spec, treedef: Any, with_squares: bool, **params: Any
) -> tuple[Any, Any]:
    """The kernel's results and the derivative of the formula.

    Operands with a zero tangent are constants, so nothing is computed from zeros.
    """
    if spec.mode == "step_split":  # parameters are halves of a number, which have no derivative
        raise PolicyError(
            "main_params_dtype: a step cannot be differentiated: "
            "got remainder16, with which a parameter is two integers, expected float32 or None. "
            "Set main_params_dtype=jnp.float32, or put jax.lax.stop_gradient around gradients, "
            "state, params and hyperparameters."
        )
    if with_squares:
        raise _no_norms("a derivative")
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def formula(*values: Any) -> list[Any]:
        changed = list(leaves)
        for i, value in zip(moving, values, strict=True):
            changed[i] = value
        scalars, operands, _ = jax.tree.unflatten(treedef, changed)
        return jax.tree.leaves(kernel.adam_fallback(spec, scalars, operands, every_term=True))

    given, directions = ([x[i] for i in moving] for x in (leaves, tangents))
    static = dict(spec=spec, treedef=treedef, with_squares=with_squares)
    results = _step.primitive.bind(*leaves, **static, **params)
    return results, jax.jvp(formula, given, directions)[1]


_step = CalledPrimitive("jdistadam_step", batched=_batched, jvp=_jvp)
