"""Rounding to 16 or 8 bits, to nearest or at random: the reference of cuda/rounding.h.

Its notes, [Note: random bits] and [Note: block8], say what is computed. With numpy all bits are
those of the compiled kernels; with jax.numpy too, but for numbers below 2^-126 where XLA flushes
these to zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jdistadam.core.moments import BLOCK

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


def round_at_random(x: Any, dtype: Any, random: Any, xp: Any) -> Any:
    """Rounds float32 to bfloat16 or float16 with random words; float32 stays as it is."""
    u32 = xp.uint32
    x = xp.where(xp.isnan(x), xp.asarray(np.nan, xp.float32), x)
    bits = x.view(u32)
    name = np.dtype(dtype).name
    if name == "bfloat16":
        return ((bits + (random >> u32(16))) >> u32(16)).astype(xp.uint16).view(dtype)
    if name != "float16":
        return x.astype(dtype)
    magnitude = bits & u32(0x7FFFFFFF)
    low = _scaled_down(magnitude, 112, xp)
    half = (low + (random >> u32(19))) >> u32(13)
    half = xp.where((half > 0x7C00) | (magnitude == 0x7F800000), u32(0x7C00), half)
    half = xp.where(magnitude > 0x7F800000, u32(0x7E00), half)
    return (half | (bits >> u32(16) & u32(0x8000))).astype(xp.uint16).view(dtype)


def _scaled_down(bits: Any, exponent: int, xp: Any) -> Any:
    """The bits of positive float32s times 2^-exponent, also where XLA flushes these to zero."""
    u32 = xp.uint32
    is_normal = bits >= u32((exponent + 1) << 23)
    dropped = xp.clip(u32(exponent + 1) - (bits >> u32(23)), u32(1), u32(25))
    mantissa = (bits & u32(0x7FFFFF)) | u32(0x800000)
    half = u32(1) << (dropped - u32(1))
    subnormal = (mantissa + half - u32(1) + ((mantissa >> dropped) & u32(1))) >> dropped
    is_large = bits >= u32(0x7F800000)  # infinite, or NaN
    scaled = xp.where(is_normal, bits - u32(exponent << 23), subnormal)
    return xp.where(is_large, bits, scaled)


class Code(NamedTuple):
    """The numbers that a code of 8 bits can mean, relative to the scale of its block."""

    is_signed: bool
    highest_exponent: int

    @property
    def smallest_scale(self) -> int:
        """The exponent of the smallest scale: below it a code would mean a subnormal float32."""
        return -126 + self.highest_exponent + 2


MU = Code(is_signed=True, highest_exponent=15)
NU = Code(is_signed=False, highest_exponent=31)


def num_blocks(size: int) -> int:
    """Returns how many blocks hold ``size`` elements."""
    return -(-size // BLOCK)


def decode(code: Code, codes: Any, scales: Any, xp: Any) -> Any:
    """Returns the float32 that codes of any shape mean, with the scales of their blocks."""
    u32 = xp.uint32
    values = xp.asarray(_values(code))[codes.reshape(-1).astype(xp.int32)]
    with np.errstate(all="ignore"):
        x = values * xp.repeat(scales, BLOCK)[: values.size]
    # The zero of a scale that is zero has the sign of its code, as in the kernels.
    sign = codes.reshape(-1).astype(u32) >> u32(7) << u32(31) if code.is_signed else u32(0)
    return (x.view(u32) | sign).view(xp.float32).reshape(codes.shape)


def _values(code: Code) -> Any:
    """What each code means where the scale is one."""
    codes = np.arange(256)
    magnitude = codes & 0x7F if code.is_signed else codes
    exponent, fraction = magnitude >> 3, magnitude & 7
    mantissa = np.where(exponent > 0, 8 + fraction, fraction)
    values = np.ldexp(mantissa, np.maximum(exponent, 1) - code.highest_exponent - 3)
    return np.float32(np.where(codes > magnitude, -values, values))


def encode(code: Code, x: Any, random: Any, xp: Any) -> tuple[Any, Any]:
    """Returns (codes, scales) of float32s.

    Args:
      code: MU or NU.
      x: The numbers, of any shape; blocks are in row-major order.
      random: A random word for each, uint32. None: to nearest, ties to even.
      xp: numpy, or jax.numpy.
    """
    u32 = xp.uint32
    size, blocks = x.size, num_blocks(x.size)

    def in_blocks(y: Any) -> Any:
        return xp.pad(y.reshape(-1), (0, blocks * BLOCK - size)).reshape(blocks, BLOCK)

    bits = in_blocks(x.view(u32))
    added = None if random is None else in_blocks(random) >> u32(12)

    def increment(magnitude: Any) -> Any:
        nearest = u32(0x7FFFF) + ((magnitude >> u32(20)) & u32(1))
        return nearest if added is None else added

    magnitude = bits & u32(0x7FFFFFFF)
    is_large = magnitude >= 0x7F000000
    clipped = xp.where(is_large, u32(0), magnitude)
    rounded = (clipped + increment(clipped)) & u32(0xFFF00000)
    rounded = xp.where((rounded == 0) & (magnitude != 0), u32(1), rounded)
    rounded = xp.where(is_large, u32(0x7F000000), rounded)
    largest = xp.max(rounded, axis=1, keepdims=True)
    is_zero = largest < (0x00800000 if code.is_signed else 1)  # no code of mu means less
    smallest = u32(127 + code.smallest_scale << 23)
    exponent = xp.maximum(largest & u32(0x7F800000), smallest)
    is_nan = largest >= 0x7F000000
    scale_bits = xp.where(is_nan, u32(0x7FC00000), xp.where(is_zero, u32(0), exponent))
    inverse = (u32(0x7F000000) - exponent).view(xp.float32)
    with np.errstate(all="ignore"):
        relative = (magnitude.view(xp.float32) * inverse).view(u32)
        low = _scaled_down(relative, 127 - code.highest_exponent, xp)
        codes = (low + increment(low)) >> u32(20)
    if code.is_signed:
        codes = codes | (bits >> u32(24) & u32(0x80))
    else:
        codes = xp.where((codes == 0) & (magnitude != 0), u32(1), codes)
    codes = xp.where(is_nan | is_zero, u32(0), codes)
    codes = codes.reshape(-1)[:size].reshape(x.shape).astype(xp.uint8)
    return codes, scale_bits.reshape(-1).view(xp.float32)
