"""How to shard an optimizer state in ``jax.jit``: ZeRO-1 in a training loop of one's own."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.codecs import BLOCK, BlockCodes
from jdistadam.core.collectives import axes_in, axes_of
from jdistadam.core.trees import OptState, Params
from jdistadam.errors import DtypeError, MeshError


def state_shardings(
    opt_state: OptState,
    params: Params,
    mesh: Mesh,
    axis: str | tuple[str, ...] = "data",
    *,
    param_shardings: Any = None,
) -> Any:
    r"""Returns shardings of an optimizer state for ``jax.jit``: ZeRO-1 in a loop of your own.

    Each array of the state that belongs to a parameter is sharded like the parameter and also over
    ``axis``, along the first dimension that the size of the axis divides. Each of :math:`N` devices
    then keeps :math:`1/N` of the array. All other arrays, such as counts, are replicated. Where
    moments are in "block8" or "block16", all arrays of the parameter are cut along the first
    dimension, into parts of whole blocks of 128 elements. If there are no such parts, all of them
    are replicated; ``distributed`` shards these, too.
    ``fused_adamw`` updates each shard on its device and gathers the new parameters. Results keep
    their shardings, without ``out_shardings``.

    Args:
      opt_state: Any state of optax or ``fused_adamw``, also of a chain: arrays, or their shapes
        (``jax.eval_shape(tx.init, params)``).
      params: The parameters, or their shapes. A ``NamedSharding`` of a parameter is kept.
      mesh: The mesh.
      axis: The mesh axis, or axes, over which the state is sharded in addition.
      param_shardings: A tree like ``params`` of NamedShardings or PartitionSpecs, for shapes
        without. None: the shardings of ``params``, or replicated if they have none.

    Returns:
      A tree like ``opt_state`` of NamedShardings, with one in place of each box of Flax.

    Raises:
      MeshError: The mesh lacks an axis, a parameter is sharded over another mesh, or a
        PartitionSpec does not fit its parameter.
      TreeError: ``param_shardings`` has another structure than ``params``.
      DtypeError: A leaf of ``params`` is no array, such as a function of a module.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
      >>> tx, params = jda.fused_adamw(1e-3), {"w": jnp.ones((1024, 4))}
      >>> shardings = state_shardings(jax.eval_shape(tx.init, params), params, mesh)
      >>> opt_state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> tuple(opt_state[0].mu["w"].sharding.spec)
      ('data', None)
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if name not in mesh.axis_names:
            raise MeshError(
                f"axis: not an axis of the mesh: got {name!r}, expected one of "
                f"{', '.join(map(repr, mesh.axis_names))}. Name an axis of the mesh."
            )
    pairs = trees.leaves_with_path(params)
    places = [getattr(x, "sharding", None) for _, x in pairs]
    if param_shardings is not None:
        places = _as_given(param_shardings, params)
    own = {}
    for (path, x), place in zip(pairs, places, strict=True):
        name = "params" + jax.tree_util.keystr(path)
        if not hasattr(x, "shape"):
            raise DtypeError(
                f"{name}: not an array: got {type(x).__name__}, expected an array or its shape. "
                "Leave it out of the tree, or put None in its place."
            )
        own[path] = x.shape, _spec_of(name, x.shape, place, mesh)
    depths = sorted({len(path) for path in own}, reverse=True)

    def owners(path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        ends = (path[len(path) - depth :] for depth in depths if depth <= len(path))
        return [end for end in ends if end in own]

    leaves = trees.leaves_with_path(opt_state)
    coded = {
        end
        for path, x in leaves
        if _is_of_codes(path)
        for end in owners(path[:-1])
        if own[end][0] == x.shape
    }

    def sharding_of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        if _is_of_codes(path):
            for end in filter(coded.__contains__, owners(path[:-1])):
                return NamedSharding(mesh, _in_blocks(axes, *own[end], mesh))
        for end in owners(path):
            shape, spec = own[end]
            if shape == x.shape:
                cut = _in_blocks if end in coded else _also_over
                return NamedSharding(mesh, cut(axes, shape, spec, mesh))
        return NamedSharding(mesh, P())

    made = [sharding_of(path, x) for path, x in leaves]
    return jax.tree.unflatten(jax.tree.structure(trees.unboxed(opt_state)), made)


def _is_of_codes(path: tuple[Any, ...]) -> bool:
    """Whether a path leads to the codes or scales of a moment, or of something with such a name."""
    return bool(path) and getattr(path[-1], "name", None) in BlockCodes._fields


def _in_blocks(axes: tuple[str, ...], shape: tuple[int, ...], spec: P, mesh: Mesh) -> P:
    """How all arrays of a parameter are cut whose moments are codes: in whole blocks, or not."""
    first, *others = [*map(axes_in, spec), ()]
    names = (*first, *(name for name in axes if name not in axes_of(spec)))
    num_parts = math.prod(mesh.shape[name] for name in names)
    is_whole = shape[0] % num_parts == 0 and math.prod(shape) // num_parts % BLOCK == 0
    return P(names if len(names) > 1 else names[0]) if is_whole and not any(others) else P()


def _as_given(param_shardings: Any, params: Params) -> list[Any]:
    """The shardings of the leaves of params; raises TreeError for another tree."""
    is_place = lambda x: x is None or isinstance(x, NamedSharding | P)  # noqa: E731
    given = jax.tree.map(lambda x: 0, trees.unboxed(param_shardings), is_leaf=is_place)
    like = jax.tree.map(lambda x: 0, trees.unboxed(params))
    trees.check_same_structure(given, like, name="param_shardings", like_name="params")
    return jax.tree.leaves(trees.unboxed(param_shardings), is_leaf=is_place)


def _spec_of(path: str, shape: tuple[int, ...], sharding: Any, mesh: Mesh) -> P:
    """The PartitionSpec of a parameter; replicated if it is on no mesh."""
    if isinstance(sharding, P):
        if not set(axes_of(sharding)) <= set(mesh.axis_names) or len(sharding) > len(shape):
            raise MeshError(
                f"{path}: the PartitionSpec does not fit: got {sharding} for shape {shape}, "
                f"expected axes of the mesh {dict(mesh.shape)}, and at most {len(shape)} of them "
                "or groups of them. Correct it in param_shardings."
            )
        return sharding
    if not isinstance(sharding, NamedSharding):
        return P()
    # Under an explicit mesh, shapes that jax.eval_shape returns have a mesh without devices.
    is_abstract = isinstance(sharding.mesh, AbstractMesh)
    is_here = is_abstract or sharding.device_set == set(mesh.devices.flat)
    if sharding.mesh.shape != mesh.shape or not is_here:
        raise MeshError(
            f"{path}: sharded over another mesh: got {dict(sharding.mesh.shape)}, expected "
            f"{dict(mesh.shape)}, of the same devices. Place the params on this mesh first."
        )
    return sharding.spec


def _also_over(axes: tuple[str, ...], shape: tuple[int, ...], spec: P, mesh: Mesh) -> P:
    """A PartitionSpec with ``axes`` at the first dimension that they divide, if any."""
    if set(axes) & set(axes_of(spec)):
        return spec
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    size = math.prod(mesh.shape[name] for name in axes)
    for i, names in enumerate(map(axes_in, entries)):
        cut = size * math.prod(mesh.shape[name] for name in names)
        if shape[i] and shape[i] % cut == 0:
            new = (*names, *axes)
            entries[i] = new if len(new) > 1 else new[0]
            return P(*entries)
    return spec
