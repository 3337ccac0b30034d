"""Copies between devices of one host that reach each other's memory; inside ``jax.shard_map``.

``exchange`` is an all-to-all and ``gather`` an all-gather, by the copy engines of GPUs, without a
kernel. Each is a start and a wait (cuda/ffi_copies.h). Where they are adjacent, nothing overlaps;
training/overlap.py moves them apart. A wait takes the sources too, unless they are the targets, so
that sources are neither freed nor overwritten before other devices have them.

A start is a primitive of its own, because each needs a number in its program: a *channel*, as
collectives have. JAX counts them while it lowers a program, so they are equal in all processes, and
do not depend on what else a process has traced.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.collectives import make_primitive
from jdistadam.errors import PolicyError
from jdistadam.kernels import native

Groups = tuple[tuple[int, ...], ...]
"""Of devices that copy among each other: their local numbers, in the order of the parts."""

START, WAIT = "jdistadam_copy_start", "jdistadam_copy_wait"
"""The targets of the two calls."""


def exchange(x: jax.Array, *, dim: int, groups: Groups) -> jax.Array:
    """Sends part ``i`` of dimension ``dim`` to device ``i``.

    Args:
      x: An array of N equal parts along ``dim``.
      dim: The dimension to distribute.
      groups: Of N devices each, which copy among each other.

    Returns:
      The parts of the other N - 1 devices, stacked in a new first dimension, in their order.
    """
    n = len(groups[0])
    part = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    target = native.type_like(x, (n - 1, *part), x.dtype)
    return _copied(x, target, rows=math.prod(x.shape[:dim]), gathers=False, groups=groups)


def gather(shard: jax.Array, *, dim: int, groups: Groups, to: str) -> jax.Array:
    """Concatenates every device's shard along ``dim``; the result is equal on all devices.

    Its type says so unless ``to`` is "varying".
    """
    shape = (*shard.shape[:dim], shard.shape[dim] * len(groups[0]), *shard.shape[dim + 1 :])
    target = native.type_like(shard, shape, shard.dtype)
    if to != "varying":
        target = _equal(target)
    return _copied(shard, target, rows=math.prod(shard.shape[:dim]), gathers=True, groups=groups)


def gather_in_place(whole: jax.Array, *, dim: int, groups: Groups) -> jax.Array:
    """Completes an array of which every device has written its shard along ``dim``.

    Returns:
      The array, equal on all devices.
    """
    target = _equal(native.type_like(whole, whole.shape, whole.dtype))
    rows = math.prod(whole.shape[:dim])
    return _copied(whole, target, rows=rows, gathers=True, groups=groups, in_place=True)


def _equal(like: Any) -> Any:
    """The type of an array that is equal on all devices."""
    (equal,) = jax.make_jaxpr(lambda: jnp.zeros(like.shape, like.dtype))().out_avals
    return equal


def compiled_trial(
    mesh: jax.sharding.Mesh, axes: tuple[str, ...], groups: Groups
) -> Callable[[], tuple[str, float]]:
    """Compiles a gather, which the result makes a few times; call each in all processes.

    XLA may compile a program in all processes together, so all compile before any process copies.

    Args:
      mesh: The devices.
      axes: Those along which they copy.
      groups: Their devices.

    Returns:
      What makes the gather. It returns why that fails, or "", and the GB/s that a device sends.
    """
    devices = mesh.devices.flat
    is_timed = devices[0].platform != "cpu" and len({x.process_index for x in devices}) > 1
    shard = 2**25 if is_timed else 2**16  # bytes
    spec, shape = jax.sharding.PartitionSpec(axes), (shard // 4 * len(groups[0]),)
    run = functools.partial(gather, dim=0, groups=groups, to="varying")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    make = functools.partial(jnp.arange, *shape, dtype=jnp.int32)
    count = jax.jit(make, out_shardings=sharding).lower().compile()
    copied = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
    copy = copied.lower(jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)).compile()

    def attempt() -> tuple[str, float]:
        times = []
        try:
            x = count()
            for _ in range(4):
                jax.block_until_ready(x)
                begin = time.perf_counter()
                whole = jax.block_until_ready(copy(x))
                times.append(time.perf_counter() - begin)
            arrived = [np.asarray(shard.data) for shard in whole.addressable_shards]
            if any((values != np.arange(*shape)).any() for values in arrived):
                return "copies between devices bring other values", 0.0
        except Exception as error:  # whatever it is: the others wait for word
            return f"copies between devices fail: {error}", 0.0
        return "", shard * (len(groups[0]) - 1) / min(times) / 1e9

    return attempt


def _copied(
    source: jax.Array,
    target: Any,
    *,
    rows: int,
    gathers: bool,
    groups: Groups,
    in_place: bool = False,
) -> jax.Array:
    """Starts a copy and waits for it."""
    if getattr(jax.config, "jax_disable_jit", False):
        raise PolicyError(
            "communication: copies over peer memory start and end in one compiled program: "
            "got jax.disable_jit(), expected jax.jit. "
            'Pass communication="xla" to distributed while you look for an error.'
        )
    source = native.unfused(source)
    with jax.named_scope("jdistadam/gather" if gathers else "jdistadam/exchange"):
        (started,) = start.bind(
            source,
            target_name=START,
            types=(target,),
            groups=groups,
            rows=(rows,),
            gathers=gathers,
            in_place=in_place,
            is_kept=False,
        )
        wait = jax.ffi.ffi_call(WAIT, [target], input_output_aliases={0: 0})
        sources = () if in_place else (source,)
        (arrived,) = wait(started, *sources, **attributes_of(groups))
    return native.unfused(arrived)


def _lower_start(
    context: Any,
    *operands: Any,
    target_name: str,
    types: tuple[Any, ...],
    groups: Groups,
    rows: tuple[int, ...],
    gathers: bool,
    in_place: bool,
    is_kept: bool,
) -> Any:
    aliases = _aliases(in_place, len(types))
    lower = jax.ffi.ffi_lowering(
        target_name, has_side_effect=is_kept, operand_output_aliases=aliases
    )
    return lower(
        context,
        *operands,
        **attributes_of(groups),
        gathers=np.bool_(gathers),
        in_place=np.bool_(in_place),
        rows=np.asarray(rows, np.int64),
        channel=np.int64(context.module_context.new_channel()),
    )


def _run_start(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("copies between devices start in a compiled program")


start = make_primitive(
    "start_copies",
    _run_start,
    lambda *_, types, **__: list(types),
    lowering=_lower_start,
    is_cached=False,  # equal starts would be one function, with one channel
)
"""Starts copies: of sources with ``rows``, to arrays of some ``types``, which a wait takes.

``target_name`` is that of the call, as other calls have; ``is_kept``: XLA must neither leave it out
nor move it."""


def attributes_of(groups: Groups) -> dict[str, Any]:
    """The attributes of a call that say which devices copy among each other."""
    return {"devices": np.asarray(groups, np.int64).ravel(), "per_group": np.int64(len(groups[0]))}


def _aliases(in_place: bool, count: int) -> dict[int, int]:
    """Sources that are the targets."""
    return {i: i for i in range(count)} if in_place else {}


def start_together(eqns: list[Any], values: list[Any]) -> list[jax.Array]:
    """Evaluates traced starts as one call, which sends all their sources together.

    Returns:
      The target of each.
    """
    types = tuple(kind for eqn in eqns for kind in eqn.params["types"])
    rows = tuple(n for eqn in eqns for n in eqn.params["rows"])
    # Kept: XLA could start copies of parameters before a loop, and wait for them in it.
    changed = dict(types=types, rows=rows, is_kept=True)
    return list(start.bind(*values, **eqns[0].params | changed))


def wait_together(
    eqns: list[Any], types: list[Any], targets: list[Any], sources: list[Any], after: list[Any]
) -> list[jax.Array]:
    """Waits for the copies of traced starts that were evaluated together.

    Args:
      eqns: The starts.
      types: The types of the results.
      targets: What the starts returned.
      sources: What the starts read.
      after: Arrays for which the wait waits, too.

    Returns:
      The targets, which have arrived.
    """
    _, in_place, groups = kind_of(eqns[0])
    call = jax.ffi.ffi_call(
        WAIT, types, has_side_effect=True, input_output_aliases=_aliases(True, len(types))
    )
    sources = [] if in_place else sources
    return list(call(*targets, *sources, *after, **attributes_of(groups)))


def is_start(eqn: Any, *, gathers: bool) -> bool:
    """Whether a traced equation starts a gather, or an exchange."""
    return eqn.primitive is start and kind_of(eqn)[0] == gathers


def kind_of(eqn: Any) -> tuple[bool, bool, Groups]:
    """Returns whether a traced start gathers, or exchanges; whether in place; and the groups."""
    return eqn.params["gathers"], eqn.params["in_place"], eqn.params["groups"]
