"""Bitwise comparison of arrays and of trees."""

import jax
import numpy as np


def assert_same_bits(got, want, err_msg=""):
    """Equal shape, dtype and bits; -0.0 differs from 0.0, and a NaN from another NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{err_msg}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{err_msg}: shape {got.shape}, expected {want.shape}"
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[got.dtype.itemsize]
    differ = np.flatnonzero(got.ravel().view(unsigned) != want.ravel().view(unsigned))
    if differ.size:
        i = differ[0]
        raise AssertionError(
            f"{err_msg}: {differ.size} of {got.size} elements differ in bits, first at {i}: "
            f"got {got.ravel()[i]!r}, expected {want.ravel()[i]!r}"
        )


def assert_trees_same_bits(got, want, what=""):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        assert_same_bits(a, b, what + jax.tree_util.keystr(path))
