"""Which of their parameters is which of ours, and how its dimensions are ordered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdistadam.core import boxes, trees
from jdistadam.errors import ShapeError, TreeError

Rename = Callable[[str], str | None] | Mapping[str, str | None] | None
Transpose = Callable[[str, int], Sequence[int] | None] | Mapping[str, Sequence[int]] | None


def our_paths(tree: Any) -> list[str]:
    """Returns the path of every leaf with ``/`` between keys, such as ``Dense_0/kernel``."""
    flat = boxes.leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def flax_kernels(path: str, ndim: int) -> tuple[int, ...] | None:
    """Says how the weights of torch's layers become kernels of Flax.

    A linear weight (out, in) becomes (in, out); a convolution's (out, in, ...) becomes
    (..., in, out): OIHW to HWIO. What is not called ``kernel``, such as an embedding, stays.

    Args:
      path: The path of our leaf.
      ndim: The number of its dimensions.

    Example:
      >>> flax_kernels("Conv_0/kernel", 4), flax_kernels("Dense_0/kernel", 2)
      ((2, 3, 1, 0), (1, 0))
      >>> flax_kernels("layers/0/kernel", 2), flax_kernels("Embed_0/embedding", 2)
      ((1, 0), None)
    """
    if path.rpartition("/")[2] != "kernel" or ndim < 2:
        return None
    return (*range(2, ndim), 1, 0)


def their_name_by_path(names: Iterable[str], rename: Rename, like: Any) -> dict[str, str]:
    """Returns their name of each of our leaves, by its path, in the order of our leaves.

    Args:
      names: Their names.
      rename: A function or a dictionary from their names to our paths; None for what has no place
        in ours. If it is None itself, ``a.b`` becomes ``a/b``.
      like: Our tree.

    Raises:
      TreeError: A name leads to none of our leaves, or two lead to one, or none leads to one.
    """
    ours = dict(zip(our_paths(like), trees.paths(like, "params"), strict=True))
    found: dict[str, str] = {}
    names = list(names)
    for name in names:
        path = _renamed(name, rename)
        if path is None:
            continue
        if path not in ours or path in found:
            raise TreeError(
                ours.get(path, f"params: {path}"),
                "two parameters lead here" if path in found else "unexpected: params has no leaf",
                got=f"{name!r} and {found[path]!r}" if path in found else f"{name!r}",
                expected="one of theirs"
                if path in found
                else f"a path such as {next(iter(ours), '')!r}",
                action=f"Fix rename for {name!r}: a path of ours, or None to leave it out.",
            )
        found[path] = name
    if missing := [path for path in ours if path not in found]:
        raise TreeError(
            ours[missing[0]],
            "missing: none of their parameters leads here",
            got=f"{len(found)} of {len(ours)} leaves from {len(names)} names {names[:3]}",
            expected=f"one that rename brings to {missing[0]!r}",
            action="Fix rename, or give the optimizer's whole state.",
        )
    return {path: found[path] for path in ours}


def _renamed(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name.replace(".", "/")
    if callable(rename):
        return rename(name)
    if name not in rename:
        raise TreeError(
            f"rename[{name!r}]",
            "missing: the other optimizer has this parameter",
            got=f"{len(rename)} names",
            expected="a path of ours, or None to leave it out",
            action="Add it.",
        )
    return rename[name]


def axes_by_path(like: Any, transpose: Transpose) -> dict[str, tuple[int, ...]]:
    """Returns the order of their dimensions in each of our leaves, by its path.

    Args:
      like: Our tree.
      transpose: A function of the path of a leaf and its number of dimensions, or a dictionary by
        path, of axes: ours is ``np.transpose(theirs, axes)``. None: the order is the same.

    Raises:
      TreeError: The dictionary has a path of no leaf.
      ShapeError: The axes are no order of the dimensions.
    """
    leaves = dict(zip(our_paths(like), jax.tree.leaves(like), strict=True))
    if isinstance(transpose, Mapping) and (extra := [x for x in transpose if x not in leaves]):
        raise TreeError(
            f"transpose[{extra[0]!r}]",
            "belongs to no leaf",
            got=extra[0],
            expected=f"a path such as {next(iter(leaves), '')!r}",
            action="Fix or remove it.",
        )
    found = {}
    for where, (path, leaf) in zip(trees.paths(like, "params"), leaves.items(), strict=True):
        ndim = len(leaf.shape)
        axes = transpose(path, ndim) if callable(transpose) else (transpose or {}).get(path)
        found[path] = tuple(range(ndim)) if axes is None else tuple(axes)
        if sorted(found[path]) != list(range(ndim)):
            raise ShapeError(
                where,
                "cannot be transposed so",
                got=f"axes {found[path]}",
                expected=f"an order of its {ndim} dimensions",
                action="Fix transpose.",
            )
    return found


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes that undo a transposition."""
    return tuple(int(i) for i in np.argsort(axes))
