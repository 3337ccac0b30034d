"""Coded moments and stochastic rounding under plain ``jax.jit`` on several devices.

Coded moments have the shapes of leaves: codes, and the scales of their blocks. If a leaf is sharded
into pieces of whole blocks, it is encoded and decoded in place. Only its scales are gathered on all
devices, because they are stored in the order of the whole leaf; they are small. Otherwise the leaf
is gathered first.

In a step, a leaf may be sharded along its first dimension, if the shards consist of whole blocks.
Each shard is updated where its moments are. Other shardings, ``jax.vmap`` and derivatives raise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives
from jdistadam.core.codecs import BLOCK, BlockCodes, Codec, codec_of, is_codes
from jdistadam.core.collectives import CalledPrimitive
from jdistadam.errors import PolicyError
from jdistadam.kernels import native, quantized_adam, sharded_adam
from jdistadam.kernels.adam import Operands, Results, Scalars
from jdistadam.kernels.quantized_adam import LeafPositions, QuantizedSpec, Rounding, codes_of
from jdistadam.kernels.reference import SquaresRequest


def encoded(name: str, codec: Codec, x: jax.Array) -> BlockCodes:
    """Encodes a float32 leaf of the moment "mu" or "nu", rounded to nearest."""
    mesh, spec, scale_spec = _pieces(x.shape, x.sharding)
    x = _placed(x, mesh, spec)
    codes, scales = jax.block_until_ready(_encoder(name, codec, mesh, spec, scale_spec)(x))
    return BlockCodes(codes, _reshaped(_placed(scales, mesh, P()), (-1,)))


def decoded(name: str, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns a leaf of the moment "mu" or "nu" as float32.

    Args:
      name: "mu" or "nu".
      codes: The codes. While tracing, each device has whole blocks as far as types say.
      scales: The scales of all blocks: sharded like the codes, or on all devices.
    """
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    is_traced = isinstance(codes, jax.core.Tracer)
    sharding: Any = jax.typeof(codes).sharding if is_traced else codes.sharding
    if is_traced and not any(sharding.spec):  # on one device, or XLA decides
        moment = BlockCodes(codes, scales)
        return codec_of(moment).decode(name, moment, jnp)
    mesh, spec, scale_spec = _pieces(codes.shape, sharding)
    in_pieces = _reshaped(scales, (*codes.shape[: len(scale_spec[:-1])], -1))
    decode = _decoder(name, mesh, spec, scale_spec)
    return decode(_placed(codes, mesh, spec), _placed(in_pieces, mesh, scale_spec))


def _pieces(shape: tuple[int, ...], sharding: Any) -> tuple[Any, P, P]:
    """The shardings of codes and scales if each piece is whole blocks, otherwise unsharded.

    Scales have the dimensions of the leaf up to the last cut one, which counts blocks instead of
    elements. The mesh is None on one device.
    """
    if not isinstance(sharding, NamedSharding):
        return None, P(), P()
    spec = P(*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    last = max((i for i, axes in enumerate(spec) if axes), default=None)
    if last is None or math.prod(sharding.shard_shape(shape)[last:]) % BLOCK:
        return sharding.mesh, P(), P()
    return sharding.mesh, spec, P(*spec[: last + 1])


def _placed(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    """Reshards an array and waits for it: collectives of two programs must not overlap."""
    if mesh is None:
        return x
    if isinstance(x, jax.core.Tracer):
        return jax.reshard(x, NamedSharding(mesh, spec))
    return jax.block_until_ready(jax.device_put(x, NamedSharding(mesh, spec)))


@functools.partial(jax.jit, static_argnums=1)
def _reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(shape)


@functools.lru_cache(maxsize=1024)
def _encoder(name: str, codec: Codec, mesh: Any, spec: P, scale_spec: P) -> Any:
    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = codec.encode(name, x, None, jnp)
        if scale_spec:
            scales = scales.reshape(*x.shape[: len(scale_spec) - 1], -1)
        return codes, scales

    return _on_devices(local, mesh, (spec,), (spec, scale_spec))


@functools.lru_cache(maxsize=1024)
def _decoder(name: str, mesh: Any, spec: P, scale_spec: P) -> Any:
    def local(codes: jax.Array, scales: jax.Array) -> jax.Array:
        moment = BlockCodes(codes, scales.reshape(-1))
        return codec_of(moment).decode(name, moment, jnp)

    return _on_devices(local, mesh, (spec, scale_spec), spec)


def _on_devices(local: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    if mesh is None:
        return jax.jit(local)
    how: Any = dict(mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(jax.shard_map(local, **how))


def adam(
    spec: QuantizedSpec,
    scalars: Scalars,
    rounded: Rounding,
    operands: Operands,
    out_like: Sequence[Any] = (),
    *,
    with_squares: bool = False,
) -> Results:
    """Takes one Adam step. params, mu and nu are updated in place if donated.

    Args:
      spec: The static side.
      scalars: As for the kernel without rounding, without members.
      rounded: What random bits depend on.
      operands: The leaves; mu is all BlockCodes or none, and so is nu.
      out_like: Donated arrays whose memory ``out`` may take; they are not read.
      with_squares: Whether to sum the squares of each leaf.

    Raises:
      PolicyError: Under ``jax.vmap``, in differentiation, or if a leaf is sharded otherwise.
    """
    scalars, rounded, operands = collectives.vary_together((scalars, rounded, operands))
    out_like = tuple(operands.out or out_like or operands.params)
    placed = _placed_like_moments(operands)
    args = (scalars, rounded, placed, out_like)
    made: Results = _step(functools.partial(_sharded, spec, with_squares), *args)
    models = (operands.params, operands.mu, operands.nu, out_like)
    typed = Results(*map(_typed_like, made[: len(models)], models))
    return typed._replace(squares=made.squares)


def check_leaf(path: str, param: Any, *, is_coded: bool) -> None:
    """Raises PolicyError if no coded or rounded step supports an array's sharding."""
    if isinstance(param, jax.Array) and not isinstance(param, jax.core.Tracer):
        if not isinstance(param.sharding, SingleDeviceSharding):
            _check_parts(param, _Kinds((param.ndim,), is_coded, is_coded), path)


def _sharded(
    spec: QuantizedSpec,
    with_squares: bool,
    scalars: Scalars,
    rounded: Rounding,
    operands: Operands,
    out_like: Sequence[Any],
) -> Results:
    shardings = tuple(map(sharded_adam.sharding_of, codes_of(operands.mu)))
    step = _partitioned(spec, _Kinds.of(operands), with_squares)
    positions = LeafPositions.of_parts(np.zeros(len(spec.ids), np.int32))  # if nothing is sharded
    placed = (out_like, shardings, positions)
    return native.unfused(step(placed, scalars, rounded, operands.unfused()))


def _placed_like_moments(operands: Operands) -> Operands:
    """Reshards every array of a leaf like its first moment, as far as types know it."""
    codes = codes_of(operands.mu)
    kinds = _Kinds.of(operands)
    for typed in map(jax.typeof, codes):
        if not typed.sharding.mesh.empty:
            _check_parts(typed, kinds)

    def resharded(x: Any, code: Any) -> Any:
        sharding = jax.typeof(code).sharding
        if not is_codes(x):
            return sharded_adam.reshard_as(x, sharding)
        first = sharding.update(spec=P(*sharding.spec[:1]))
        return BlockCodes(
            sharded_adam.reshard_as(x.codes, sharding), sharded_adam.reshard_as(x.scales, first)
        )

    return Operands(*(tuple(map(resharded, kind, codes)) for kind in operands))


def _typed_like(made: Sequence[Any], models: Sequence[Any]) -> tuple[Any, ...]:
    """Reshards arrays like ``models``, as far as types know it."""

    def moved(x: Any, model: Any) -> Any:
        return sharded_adam.reshard_as(x, jax.typeof(model).sharding)

    return tuple(jax.tree.map(moved, *pair) for pair in zip(made, models, strict=False))


class _Kinds(NamedTuple):
    """What a sharding rule depends on: ranks of leaves, and which moments are coded."""

    ranks: tuple[int, ...]
    mu_is_coded: bool
    nu_is_coded: bool

    @classmethod
    def of(cls, operands: Operands) -> _Kinds:
        """The kinds of a call's operands."""
        ranks = tuple(x.ndim for x in operands.grads)
        return cls(ranks, is_codes(operands.mu[0]), is_codes(operands.nu[0]))


@functools.lru_cache(maxsize=256)
def _partitioned(spec: QuantizedSpec, kinds: _Kinds, with_squares: bool) -> Any:
    """The kernel with one more argument that passes only shardings."""

    def call(scalars: Scalars, rounded: Rounding, here: LeafPositions, operands: Operands) -> Any:
        request = SquaresRequest.of_leaves(operands.grads) if with_squares else None
        return quantized_adam.adam(spec, scalars, rounded, here, operands, request)

    @custom_partitioning
    def step(placed: Any, scalars: Scalars, rounded: Rounding, operands: Operands) -> Results:
        return call(scalars, rounded, placed[-1], operands)

    def partition(mesh: Mesh, arg_shapes: Any, result_shapes: Results) -> Any:
        placed, scalars, rounded, operands = arg_shapes
        codes = codes_of(operands.mu)
        axes = [_first_axes(x) for x in codes]
        for x in codes:
            _check_parts(x, kinds)
        positions = [NamedSharding(mesh, P(names or None)) for names in axes]

        def lower_fn(placed: Any, scalars: Scalars, rounded: Rounding, operands: Operands) -> Any:
            here = placed[-1]
            if any(axes):
                with collectives.no_mesh():
                    mine = [collectives.axis_index(x) if x else np.int32(0) for x in axes]
                    here = LeafPositions.of_parts(jnp.stack(mine))
            if not with_squares:
                return call(scalars, rounded, here, operands)
            with collectives.no_mesh():
                made = call(scalars, rounded, here, operands)
                squares = sharded_adam.squares_of_all(mesh, made.squares, list(map(set, axes)))
            return made._replace(squares=squares)

        def of_leaves(kind: Any) -> Any:
            pairs = zip(kind, positions, strict=False)
            return tuple(jax.tree.map(lambda _, place=place: place, x) for x, place in pairs)

        whole = NamedSharding(mesh, P())
        arg_shardings = (
            (*jax.tree.map(lambda x: x.sharding, placed[:2]), LeafPositions(whole, whole)),
            *jax.tree.map(lambda _: whole, (scalars, rounded)),
            Operands(*map(of_leaves, operands)),
        )
        results = Results(*map(of_leaves, result_shapes[:-1]))
        if with_squares:
            results = results._replace(squares=whole)
        return mesh, lower_fn, results, arg_shardings

    scalars: Any = (("l", "t"), ("b", "w"), ("r", "c"), (), (), ("k",), ())
    coded = ["m"] * kinds.mu_is_coded + ["n"] * kinds.nu_is_coded
    whole = tuple("ltbwrck")
    given = (spec.adam.mode, kinds.ranks, scalars, whole, coded)
    rule = sharded_adam.sharding_rule(*given, with_squares=with_squares)
    step.def_partition(partition=partition, sharding_rule=rule)
    return step


def _first_axes(x: Any, path: str = "fused_adamw") -> tuple[str, ...]:
    """The mesh axes that cut a leaf's first dimension; raises if others are cut."""
    if x.sharding.is_fully_replicated:
        return ()
    if isinstance(x.sharding, NamedSharding):
        first, *others = sharded_adam.dim_axes(x.sharding, len(x.shape))
        if not any(others):
            return first
    raise _not_supported(
        "on leaves that are sharded along a dimension other than the first",
        f"shape {x.shape}, sharded as {getattr(x.sharding, 'spec', x.sharding)}",
        path,
    )


def _check_parts(x: Any, kinds: _Kinds, path: str = "fused_adamw") -> None:
    """Raises unless a leaf is cut along its first dimension, and at the ends of blocks."""
    names = _first_axes(x, path)
    num_parts = math.prod(x.sharding.mesh.shape[name] for name in names)
    if num_parts == 1:
        return
    unit = BLOCK if kinds.mu_is_coded or kinds.nu_is_coded else 1
    size = math.prod(x.shape)
    if x.shape[0] % num_parts or size // num_parts % unit:
        raise _not_supported(
            f"on leaves whose parts are not blocks of {BLOCK} elements",
            f"shape {x.shape} in {num_parts} parts along its first dimension",
            path,
        )


def _not_supported(
    how: str,
    got: str,
    path: str = "fused_adamw",
    expected: str = "leaves that are replicated, or sharded along their first dimension in whole "
    "blocks",
) -> PolicyError:
    return PolicyError(
        f'{path}: a step with "block8" or "block16" moments or stochastic rounding is not '
        f"supported {how}: got {got}, expected {expected}. "
        "Use float32 or bfloat16 moments, rounded to nearest."
    )


def _batched(leaves: Any, dims: Any, *, call: Any) -> Any:
    del dims, call
    got = f"vmap of a step with {len(leaves)} arrays"
    raise _not_supported("under jax.vmap", got, expected="a step of one member")


def _jvp(leaves: Any, tangents: Any, *, call: Any) -> Any:
    del tangents, call
    got = f"a step with {len(leaves)} arrays"
    raise _not_supported("where it is differentiated", got, expected="jax.lax.stop_gradient")


_step = CalledPrimitive("jdistadam_quantized_step", batched=_batched, jvp=_jvp)
