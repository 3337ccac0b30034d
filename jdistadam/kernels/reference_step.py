"""The reference implementation of a call: many leaves, flat arrays, coded and rounded ones.

With numpy it gives the bits of the compiled kernels. With jax.numpy it is the fallback, and the
function of which a step has the derivative; it is close then, but not bitwise equal.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdistadam.core import hyperparameters
from jdistadam.core.codecs import BLOCK, BlockCodes, codec_of, float_codec, is_codes
from jdistadam.kernels import reference
from jdistadam.kernels.operands import Operands, Results, Rounding, RoundingSpec, Scalars, Spec
from jdistadam.kernels.reference import AdamResult, LeafPartition, RandomBits, SquaresRequest


def adam_reference(
    spec: Spec,
    scalars: Scalars,
    operands: Operands,
    rounding: Rounding | None = None,
    *,
    every_term: bool = False,
    xp: Any,
) -> Results:
    """The step of kernels/adam.py; ``every_term`` is for derivatives: reference.adam_update."""
    if scalars.member_dims:
        one = functools.partial(adam_reference, spec, every_term=every_term, xp=xp)
        return jax.vmap(one, (Scalars(0, None, None), 0))(scalars, operands)
    steps = [
        _step_leaf(spec, scalars, rounding, i, *leaf, every_term=every_term, xp=xp)
        for i, leaf in enumerate(_leaves(spec, operands))
    ]
    stepped = AdamResult(*(tuple(column) for column in zip(*steps, strict=True)))
    params, mu, nu, out = (
        _joined(spec, kind, getattr(operands, kind), new, xp)
        for kind, new in stepped._asdict().items()
    )
    mode = spec.mode
    return Results(() if mode == "update" else params, mu, nu, () if mode == "step" else out)


def squares_reference(
    spec: Spec, scalars: Scalars, operands: Operands, request: SquaresRequest, *, xp: Any
) -> Any:
    """The sums of squares that ``request`` asks for."""
    squares = []
    for group, leaf in zip(spec.groups, _leaves(spec, operands), strict=True):
        grad, param, mu, nu, remainder = leaf
        mu, nu = (codec_of(x).decode(kind, x, xp) for kind, x in (("mu", mu), ("nu", nu)))
        arrays = (x if x is None else x.reshape(-1) for x in (grad, param, mu, nu, remainder))
        how = spec.mode, _coefficients(scalars, group), scalars.inv_scale, scalars.found_inf
        squares.append(reference.squares_of_leaf(*how, *arrays, flags=spec.flags, xp=xp))
    return reference.sums_of_runs(squares, request, xp)


def _coefficients(scalars: Scalars, group: int) -> dict[str, Any]:
    return dict(zip(hyperparameters.NAMES, scalars.coefficients[group], strict=True))


def _step_leaf(
    spec: Spec,
    scalars: Scalars,
    rounding: Rounding | None,
    i: int,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    remainder: Any,
    *,
    every_term: bool,
    xp: Any,
) -> AdamResult:
    """Steps leaf number ``i``: coded and stochastically rounded ones in float32."""
    step = functools.partial(
        reference.adam_leaf,
        mode=spec.mode,
        c=_coefficients(scalars, spec.groups[i]),
        inv_scale=scalars.inv_scale,
        found_inf=scalars.found_inf,
        grad=grad,
        remainder=remainder,
        flags=spec.flags,
        out_dtype=spec.out_dtype,
        every_term=every_term,
        xp=xp,
    )
    if spec.rounding is None:
        return step(param=param, mu=mu, nu=nu)
    assert rounding is not None
    bits = _bits(spec.rounding, rounding, i, grad.shape, xp)
    is_param_rounded = spec.mode == "step" and spec.rounding.is_stochastic
    is_wide = is_param_rounded and param.dtype.itemsize == 2
    new = step(
        param=param.astype(xp.float32) if is_wide else param,
        mu=codec_of(mu).decode("mu", mu, xp),
        nu=codec_of(nu).decode("nu", nu, xp),
    )

    def stored(name: str, old: Any, exact: Any, random: Any) -> Any:
        with np.errstate(all="ignore"):
            codec = float_codec(old.dtype) if name == "param" else codec_of(old)
            rounded = codec.encode(name, exact, random, xp)
        return jax.tree.map(lambda x, y: xp.where(scalars.found_inf, x, y), old, rounded)

    return AdamResult(
        stored("param", param, new.params, bits.param) if is_wide else new.params,
        stored("mu", mu, new.mu, bits.mu),
        stored("nu", nu, new.nu, bits.nu),
        new.out,
    )


def _bits(
    spec: RoundingSpec, rounding: Rounding, i: int, shape: tuple[int, ...], xp: Any
) -> RandomBits:
    """The random bits of leaf number ``i``; None where it is rounded to nearest."""
    if not spec.is_stochastic:
        return RandomBits(None, None, None)
    assert rounding.positions is not None
    shards, blocks = rounding.positions
    size = math.prod(shape)
    number, table = spec.ids[i], spec.tables[i] if spec.tables else -1
    if table >= 0:
        rows = blocks[table : table + -(-size // BLOCK)]
        number, index = reference.indices_of_blocks(size, rows, xp)
    else:
        cuts = spec.cuts[i] if spec.cuts else LeafPartition.into_runs(size)
        index = reference.indices(size, cuts, shards[i], xp)
    return reference.random_bits(rounding.key, rounding.count, number, index, shape, xp)


def _leaves(spec: Spec, operands: Operands) -> Iterator[tuple[Any, ...]]:
    """The gradient, parameter, moments and remainder, or None, of each leaf."""
    sizes = [(size,) for size in spec.sizes] or [x.shape for x in operands.grads]
    grads = _cut(spec, "grads", operands.grads, sizes)
    shapes = [x.shape for x in grads]
    params, mu, nu, out = (
        _cut(spec, kind, getattr(operands, kind), shapes) for kind in ("params", "mu", "nu", "out")
    )
    yield from zip(grads, params, mu, nu, out or (None,) * len(grads), strict=True)


def _elements_each(flat: Any) -> Any:
    """The elements of leaves for each element of a flat array, or of its codes and scales."""
    return BlockCodes(1, BLOCK) if is_codes(flat) else 1


def _cut(spec: Spec, kind: str, arrays: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
    """The leaves of a kind, cut out of its flat array."""
    if kind not in spec.flat or not arrays:
        return arrays
    (flat,) = arrays

    def leaf(start: int, size: int, shape: tuple[int, ...]) -> Any:
        mine = jax.tree.map(
            lambda x, n: x[start // n : start // n + -(-size // n)], flat, _elements_each(flat)
        )
        if is_codes(flat):
            return mine._replace(codes=mine.codes.reshape(shape))
        return mine.reshape(shape)

    return list(map(leaf, spec.offsets_of(kind), spec.sizes, shapes))


def _joined(
    spec: Spec, kind: str, old: Sequence[Any], leaves: Sequence[Any], xp: Any
) -> tuple[Any, ...]:
    """New leaves of a kind, written into its flat array."""
    if kind not in spec.flat or not old:
        return tuple(leaves)
    (flat,) = old

    def written(n: int, x: Any, *leaves: Any) -> Any:
        starts, arrays, end = (offset // n for offset in spec.offsets_of(kind)), [], 0
        pairs = zip(starts, leaves, strict=True)
        for start, leaf in sorted(pairs, key=operator.itemgetter(0)):
            arrays += [x[end:start], leaf.reshape(-1)]
            end = max(end, start + leaf.size)
        return xp.concatenate([*arrays, x[end:]])

    return (jax.tree.map(written, _elements_each(flat), flat, *leaves),)
