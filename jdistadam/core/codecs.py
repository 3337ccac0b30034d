"""How arrays of numbers are stored: as floats, as halves of floats, or in blocks of codes.

A ``Codec`` knows its size, its bounds, and how to encode and decode numbers. Its ``encode`` and
``decode`` are the reference of cuda/rounding.h, whose notes [Note: blocks] and
[Note: subnormal codes] define the result. With numpy the results equal those of the compiled
kernels bit for bit; with jax.numpy they do too, except for numbers below 2^-126, which XLA flushes
to zero.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.errors import DtypeError

BLOCK = 128
"""Elements that share a scale."""

SMALLEST_CODED = 4096
"""Leaves with fewer elements have float32 moments."""


HALVES = (jnp.bfloat16, jnp.float16)
"""The dtypes of floats of 16 bits."""


# [Note: moments that follow]
# A step stores (1 + e) (b m + (1 - b) g) instead of b m + (1 - b) g. With rounding to nearest and M
# bits of mantissa, |e| <= h = 1 / (2^(M + 1) + 1). The stored value is between the means with the
# decay rates b (1 - h) and b (1 + h).
# Decay: if b (1 + h) reaches 1, a moment stays where it is. Up to b = 1 / (1 + 2 h) rounding at
# most doubles the memory of the mean, as 1 - b (1 + h) is at least half of 1 - b.
# Updates: by the Cauchy-Schwarz inequality a step turns r = |mu| / sqrt(nu) into at most
# sqrt((1 - b1)^2 / (1 - b2) + b1^2 / b2 r^2). Rounding multiplies that by up to
# q = (1 + h_mu) / sqrt(1 - h_nu). If q^2 b1^2 < b2, an update, which is computed before rounding,
# stays below sqrt((1 - b1)^2 / (1 - b2) / (1 - q^2 b1^2 / b2)). For float32 q is 1.
# Subnormal codes change nothing: they round mu toward zero and nu up.


class CodeBits(NamedTuple):
    """The bits of a code: an optional sign, then an exponent, then a mantissa."""

    sign: int
    """The bit of the sign; 0 without a sign."""
    magnitude: int
    """All other bits."""
    dropped: int
    """Mantissa bits of a float32 that a code drops."""
    highest_exponent: int
    """The exponent field of the largest codes, which are all finite."""
    smallest_scale: int
    """The exponent of the smallest scale; a smaller one would need subnormal float32s."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """How an array of numbers is stored.

    Attributes:
      name: Its name in ``mu_dtype``, ``nu_dtype`` and ``main_params_dtype``.
      dtype: The dtype of the stored array; for codes, of the codes.
      mantissa: Bits of a number's mantissa.
      block: Elements that share a float32 scale; 1: no scales. Arrays are cut at multiples of it.
      is_remainder: Whether the array is the remainder of a bfloat16 parameter.
    """

    name: str
    dtype: np.dtype[Any]
    mantissa: int
    block: int = 1
    is_remainder: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether numbers are stored as codes with scales, in ``BlockCodes``."""
        return self.block > 1

    @property
    def is_stored(self) -> bool:
        """Whether anything is stored."""
        return self.dtype.itemsize > 0

    @property
    def argument(self) -> str | None:
        """Its name in arguments and files: None if nothing is stored."""
        return self.name if self.is_stored else None

    @property
    def bits(self) -> int:
        """Bits of a number, without its share of a scale."""
        return 8 * self.dtype.itemsize

    @property
    def rounding_error(self) -> float:
        """The largest relative distance of a number to the nearest stored one: h."""
        return 1 / (2 ** (self.mantissa + 1) + 1)

    @property
    def largest_decay(self) -> float:
        """The largest decay rate with which a moment rounded to nearest follows its gradients.

        The bound of [Note: moments that follow], rounded down to three decimals.
        """
        return math.floor(1000 / (1 + 2 * self.rounding_error)) / 1000

    def num_scales(self, size: int) -> int:
        """Returns the number of scales of ``size`` elements."""
        return -(-size // self.block) if self.is_coded else 0

    def nbytes(self, size: int) -> int:
        """Returns the bytes of ``size`` elements including scales."""
        return size * self.dtype.itemsize + 4 * self.num_scales(size)

    def code(self, moment: str) -> CodeBits:
        """Returns the bits of a code of the moment "mu", which has a sign, or "nu"."""
        sign = 1 << (self.bits - 1) if moment == "mu" else 0
        magnitude = (1 << self.bits) - 1 - sign
        highest = magnitude >> self.mantissa
        return CodeBits(sign, magnitude, 23 - self.mantissa, highest, highest + self.mantissa - 127)

    def decode(self, moment: str, stored: Any, xp: Any) -> Any:
        """Returns the float32 values of a stored moment.

        Args:
          moment: "mu" or "nu".
          stored: An array, or ``BlockCodes``.
          xp: numpy, or jax.numpy.
        """
        if not self.is_coded:
            return stored.astype(xp.float32)
        code, u32 = self.code(moment), xp.uint32
        codes = stored.codes.reshape(-1).astype(u32)
        magnitude = codes & u32(code.magnitude)
        bias = 127 - code.highest_exponent
        normal = ((magnitude + u32(bias << self.mantissa)) << u32(code.dropped)).view(xp.float32)
        subnormal = magnitude.astype(xp.float32) * xp.float32(2.0 ** (bias - 126 - self.mantissa))
        with np.errstate(all="ignore"):
            x = xp.where(magnitude >> u32(self.mantissa) > 0, normal, subnormal)
            x = x * xp.repeat(stored.scales, self.block)[: codes.size]
        # If a scale is zero, the zero has the sign of its code, as in the kernels.
        sign = (codes & u32(code.sign)) << u32(32 - self.bits)
        return (x.view(u32) | sign).view(xp.float32).reshape(stored.shape)

    def encode(self, moment: str, x: Any, random: Any, xp: Any) -> Any:
        """Returns a moment's float32 values as stored: an array, or ``BlockCodes``.

        Args:
          moment: "mu" or "nu".
          x: The values, of any shape; blocks are in row-major order.
          random: A random uint32 for each value, for stochastic rounding. None: to nearest, ties to
            even; subnormal codes round toward zero for "mu", up for "nu".
          xp: numpy, or jax.numpy.
        """
        if not self.is_coded:
            if random is None:
                return store(x, self.dtype, xp)
            return round_at_random(x, self.dtype, random, xp)
        code, u32 = self.code(moment), xp.uint32
        size, blocks, dropped = x.size, self.num_scales(x.size), code.dropped

        def in_blocks(y: Any) -> Any:
            padding = (0, blocks * self.block - size)
            return xp.pad(y.reshape(-1), padding).reshape(blocks, self.block)

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
        is_zero = largest < (0x00800000 if code.sign else 1)  # codes of mu have no smaller values
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
                away = 0 if code.sign else (1 << dropped) - 1
                up = xp.where(low < u32(0x00800000), u32(away), up)
            codes = (low + up) >> u32(dropped)
        if code.sign:
            codes = codes | (bits >> u32(32 - self.bits) & u32(code.sign))
        else:
            codes = xp.where((codes == 0) & (magnitude != 0), u32(1), codes)
        codes = xp.where(is_nan | is_zero, u32(0), codes)
        codes = codes.reshape(-1)[:size].reshape(x.shape).astype(self.dtype)
        return BlockCodes(codes, scale_bits.reshape(-1).view(xp.float32))

    def join(self, param: Any, main: Any, xp: Any) -> Any:
        """Returns the float32 value of a parameter; for ``NOTHING`` the parameter itself.

        Args:
          param: The parameter.
          main: What is stored with it as its main parameter; None for ``NOTHING``.
          xp: numpy, or jax.numpy.
        """
        if self.is_remainder:
            return join_halves(param, main, xp)
        return main if self.is_stored else param

    def split(self, value: Any, param_dtype: Any, xp: Any) -> tuple[Any, Any]:
        """Splits a float32 into (parameter, main parameter to store): the inverse of ``join``.

        Args:
          value: The float32 value.
          param_dtype: Dtype of the parameter.
          xp: numpy, or jax.numpy.
        """
        if self.is_remainder:
            return split_halves(value, param_dtype, xp)
        return value.astype(param_dtype), value if self.is_stored else None


def store(x: Any, dtype: Any, xp: Any) -> Any:
    """Rounds float32 once to ``dtype``, ties to even; every NaN becomes the positive quiet NaN."""
    return xp.where(xp.isnan(x), xp.asarray(np.nan, xp.float32), x).astype(dtype)


# [Note: remainders]
# A float32 is kept in two halves of 16 bits: the parameter, which is the nearest bfloat16, and the
# low half of its bits. Rounding is to nearest with ties away from zero. A cast rounds ties to even
# and has no inverse in 16 bits: an even bfloat16 is then the nearest of 65,537 float32s. A low half
# of 0x8000 or more means that the upper half was rounded up; as an int16 it is the negative number
# to add. cuda/dtype.h has the same two functions.


def split_halves(x: Any, bfloat16: Any, xp: Any) -> tuple[Any, Any]:
    """A float32 as its nearest bfloat16 and its low 16 bits: [Note: remainders]."""
    bits = store(x, xp.float32, xp).view(xp.uint32)
    high = ((bits + xp.uint32(0x8000)) >> 16).astype(xp.uint16).view(bfloat16)
    return high, bits.astype(xp.uint16)


def join_halves(high: Any, low: Any, xp: Any) -> Any:
    """The float32 whose halves are a bfloat16 and a uint16: [Note: remainders]."""
    signed = low.view(xp.int16).astype(xp.int32).view(xp.uint32)
    return ((high.view(xp.uint16).astype(xp.uint32) << 16) + signed).view(xp.float32)


def float_codec(dtype: Any) -> Codec:
    """Returns the codec that stores plain floats."""
    dtype = jnp.dtype(dtype)
    return Codec(dtype.name, dtype, jnp.finfo(dtype).nmant)


FLOAT32, BFLOAT16, FLOAT16 = map(float_codec, ("float32", "bfloat16", "float16"))
NOTHING = Codec("nothing", np.dtype(np.void), 0)
BLOCK8 = Codec("block8", np.dtype(np.uint8), 3, BLOCK)
BLOCK16 = Codec("block16", np.dtype(np.uint16), 10, BLOCK)
REMAINDER16 = Codec("remainder16", np.dtype(np.uint16), 23, is_remainder=True)
"""The low half of a float32; the bfloat16 parameter is the other: [Note: remainders]."""

BLOCK_CODECS = (BLOCK8, BLOCK16)


def growth(mu: Codec, nu: Codec) -> float:
    """Returns how much rounding to nearest increases mu^2 / nu at most: q^2.

    See [Note: moments that follow]; 1 for plain floats.
    """
    of_mu, of_nu = (x.rounding_error if x.is_coded else 0.0 for x in (mu, nu))
    return (1 + of_mu) ** 2 / (1 - of_nu)


class BlockCodes(NamedTuple):
    """A moment in "block8" or "block16", in place of an array in a tree of moments.

    Attributes:
      codes: The parameter's shape; uint8 for "block8", uint16 for "block16".
      scales: Shape (number of elements / 128, rounded up,), float32: a power of two for each block
        of 128 elements in row-major order.

    References:
      Block-wise scales: Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2021. Here the codes are small floats.
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the moment."""
        return tuple(self.codes.shape)


def is_codes(x: Any) -> bool:
    """Whether ``x`` is a moment in blocks of codes."""
    return isinstance(x, BlockCodes)


def codec_of(moment: Any) -> Codec:
    """Returns how a moment is stored: an array of floats, or an object with ``codes``.

    Raises:
      DtypeError: No codec has codes of this dtype.
    """
    codes = getattr(moment, "codes", None)
    if codes is None:
        return float_codec(moment.dtype)
    for known in BLOCK_CODECS:
        if known.dtype == codes.dtype:
            return known
    raise DtypeError(
        f"codes: not codes of a moment: got {codes.dtype}, "
        f"expected {' or '.join(str(known.dtype) for known in BLOCK_CODECS)}. "
        "Do not cast the state: its codes are not numbers."
    )


def moment_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree of moments: arrays and BlockCodes."""
    return jax.tree.leaves(tree, is_leaf=is_codes)


def round_at_random(x: Any, dtype: Any, random: Any, xp: Any) -> Any:
    """Rounds float32 stochastically to bfloat16 or float16; float32 stays as it is."""
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
    """The bits of positive float32s times 2^-exponent, also if XLA flushes these to zero."""
    u32 = xp.uint32
    is_normal = bits >= u32((exponent + 1) << 23)
    dropped = xp.clip(u32(exponent + 1) - (bits >> u32(23)), u32(1), u32(25))
    mantissa = (bits & u32(0x7FFFFF)) | u32(0x800000)
    half = u32(1) << (dropped - u32(1))
    subnormal = (mantissa + half - u32(1) + ((mantissa >> dropped) & u32(1))) >> dropped
    is_large = bits >= u32(0x7F800000)  # infinite, or NaN
    scaled = xp.where(is_normal, bits - u32(exponent << 23), subnormal)
    return xp.where(is_large, bits, scaled)
