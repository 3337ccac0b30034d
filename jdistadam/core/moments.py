"""How moments are stored: as floats, or in blocks of codes that share a scale."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistadam.errors import DtypeError

BLOCK = 128
"""Elements that share a scale."""

SMALLEST_CODED = 4096
"""Leaves with fewer elements keep float32 moments."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Codes of so many bits, with a scale for each block: [Note: blocks] in cuda/rounding.h.

    Attributes:
      name: How ``mu_dtype`` and ``nu_dtype`` call it.
      dtype: The dtype of codes.
      mantissa: Bits of a code's mantissa.
      largest_b2: Up to which b2 a second moment may be rounded to nearest.
    """

    name: str
    dtype: np.dtype[Any]
    mantissa: int
    largest_b2: float

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.dtype.itemsize


# A step without a gradient takes 1 - b2 of a second moment; rounded to nearest, that is lost where
# it is less than half a unit in the last place. Half a unit is at least 2^-(mantissa + 2) of a
# number, 1/32 and 1/4096, and at most twice that, 1/16 and 1/2048. With 8 bits the bound is between
# the two: some codes stay, but not all. With 16 bits 1 - b2 is more than the larger one.
BLOCK8 = BlockFormat("block8", np.dtype(np.uint8), 3, 0.95)
BLOCK16 = BlockFormat("block16", np.dtype(np.uint16), 10, 0.9995)
FORMATS = (BLOCK8, BLOCK16)


def format_of(codes: Any) -> BlockFormat:
    """Returns what codes mean, by their dtype."""
    found = next((known for known in FORMATS if known.dtype == codes.dtype), None)
    if found is not None:
        return found
    raise DtypeError(
        "codes",
        "not codes of a moment",
        got=codes.dtype,
        expected=" or ".join(str(known.dtype) for known in FORMATS),
        action="Do not cast the state: its codes are no numbers.",
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
    def format(self) -> BlockFormat:
        """What the codes mean, by their dtype."""
        return format_of(self.codes)


def is_codes(x: Any) -> bool:
    """Whether ``x`` is a moment in blocks of codes."""
    return isinstance(x, BlockCodes)


def moment_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree of moments: arrays, and BlockCodes."""
    return jax.tree.leaves(tree, is_leaf=is_codes)
