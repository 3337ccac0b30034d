"""Rounding to 16 or 8 bits, to nearest or at random: the reference of cuda/rounding.h.

Its notes, [Note: random bits], [Note: blocks] and [Note: subnormal codes], say what is computed.
With numpy all bits are those of the compiled kernels; with jax.numpy too, but for numbers below
2^-126 where XLA flushes these to zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jdistadam.core.codecs import BLOCK, BlockCodes, Codec

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
    """The numbers that a code can mean, relative to the scale of its block."""

    codec: Codec
    is_signed: bool

    @classmethod
    def of(cls, name: str, codec: Codec) -> Code:
        """That of the moment "mu" or "nu"."""
        return cls(codec, name == "mu")

    @property
    def sign(self) -> int:
        """The bit of the sign; 0 where there is none."""
        return 1 << (self.codec.bits - 1) if self.is_signed else 0

    @property
    def magnitude(self) -> int:
        """All other bits."""
        return (1 << self.codec.bits) - 1 - self.sign

    @property
    def dropped(self) -> int:
        """Bits of the mantissa of a float32 that a code does not have."""
        return 23 - self.codec.mantissa

    @property
    def highest_exponent(self) -> int:
        """The exponent field of the largest codes, all of which are finite."""
        return self.magnitude >> self.codec.mantissa

    @property
    def smallest_scale(self) -> int:
        """The exponent of the smallest scale: below it a code would mean a subnormal float32."""
        return -126 + self.highest_exponent + self.codec.mantissa - 1


def num_blocks(size: int) -> int:
    """Returns how many blocks hold ``size`` elements."""
    return -(-size // BLOCK)


def decode(name: str, moment: BlockCodes, xp: Any) -> Any:
    """Returns the float32 that the codes of the moment "mu" or "nu" mean."""
    code, u32 = Code.of(name, moment.codec), xp.uint32
    mantissa, highest = code.codec.mantissa, code.highest_exponent
    codes = moment.codes.reshape(-1).astype(u32)
    magnitude = codes & u32(code.magnitude)
    normal = ((magnitude + u32((127 - highest) << mantissa)) << u32(code.dropped)).view(xp.float32)
    subnormal = magnitude.astype(xp.float32) * xp.float32(2.0 ** (1 - highest - mantissa))
    with np.errstate(all="ignore"):
        x = xp.where(magnitude >> u32(mantissa) > 0, normal, subnormal)
        x = x * xp.repeat(moment.scales, BLOCK)[: codes.size]
    # The zero of a scale that is zero has the sign of its code, as in the kernels.
    sign = (codes & u32(code.sign)) << u32(32 - code.codec.bits)
    return (x.view(u32) | sign).view(xp.float32).reshape(moment.shape)


def encode(name: str, codec: Codec, x: Any, random: Any, xp: Any) -> BlockCodes:
    """Returns float32s of the moment "mu" or "nu" as codes.

    Args:
      name: "mu" or "nu".
      codec: The codec of the codes.
      x: The numbers, of any shape; blocks are in row-major order.
      random: A random word for each, uint32. None: to nearest, ties to even, and to subnormal
        codes toward zero for "mu", up for "nu".
      xp: numpy, or jax.numpy.
    """
    code, u32 = Code.of(name, codec), xp.uint32
    size, blocks, dropped = x.size, num_blocks(x.size), code.dropped

    def in_blocks(y: Any) -> Any:
        return xp.pad(y.reshape(-1), (0, blocks * BLOCK - size)).reshape(blocks, BLOCK)

    bits = in_blocks(x.view(u32))
    added = None if random is None else in_blocks(random) >> u32(32 - dropped)

    def increment(magnitude: Any) -> Any:
        nearest = u32((1 << dropped - 1) - 1) + ((magnitude >> u32(dropped)) & u32(1))
        return nearest if added is None else added

    magnitude = bits & u32(0x7FFFFFFF)
    is_large = magnitude >= 0x7F000000
    clipped = xp.where(is_large, u32(0), magnitude)
    rounded = (clipped + increment(clipped)) >> u32(dropped) << u32(dropped)
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
        up = increment(low)
        if random is None:  # [Note: subnormal codes]
            away = 0 if code.is_signed else (1 << dropped) - 1
            up = xp.where(low < u32(0x00800000), u32(away), up)
        codes = (low + up) >> u32(dropped)
    if code.is_signed:
        codes = codes | (bits >> u32(32 - codec.bits) & u32(code.sign))
    else:
        codes = xp.where((codes == 0) & (magnitude != 0), u32(1), codes)
    codes = xp.where(is_nan | is_zero, u32(0), codes)
    codes = codes.reshape(-1)[:size].reshape(x.shape).astype(codec.dtype)
    return BlockCodes(codes, scale_bits.reshape(-1).view(xp.float32))
