"""Trees of ours from named leaves of theirs, and back: exact copies, leaf by leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistadam.core import trees
from jdistadam.errors import DtypeError, ShapeError, TreeError
from jdistadam.interop import name_map
from jdistadam.interop.name_map import Rename, Transpose
from jdistadam.interop.named_state import NamedLeaf, NamedState


class AdamTrees(NamedTuple):
    """What Adam holds, as trees with the structure of our parameters, of numpy arrays.

    Attributes:
      params: Exact parameters, float32.
      mu: First moments, in the dtype in which they were kept.
      nu: Second moments, likewise.
    """

    params: Any
    mu: Any
    nu: Any


def to_trees(
    theirs: NamedState,
    like: Any,
    rename: Rename,
    transpose: Transpose,
    is_frozen: Sequence[bool],
) -> AdamTrees:
    """Returns trees of what is theirs.

    Args:
      theirs: The state.
      like: Tree of arrays or shapes: our parameters.
      rename: From their names to our paths, as ``their_name_by_path`` takes it.
      transpose: As ``axes_by_path`` takes it.
      is_frozen: For each leaf of ours, whether it is never trained: it may have no moments then,
        and gets zeros.

    Raises:
      TreeError: A leaf is missing, or one of theirs has no place in ours.
      ShapeError: One has another shape than ours.
      DtypeError: One has a dtype that float32 does not hold.
    """
    trees.check_dtypes(like, name="like", action="Pass our parameters, or their shapes.")
    names = name_map.their_name_by_path(theirs.leaves, rename, like)
    axes = name_map.axes_by_path(like, transpose)
    ours = zip(trees.paths(like, "params"), jax.tree.leaves(like), is_frozen, strict=True)
    made = [
        _our_leaf(where, tuple(x.shape), names[path], theirs, axes[path], frozen)
        for path, (where, x, frozen) in zip(name_map.our_paths(like), ours, strict=True)
    ]
    treedef: Any = jax.tree.structure(like)
    parts = zip(*made, strict=True) if made else ((), (), ())
    return AdamTrees(*(treedef.unflatten(list(part)) for part in parts))


def _our_leaf(
    where: str,
    shape: tuple[int, ...],
    name: str,
    theirs: NamedState,
    axes: tuple[int, ...],
    is_frozen: bool,
) -> NamedLeaf:
    """Copies one leaf into our order of dimensions."""
    leaf = theirs.leaves[name]
    if leaf.param is None:
        raise TreeError(
            where,
            "missing: the state has moments of it alone",
            got=f"no parameter {name!r}",
            expected=f"an array of shape {shape}",
            action=f"Pass it in params, under the name {name!r}.",
        )
    if (leaf.mu is None or leaf.nu is None) and not is_frozen:
        raise TreeError(
            where,
            "has no moments in the other optimizer, which never stepped it",
            got=f"no state of {name!r}",
            expected="exp_avg and exp_avg_sq",
            action="Freeze it here too, with param_labels and groups.",
        )
    zeros = np.zeros(np.shape(leaf.param), np.float32)
    given = [leaf.param, *(zeros if x is None else x for x in (leaf.mu, leaf.nu))]
    for key, x in zip(("parameter", "exp_avg", "exp_avg_sq"), given, strict=True):
        _check_dtype(where, f"{key} of {name!r}", x)
    if len(given[0].shape) != len(axes) or given[0].transpose(axes).shape != shape:
        raise ShapeError(
            where,
            "shape differs from the other framework's",
            got=f"{given[0].shape} of {name!r}, whose dimensions are taken in the order {axes}",
            expected=shape,
            action="Fix transpose or rename; flax_kernels transposes what torch's layers have.",
        )
    ours = [np.array(x.transpose(axes), order="C") for x in given]  # copies: theirs may train on
    return NamedLeaf(ours[0].astype(np.float32, copy=False), *ours[1:])


def _check_dtype(where: str, what: str, x: np.ndarray) -> None:
    if x.dtype not in trees.STORAGE_DTYPES:
        raise DtypeError(
            where,
            "dtype cannot be used",
            got=f"{x.dtype} for {what}",
            expected=" or ".join(map(str, trees.STORAGE_DTYPES)),
            action="Convert it before, if the rounding is meant.",
        )


def to_leaves(
    ours: AdamTrees,
    names: Sequence[str],
    rename: Rename,
    transpose: Transpose,
    is_frozen: Sequence[bool],
) -> Mapping[str, NamedLeaf]:
    """Returns named leaves of what is ours, in the order of ``names``: the inverse."""
    name_of = name_map.their_name_by_path(names, rename, ours.params)
    axes = name_map.axes_by_path(ours.params, transpose)
    parts = zip(*map(jax.tree.leaves, ours), is_frozen, strict=True)
    made = {}
    for path, (param, mu, nu, frozen) in zip(name_map.our_paths(ours.params), parts, strict=True):
        order = name_map.inverse(axes[path])
        given = (param, *((None, None) if frozen else (mu, nu)))
        made[name_of[path]] = NamedLeaf(*(x if x is None else _ordered(x, order) for x in given))
    return {name: made[name] for name in names if name in made}


def _ordered(x: Any, axes: tuple[int, ...]) -> np.ndarray:
    return np.array(np.asarray(x).transpose(axes), order="C")


def check_kept(exact: Any, like: Any, *, keeps_main: bool) -> None:
    """Raises DtypeError where our parameters would lose bits, and nothing would keep these.

    Args:
      exact: The parameters, float32.
      like: Our parameters, in their dtypes.
      keeps_main: Whether the optimizer keeps main parameters.
    """
    if keeps_main:
        return
    leaves = zip(
        trees.paths(like, "params"), jax.tree.leaves(exact), jax.tree.leaves(like), strict=True
    )
    for where, x, y in leaves:
        if x.dtype != y.dtype and (x.astype(y.dtype).astype(x.dtype) != x).any():
            raise DtypeError(
                where,
                "would be rounded, and the optimizer keeps no main parameters",
                got="float32 parameters",
                expected=f"what {y.dtype} holds exactly",
                action="Use main_params_dtype=jnp.float32, or read the model's own parameters.",
            )
