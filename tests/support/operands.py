"""Random operands of the kernels, and their reference."""

import functools

import ml_dtypes
import numpy as np

from jdistadam.core import hyperparameters
from jdistadam.core.codecs import split_halves
from jdistadam.kernels import native
from jdistadam.kernels.operands import Scalars
from jdistadam.kernels.reference_step import adam_reference

F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
DTYPES = (F32, BF16, F16)
SIZES = (0, 1, 2, 3, 7, 8, 31, 255, 256, 257, 4095, 65_537)  # around vectors, tiles and tails
SPECIALS = (
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -3e-39,
    1e-38,
    3.4e38,
    -3.4e38,
    6e-8,
    65504.0,
    65520.0,
)
by_reference = functools.partial(adam_reference, xp=np)


def random_array(rng, size, dtype, *, nonnegative=False, specials=True):
    """Values over the whole exponent range of float32, with zeros, denormals, inf and NaN."""
    x = rng.normal(size=size) * 10.0 ** rng.uniform(-42, 38, size)
    plain = rng.random(size) < 0.7  # most values are in the usual range
    x = np.where(plain, rng.normal(size=size), x)
    if specials and size:
        where = rng.random(size) < 0.1
        x = np.where(where, rng.choice(SPECIALS, size), x)
    with np.errstate(all="ignore"):
        return (np.abs(x) if nonnegative else x).astype(np.float32).astype(dtype)


def halves_of(params):
    """bfloat16 parameters with remainders, of float32 ones."""
    return zip(*(split_halves(x, BF16, np) for x in params), strict=True)


def random_rows(count=7):
    """Coefficient rows without defaults; the last group has no decay."""
    b1, b2 = 0.87, 0.9973
    row = dict(
        learning_rate=3e-3, b1=b1, one_minus_b1=1 - b1, b2=b2, one_minus_b2=1 - b2, eps=1e-7, eps_root=1e-10,
        weight_decay=0.13, c1=1 - b1**count, c1_next=1 - b1 ** (count + 1), c2=1 - b2**count, l2=0.021,
    )  # fmt: skip
    rows = np.asarray([[row[name] for name in hyperparameters.NAMES]] * 2, np.float32)
    for name in ("weight_decay", "l2"):
        rows[-1, hyperparameters.NAMES.index(name)] = 0.0
    return rows


def scalars(rows, inv_scale=0.37, found_inf=False):
    return Scalars(np.asarray(rows), np.float32(inv_scale), np.bool_(found_inf))


for _platform in native.PLATFORMS:
    native.status(_platform)  # registers the handlers, which some tests call directly
