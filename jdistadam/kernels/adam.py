"""One Adam step over many leaves: checks operands, picks the backend, makes the FFI call.

All arrays are local to one device. Under plain ``jax.jit`` over several devices use
sharded_adam.py, inside ``jax.shard_map`` use this directly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, hyperparameters
from jdistadam.core.codecs import FLOAT32, Codec
from jdistadam.core.hyperparameters import FLAGS
from jdistadam.kernels import native, reference
from jdistadam.kernels.reference import KINDS, SquaresRequest, num_runs

_MODES = {"step": 0, "step_and_cast": 1, "update": 2, "step_split": 3}  # enum Mode of cuda/adam.h
_OPERANDS = ("grads", "params", "mu", "nu", "out")  # bits of the handler's attribute `flat`

UPDATES = frozenset(f"jdistadam_{x}{y}" for x in ("adam", "quantized") for y in ("", "_squares"))
"""The targets of calls that make new parameters."""


class Scalars(NamedTuple):
    """The scalar operands of a step, on the device. Changing them never recompiles."""

    coefficients: Any  # shape (*members, groups, len(coefficients.NAMES)), float32
    inv_scale: Any  # shape (), float32: the factor of every gradient
    found_inf: Any  # shape (), bool: whether to change nothing

    @classmethod
    def plain(cls, rows: jax.Array) -> Scalars:
        """Coefficients only: unscaled gradients, no skip."""
        return cls(rows, jnp.ones((), jnp.float32), jnp.zeros((), jnp.bool_))


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static side of a call; hashable.

    Attributes:
      mode: "step": new params. "step_and_cast": new params, and a copy of them in ``out_dtype``.
        "update": optax's updates in ``out_dtype``; params are only read.
        "step_split": new params, whose bfloat16 half is in params and whose remainder is in out,
        both updated in place; [Note: remainders].
      groups: For each leaf, its row of the coefficients.
      flags: The enabled flags of the formula: names in ``hyperparameters.FLAGS``.
      out_dtype: Dtype of the extra output; None in modes "step" and "step_split".
      flat: Operand kinds that are one flat array instead of one array per leaf. In a new flat out,
        gaps between the leaves are undefined; the fallback cannot make one.
      sizes: Elements of each leaf, given if any kind is flat.
      offsets: The start of each leaf in the flat arrays, in elements.
      mu_offsets: The same in a flat first moment. (): as ``offsets``.
      nu_offsets: The same in a flat second moment. (): as ``offsets``.
      contributions: The number of gradients in each array of grads, stacked in a first dimension
        (concatenated if flat). They are added pairwise in float32, then used as one.
    """

    mode: str
    groups: tuple[int, ...]
    flags: frozenset[str] = frozenset()
    out_dtype: Any = None
    flat: frozenset[str] = frozenset()
    sizes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    mu_offsets: tuple[int, ...] = ()
    nu_offsets: tuple[int, ...] = ()
    contributions: int = 1

    def offsets_of(self, kind: str) -> tuple[int, ...]:
        """The start of each leaf in a flat array of a kind."""
        return {"mu": self.mu_offsets, "nu": self.nu_offsets}.get(kind) or self.offsets


class Operands(NamedTuple):
    """Leaves by kind: a sequence of arrays, or of a single flat array."""

    grads: Sequence[Any]
    params: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    out: Sequence[Any] = ()  # the remainders, uint16, in mode "step_split"

    def unfused(self) -> Operands:
        """native.unfused for arrays updated in place; gradients may be read from slices."""
        return native.unfused(self._replace(grads=()))._replace(grads=self.grads)


class Results(NamedTuple):
    """The new values, like Operands; ``out`` is empty in mode "step", params in "update"."""

    params: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    out: Sequence[Any]
    squares: Any = None  # shape (segments, 3), float32: the requested sums; None: none


def keeping_main_params(
    kind: Codec,
    spec: Spec,
    operands: Operands,
    main: Sequence[Any],
    param_dtype: Any,
    *,
    is_flat: bool = False,
) -> tuple[Spec, Operands]:
    """Returns a call in mode "step", changed to keep main parameters.

    Args:
      kind: How they are kept.
      spec: The call without main parameters.
      operands: The operands without main parameters.
      main: The stored arrays, one for each leaf or a flat one; not used under NOTHING.
      param_dtype: Dtype of the params.
      is_flat: Whether ``main`` is flat.
    """
    if not kind.is_stored:
        return spec, operands
    is_split = kind.is_remainder
    operands = operands._replace(out=main) if is_split else operands._replace(params=main)
    flat = spec.flat | {"out" if is_split else "params"} if is_flat else spec.flat
    mode = "step_split" if is_split else "step_and_cast"
    out_dtype = None if is_split else param_dtype
    return dataclasses.replace(spec, mode=mode, out_dtype=out_dtype, flat=flat), operands


def new_params(kind: Codec, results: Results) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns new params, or updates, and the stored main parameters."""
    if kind == FLOAT32:
        return results.out, results.params
    return results.params or results.out, results.out


def member_dims(scalars: Scalars) -> int:
    """The number of leading member dimensions of the coefficients, and then of every leaf."""
    return scalars.coefficients.ndim - 2


def adam(
    spec: Spec, scalars: Scalars, operands: Operands, request: SquaresRequest | None = None
) -> Results:
    """Takes one Adam step on this device. Updates donated params, mu and nu in place.

    Coefficients may have leading dimensions of members. Then every leaf has them too, and each
    member uses its own rows; no kind may be flat.

    Args:
      spec: The static side.
      scalars: The scalar operands.
      operands: The leaves, at least one if sums are requested.
      request: Which sums of squares to take: of the scaled gradients, new parameters and updates of
        each segment (cuda/squares.h). Modes are those of a step then, without members.
    """
    if not operands.grads:
        return Results(
            operands.params if spec.mode != "update" else (), operands.mu, operands.nu, ()
        )

    def compiled(scalars: Scalars, operands: Operands, segments: Any) -> Results:
        return _adam_native(
            spec, scalars, operands, request and request._replace(segments=segments)
        )

    def fallback(scalars: Scalars, operands: Operands, segments: Any) -> Results:
        results = adam_fallback(spec, scalars, operands)
        if request is None:
            return results
        given = request._replace(segments=segments)
        sums = squares_reference(spec, scalars, operands, given, xp=jnp)
        return results._replace(squares=sums)

    args = scalars, operands, request and request.segments
    return native.choose(compiled, fallback)(*collectives.vary_together(args))


def _adam_native(
    spec: Spec, scalars: Scalars, operands: Operands, request: SquaresRequest | None
) -> Results:
    results = _result_types(spec, operands)
    # operands: 3 scalars, grads, params, mu, nu, remainders; results: params, mu, nu, out
    first_param = len(Scalars._fields) + len(operands.grads)
    first_aliased = first_param if results.params else first_param + len(operands.params)
    num_aliased = len(results.params) + sum(map(len, operands[2:]))
    call = ffi_call(
        "jdistadam_adam",
        spec,
        operands.grads,
        jax.tree.leaves(results),
        {first_aliased + i: i for i in range(num_aliased)},
        request,
    )
    outputs, sums = call(*scalars, *jax.tree.leaves(operands), **_attributes(spec))
    stepped: Results = jax.tree.unflatten(jax.tree.structure(results), outputs)
    return stepped._replace(squares=sums)


def ffi_call(
    target: str,
    spec: Spec,
    grads: Sequence[Any],
    results: Sequence[Any],
    aliases: dict[int, int],
    request: SquaresRequest | None,
) -> Callable[..., tuple[Sequence[jax.Array], Any]]:
    """Returns a call of a step, which returns its results, and the sums of squares or None.

    Args:
      target: The handler of steps without sums.
      spec: The static side.
      grads: The gradients.
      results: Types of its results.
      aliases: Operand number to result number.
      request: The requested sums; None: none.
    """
    if request is None:
        call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
        return lambda *args, **attributes: (call(*args, **attributes), None)
    sizes = spec.sizes or [x.size // spec.contributions for x in grads]
    runs = sum(map(num_runs, sizes, request.by_element))
    shapes = (request.segments.shape[0], len(KINDS)), (len(KINDS), runs)
    sums = [native.type_like(request.segments, shape, jnp.float32) for shape in shapes]
    moved = {operand + 1: result + len(sums) for operand, result in aliases.items()}
    call = jax.ffi.ffi_call(f"{target}_squares", [*sums, *results], input_output_aliases=moved)

    def with_sums(*args: Any, **attributes: Any) -> tuple[Sequence[jax.Array], Any]:
        out = call(
            request.segments, *args, fine=np.asarray(request.by_element, np.int32), **attributes
        )
        return out[len(sums) :], out[0]

    return with_sums


def _attributes(spec: Spec) -> dict[str, Any]:
    """Every attribute with its exact numpy type: the handler accepts no other."""
    return {
        "mode": np.int32(_MODES[spec.mode]),
        "flags": bits_of(spec.flags),
        "contributions": np.int32(spec.contributions),
        "groups": np.asarray(spec.groups, np.int32),
        "flat": np.int32(sum(1 << _OPERANDS.index(kind) for kind in spec.flat)),
        "sizes": np.asarray(spec.sizes, np.int64),
        "offsets": np.asarray(spec.offsets, np.int64),
        "mu_offsets": np.asarray(spec.mu_offsets, np.int64),
        "nu_offsets": np.asarray(spec.nu_offsets, np.int64),
    }


def bits_of(flags: frozenset[str]) -> np.int32:
    """The attribute ``flags`` of a call."""
    return np.int32(sum(1 << FLAGS.index(name) for name in flags))


def _result_types(spec: Spec, operands: Operands) -> Results:
    """The types of all results: [Note: types of results]."""

    def like(arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(jax.typeof(x) for x in arrays)

    out = like(operands.out)
    if spec.mode in ("step_and_cast", "update"):
        out = tuple(
            _summed(spec, x).update(dtype=jnp.dtype(spec.out_dtype)) for x in operands.grads
        )
    params = () if spec.mode == "update" else like(operands.params)
    return Results(params, like(operands.mu), like(operands.nu), out)


def _summed(spec: Spec, grads: Any) -> Any:
    """The type of the sum of an array's contributions."""
    if spec.contributions == 1:
        return jax.typeof(grads)
    flat = "grads" in spec.flat
    shape = (grads.size // spec.contributions,) if flat else grads.shape[1:]
    return native.type_like(grads, shape, grads.dtype)


def adam_fallback(
    spec: Spec, scalars: Scalars, operands: Operands, *, every_term: bool = False
) -> Results:
    """The same step in jax.numpy. Close to the compiled kernels, but not bitwise equal.

    ``every_term`` is for derivatives: see reference.adam_update.
    """
    if member_dims(scalars):
        one = functools.partial(adam_fallback, spec, every_term=every_term)
        return jax.vmap(one, (Scalars(0, None, None), 0))(scalars, operands)
    if spec.contributions > 1:
        stacked = [x.reshape(spec.contributions, *_summed(spec, x).shape) for x in operands.grads]
        summed = tuple(reference.pairwise_sum(x.astype(jnp.float32), jnp) for x in stacked)
        operands = operands._replace(grads=summed)
    shapes = [x.shape for x in operands.grads]
    leaves = Operands(
        *(split(spec, kind, arrays, shapes) for kind, arrays in operands._asdict().items())
    )
    if not leaves.out:
        leaves = leaves._replace(out=(None,) * len(leaves.grads))
    steps = [
        reference.adam_leaf(
            mode=spec.mode,
            c=dict(zip(hyperparameters.NAMES, scalars.coefficients[group], strict=True)),
            inv_scale=scalars.inv_scale,
            found_inf=scalars.found_inf,
            grad=grad,
            param=param,
            mu=mu,
            nu=nu,
            remainder=out,
            flags=spec.flags,
            out_dtype=spec.out_dtype,
            every_term=every_term,
            xp=jnp,
        )
        for group, grad, param, mu, nu, out in zip(spec.groups, *leaves, strict=True)
    ]
    columns = reference.AdamResult(*(tuple(column) for column in zip(*steps, strict=True)))
    params, mu, nu, out = (
        join(spec, kind, getattr(operands, kind), getattr(columns, kind), jnp)
        for kind in ("params", "mu", "nu", "out")
    )
    return Results(
        () if spec.mode == "update" else params, mu, nu, () if spec.mode == "step" else out
    )


def squares_reference(
    spec: Spec, scalars: Scalars, operands: Operands, request: SquaresRequest, *, xp: Any
) -> Any:
    """The sums of squares by the reference implementation, for one contribution."""
    shapes = [(size,) for size in spec.sizes or (x.size for x in operands.grads)]
    cut = Operands(*(split(spec, kind, x, shapes) for kind, x in operands._asdict().items()))
    leaves = zip(spec.groups, *cut[:4], cut.out or (None,) * len(cut.grads), strict=True)
    found = [
        reference.squares_of_leaf(
            spec.mode,
            dict(zip(hyperparameters.NAMES, scalars.coefficients[group], strict=True)),
            scalars.inv_scale,
            scalars.found_inf,
            *(x if x is None else x.reshape(-1) for x in leaf),
            flags=spec.flags,
            xp=xp,
        )
        for group, *leaf in leaves
    ]
    return reference.sums_of_runs(found, request, xp)


def split(spec: Spec, kind: str, arrays: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
    """Splits a flat array into leaves."""
    if kind not in spec.flat or not arrays:
        return arrays
    (flat,) = arrays
    starts = spec.offsets_of(kind)
    ends = np.add(starts, spec.sizes).tolist()
    pieces = [flat[start:end] for start, end in zip(starts, ends, strict=True)]
    return [
        x if "grads" in spec.flat else x.reshape(s) for x, s in zip(pieces, shapes, strict=False)
    ]


def join(
    spec: Spec, kind: str, arrays: Sequence[Any], leaves: Sequence[Any], xp: Any
) -> tuple[Any, ...]:
    """Writes leaves back into their flat array."""
    if kind not in spec.flat or not arrays:
        return tuple(leaves)
    flat: Any = np.array(arrays[0]) if xp is np else arrays[0]
    for offset, leaf in zip(spec.offsets_of(kind), leaves, strict=True):
        where = slice(offset, offset + leaf.size)
        if xp is np:
            flat[where] = leaf.reshape(-1)
        else:
            flat = flat.at[where].set(leaf.reshape(-1))
    return (flat,)
