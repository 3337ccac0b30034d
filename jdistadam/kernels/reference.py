"""The reference implementation in Python: the Adam formula, sums, and random bits for rounding.

With numpy, it gives the same bits as the compiled kernels. With jax.numpy, the same code is the
fallback if there is no compiled kernel. XLA may contract operations there, so the result is close
but not bitwise equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.codecs import BLOCK, join_halves, split_halves, store

# The random bits of stochastic rounding: the reference of [Note: random bits] in cuda/rounding.h.
#
# The bits of an element depend on the seed, the step, and its index in the whole leaf. numpy and
# jax.numpy give those of the compiled kernels.

_ROUNDS = 7


class RandomBits(NamedTuple):
    """Random words, uint32 of the leaf's shape; rounding uses as many upper bits as it drops."""

    param: Any
    mu: Any
    nu: Any


class LeafPartition(NamedTuple):
    """How a leaf was cut into shards along one dimension, and a shard along another one.

    A shard has pieces of ``piece`` elements, one every ``whole_piece`` elements of the uncut array.
    The last cut comes first: ``piece`` and ``whole_piece`` of its array, then of the whole leaf.
    """

    piece: int
    whole_piece: int
    outer_piece: int
    outer_whole_piece: int

    @classmethod
    def into_runs(cls, size: int) -> LeafPartition:
        """Contiguous shards of equal size."""
        return cls(size, size, 2**63 - 1, 2**63 - 1)


class Index(NamedTuple):
    """Row-major indices in whole leaves: 64 bits as two uint32, as JAX may lack uint64."""

    low: Any
    high: Any


def indices(size: int, cuts: LeafPartition, shards: Any, xp: Any) -> Index:
    """Returns the whole-leaf indices of a shard's elements.

    Args:
      size: Elements of the shard, below 2^32.
      cuts: How the leaf was cut.
      shards: The number of the shard for each cut.
      xp: numpy, or jax.numpy.
    """
    with np.errstate(over="ignore"):
        i = Index(xp.arange(size, dtype=xp.uint32), xp.zeros(size, xp.uint32))
        whole = -(-size // max(cuts.piece, 1)) * cuts.whole_piece
        i = _before_cut(i, size, cuts[:2], shards[0], xp)
        return _before_cut(i, whole, cuts[2:], shards[1], xp)


def _before_cut(i: Index, size: int, cut: tuple[int, int], shard: Any, xp: Any) -> Index:
    piece, whole_piece = cut
    if piece < size:  # several pieces
        if size > 2**32:
            raise NotImplementedError(
                f"a part of {size} elements, cut in two ways, without the compiled kernels"
            )
        row, i = i.low // xp.uint32(piece), Index(i.low % xp.uint32(piece), i.high)
        i = _add(i, _times(row, whole_piece, xp), xp)
    return _add(i, _times(shard, piece, xp), xp)


def _add(a: Index, b: Index, xp: Any) -> Index:
    low = a.low + b.low
    return Index(low, a.high + b.high + (low < b.low).astype(xp.uint32))


def _times(x: Any, n: int, xp: Any) -> Index:
    """A product in 64 bits."""
    x = xp.asarray(x, xp.uint32)
    high, low = _multiply(n & 0xFFFFFFFF, x, xp.uint32)
    return Index(low, high + x * xp.uint32(n >> 32))


def indices_of_blocks(size: int, table: Any, xp: Any) -> tuple[Any, Index]:
    """Returns leaf numbers and indices of the elements of several leaves in blocks.

    Args:
      size: Number of elements.
      table: Shape (blocks, 2), uint32: for each block its leaf number and its number in that leaf.
      xp: numpy, or jax.numpy.
    """
    i = xp.arange(size, dtype=xp.uint32)
    rows = xp.asarray(table)[(i // xp.uint32(BLOCK)).astype(xp.int32)]
    with np.errstate(over="ignore"):
        within = Index(i % xp.uint32(BLOCK), xp.zeros_like(i))
        return rows[:, 0], _add(within, _times(rows[:, 1], BLOCK, xp), xp)


def random_bits(
    key: Any, count: Any, leaf: Any, index: Index, shape: tuple[int, ...], xp: Any
) -> RandomBits:
    """Returns the random bits of elements of leaves.

    Args:
      key: Shape (2,), uint32: the seed.
      count: Steps taken before this one.
      leaf: Number of the leaf in its tree, or an array with the leaf number of every element.
      index: Indices in whole leaves.
      shape: Shape of the result.
      xp: numpy, or jax.numpy.
    """
    u32 = xp.uint32
    low, high = index
    with np.errstate(over="ignore"):
        groups = (low >> u32(2)) | (high << u32(30)), high >> u32(2)
        counter = (*groups, xp.zeros_like(low) + xp.asarray(leaf, u32), xp.asarray(count, u32))
        words = xp.stack(philox(xp.asarray(key, u32), counter, xp), axis=-1)
        which = (low & u32(3)).astype(xp.int32)[:, None]
        word = xp.take_along_axis(words, which, axis=-1).reshape(shape)
        return RandomBits(word << u32(16), word * u32(0x9E3779B9), word)


def philox(key: Any, counter: Any, xp: Any) -> tuple[Any, ...]:
    """Returns the four words of Philox 4x32 with 7 rounds.

    Args:
      key: Two uint32.
      counter: Four arrays of uint32.
      xp: numpy, or jax.numpy.

    References:
      Salmon et al., `Parallel Random Numbers: As Easy as 1, 2, 3
      <https://doi.org/10.1145/2063384.2063405>`_, 2011.
    """
    u32 = xp.uint32
    x0, x1, x2, x3 = (xp.asarray(x, u32) for x in counter)
    k0, k1 = key[0], key[1]
    with np.errstate(over="ignore"):
        for _ in range(_ROUNDS):
            a_high, a_low = _multiply(0xD2511F53, x0, u32)
            b_high, b_low = _multiply(0xCD9E8D57, x2, u32)
            x0, x1, x2, x3 = b_high ^ x1 ^ k0, b_low, a_high ^ x3 ^ k1, a_low
            k0, k1 = k0 + u32(0x9E3779B9), k1 + u32(0xBB67AE85)
    return x0, x1, x2, x3


def _multiply(constant: int, x: Any, u32: Any) -> tuple[Any, Any]:
    """The upper and lower halves of a 64-bit product; JAX may lack uint64."""
    c_high, c_low = u32(constant >> 16), u32(constant & 0xFFFF)
    x_high, x_low = x >> u32(16), x & u32(0xFFFF)
    low, middle = x_low * c_low, x_high * c_low
    other = x_low * c_high + (low >> u32(16)) + (middle & u32(0xFFFF))
    return x_high * c_high + (middle >> u32(16)) + (other >> u32(16)), x * u32(constant)


class AdamResult(NamedTuple):
    """The results of one step of one leaf."""

    params: Any
    mu: Any
    nu: Any
    out: Any  # the update, the cast parameter or the remainder; None in mode "step"


def adam_update(
    c: Mapping[str, Any],
    *,
    g: Any,
    p: Any,
    m: Any,
    v: Any,
    flags: frozenset[str],
    every_term: bool,
    xp: Any,
) -> Any:
    """Returns (update, m, v) in float32: cuda/adam_math.h, operation by operation.

    A term whose coefficient is zero is left out, so an infinite parameter does not become a NaN.
    ``every_term``, for derivatives, keeps them all: the derivative by a zero coefficient is not
    zero. And where both moments are zero, it takes the derivative of the root to be zero: it is
    multiplied by the first moment, and infinity times zero would be NaN.
    """

    def with_term(name: str, x: Any, where: Any = True) -> Any:
        is_there = every_term | (c[name] != 0)
        return xp.where(is_there & where, x + c[name] * p, x)

    g = with_term("l2", g)
    m = c["one_minus_b1"] * g + c["b1"] * m
    v = c["one_minus_b2"] * (g * g) + c["b2"] * v
    if "nesterov" in flags:
        m_hat = c["b1"] * (m / c["c1_next"]) + c["one_minus_b1"] * (g / c["c1"])
    else:
        m_hat = m / c["c1"]

    def root(x: Any) -> Any:
        if not every_term:
            return xp.sqrt(x)
        is_still = (x == 0) & (m_hat == 0)
        return xp.where(is_still, 0, xp.sqrt(xp.where(is_still, 1, x)))

    u = m_hat / (root(v / c["c2"] + c["eps_root"]) + c["eps"])
    is_cautious = "cautious_weight_decay" in flags
    u = with_term("weight_decay", u, where=~(u * p < 0) if is_cautious else True)
    return c["learning_rate"] * u, m, v


def pairwise_sum(terms: Any, xp: Any) -> Any:
    """Adds along the first dimension: adjacent terms, then adjacent sums; odd ones are carried."""
    while len(terms) > 1:
        with np.errstate(all="ignore"):
            pairs = terms[0 : len(terms) - 1 : 2] + terms[1::2]
        terms = xp.concatenate([pairs, terms[len(terms) // 2 * 2 :]])
    return terms[0]


NORM_LANES = 1024
NORM_TILE = 8 * NORM_LANES
"""The lanes of cuda/norm.h and the elements of a tile."""


def sum_of_squares(grads: Any, inv_scale: Any) -> tuple[Any, Any]:
    """The square of the global norm, and whether a gradient is non-finite: cuda/norm.h in numpy."""
    with np.errstate(all="ignore"):
        scaled = [np.ravel(g).astype(np.float32) * inv_scale for g in grads]
        tiles = [
            _sum_lanes(np.square(g[i : i + NORM_TILE]))
            for g in scaled
            for i in range(0, g.size, NORM_TILE)
        ]
        total = store(_sum_lanes(np.asarray(tiles, np.float32)), np.float32, np)
    return total, np.bool_(any(not np.isfinite(g).all() for g in scaled))


def _sum_lanes(terms: Any) -> Any:
    """Each lane adds its terms in sequence; then the lanes are summed in halves."""
    rows = np.zeros((-(-terms.size // NORM_LANES), NORM_LANES), np.float32)
    rows.ravel()[: terms.size] = terms
    lanes = np.zeros(NORM_LANES, np.float32)
    for row in rows:
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


def adam_leaf(
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
    out_dtype: Any = None,
    every_term: bool = False,
    xp: Any = np,
) -> AdamResult:
    """One Adam step of one leaf.

    Args:
      mode: "step", "step_and_cast", "update" or "step_split", as in adam.py.
      c: The coefficients by name, float32 scalars.
      inv_scale: Multiplies the gradient, float32.
      found_inf: Whether to skip the step.
      grad: Gradient, float32, bfloat16 or float16.
      param: Parameter; shape of the gradient, same choice of dtypes.
      mu: First moment, likewise.
      nu: Second moment, likewise.
      remainder: The other half of the parameter, uint16, in mode "step_split".
      flags: The enabled flags of the formula.
      out_dtype: Dtype of ``out``.
      every_term: As in ``adam_update``.
      xp: numpy, or jax.numpy.

    Returns:
      The new values, each in the dtype of the old one.
    """
    f32 = xp.float32
    with np.errstate(all="ignore"):
        is_split = mode == "step_split"
        p = join_halves(param, remainder, xp) if is_split else param.astype(f32)
        g = grad.astype(f32) * inv_scale
        m, v = mu.astype(f32), nu.astype(f32)
        if every_term:  # the derivative of a skipped step must be finite to be multiplied by zero
            g, p, m, v = (xp.where(found_inf, 1, x) for x in (g, p, m, v))
        u, m, v = adam_update(c, g=g, p=p, m=m, v=v, flags=flags, every_term=every_term, xp=xp)
        if is_split:
            new_param, out = split_halves(p - u, param.dtype, xp)
            out_if_skipped = remainder
        elif mode == "update":
            new_param, out, out_if_skipped = param, store(-u, out_dtype, xp), xp.zeros_like(p)
        else:
            new_param, out, out_if_skipped = store(p - u, param.dtype, xp), None, None
            if mode == "step_and_cast":
                out, out_if_skipped = (store(x, out_dtype, xp) for x in (p - u, p))

        def unless_skipped(new: Any, old: Any) -> Any:
            return xp.where(found_inf, old.astype(new.dtype), new)

        return AdamResult(
            unless_skipped(new_param, param),
            unless_skipped(store(m, mu.dtype, xp), mu),
            unless_skipped(store(v, nu.dtype, xp), nu),
            None if out is None else unless_skipped(out, out_if_skipped),
        )


# Sums of squares of gradients, parameters and updates during a step: cuda/squares.h defines them.

RUN = 128
"""Elements per run of a leaf summed by runs."""
KINDS = ("grad", "param", "update")


class SquaresRequest(NamedTuple):
    """The sums of squares that a call takes.

    Attributes:
      by_element: For each leaf whether each of its elements is a run, instead of 128 of them.
      segments: Shape (n, 2), int32: the first run of each sum, and one past the last.
    """

    by_element: tuple[bool, ...]
    segments: Any

    @classmethod
    def of_leaves(cls, grads: Sequence[Any]) -> SquaresRequest:
        """One sum for each leaf."""
        sums = np.cumsum([0, *(num_runs(x.size, False) for x in grads)])
        # Scalars, because custom_partitioning takes no constant array.
        ends = jnp.stack([jnp.int32(x) for x in sums.tolist()])
        return cls((False,) * len(grads), jnp.stack([ends[:-1], ends[1:]], 1))


def num_runs(size: int, by_element: bool) -> int:
    """Returns the number of runs of a leaf."""
    return size if by_element else -(-size // RUN)


def squares_of_leaf(
    mode: str,
    c: Mapping[str, Any],
    inv_scale: Any,
    found_inf: Any,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    remainder: Any,
    *,
    flags: frozenset[str],
    xp: Any,
) -> Any:
    """The squares of a leaf, shape (3, size), float32; arguments are those of ``adam_leaf``."""
    f32 = xp.float32
    with np.errstate(all="ignore"):
        p = join_halves(param, remainder, xp) if mode == "step_split" else param.astype(f32)
        g = grad.astype(f32) * inv_scale
        u, _, _ = adam_update(
            c, g=g, p=p, m=mu.astype(f32), v=nu.astype(f32), flags=flags, every_term=False, xp=xp
        )
        u = xp.where(found_inf, f32(0), u)
        new = xp.where(found_inf, p, p - u)
        return xp.stack([xp.square(x).reshape(-1) for x in (g, new, u)])


def sums_of_runs(squares: Sequence[Any], request: SquaresRequest, xp: Any) -> Any:
    """The sums of squares that a call takes, shape (n, 3), float32; with numpy the same bits."""
    with np.errstate(all="ignore"):
        runs = [
            x if by_element else _runs(x, xp)
            for x, by_element in zip(squares, request.by_element, strict=True)
        ]
        partials = xp.concatenate(runs, axis=1)
        if xp is np:
            pairs = np.clip(request.segments, 0, partials.shape[1])
            sums = [[_sum_lanes(x[a:b]) for x in partials] for a, b in pairs.tolist()]
            return store(np.reshape(sums, (-1, len(KINDS))), np.float32, np)
    at = jnp.arange(partials.shape[1])

    def one(segment: Any) -> jax.Array:
        return jnp.sum(jnp.where((at >= segment[0]) & (at < segment[1]), partials, 0), axis=1)

    return jax.lax.map(one, request.segments)


def _runs(x: Any, xp: Any) -> Any:
    """The sums of runs, along the last dimension: adjacent terms, then adjacent sums."""
    x = xp.pad(x, ((0, 0), (0, -x.shape[1] % RUN))).reshape(len(x), -1, RUN)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
