"""How moments are stored: as floats, or in 8 bits with scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

BLOCK8 = "block8"
"""Name of the dtype of moments in 8 bits."""

BLOCK = 128
"""Elements that share a scale."""

SMALLEST_CODED = 4096
"""Leaves with fewer elements keep float32 moments."""


class Block8(NamedTuple):
    """A moment in 8 bits: it stands in the place of an array in the tree of moments.

    Attributes:
      codes: The parameter's shape, uint8.
      scales: Shape (number of elements / 128, rounded up,), float32: one for each block of 128
        elements in row-major order, a power of two.
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the moment."""
        return tuple(self.codes.shape)


def is_block8(x: Any) -> bool:
    """Whether ``x`` is a moment in 8 bits."""
    return isinstance(x, Block8)


def moment_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree of moments: arrays, and Block8."""
    return jax.tree.leaves(tree, is_leaf=is_block8)
