"""One Adam step with coded moments or stochastic rounding, on this device.

It takes the operands of kernels/adam.py, and scales and random keys: see [Note: random bits] and
[Note: blocks] in cuda/rounding.h. Over several devices use sharded_quantized_adam.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, hyperparameters
from jdistadam.core.codecs import BLOCK, BlockCodes, codec_of, float_codec, is_codes
from jdistadam.kernels import adam as kernel
from jdistadam.kernels import native, reference
from jdistadam.kernels.adam import Operands, Results, Scalars, Spec
from jdistadam.kernels.reference import LeafPartition, SquaresRequest


@dataclasses.dataclass(frozen=True)
class QuantizedSpec:
    """The static side of a call; hashable.

    Attributes:
      adam: As for the kernel without rounding.
      is_stochastic: Whether mu and nu of 8 or 16 bits are rounded stochastically, and in mode
        "step" the parameters of 16 bits. If not, to nearest.
      ids: For each leaf its number in the tree of params.
      cuts: For each leaf how it was cut. (): into consecutive parts of equal size.
      tables: For each leaf that packs several, each padded to whole blocks, its first row of
        ``LeafPositions.blocks``; -1 for other leaves. (): no leaf packs several.
    """

    adam: Spec
    is_stochastic: bool
    ids: tuple[int, ...]
    cuts: tuple[LeafPartition, ...] = ()
    tables: tuple[int, ...] = ()


class LeafPositions(NamedTuple):
    """The positions of local leaves in whole leaves, if they differ between devices."""

    parts: Any  # shape (leaves, 2), int32: its part, and the part from which that was cut
    blocks: Any  # shape (rows, 2), uint32: a block's leaf, and its index there

    @classmethod
    def of_parts(cls, parts: Any) -> LeafPositions:
        """For leaves that were cut at most once; ``parts`` has shape (leaves,), int32."""
        parts = jnp.stack([jnp.asarray(parts, jnp.int32), jnp.zeros(len(parts), jnp.int32)], 1)
        return cls(parts, jnp.zeros((1, 2), jnp.uint32))


class Rounding(NamedTuple):
    """The operands of stochastic rounding, on the device."""

    key: Any  # shape (2,), uint32: the seed
    count: Any  # shape (), int32: steps taken before this one


def adam(
    spec: QuantizedSpec,
    scalars: Scalars,
    rounded: Rounding,
    positions: LeafPositions,
    operands: Operands,
    request: SquaresRequest | None = None,
) -> Results:
    """Takes one Adam step on this device. Updates donated params, mu and nu in place.

    Args:
      spec: The static side.
      scalars: As for the kernel without rounding, without members.
      rounded: The operands that determine random bits.
      positions: The positions of the leaves in whole leaves.
      operands: The leaves; all of mu may be BlockCodes of one format, and all of nu, also flat.
      request: Which sums of squares to take, as for the kernel without rounding.
    """

    def compiled(segments: Any, *args: Any) -> Results:
        return _adam_native(spec, *args, request=request and request._replace(segments=segments))

    def fallback(segments: Any, *args: Any) -> Results:
        results = adam_reference(spec, *args, xp=jnp)
        if request is None:
            return results
        scalars, *_, operands = args
        given = request._replace(segments=segments)
        sums = squares_reference(spec, scalars, operands, given, xp=jnp)
        return results._replace(squares=sums)

    args = request and request.segments, scalars, rounded, positions, operands
    return native.choose(compiled, fallback)(*collectives.vary_together(args))


def codes_of(moments: Sequence[Any]) -> tuple[Any, ...]:
    """Returns moments as arrays: coded ones as their codes."""
    return tuple(x.codes if is_codes(x) else x for x in moments)


def _scales(moments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.scales for x in moments if is_codes(x))


def _coded(codes: Sequence[Any], scales: Sequence[Any]) -> tuple[Any, ...]:
    if not scales:
        return tuple(codes)
    return tuple(BlockCodes(*pair) for pair in zip(codes, scales, strict=True))


def _adam_native(
    spec: QuantizedSpec,
    scalars: Scalars,
    rounded: Rounding,
    positions: LeafPositions,
    operands: Operands,
    *,
    request: SquaresRequest | None,
) -> Results:
    """The call: scales follow the operands of `jdistadam_adam`, and likewise its results."""
    mode = spec.adam.mode
    given = {
        "grads": tuple(operands.grads),
        "params": tuple(operands.params),
        "mu": codes_of(operands.mu),
        "nu": codes_of(operands.nu),
        "out": tuple(operands.out),
        "mu_scales": _scales(operands.mu),
        "nu_scales": _scales(operands.nu),
    }
    made = {name: given[name] for name in ("params", "mu", "nu", "out", "mu_scales", "nu_scales")}
    if mode == "update":
        made["params"] = ()
    types = {name: [jax.typeof(x) for x in arrays] for name, arrays in made.items()}
    if mode in ("step_and_cast", "update"):
        dtype = jnp.dtype(spec.adam.out_dtype)
        types["out"] = [jax.typeof(x).update(dtype=dtype) for x in operands.grads]
    results = [x for arrays in types.values() for x in arrays]
    aliases = _aliases(given, types)
    outputs, sums = kernel.ffi_call(
        "jdistadam_quantized", spec.adam, operands.grads, results, aliases, request
    )(*scalars, *rounded, *positions, *jax.tree.leaves(list(given.values())), **_attributes(spec))
    new = iter(outputs)
    found = {name: tuple(next(new) for _ in arrays) for name, arrays in types.items()}
    return Results(
        found["params"],
        _coded(found["mu"], found["mu_scales"]),
        _coded(found["nu"], found["nu_scales"]),
        found["out"],
        sums,
    )


def _aliases(given: dict[str, Any], made: dict[str, Any]) -> dict[int, int]:
    """Operand number to result number, for each kind that is both operand and result."""

    def first(kinds: dict[str, Any], start: int) -> dict[str, int]:
        ends = np.cumsum([start, *map(len, kinds.values())]).tolist()
        return dict(zip(kinds, ends, strict=False))

    num_scalars = len(Scalars._fields) + len(Rounding._fields) + len(LeafPositions._fields)
    sources, targets = first(given, num_scalars), first(made, 0)
    return {
        sources[kind] + i: targets[kind] + i
        for kind in made
        for i in range(min(len(given[kind]), len(made[kind])))
    }


def _attributes(spec: QuantizedSpec) -> dict[str, Any]:
    return kernel._attributes(spec.adam) | {
        "random": np.bool_(spec.is_stochastic),
        "ids": np.asarray(spec.ids, np.int32),
        "cuts": np.asarray(spec.cuts, np.int64).reshape(-1),
        "tables": np.asarray(spec.tables, np.int64),
    }


def adam_reference(
    spec: QuantizedSpec,
    scalars: Scalars,
    rounded: Rounding,
    positions: LeafPositions,
    operands: Operands,
    *,
    xp: Any,
) -> Results:
    """The same step by the reference implementation: with numpy the same bits."""
    shapes = [x.shape for x in operands.grads]
    cut = (_split(spec.adam, kind, arrays, shapes) for kind, arrays in operands._asdict().items())
    leaves = Operands(*cut)
    rows = [scalars.coefficients[group] for group in spec.adam.groups]
    bits = [_bits(spec, rounded, positions, i, shape, xp) for i, shape in enumerate(shapes)]
    mains = leaves.out or (None,) * len(shapes)
    steps = [
        _leaf(spec, scalars, *leaf, xp=xp)
        for leaf in zip(rows, bits, *leaves[:4], mains, strict=True)
    ]
    made = Results(*(tuple(x) for x in zip(*steps, strict=True)))
    params, mu, nu, out = (
        _join(spec.adam, kind, getattr(operands, kind), getattr(made, kind), xp)
        for kind in ("params", "mu", "nu", "out")
    )
    mode = spec.adam.mode
    return Results(() if mode == "update" else params, mu, nu, () if mode == "step" else out)


def squares_reference(
    spec: QuantizedSpec, scalars: Scalars, operands: Operands, request: SquaresRequest, *, xp: Any
) -> Any:
    """The sums of squares by the reference implementation."""
    shapes = [x.shape for x in operands.grads]
    cut = Operands(*(_split(spec.adam, kind, x, shapes) for kind, x in operands._asdict().items()))
    mu, nu = (
        [codec_of(x).decode(kind, x, xp) for x in getattr(cut, kind)] for kind in ("mu", "nu")
    )
    plain = dataclasses.replace(spec.adam, flat=frozenset())
    return kernel.squares_reference(plain, scalars, cut._replace(mu=mu, nu=nu), request, xp=xp)


def _bits(
    spec: QuantizedSpec,
    rounded: Rounding,
    positions: LeafPositions,
    i: int,
    shape: tuple[int, ...],
    xp: Any,
) -> reference.RandomBits:
    if not spec.is_stochastic:
        return reference.RandomBits(None, None, None)
    size = math.prod(shape)
    number, table = spec.ids[i], spec.tables[i] if spec.tables else -1
    if table >= 0:
        blocks = positions.blocks[table : table + -(-size // BLOCK)]
        number, index = reference.indices_of_blocks(size, blocks, xp)
    else:
        cuts = LeafPartition(*spec.cuts[i]) if spec.cuts else LeafPartition.into_runs(size)
        index = reference.indices(size, cuts, positions.parts[i], xp)
    return reference.random_bits(rounded.key, rounded.count, number, index, shape, xp)


def _of_scales(spec: Spec, kind: str) -> Spec:
    """The positions of the leaves' scales in the flat arrays of a moment."""
    return dataclasses.replace(
        spec,
        sizes=tuple(-(-size // BLOCK) for size in spec.sizes),
        offsets=tuple(offset // BLOCK for offset in spec.offsets_of(kind)),
        mu_offsets=(),
        nu_offsets=(),
    )


def _split(spec: Spec, kind: str, arrays: Sequence[Any], shapes: Any) -> Sequence[Any]:
    """Splits flat arrays into leaves."""
    if kind not in spec.flat or not arrays or not is_codes(arrays[0]):
        return kernel.split(spec, kind, arrays, shapes)
    codes = kernel.split(spec, kind, codes_of(arrays), shapes)
    of_scales = _of_scales(spec, kind)
    scales = kernel.split(of_scales, kind, _scales(arrays), [(n,) for n in of_scales.sizes])
    return _coded(codes, scales)


def _join(
    spec: Spec, kind: str, arrays: Sequence[Any], leaves: Sequence[Any], xp: Any
) -> tuple[Any, ...]:
    """Writes leaves back into their flat arrays."""
    if kind not in spec.flat or not arrays or not is_codes(arrays[0]):
        return kernel.join(spec, kind, arrays, leaves, xp)
    codes = kernel.join(spec, kind, codes_of(arrays), codes_of(leaves), xp)
    of_scales = _of_scales(spec, kind)
    return _coded(codes, kernel.join(of_scales, kind, _scales(arrays), _scales(leaves), xp))


def _leaf(
    spec: QuantizedSpec,
    scalars: Scalars,
    row: Any,
    bits: reference.RandomBits,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    remainder: Any,
    *,
    xp: Any,
) -> reference.AdamResult:
    """Steps a leaf in float32, and rounds the results."""
    is_step = spec.adam.mode == "step"
    is_16_bits = param.dtype.itemsize == 2
    # Rounded stochastically below: so float32 here.
    wide = param.astype(xp.float32) if is_step and spec.is_stochastic and is_16_bits else param
    new = reference.adam_leaf(
        mode=spec.adam.mode,
        c=dict(zip(hyperparameters.NAMES, row, strict=True)),
        inv_scale=scalars.inv_scale,
        found_inf=scalars.found_inf,
        grad=grad,
        param=wide,
        mu=codec_of(mu).decode("mu", mu, xp),
        nu=codec_of(nu).decode("nu", nu, xp),
        remainder=remainder,
        flags=spec.adam.flags,
        out_dtype=spec.adam.out_dtype,
        xp=xp,
    )

    def keep_if_skipped(old: Any, made: Any) -> Any:
        return xp.where(scalars.found_inf, old, made)

    new_param = new.params
    if wide is not param:
        made = float_codec(param.dtype).encode("param", new_param, bits.param, xp)
        new_param = keep_if_skipped(param, made)

    def stored(name: str, old: Any, made: Any, random: Any) -> Any:
        with np.errstate(all="ignore"):
            rounded_to = codec_of(old).encode(name, made, random, xp)
        return jax.tree.map(keep_if_skipped, old, rounded_to)

    new_mu = stored("mu", mu, new.mu, bits.mu)
    new_nu = stored("nu", nu, new.nu, bits.nu)
    return reference.AdamResult(new_param, new_mu, new_nu, new.out)
