"""One Adam step whose moments or parameters are rounded to 8 bits, or at random.

The operands of kernels/adam.py, and what rounding needs: [Note: random bits] and [Note: block8] in
cuda/rounding.h. Every leaf is whole: a program that cuts one over devices raises.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import varying
from jdistadam.core.moments import Block8, is_block8
from jdistadam.errors import PolicyError
from jdistadam.kernels import adam as kernel
from jdistadam.kernels import coefficients, native, reference, rounding
from jdistadam.kernels.adam import Operands, Results, Scalars, Spec


@dataclasses.dataclass(frozen=True)
class CompactSpec:
    """The static side of a call; hashable.

    Attributes:
      adam: As for the kernel without rounding; nothing is flat.
      is_random: Whether mu and nu of 8 or 16 bits are rounded at random, and in mode "step" the
        parameters of 16 bits. If not, to nearest.
      ids: For each leaf its number in the tree of params.
    """

    adam: Spec
    is_random: bool
    ids: tuple[int, ...]


class Rounding(NamedTuple):
    """The device operands of rounding at random."""

    key: Any  # shape (2,), uint32: the seed
    count: Any  # shape (), int32: steps taken before this one


def adam(
    spec: CompactSpec,
    scalars: Scalars,
    rounded: Rounding,
    operands: Operands,
    out_like: Sequence[Any] = (),
) -> Results:
    """Takes one Adam step. params, mu and nu are updated in place where donated.

    Args:
      spec: The static side.
      scalars: As for the kernel without rounding, without members.
      rounded: What random bits depend on.
      operands: The leaves; all of mu may be Block8, and all of nu.
      out_like: Arrays that are donated, whose memory ``out`` may take; they are not read.

    Raises:
      PolicyError: Under ``jax.vmap``, when differentiated, or where a leaf is sharded.
    """
    rows, inv_scale, found_inf = scalars
    scalars = Scalars(rows, inv_scale, found_inf)
    args = varying.vary_together((scalars, rounded, operands, tuple(out_like)))
    call, results = jax.make_jaxpr(_partitioned(spec), return_shape=True)(*args)
    new = _compact_p.bind(*jax.tree.leaves(args), call=call)
    return jax.tree.unflatten(jax.tree.structure(results), new)


def _adam_local(
    spec: CompactSpec, scalars: Scalars, rounded: Rounding, operands: Operands
) -> Results:
    compiled = functools.partial(_adam_native, spec)
    fallback = functools.partial(adam_reference, spec, xp=jnp)
    return native.choose(compiled, fallback, scalars, rounded, operands)


def _codes(moments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.codes if is_block8(x) else x for x in moments)


def _scales(moments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.scales for x in moments if is_block8(x))


def _coded(codes: Sequence[Any], scales: Sequence[Any]) -> tuple[Any, ...]:
    if not scales:
        return tuple(codes)
    return tuple(Block8(*pair) for pair in zip(codes, scales, strict=True))


def _adam_native(
    spec: CompactSpec, scalars: Scalars, rounded: Rounding, operands: Operands
) -> Results:
    """The call: behind the operands of `jdistadam_adam` come the scales, and so with results."""
    mode = spec.adam.mode
    given = {
        "grads": tuple(operands.grads),
        "params": tuple(operands.params),
        "mu": _codes(operands.mu),
        "nu": _codes(operands.nu),
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
    outputs = jax.ffi.ffi_call(
        "jdistadam_compact", results, input_output_aliases=_aliases(given, types)
    )(*scalars, *rounded, *jax.tree.leaves(given_in_order(given)), **_attributes(spec))
    new = iter(outputs)
    found = {name: tuple(next(new) for _ in arrays) for name, arrays in types.items()}
    return Results(
        found["params"],
        _coded(found["mu"], found["mu_scales"]),
        _coded(found["nu"], found["nu_scales"]),
        found["out"],
    )


def given_in_order(given: dict[str, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The arrays by kind in the order of the operands, which a dictionary's leaves are not in."""
    return list(given.values())


def _aliases(given: dict[str, Any], made: dict[str, Any]) -> dict[int, int]:
    """Operand number to result number, for each kind that there is on both sides."""

    def first(kinds: dict[str, Any], start: int) -> dict[str, int]:
        ends = np.cumsum([start, *map(len, kinds.values())]).tolist()
        return dict(zip(kinds, ends, strict=False))

    num_scalars = len(Scalars._fields) + len(Rounding._fields)
    sources, targets = first(given, num_scalars), first(made, 0)
    return {
        sources[kind] + i: targets[kind] + i
        for kind in made
        for i in range(min(len(given[kind]), len(made[kind])))
    }


def _attributes(spec: CompactSpec) -> dict[str, Any]:
    return kernel._attributes(spec.adam) | {
        "random": np.bool_(spec.is_random),
        "starts": np.zeros(len(spec.ids), np.int64),
        "ids": np.asarray(spec.ids, np.int32),
    }


def adam_reference(
    spec: CompactSpec, scalars: Scalars, rounded: Rounding, operands: Operands, *, xp: Any
) -> Results:
    """The same step by the reference implementation: with numpy the same bits."""
    mains = operands.out or (None,) * len(operands.grads)
    leaves = zip(spec.adam.groups, spec.ids, *operands[:4], mains, strict=True)
    steps = [
        _leaf(spec, scalars, rounded, group, number, *leaf, xp=xp)
        for group, number, *leaf in leaves
    ]
    params, mu, nu, out = (tuple(x) for x in zip(*steps, strict=True))
    mode = spec.adam.mode
    return Results(() if mode == "update" else params, mu, nu, () if mode == "step" else out)


def _leaf(
    spec: CompactSpec,
    scalars: Scalars,
    rounded: Rounding,
    group: int,
    number: int,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    remainder: Any,
    *,
    xp: Any,
) -> reference.AdamResult:
    """Steps a leaf in float32, and rounds what it has computed."""
    is_step = spec.adam.mode == "step"
    is_16_bits = param.dtype.itemsize == 2
    bits = rounding.RandomBits(None, None, None)
    if spec.is_random:
        start = np.uint64(0)
        bits = rounding.random_bits(rounded.key, rounded.count, number, int(start), grad.shape, xp)
    # Rounded at random below: so in float32 here.
    wide = param.astype(xp.float32) if is_step and spec.is_random and is_16_bits else param
    rows = scalars.coefficients[group]
    new = reference.adam_leaf(
        mode=spec.adam.mode,
        c=dict(zip(coefficients.NAMES, rows, strict=True)),
        inv_scale=scalars.inv_scale,
        found_inf=scalars.found_inf,
        grad=grad,
        param=wide,
        mu=_widened(rounding.MU, mu, xp),
        nu=_widened(rounding.NU, nu, xp),
        remainder=remainder,
        nesterov=spec.adam.nesterov,
        out_dtype=spec.adam.out_dtype,
        xp=xp,
    )

    def keep_if_skipped(old: Any, made: Any) -> Any:
        return xp.where(scalars.found_inf, old, made)

    new_param = new.params
    if wide is not param:
        made = rounding.round_at_random(new_param, param.dtype, bits.param, xp)
        new_param = keep_if_skipped(param, made)

    def stored(code: rounding.Code, old: Any, made: Any, random: Any) -> Any:
        with np.errstate(all="ignore"):
            rounded_to = _rounded(code, old, made, random, xp)
        return jax.tree.map(keep_if_skipped, old, rounded_to)

    new_mu = stored(rounding.MU, mu, new.mu, bits.mu)
    new_nu = stored(rounding.NU, nu, new.nu, bits.nu)
    return reference.AdamResult(new_param, new_mu, new_nu, new.out)


def _widened(code: rounding.Code, moment: Any, xp: Any) -> Any:
    if is_block8(moment):
        return rounding.decode(code, moment.codes, moment.scales, xp)
    return moment.astype(xp.float32)


def _rounded(code: rounding.Code, old: Any, made: Any, random: Any, xp: Any) -> Any:
    if is_block8(old):
        return Block8(*rounding.encode(code, made, random, xp))
    if random is None:
        return reference.store(made, old.dtype, xp)
    return rounding.round_at_random(made, old.dtype, random, xp)


# ---- What may be done with the call ----


@functools.lru_cache(maxsize=256)
def _partitioned(spec: CompactSpec) -> Any:
    @custom_partitioning
    def step(scalars: Scalars, rounded: Rounding, operands: Operands, out_like: Any) -> Results:
        del out_like
        return _adam_local(spec, scalars, rounded, operands)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        for x in jax.tree.leaves(arg_shapes[2:]):
            sharding = x.sharding
            if not sharding.is_fully_replicated:
                raise _not_supported(
                    "on sharded leaves", f"shape {x.shape}, sharded as {sharding.spec}"
                )
        whole = NamedSharding(mesh, P())
        return (
            mesh,
            lambda scalars, rounded, operands, _: _adam_local(spec, scalars, rounded, operands),
            jax.tree.map(lambda _: whole, result_shapes),
            jax.tree.map(lambda _: whole, arg_shapes),
        )

    step.def_partition(partition=partition, sharding_rule=_no_sharding)
    return step


def _no_sharding(mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
    """No dimension has anything to do with another."""
    del mesh
    count = 0
    mappings: list[Any] = []
    for types in (operand_types, result_types):
        mapping = []
        for kind in types:
            dims = tuple(f"d{count + i}" for i in range(len(kind.shape)))
            count += len(dims)
            mapping.append(dims)
        mappings.append(tuple(mapping))
    return SdyShardingRule(operand_mappings=mappings[0], result_mappings=mappings[1])


_compact_p = Primitive("jdistadam_compact_step")
_compact_p.multiple_results = True


@_compact_p.def_impl
def _step(*leaves: Any, call: Any) -> Any:
    return jaxpr_as_fun(call)(*leaves)


_compact_p.def_abstract_eval(lambda *leaves, call: call.out_avals)
mlir.register_lowering(_compact_p, mlir.lower_fun(_step, multiple_results=True))


def _not_supported(how: str, got: str) -> PolicyError:
    return PolicyError(
        "fused_adamw",
        f'a step with "block8" moments or stochastic rounding is not supported {how}',
        got=got,
        expected="one program that holds all of every leaf",
        action="Use float32 or bfloat16 moments, rounded to nearest.",
    )


def _batched(leaves: Any, dims: Any, *, call: Any) -> Any:
    del dims, call
    raise _not_supported("under jax.vmap", f"vmap of a step with {len(leaves)} arrays")


def _jvp(leaves: Any, tangents: Any, *, call: Any) -> Any:
    del tangents, call
    raise _not_supported("where it is differentiated", f"a step with {len(leaves)} arrays")


batching.primitive_batchers[_compact_p] = _batched
ad.primitive_jvps[_compact_p] = _jvp
