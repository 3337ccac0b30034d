"""Workarounds for defects of JAX releases, each with the condition for its removal.

jaxlib 0.11 ends the process with a segmentation fault when it compiles a program for several CPU
devices in which a zero-size array enters a manual region together with another array. jaxlib 0.10
and 0.12 do not, and no report of it is known upstream. This crashes on two CPU devices::

    f = lambda x, y: (x, y + 1)
    f = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.jit(f)(jnp.zeros((0, 3)), jnp.ones(3))

Remove ``refuse_empty_leaves`` and the special treatment in ``shard_map`` when jax 0.11 is no longer
supported; a test in ``tests/test_compat.py`` then fails and says so.

JAX has no public way for the lowering of a primitive to see what makes its operands. The argument
``cacheable`` of ``register_lowering`` is documented as temporary, and an inner ``jax.jit`` must be
inlined while it is traced, or its operands are arguments of a function. ``lower_by_operands`` and
``inlined_jit`` are the only places that know of it; tests in ``tests/test_compat.py`` fail if a new
jax changes it. Without them the step is right, and gradients are widened before it.

If jax 0.10 moves an array with its own ``Format`` to several devices, a program reads it correctly
only on the first one. Remove ``row_major`` when jax 0.10 is no longer supported.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding

from jdistadam.core import trees
from jdistadam.errors import ShapeError


def shard_map(
    f: Callable[..., Any],
    *,
    mesh: Mesh,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    axis_names: Iterable[str] = (),
    check_vma: bool = False,
) -> Any:
    """``jax.shard_map`` for arguments that may have zero-size arrays, also inside another one.

    jaxlib 0.11 crashes when it compiles a program for several CPU devices that passes a zero-size
    array into a manual region. Such arrays have no content, so they are made anew inside.
    """
    context = jax.sharding.get_abstract_mesh()
    is_nested = bool(context.manual_axes)

    def mapped(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        treedef: Any = jax.tree.structure(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        passed = [i for i, x in enumerate(leaves) if x.size]

        def local(arrays: list[Any]) -> Any:
            given = iter(arrays)
            return f(
                *treedef.unflatten(
                    next(given)
                    if x.size
                    else jnp.zeros(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)
                    for x, spec in zip(leaves, specs, strict=True)
                )
            )

        inner = jax.shard_map(
            local,
            mesh=context if is_nested else mesh,
            in_specs=([specs[i] for i in passed],),
            out_specs=out_specs,
            axis_names=frozenset(axis_names),
            check_vma=check_vma,
        )
        arguments = [leaves[i] for i in passed]
        if crashes_on_empty_arrays(mesh) and not is_nested:
            _refuse_empty_constants(inner, arguments)
        return inner(arguments)

    return mapped


def crashes_on_empty_arrays(mesh: Mesh) -> bool:
    """Whether XLA crashes when a zero-size array enters a manual region of the mesh."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_cpu and mesh.size > 1 and jax.__version_info__[:2] == (0, 11)


def _refuse_empty_constants(mapped: Any, arguments: list[Any]) -> None:
    """Raises if a mapped function closes over a zero-size array, which enters it unseen."""
    for constant in jax.make_jaxpr(mapped)(arguments).consts:
        if not jnp.size(constant):
            raise ShapeError(
                "loss_fn: closes over a zero-size array, on which jax 0.11 crashes: "
                f"got {jnp.shape(constant)}, expected at least one element. "
                "Make the array inside of loss_fn, or pass it in the batch."
            )


def refuse_empty_leaves(mesh: Mesh, params: Any) -> None:
    """Raises if XLA would crash: see compat.shard_map, which train_step uses."""
    if not crashes_on_empty_arrays(mesh):
        return
    for path, x in trees.named_leaves(params, "params"):
        if not np.size(x):
            raise ShapeError(
                f"{path}: zero-size arguments of jax.shard_map crash jax 0.11 on "
                f"several CPU devices: got {np.shape(x)}, expected at least one element. "
                "Use train_step, or leave such arrays out of the params."
            )


def row_major(tree: Any) -> Any:
    """Returns a tree whose arrays can be moved to several devices: row-major ones in jax 0.10."""
    if jax.__version_info__[:2] > (0, 10):
        return tree

    def copied(x: Any) -> Any:
        given: Any = None if trees.is_traced(x) else getattr(x, "format", None)
        order = getattr(getattr(given, "layout", None), "major_to_minor", None)
        return x if order is None or order == tuple(range(x.ndim)) else jax.jit(jnp.copy)(x)

    return jax.tree.map(copied, tree)


def lower_by_operands(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers how a primitive is compiled, by a rule that sees what makes its operands.

    ``rule(ctx, *values, **params)`` gets values of MLIR. If lowerings were shared between equal
    operations, they would be arguments of a function. A rule for one platform alone would end
    exports for several with a TypeError, so it has to ask ``is_for_nvidia``.
    """
    mlir.register_lowering(primitive, rule, cacheable=False)


def is_for_nvidia(ctx: Any) -> bool:
    """Whether a program is compiled for NVIDIA GPUs alone; ``ctx`` is that of a lowering rule."""
    return tuple(ctx.platforms or ctx.module_context.platforms) == ("cuda",)


def inlined_jit(function: Callable[..., Any], **options: Any) -> Any:
    """``jax.jit``, whose operations become those of a program that calls it while it is traced."""
    inline: Any = getattr(jax, "Inline", None)
    return jax.jit(function, inline=True if inline is None else inline.JAX_EARLY, **options)


def devices_of_lowering(ctx: Any) -> tuple[tuple[Any, ...], int]:
    """Returns a program's devices, none if unknown, and into how many parts XLA may cut an array.

    ``ctx`` is that of a lowering rule. JAX knows the devices of a program with a
    ``custom_partitioning``, as every step has.
    """
    where = ctx.module_context.axis_context
    if (mesh := getattr(where, "mesh", None)) is not None:  # in a shard_map
        manual = math.prod(mesh.shape[axis] for axis in where.manual_axes)
        return tuple(mesh.devices.flat), mesh.size // manual
    num_devices = getattr(where, "num_devices", 0) or 1  # 0 in an export
    return getattr(where, "device_assignment", None) or (), num_devices


def coordination_client() -> Any:
    """The client of the coordination service of ``jax.distributed``; None in a single process.

    JAX has no public API for its key-value store, whose functions have been the same since jax 0.4.
    ``multihost_utils`` offers comparisons of arrays instead, by collectives.
    """
    from jax._src import distributed

    return distributed.global_state.client


class KeyValueStore:
    """JSON values that processes tell each other, by name, through a coordination client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def put(self, name: str, value: Any) -> None:
        """Stores a value for all processes, in place of an earlier one."""
        name = f"{self._prefix}/{name}"
        self._client.key_value_set(name, json.dumps(value), allow_overwrite=True)

    def take_all(self, names: Iterable[str], seconds: float) -> dict[str, Any]:
        """Waits for several values, for all together so long; None for those that do not come."""
        limit = time.monotonic() + seconds
        return {name: self.take(name, max(limit - time.monotonic(), 0.001)) for name in names}

    def take(self, name: str, seconds: float) -> Any:
        """Waits for a value; None if it does not come in time."""
        limit = round(1000 * seconds)
        try:
            text = self._client.blocking_key_value_get(f"{self._prefix}/{name}", limit)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return json.loads(text)

    def delete(self) -> None:
        """Deletes all values."""
        self._client.key_value_delete(self._prefix + "/")
