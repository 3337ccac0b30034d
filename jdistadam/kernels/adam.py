"""One Adam step over many leaves: picks the backend, makes the FFI call.

All arrays are local to one device. Under plain ``jax.jit`` over several devices use
sharded_adam.py, inside ``jax.shard_map`` use this directly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.core.codecs import BlockCodes, is_codes
from jdistadam.core.hyperparameters import FLAGS
from jdistadam.core.storage import MOMENTS
from jdistadam.kernels import native
from jdistadam.kernels.operands import Operands, Results, Rounding, Scalars, Spec, codes_of
from jdistadam.kernels.reference import KINDS, SquaresRequest, num_runs
from jdistadam.kernels.reference_step import adam_reference, squares_reference

_MODES = {"step": 0, "step_and_cast": 1, "update": 2, "step_split": 3}  # enum Mode of cuda/adam.h
_OPERANDS = ("grads", "params", "mu", "nu", "out")  # bits of the handler's attribute `flat`

UPDATES = frozenset(f"jdistadam_{x}{y}" for x in ("adam", "quantized") for y in ("", "_squares"))
"""The targets of calls that make new parameters."""


def adam(
    spec: Spec,
    scalars: Scalars,
    operands: Operands,
    rounding: Rounding | None = None,
    request: SquaresRequest | None = None,
) -> Results:
    """Takes one Adam step on this device. Updates donated params, mu and nu in place.

    Coefficients may have leading dimensions of members. Then every leaf has them too, and each
    member uses its own rows; no kind may be flat, and nothing coded or rounded stochastically.

    Args:
      spec: The static side.
      scalars: The scalar operands.
      operands: The leaves, at least one if sums are requested. All of mu may be BlockCodes of one
        format, and all of nu, also flat.
      rounding: What random bits depend on, if and only if there is ``spec.rounding``.
      request: Which sums of squares to take: of the scaled gradients, new parameters and updates of
        each segment (cuda/squares.h). Modes are those of a step then, without members.
    """
    if not operands.grads:
        params = () if spec.mode == "update" else operands.params
        return Results(params, operands.mu, operands.nu, ())

    def compiled(scalars: Scalars, operands: Operands, rounding: Any, segments: Any) -> Results:
        passed = request and request._replace(segments=segments)
        return _compiled(spec, scalars, operands, rounding, passed)

    def fallback(scalars: Scalars, operands: Operands, rounding: Any, segments: Any) -> Results:
        results = adam_reference(spec, scalars, operands, rounding, xp=jnp)
        if request is None:
            return results
        passed = request._replace(segments=segments)
        sums = squares_reference(spec, scalars, operands, passed, xp=jnp)
        return results._replace(squares=sums)

    args = scalars, operands, rounding, request and request.segments
    return native.choose(compiled, fallback)(*collectives.vary_together(args))


def _compiled(
    spec: Spec,
    scalars: Scalars,
    operands: Operands,
    rounding: Rounding | None,
    request: SquaresRequest | None,
) -> Results:
    """The call. Its operands: scalars, rounding, arrays by kind. Its results: arrays by kind."""
    by_kind = _by_kind(operands)
    result_types = _result_types(spec, by_kind)
    target = "jdistadam_adam" if spec.rounding is None else "jdistadam_quantized"
    first, attributes = jax.tree.leaves((scalars, rounding)), _attributes(spec)
    sums: list[Any] = []
    if request is not None:
        target += "_squares"
        first = [request.segments, *first]
        sums = _types_of_sums(spec, operands.grads, request)
        attributes["fine"] = np.asarray(request.by_element, np.int32)
    operand, result, aliases = len(first), len(sums), dict[int, int]()
    for kind, arrays in by_kind.items():
        types = result_types.get(kind, [])
        aliases |= {operand + i: result + i for i in range(min(len(arrays), len(types)))}
        operand, result = operand + len(arrays), result + len(types)
    results = [*sums, *itertools.chain(*result_types.values())]
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    outputs = iter(call(*first, *itertools.chain(*by_kind.values()), **attributes))
    squares = [next(outputs) for _ in sums]
    new = {kind: tuple(next(outputs) for _ in types) for kind, types in result_types.items()}
    mu, nu = (_coded(new[kind], new[f"{kind}_scales"]) for kind in MOMENTS)
    return Results(new["params"], mu, nu, new["out"], squares[0] if squares else None)


def _by_kind(operands: Operands) -> dict[str, Sequence[Any]]:
    """The arrays in the order of the call: scales follow all others."""
    mu, nu = operands.mu, operands.nu
    scales = {f"{kind}_scales": _scales(x) for kind, x in (("mu", mu), ("nu", nu))}
    return operands._replace(mu=codes_of(mu), nu=codes_of(nu))._asdict() | scales


def _scales(moments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.scales for x in moments if is_codes(x))


def _coded(codes: Sequence[Any], scales: Sequence[Any]) -> tuple[Any, ...]:
    pairs = zip(codes, scales, strict=True) if scales else ()
    return tuple(itertools.starmap(BlockCodes, pairs)) or tuple(codes)


def _result_types(spec: Spec, by_kind: dict[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The types of all results by kind: [Note: types of results]."""
    types = {kind: [jax.typeof(x) for x in arrays] for kind, arrays in by_kind.items()}
    del types["grads"]
    if spec.mode == "update":
        types["params"] = []
    if spec.mode in ("step_and_cast", "update"):
        dtype = jnp.dtype(spec.out_dtype)
        types["out"] = [jax.typeof(x).update(dtype=dtype) for x in by_kind["grads"]]
    return types


def _types_of_sums(spec: Spec, grads: Sequence[Any], request: SquaresRequest) -> list[Any]:
    """The types of the sums, and of the sums of runs that the call adds."""
    sizes = spec.sizes or [x.size for x in grads]
    runs = sum(map(num_runs, sizes, request.by_element))
    shapes = (request.segments.shape[0], len(KINDS)), (len(KINDS), runs)
    return [native.type_like(request.segments, shape, jnp.float32) for shape in shapes]


def _attributes(spec: Spec) -> dict[str, Any]:
    """Every attribute with its exact numpy type: the handler accepts no other."""
    attributes = {
        "mode": np.int32(_MODES[spec.mode]),
        "flags": bits_of(spec.flags),
        "groups": np.asarray(spec.groups, np.int32),
        "flat": np.int32(sum(1 << _OPERANDS.index(kind) for kind in spec.flat)),
        "sizes": np.asarray(spec.sizes, np.int64),
        "offsets": np.asarray(spec.offsets, np.int64),
        "mu_offsets": np.asarray(spec.mu_offsets, np.int64),
        "nu_offsets": np.asarray(spec.nu_offsets, np.int64),
    }
    if spec.rounding is None:
        return attributes
    return attributes | {
        "random": np.bool_(spec.rounding.is_stochastic),
        "ids": np.asarray(spec.rounding.ids, np.int32),
        "cuts": np.asarray(spec.rounding.cuts, np.int64).reshape(-1),
        "tables": np.asarray(spec.rounding.tables, np.int64),
    }


def bits_of(flags: frozenset[str]) -> np.int32:
    """The attribute ``flags`` of a call."""
    return np.int32(sum(1 << FLAGS.index(name) for name in flags))
