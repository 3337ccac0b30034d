"""How numbers are stored: as floats, as halves of them, or in blocks of codes with a scale."""

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
"""Leaves with fewer elements keep float32 moments."""


# [Note: moments that follow]
# A step stores (1 + e) (b m + (1 - b) g) in place of b m + (1 - b) g. To nearest, with M bits of
# mantissa, |e| <= h = 1 / (2^(M + 1) + 1), so that what is stored is between the means with the
# decay rates b (1 - h) and b (1 + h).
# Decay: where b (1 + h) reaches 1 a moment stays where it is. Up to b = 1 / (1 + 2 h) rounding at
# most doubles the memory of the mean, as 1 - b (1 + h) is at least half of 1 - b.
# Updates: by the inequality of Cauchy and Schwarz a step turns r = |mu| / sqrt(nu) into at most
# sqrt((1 - b1)^2 / (1 - b2) + b1^2 / b2 r^2). Rounding multiplies that by up to
# q = (1 + h_mu) / sqrt(1 - h_nu). So where q^2 b1^2 < b2 an update, which is computed before it is
# rounded, stays below sqrt((1 - b1)^2 / (1 - b2) / (1 - q^2 b1^2 / b2)). For float32 q is 1.
# Subnormal codes change nothing: to these mu is rounded toward zero, and nu up.


def rounding_error(mantissa: int) -> float:
    """Returns how far a number rounded to nearest is from itself at most, relative to it: h."""
    return 1 / (2 ** (mantissa + 1) + 1)


def largest_decay(mantissa: int) -> float:
    """Returns the largest decay rate with which a moment rounded to nearest follows its gradients.

    ``mantissa``: bits of it. The bound of [Note: moments that follow], rounded down to three
    decimals.
    """
    return math.floor(1000 / (1 + 2 * rounding_error(mantissa))) / 1000


@dataclasses.dataclass(frozen=True)
class Codec:
    """How an array of numbers is stored.

    Attributes:
      name: How ``mu_dtype``, ``nu_dtype`` and ``main_params_dtype`` call it.
      dtype: The dtype of the array; of codes, that of these.
      mantissa: Bits of a number's mantissa.
      block: Elements that share a scale, a float32; 1: none do. Arrays are cut at multiples of it.
        Codes with scales are those of [Note: blocks] in cuda/rounding.h.
    """

    name: str
    dtype: np.dtype[Any]
    mantissa: int
    block: int = 1

    @property
    def is_coded(self) -> bool:
        """Whether numbers are stored as codes with scales, in ``BlockCodes``."""
        return self.block > 1

    @property
    def bits(self) -> int:
        """Bits of a number, without its share of a scale."""
        return 8 * self.dtype.itemsize

    @property
    def largest_decay(self) -> float:
        """The decay rate up to which a moment that is rounded to nearest follows its gradients."""
        return largest_decay(self.mantissa)

    def num_scales(self, size: int) -> int:
        """Returns the number of scales of ``size`` elements."""
        return -(-size // self.block) if self.is_coded else 0

    def nbytes(self, size: int) -> int:
        """Returns the bytes of ``size`` elements, scales included."""
        return size * self.dtype.itemsize + 4 * self.num_scales(size)


def float_codec(dtype: Any) -> Codec:
    """Returns the codec of floating-point numbers as they are."""
    dtype = jnp.dtype(dtype)
    return Codec(dtype.name, dtype, jnp.finfo(dtype).nmant)


FLOAT32, BFLOAT16, FLOAT16 = map(float_codec, ("float32", "bfloat16", "float16"))
BLOCK8 = Codec("block8", np.dtype(np.uint8), 3, BLOCK)
BLOCK16 = Codec("block16", np.dtype(np.uint16), 10, BLOCK)
REMAINDER16 = Codec("remainder16", np.dtype(np.uint16), 23)
"""The low half of a float32, beside a bfloat16: [Note: remainders]."""

BLOCK_CODECS = (BLOCK8, BLOCK16)


def growth(mu: Codec, nu: Codec) -> float:
    """Returns by what rounding to nearest multiplies the square of mu over the root of nu: q^2.

    At most, [Note: moments that follow]; of floats nothing.
    """
    of_mu, of_nu = (rounding_error(x.mantissa) if x.is_coded else 0.0 for x in (mu, nu))
    return (1 + of_mu) ** 2 / (1 - of_nu)


def codec_of(codes: Any) -> Codec:
    """Returns what codes mean, by their dtype."""
    found = next((known for known in BLOCK_CODECS if known.dtype == codes.dtype), None)
    if found is not None:
        return found
    raise DtypeError(
        f"codes: not codes of a moment: got {codes.dtype}, "
        f"expected {' or '.join(str(known.dtype) for known in BLOCK_CODECS)}. "
        "Do not cast the state: its codes are no numbers."
    )


class BlockCodes(NamedTuple):
    """A moment in "block8" or "block16": it stands in the place of an array in a tree of moments.

    Attributes:
      codes: The parameter's shape; uint8 for "block8", uint16 for "block16".
      scales: Shape (number of elements / 128, rounded up,), float32: one for each block of 128
        elements in row-major order, a power of two.
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the moment."""
        return tuple(self.codes.shape)

    @property
    def codec(self) -> Codec:
        """What the codes mean, by their dtype."""
        return codec_of(self.codes)


def is_codes(x: Any) -> bool:
    """Whether ``x`` is a moment in blocks of codes."""
    return isinstance(x, BlockCodes)


def moment_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree of moments: arrays, and BlockCodes."""
    return jax.tree.leaves(tree, is_leaf=is_codes)
