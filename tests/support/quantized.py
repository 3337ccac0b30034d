"""Operands of the step with 8-bit or stochastic rounding."""

import jax
import numpy as np

from jdistadam.core.codecs import Codec
from jdistadam.kernels.adam import adam
from jdistadam.kernels.operands import Rounding
from support.operands import F32

adam_of_parts = jax.jit(adam, static_argnums=0)


def plain_array(rng, size, dtype, nonnegative=False):
    """Values as in training: over a range of about 2^20, every seventh zero."""
    x = rng.normal(size=size) * np.exp2(rng.normal(size=size) * 3 - 9) * (rng.random(size) < 6 / 7)
    with np.errstate(all="ignore"):
        return np.float32(np.abs(x) if nonnegative else x).astype(dtype)


def random_moment(rng, size, stored, name, array=plain_array):
    """Moment "mu" or "nu" of a leaf, in a dtype or in codes."""
    x = array(rng, size, F32, nonnegative=name == "nu")
    if isinstance(stored, Codec):
        return stored.encode(name, x, None, np)
    with np.errstate(all="ignore"):
        return x.astype(stored)


def rounded(positions=None, seed=2**40 + 5, count=6):
    key = np.asarray([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return Rounding(key, np.int32(count), positions)
