"""How XLA partitions a step: each leaf is updated in the sharding of its first moment.

With coded moments or stochastic rounding, a leaf may be sharded along its first dimension, if the
shards consist of whole blocks. Other shardings raise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives, trees
from jdistadam.core.codecs import BLOCK, is_codes
from jdistadam.errors import PolicyError
from jdistadam.kernels.adam import adam
from jdistadam.kernels.operands import (
    LeafPositions,
    Operands,
    Results,
    Rounding,
    Scalars,
    Spec,
    codes_of,
)
from jdistadam.kernels.reference import SquaresRequest
from jdistadam.kernels.routes import Arrays, DimAxes, Route, along, dim_axes, divides, routes_of


class Kinds(NamedTuple):
    """What the partitioning of a call depends on."""

    ranks: tuple[int, ...]  # of the leaves, with members
    member_dims: int
    coded: tuple[str, ...]  # the moments that are

    @classmethod
    def of(cls, scalars: Scalars, operands: Operands) -> Kinds:
        """Those of a call's operands."""
        moments = {"mu": operands.mu, "nu": operands.nu}
        coded = tuple(kind for kind, arrays in moments.items() if is_codes(arrays[0]))
        return cls(tuple(x.ndim for x in operands.grads), scalars.member_dims, coded)


@functools.lru_cache(maxsize=256)
def partitioned_step(spec: Spec, kinds: Kinds, with_squares: bool) -> Any:
    """The kernel with one more argument that passes only shardings."""

    @custom_partitioning
    def adam_step(
        placed: Any, scalars: Scalars, rounding: Rounding | None, operands: Operands
    ) -> Results:
        del placed
        rounding = rounding and rounding._replace(positions=_positions([()] * len(kinds.ranks)))
        request = SquaresRequest.of_leaves(operands.grads) if with_squares else None
        return adam(spec, scalars, operands, rounding, request)

    def partition(mesh: Mesh, arg_shapes: Any, result_shapes: Results) -> Any:
        placed, _, rounding, operands = arg_shapes
        codes = codes_of(operands.mu)
        moments, members = _moment_shardings(mesh, spec, kinds, codes)
        inward = [_routes(spec, kind, moments, inward=True) for kind in operands]
        outward = [_routes(spec, kind, moments, inward=False) for kind in result_shapes[:-1]]
        cut = _axes_of_squares(codes, moments) if with_squares else []

        def lower_fn(
            placed: Any, scalars: Scalars, rounding: Rounding | None, operands: Operands
        ) -> Results:
            del placed
            moved = Operands(*map(functools.partial(along, mesh), inward, operands))
            with collectives.no_mesh():
                if rounding is not None:
                    positions = _positions([_first_axes(x) for x in codes])
                    rounding = rounding._replace(positions=positions)
                request = SquaresRequest.of_leaves(moved.grads) if with_squares else None
                new = adam(spec, scalars, moved, rounding, request)
                if with_squares:
                    new = new._replace(squares=_squares_of_all(mesh, new.squares, cut))
            return new.mapped(lambda kind, routes: along(mesh, routes, kind), outward)

        whole = NamedSharding(mesh, P())
        arg_shardings = (
            jax.tree.map(lambda x: x.sharding, placed),
            Scalars(NamedSharding(mesh, members), whole, whole),
            jax.tree.map(lambda _: whole, rounding),
            Operands(*map(_told, operands, inward)),
        )
        told = result_shapes.mapped(_told, outward)
        if with_squares:
            told = told._replace(squares=whole)
        return mesh, lower_fn, told, arg_shardings

    rule = _sharding_rule(spec, kinds, with_squares=with_squares)
    adam_step.def_partition(partition=partition, sharding_rule=rule)
    return adam_step


def _moment_shardings(
    mesh: Mesh, spec: Spec, kinds: Kinds, codes: Arrays
) -> tuple[list[Sharding], P]:
    """The sharding in which each leaf is updated, and that of the members of coefficients."""
    if spec.rounding is None:
        return _with_equal_members(mesh, codes, kinds.member_dims)
    for x in codes:
        check_shards(x, bool(kinds.coded))
    return [NamedSharding(mesh, P(_first_axes(x) or None)) for x in codes], P()


def _routes(
    spec: Spec, kind: Arrays, moments: Sequence[Sharding], *, inward: bool
) -> Sequence[Route]:
    """The routes of the leaves of a kind, if any, to their moments or back."""
    if spec.rounding is None:
        return routes_of(kind, moments, inward=inward)
    return [Route(x, ()) for x in moments[: len(kind)]]


def _told(kind: Arrays, routes: Sequence[Route]) -> tuple[Any, ...]:
    """The shardings of a kind's arrays, also of codes and scales, that XLA is told."""
    pairs = zip(kind, routes, strict=True)
    return tuple(jax.tree.map(lambda _, to=route.sharding: to, x) for x, route in pairs)


def _positions(axes: DimAxes) -> LeafPositions:
    """The positions of this device's shards of leaves, whose first dimensions these axes cut."""
    return LeafPositions.of_shards(jnp.stack([collectives.axis_index(x) for x in axes]))


def _axes_of_squares(moments: Arrays, shardings: Sequence[Sharding]) -> list[set[str]]:
    """The axes that cut each leaf, for ``_squares_of_all``; raises if shards differ in size."""

    def axes_of(shape: tuple[int, ...], sharding: Sharding) -> set[str]:
        if sharding.is_fully_replicated:
            return set()
        if isinstance(sharding, NamedSharding):
            by_dim = dim_axes(sharding, len(shape))
            if divides(shape, by_dim, sharding.mesh.shape):
                return set(itertools.chain(*by_dim))
        raise PolicyError(
            f"step_with_norms: does not support this sharding: got shape {shape}, sharded as "
            f"{sharding}, expected a NamedSharding into equal parts. "
            "Use step, and optax.global_norm."
        )

    pairs = zip(moments, shardings, strict=True)
    return [axes_of(x.shape, sharding) for x, sharding in pairs]


def _squares_of_all(mesh: Mesh, squares: jax.Array, cut: Sequence[set[str]]) -> jax.Array:
    """Sums the squares of leaves, shape (leaves, 3), over devices.

    Of devices with the same shard, the first one counts: that is, along axes that do not cut it.
    """
    axes: tuple[str, ...] = mesh.axis_names
    is_mine = [collectives.axis_index(tuple(x for x in axes if x not in own)) == 0 for own in cut]
    return collectives.all_reduce(jnp.where(jnp.stack(is_mine)[:, None], squares, 0), axes)


def _with_equal_members(mesh: Mesh, mu: Arrays, member_dims: int) -> tuple[list[Sharding], P]:
    """The shardings of the moments, and the one sharding of all their members.

    A device needs the coefficients of its own members. If leaves disagree about those, every device
    takes all members.
    """
    shardings = list(map(_into_equal_shards, mu))
    if not member_dims:
        return shardings, P()
    whole = (None,) * member_dims
    members = {(*x.spec, *whole)[:member_dims] for x in shardings}
    if len(members) == 1:
        return shardings, P(*members.pop())
    return [NamedSharding(mesh, P(*whole, *x.spec[member_dims:])) for x in shardings], P()


def _into_equal_shards(x: Any) -> Any:
    """A leaf's sharding, without axes that cut a dimension unequally: a partition has one shape."""
    if not isinstance(x.sharding, NamedSharding):
        return x.sharding
    of_dims, sizes = dim_axes(x.sharding, len(x.shape)), x.sharding.mesh.shape
    if divides(x.shape, of_dims, sizes):
        return x.sharding
    pairs = zip(x.shape, of_dims, strict=True)
    equal = [axes if divides((n,), [axes], sizes) else None for n, axes in pairs]
    return NamedSharding(x.sharding.mesh, P(*(axes or None for axes in equal)))


def _sharding_rule(spec: Spec, kinds: Kinds, *, with_squares: bool) -> SdyShardingRule:
    """Each kind of array shares factors only with the results that replace it."""

    def leaves(kind: str) -> Any:
        mapping: list[tuple[str, ...]] = []
        for i, rank in enumerate(kinds.ranks):
            mapping.append(tuple(f"{kind[0]}{i}d{d}" for d in range(rank)))
            mapping += [(f"{kind[0]}{i}s",)] if kind in kinds.coded else []
        return tuple(mapping)

    grads, params, mu, nu = map(leaves, ("grads", "params", "mu", "nu"))
    # Updates are added to params; every other `out` has its own arrays that give its sharding.
    out = params if spec.mode == "update" else leaves("out")
    remainders = out if spec.mode == "step_split" else ()
    new_params = () if spec.mode == "update" else params
    new_out = () if spec.mode == "step" else out
    # The members of the coefficients are resharded like those of the moments afterwards.
    rows = (*(f"b{d}" for d in range(kinds.member_dims)), "r", "c")
    scalars: Any = (rows, (), ())
    replicated = ["r", "c"]
    if spec.rounding is not None:
        scalars += (("k",), ())
        replicated += ["k"]
    return SdyShardingRule(
        operand_mappings=out + grads + scalars + grads + params + mu + nu + remainders,
        result_mappings=new_params + mu + nu + new_out + (("q", "s"),) * with_squares,
        need_replication_factors=tuple(replicated),
    )


def check_leaf(path: str, param: Any, *, is_coded: bool) -> None:
    """Raises PolicyError if no coded or rounded step supports an array's sharding."""
    if trees.is_concrete(param):
        if not isinstance(param.sharding, SingleDeviceSharding):
            check_shards(param, is_coded, path)


def _first_axes(x: Any, path: str = "fused_adamw") -> tuple[str, ...]:
    """The mesh axes that cut a leaf's first dimension; raises if others are cut."""
    if x.sharding.is_fully_replicated:
        return ()
    if isinstance(x.sharding, NamedSharding):
        first, *others = dim_axes(x.sharding, len(x.shape))
        if not any(others):
            return first
    raise not_supported(
        "on leaves that are sharded along a dimension other than the first",
        f"shape {x.shape}, sharded as {getattr(x.sharding, 'spec', x.sharding)}",
        path,
    )


def check_shards(x: Any, is_coded: bool, path: str = "fused_adamw") -> None:
    """Raises unless a leaf is cut along its first dimension, and at the ends of blocks."""
    names = _first_axes(x, path)
    num_shards = math.prod(x.sharding.mesh.shape[name] for name in names)
    if num_shards == 1:
        return
    multiple = BLOCK if is_coded else 1
    size = math.prod(x.shape)
    if x.shape[0] % num_shards or size // num_shards % multiple:
        raise not_supported(
            f"on leaves whose parts are not blocks of {BLOCK} elements",
            f"shape {x.shape} in {num_shards} parts along its first dimension",
            path,
        )


def not_supported(
    how: str,
    got: str,
    path: str = "fused_adamw",
    expected: str = "leaves that are replicated, or sharded along their first dimension in whole "
    "blocks",
) -> PolicyError:
    """The error of a step with coded moments or stochastic rounding."""
    return PolicyError(
        f'{path}: a step with "block8" or "block16" moments or stochastic rounding is not '
        f"supported {how}: got {got}, expected {expected}. "
        "Use float32 or bfloat16 moments, rounded to nearest."
    )
