"""The step under plain ``jax.jit`` over several devices, ``jax.vmap`` and differentiation.

By default, XLA gathers every operand of a custom call. partition.py tells XLA that the step is
elementwise, and how to partition it: each leaf is updated in the sharding of its first moment, so
moments are never sent. Results have the sharding of the arrays that they replace, whatever the
sharding of the gradients. Inside ``jax.shard_map`` or on one device the kernel is called directly.

On NVIDIA GPUs the kernel reads gradients in 16 bits where the program only widens them: narrow.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives
from jdistadam.core.arguments import warn_caller
from jdistadam.core.codecs import BlockCodes, is_codes
from jdistadam.errors import PolicyError
from jdistadam.kernels import native
from jdistadam.kernels.adam import adam
from jdistadam.kernels.narrow import narrow_dtype, narrow_source
from jdistadam.kernels.operands import Operands, Results, Rounding, Scalars, Spec, codes_of
from jdistadam.kernels.partition import (
    Kinds,
    check_shards,
    not_supported,
    partitioned_step,
)
from jdistadam.kernels.reference import KINDS
from jdistadam.kernels.reference_step import adam_reference
from jdistadam.kernels.routes import Arrays


def sharded_adam(
    spec: Spec,
    scalars: Scalars,
    operands: Operands,
    rounding: Rounding | None = None,
    out_like: Arrays = (),
    *,
    with_squares: bool = False,
) -> Results:
    """Like ``adam``, for leaves with any sharding; supports batching and differentiation.

    Args:
      spec: As for ``adam``; nothing is flat.
      scalars: The same on all devices.
      operands: The leaves.
      rounding: As for ``adam``, without positions.
      out_like: In mode "step_and_cast", arrays with the sharding that ``out`` takes, whose memory
        it may take if they are donated; they are not read.
      with_squares: Whether to sum the squares of each leaf; then it is not batched, and not
        differentiated.

    Returns:
      The results of ``adam``. New params, moments and remainders have the sharding of the old ones,
      updates that of the params.

    Raises:
      PolicyError: ``spec.rounding`` under ``jax.vmap``, in differentiation, or for a leaf that is
        not sharded along its first dimension in whole blocks.
    """
    if not operands.grads:
        empty = jnp.zeros((0, len(KINDS)), jnp.float32) if with_squares else None
        return adam(spec, scalars, operands)._replace(squares=empty)
    scalars, operands, rounding = collectives.vary_together((scalars, operands, rounding))
    out_like = operands.out or out_like or operands.params
    args = scalars, _placed_like_moments(spec, scalars, operands), rounding, tuple(out_like)
    step = functools.partial(_on_shards, spec, with_squares)
    treedef = jax.tree.structure(args)
    call, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    static = dict(spec=spec, treedef=treedef, with_squares=with_squares)
    leaves = _step_p.bind(*jax.tree.leaves(args), call=call, **static)
    results: Results = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return results.mapped(_typed_like, operands._replace(out=out_like)[1:])


def _placed_like_moments(spec: Spec, scalars: Scalars, operands: Operands) -> Operands:
    """Reshards every array of a leaf like its first moment, as far as types know it."""
    codes, is_coded = codes_of(operands.mu), bool(Kinds.of(scalars, operands).coded)
    for typed in map(jax.typeof, codes):
        if spec.rounding is not None and not typed.sharding.mesh.empty:
            check_shards(typed, is_coded)

    def placed(x: Any, code: Any) -> Any:
        sharding = jax.typeof(code).sharding
        if not is_codes(x):
            return reshard_as(x, sharding)
        of_blocks = sharding.update(spec=P(*sharding.spec[:1]))
        return BlockCodes(reshard_as(x.codes, sharding), reshard_as(x.scales, of_blocks))

    return Operands(*(tuple(map(placed, kind, codes)) for kind in operands))


def _typed_like(new: Arrays, models: Arrays) -> tuple[Any, ...]:
    """Reshards arrays like ``models``, as far as types know it: those of an Explicit mesh do."""

    def typed(x: Any, model: Any) -> Any:
        return reshard_as(x, jax.typeof(model).sharding)

    return tuple(jax.tree.map(typed, *pair) for pair in zip(new, models, strict=False))


def reshard_as(x: Any, sharding: Any) -> Any:
    """Reshards an array, as far as types know it."""
    is_placed = sharding.mesh.empty or jax.typeof(x).sharding.spec == sharding.spec
    return x if is_placed else jax.reshard(x, sharding)


def _on_shards(
    spec: Spec,
    with_squares: bool,
    scalars: Scalars,
    operands: Operands,
    rounding: Rounding | None,
    out_like: Arrays,
) -> Results:
    """Like ``adam``, for leaves with any sharding; dimensions of members may be sharded too.

    Args:
      spec: As for ``adam``.
      with_squares: Whether to sum the squares of each leaf.
      scalars: The same on all devices, but each takes the rows of its own members.
      operands: The leaves, resharded like their first moments as far as types know it.
      rounding: As for ``adam``, without positions.
      out_like: Arrays with the sharding that ``out`` takes.

    Returns:
      The results of ``adam``, not yet resharded like the arrays that they replace.
    """
    placed = out_like, tuple(map(_sharding_of, codes_of(operands.mu)))
    partitioned = partitioned_step(spec, Kinds.of(scalars, operands), with_squares)
    return native.unfused(partitioned(placed, scalars, rounding, operands.unfused()))


def _sharding_of(moment: Any) -> Any:
    """Passes a moment only for its sharding, which the gradients take."""
    (kept,) = _sharding_of_p.bind(moment)
    return kept


# The moment's sharding as Shardy sees it, for the gradients to take: shardings pass through it
# forward only. The moment itself would draw a loop's carry of gradients to its own sharding.
_sharding_of_p = collectives.make_primitive(
    "jdistadam_sharding_of",
    lambda x: [x],
    lambda x: [x],
    lowering=lambda ctx, x: [sdy.PropagationBarrierOp(x, sdy.PropagationDirection.FORWARD).result],
)


# The step under ``jax.vmap`` and under differentiation.
#
# Under ``vmap`` over many members, one kernel call stays one kernel call: arrays get a leading
# dimension of members, and so do coefficients that differ between members. The derivative uses the
# formula in jax.numpy; the kernel still computes the values.


def _batched(
    leaves: Any, dims: Any, *, call: Any, spec: Spec, treedef: Any, with_squares: bool
) -> tuple[Any, Any]:
    """One step for all members.

    Leaves shared by all members are repeated, because one call has one size per leaf. Coefficients
    are repeated only if they already have a dimension of other members: a leaf has its dimensions
    of members in the same order.
    """
    del call  # it is for one member
    if spec.rounding is not None:
        got = f"vmap of a step with {len(leaves)} arrays"
        raise not_supported("under jax.vmap", got, expected="a step of one member")
    (size,) = {x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None}

    def with_members(x: Any, dim: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    rows, inv_scale, found_inf = leaves[:3]
    if with_squares:
        raise _no_norms(f"jax.vmap over {size}")
    if dims[0] is not None or Scalars(rows, inv_scale, found_inf).member_dims:
        rows = with_members(rows, dims[0])
    arrays = [with_members(*pair) for pair in zip(leaves[3:], dims[3:], strict=True)]
    scalars, operands, *others = jax.tree.unflatten(treedef, (rows, *leaves[1:3], *arrays))
    grads = operands.grads
    if dims[1] is not None:  # one call has one factor, and skips all members or none
        scalars = scalars._replace(inv_scale=jnp.ones((), jnp.float32))
        grads = [x.astype(jnp.float32) * _of_members(inv_scale, x) for x in grads]
    if dims[2] is not None:
        scalars = scalars._replace(found_inf=jnp.zeros((), jnp.bool_))
        # The derivative of a skipped step must be finite to be multiplied by zero.
        grads = [jnp.where(_of_members(found_inf, x), 1, x) for x in grads]
    new = sharded_adam(spec, scalars, operands._replace(grads=tuple(grads)), *others)
    if dims[2] is not None:
        new = _unless_skipped(found_inf, new, operands._replace(out=others[-1]))
    results = jax.tree.leaves(new)
    return results, [0] * len(results)


def _of_members(values: jax.Array, x: Any) -> jax.Array:
    """One value of each member for all its elements of an array."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


def _unless_skipped(is_skipped: jax.Array, new: Results, old: Operands) -> Results:
    """The results, or for members that skip the step the arrays that they replace."""
    warn_caller(
        f"step: skipped for some of {is_skipped.size} members of a jax.vmap only, so all members "
        "are stepped, and selected afterwards, which reads and writes more. The kernel skips a "
        "step if MultiSteps or apply_if_finite decides the same for all members."
    )

    def kept(new: Arrays, old: Arrays) -> tuple[Any, ...]:
        pairs = zip(old, new, strict=False)  # some have no results
        return tuple(jnp.where(_of_members(is_skipped, x), x, y) for x, y in pairs)

    return new.mapped(kept, old[1:])


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
    if spec.rounding is not None:
        got = f"a step with {len(leaves)} arrays"
        expected = "jax.lax.stop_gradient"
        raise not_supported("where it is differentiated", got, expected=expected)
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
        scalars, operands, *_ = jax.tree.unflatten(treedef, changed)
        results = adam_reference(spec, scalars, operands, every_term=True, xp=jnp)
        return jax.tree.leaves(results)

    values, directions = ([x[i] for i in moving] for x in (leaves, tangents))
    static = dict(spec=spec, treedef=treedef, with_squares=with_squares)
    results = _step_p.bind(*leaves, **static, **params)
    return results, jax.jvp(formula, values, directions)[1]


_step_p = collectives.make_primitive(
    "jdistadam_step",
    lambda *leaves, call, **_: jaxpr_as_fun(call)(*leaves),
    lambda *leaves, call, **_: call.out_avals,
    batched=_batched,
    jvp=_jvp,
)


def _lowered(
    ctx: Any, *leaves: Any, call: Any, spec: Spec, treedef: Any, with_squares: bool
) -> Any:
    """Compiles the step; ``leaves`` are values of MLIR.

    For NVIDIA GPUs it is traced again with gradients as they were before they were widened.
    """
    where = compat.devices_of_lowering(ctx)
    values, types = list(leaves), list(ctx.avals_in)
    _, operands, *_ = jax.tree.unflatten(treedef, range(len(leaves)))
    run = jaxpr_as_fun(call)
    for i in operands.grads if compat.is_for_nvidia(ctx) else ():
        source = narrow_source(leaves[i], *where) if types[i].dtype == jnp.float32 else None
        if source is not None:
            values[i], types[i] = source, types[i].update(dtype=narrow_dtype(source))
            run = functools.partial(_calls_by_dtype, spec, treedef, with_squares)
    lower = mlir.lower_fun(lambda *xs: run(*xs), multiple_results=True)
    return lower(ctx.replace(avals_in=types), *values)


def _calls_by_dtype(spec: Spec, treedef: Any, with_squares: bool, *leaves: Any) -> list[Any]:
    """The results of ``_on_shards`` as leaves, in one call for each dtype of gradients."""
    scalars, operands, rounding, out_like = jax.tree.unflatten(treedef, leaves)
    by_dtype: dict[Any, list[int]] = {}
    for i, x in enumerate(operands.grads):
        by_dtype.setdefault(jnp.dtype(x.dtype), []).append(i)
    by_call = []
    for indices in by_dtype.values():
        like = tuple(out_like[i] for i in indices)
        some = operands.of(indices)
        by_call.append(_on_shards(spec.of(indices), with_squares, scalars, some, rounding, like))
    leaf_of = list(itertools.chain(*by_dtype.values()))
    order = sorted(range(len(leaf_of)), key=leaf_of.__getitem__)

    def in_order(*kinds: Any) -> tuple[Any, ...]:
        arrays = list(itertools.chain(*kinds))
        return tuple(arrays[i] for i in order) if arrays else ()

    first, *others = by_call
    results = first.mapped(in_order, *(x[:-1] for x in others))
    if with_squares:
        results = results._replace(squares=jnp.stack(in_order(*(x.squares for x in by_call))))
    return jax.tree.leaves(results)


compat.lower_by_operands(_step_p, _lowered)
