"""Sums of squares of gradients, parameters and updates, taken during a step.

cuda/squares.h defines the sums and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.arguments import store
from jdistadam.core.codecs import join_halves
from jdistadam.kernels import native, reference

RUN = 128
"""Elements per run of a leaf that is not fine."""
KINDS = ("grad", "param", "update")


class Asked(NamedTuple):
    """The sums of squares that a call takes.

    Attributes:
      fine: For each leaf whether each of its elements is a run, instead of 128 of them.
      segments: Shape (n, 2), int32: the first run of each sum, and one past the last.
    """

    fine: tuple[bool, ...]
    segments: Any


def num_runs(size: int, is_fine: bool) -> int:
    """Returns the number of runs of a leaf."""
    return size if is_fine else -(-size // RUN)


def ffi_call(
    target: str, results: Sequence[Any], aliases: dict[int, int], asked: Asked | None, runs: int
) -> Callable[..., tuple[Sequence[jax.Array], Any]]:
    """Returns a call of a step, which returns its results, and the sums or None.

    Args:
      target: The handler of steps without sums.
      results: Types of its results.
      aliases: Operand number to result number.
      asked: The requested sums; None: none.
      runs: Number of runs of all leaves.
    """
    if asked is None:
        call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
        return lambda *args, **attributes: (call(*args, **attributes), None)
    shapes = (asked.segments.shape[0], len(KINDS)), (len(KINDS), runs)
    sums = [native.type_like(asked.segments, shape, jnp.float32) for shape in shapes]
    moved = {operand + 1: result + len(sums) for operand, result in aliases.items()}
    call = jax.ffi.ffi_call(f"{target}_squares", [*sums, *results], input_output_aliases=moved)

    def with_sums(*args: Any, **attributes: Any) -> tuple[Sequence[jax.Array], Any]:
        none = np.zeros(0, np.int64)
        attributes = {"mu_offsets": none, "nu_offsets": none} | attributes
        out = call(asked.segments, *args, fine=np.asarray(asked.fine, np.int32), **attributes)
        return out[len(sums) :], out[0]

    return with_sums


def of_leaf(
    mode: str,
    c: Mapping[str, Any],
    inv_scale: Any,
    found_inf: Any,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    remainder: Any = None,
    *,
    flags: frozenset[str] = frozenset(),
    xp: Any = np,
) -> Any:
    """The squares of a leaf by the reference implementation, shape (3, size), float32.

    Arguments are those of ``reference.adam_leaf``.
    """
    f32 = xp.float32
    with np.errstate(all="ignore"):
        p = join_halves(param, remainder, xp) if mode == "step_split" else param.astype(f32)
        g = grad.astype(f32) * inv_scale
        u, _, _ = reference.adam_update(
            c, g=g, p=p, m=mu.astype(f32), v=nu.astype(f32), flags=flags, every_term=False, xp=xp
        )
        u = xp.where(found_inf, f32(0), u)
        new = xp.where(found_inf, p, p - u)
        return xp.stack([xp.square(x).reshape(-1) for x in (g, new, u)])


def sums(squares: Sequence[Any], asked: Asked, xp: Any) -> Any:
    """The sums of the squares of all leaves, shape (n, 3), float32; with numpy the same bits."""
    with np.errstate(all="ignore"):
        runs = [
            x if is_fine else _runs(x, xp) for x, is_fine in zip(squares, asked.fine, strict=True)
        ]
        partials = xp.concatenate(runs, axis=1)
        if xp is np:
            pairs = np.clip(asked.segments, 0, partials.shape[1])
            found = [[reference._sum_lanes(x[a:b]) for x in partials] for a, b in pairs.tolist()]
            return store(np.reshape(found, (-1, len(KINDS))), np.float32, np)
    at = jnp.arange(partials.shape[1])

    def one(segment: Any) -> jax.Array:
        return jnp.sum(jnp.where((at >= segment[0]) & (at < segment[1]), partials, 0), axis=1)

    return jax.lax.map(one, asked.segments)


def _runs(x: Any, xp: Any) -> Any:
    """The sums of runs, along the last dimension: adjacent terms, then adjacent sums."""
    x = xp.pad(x, ((0, 0), (0, -x.shape[1] % RUN))).reshape(len(x), -1, RUN)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
