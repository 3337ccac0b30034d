"""The random bits of stochastic rounding: the reference of [Note: random bits] in cuda/rounding.h.

The bits of an element depend on the seed, the step, and its place in the whole leaf. With numpy and
with jax.numpy they are those of the compiled kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jdistadam.core.codecs import BLOCK

_ROUNDS = 7


class RandomBits(NamedTuple):
    """Random words, uint32 of the leaf's shape; as many upper bits are used as are dropped."""

    param: Any
    mu: Any
    nu: Any


class Cuts(NamedTuple):
    """How a leaf was cut into parts along one dimension, and a part of it along another one.

    A part has pieces of ``piece`` elements, of which one follows another after ``whole_piece``
    elements of the uncut array. First what cut last: ``piece`` and ``whole_piece`` of that array's
    part, then of the whole leaf's.
    """

    piece: int
    whole_piece: int
    outer_piece: int
    outer_whole_piece: int

    @classmethod
    def into_runs(cls, size: int) -> Cuts:
        """Parts of equal size, one behind the other."""
        return cls(size, size, 2**63 - 1, 2**63 - 1)


class Index(NamedTuple):
    """Row-major indices in whole leaves: 64 bits, which JAX may not have, as two uint32."""

    low: Any
    high: Any


def indices(size: int, cuts: Cuts, parts: Any, xp: Any) -> Index:
    """Returns the indices in the whole leaf of the elements of a part.

    Args:
      size: Elements of the part, below 2^32.
      cuts: How it was cut.
      parts: Which part it is, and of which part.
      xp: numpy, or jax.numpy.
    """
    with np.errstate(over="ignore"):
        i = Index(xp.arange(size, dtype=xp.uint32), xp.zeros(size, xp.uint32))
        whole = -(-size // max(cuts.piece, 1)) * cuts.whole_piece
        i = _before_cut(i, size, cuts[:2], parts[0], xp)
        return _before_cut(i, whole, cuts[2:], parts[1], xp)


def _before_cut(i: Index, size: int, cut: tuple[int, int], part: Any, xp: Any) -> Index:
    piece, whole_piece = cut
    if piece < size:  # several pieces
        if size > 2**32:
            raise NotImplementedError(
                f"a part of {size} elements, cut in two ways, without the compiled kernels"
            )
        row, i = i.low // xp.uint32(piece), Index(i.low % xp.uint32(piece), i.high)
        i = _add(i, _times(row, whole_piece, xp), xp)
    return _add(i, _times(part, piece, xp), xp)


def _add(a: Index, b: Index, xp: Any) -> Index:
    low = a.low + b.low
    return Index(low, a.high + b.high + (low < b.low).astype(xp.uint32))


def _times(x: Any, n: int, xp: Any) -> Index:
    """A product in 64 bits."""
    x = xp.asarray(x, xp.uint32)
    high, low = _multiply(n & 0xFFFFFFFF, x, xp.uint32)
    return Index(low, high + x * xp.uint32(n >> 32))


def indices_of_blocks(size: int, table: Any, xp: Any) -> tuple[Any, Index]:
    """Returns the numbers of leaves and the indices, of elements of several leaves in blocks.

    Args:
      size: Number of elements.
      table: Shape (blocks, 2), uint32: of each block the number of its leaf, and its own there.
      xp: numpy, or jax.numpy.
    """
    place = xp.arange(size, dtype=xp.uint32)
    rows = xp.asarray(table)[(place // xp.uint32(BLOCK)).astype(xp.int32)]
    with np.errstate(over="ignore"):
        within = Index(place % xp.uint32(BLOCK), xp.zeros_like(place))
        return rows[:, 0], _add(within, _times(rows[:, 1], BLOCK, xp), xp)


def random_bits(
    key: Any, count: Any, leaf: Any, index: Index, shape: tuple[int, ...], xp: Any
) -> RandomBits:
    """Returns the random bits of elements of leaves.

    Args:
      key: Shape (2,), uint32: the seed.
      count: Steps taken before this one.
      leaf: Number of the leaf in its tree, or those of all elements.
      index: Their indices in whole leaves.
      shape: Shape of the result.
      xp: numpy, or jax.numpy.
    """
    u32 = xp.uint32
    low, high = index
    with np.errstate(over="ignore"):
        groups = (low >> u32(2)) | (high << u32(30)), high >> u32(2)
        counter = (*groups, xp.zeros_like(low) + xp.asarray(leaf, u32), xp.asarray(count, u32))
        words = xp.stack(philox(xp.asarray(key, u32), counter, xp), axis=-1)
        place = (low & u32(3)).astype(xp.int32)[:, None]
        word = xp.take_along_axis(words, place, axis=-1).reshape(shape)
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
    """The upper and the lower half of a product of 64 bits, which JAX may not have."""
    c_high, c_low = u32(constant >> 16), u32(constant & 0xFFFF)
    x_high, x_low = x >> u32(16), x & u32(0xFFFF)
    low, middle = x_low * c_low, x_high * c_low
    other = x_low * c_high + (low >> u32(16)) + (middle & u32(0xFFFF))
    return x_high * c_high + (middle >> u32(16)) + (other >> u32(16)), x * u32(constant)
