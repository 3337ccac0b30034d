"""The step under ``jax.vmap`` and under differentiation.

``vmap`` over many members makes one kernel call of one kernel call: arrays get a dimension of
members in front, and so do the coefficients where they differ between members. The derivative is
that of the formula in jax.numpy; the values remain those of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jdistadam.core import varying
from jdistadam.core.primitives import CalledPrimitive
from jdistadam.errors import PolicyError
from jdistadam.kernels import adam as kernel
from jdistadam.kernels import sharded_adam
from jdistadam.kernels.adam import Operands, Results, Scalars, Spec


def adam(
    spec: Spec,
    scalars: Scalars,
    operands: Operands,
    out_like: Sequence[Any] | None = None,
) -> Results:
    """Like kernel.adam, for leaves sharded in any way; it can be batched and differentiated.

    Args:
      spec: As for the kernel; nothing is flat, and there is one contribution.
      scalars: The same on all devices. ``inv_scale`` and ``found_inf`` are the same for all members
        too, and constants to a derivative.
      operands: The leaves.
      out_like: In mode "step_and_cast", arrays of the sharding that ``out`` is to have.

    Returns:
      The results of the kernel. New params, moments and remainders have the sharding of the old
      ones, updates that of the params.
    """
    if not operands.grads:
        return kernel.adam(spec, scalars, operands)
    scalars, operands = varying.vary_together((scalars, operands))
    models = operands._replace(out=operands.out or out_like or operands.params)
    args = (scalars, sharded_adam.beside_moments(operands), models.out)
    step, treedef = functools.partial(sharded_adam.adam, spec), jax.tree.structure(args)
    return sharded_adam.back_in_place(_step(step, *args, spec=spec, treedef=treedef), models)


def _batched(leaves: Any, dims: Any, *, call: Any, spec: Spec, treedef: Any) -> tuple[Any, Any]:
    """One step for all members.

    Leaves that are the same for all members are repeated, since one call has one size for each. The
    coefficients are not, unless they have a dimension of other members already: a leaf has its
    dimensions of members in the same order.
    """
    del call  # is for one member
    (size,) = {x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None}

    def with_members(x: Any, dim: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    rows, inv_scale, found_inf = leaves[:3]
    assert dims[1] is None and dims[2] is None
    if dims[0] is not None or kernel.member_dims(Scalars(rows, inv_scale, found_inf)):
        rows = with_members(rows, dims[0])
    arrays = [with_members(*pair) for pair in zip(leaves[3:], dims[3:], strict=True)]
    leaves = (rows, inv_scale, found_inf, *arrays)
    results = jax.tree.leaves(adam(spec, *jax.tree.unflatten(treedef, leaves)))
    return results, [0] * len(results)


def _jvp(leaves: Any, tangents: Any, *, spec: Spec, treedef: Any, **params: Any) -> tuple[Any, Any]:
    """The kernel's results, and the derivative of the formula.

    Operands whose tangent is zero are constants, so that nothing is computed from zeros.
    """
    _check_differentiable(spec)
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def formula(*values: Any) -> list[Any]:
        changed = list(leaves)
        for i, value in zip(moving, values, strict=True):
            changed[i] = value
        scalars, operands, _ = jax.tree.unflatten(treedef, changed)
        return jax.tree.leaves(kernel.adam_fallback(spec, scalars, operands, every_term=True))

    given, directions = ([x[i] for i in moving] for x in (leaves, tangents))
    results = _step.primitive.bind(*leaves, spec=spec, treedef=treedef, **params)
    return results, jax.jvp(formula, given, directions)[1]


_step = CalledPrimitive("jdistadam_step", batched=_batched, jvp=_jvp)


def _check_differentiable(spec: Spec) -> None:
    """Raises PolicyError where parameters are halves of a number, which have no derivative."""
    if spec.mode == "step_split":
        raise PolicyError(
            "main_params_dtype: a step cannot be differentiated: "
            "got remainder16, with which a parameter is two integers, expected float32 or None. "
            "Set main_params_dtype=jnp.float32, or put jax.lax.stop_gradient around gradients, "
            "state, params and hyperparameters."
        )
