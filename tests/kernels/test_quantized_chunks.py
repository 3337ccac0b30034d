"""Large leaves of the step with moments in codes: whole chunks of a GPU's kernel, and what is left.

cuda/quantized_chunk.cuh takes 256 elements at a time where numbers are ordinary, several times in a
tile; its results are those of the reference, as is what it leaves to quantized_part.cuh.
"""

import jax
import numpy as np
import pytest

from jdistadam.core import hyperparameters
from jdistadam.core.codecs import BLOCK8, BLOCK16, Codec, codec_of
from jdistadam.kernels.operands import LeafPositions, Operands, RoundingSpec, Spec
from jdistadam.kernels.reference import LeafPartition
from support.bits import assert_trees_same_bits
from support.operands import BF16, F32, by_reference, halves_of, random_rows, scalars
from support.quantized import adam_of_parts, plain_array, random_moment, rounded
from support.samples import few

VARIANTS = {  # those of which the kernel knows all dtypes when it is compiled
    "bf16": ("step", True, BF16, BF16, BLOCK8),
    "bf16, moments too": ("step", True, BF16, BF16, BF16),
    "float32 at random": ("step", True, F32, F32, BLOCK8),
    "float32": ("step", False, F32, F32, BLOCK8),
    "remainder16 at random": ("step_split", True, BF16, BF16, BLOCK8),
    "remainder16": ("step_split", False, BF16, BF16, BLOCK8),
    "cast at random": ("step_and_cast", True, BF16, F32, BLOCK8),
    "cast": ("step_and_cast", False, BF16, F32, BLOCK8),
    "bf16, 16 bits": ("step", True, BF16, BF16, BLOCK16),
    "remainder16, 16 bits at random": ("step_split", True, BF16, BF16, BLOCK16),
    "remainder16, 16 bits": ("step_split", False, BF16, BF16, BLOCK16),
}
# Gradients that were summed in float32.
VARIANTS |= {
    f"{name}, float32 grads": (mode, is_stochastic, F32, *stored)
    for name, (mode, is_stochastic, grad, *stored) in VARIANTS.items()
    if grad == BF16
}
# A whole leaf; one in pieces; several in one; a part far behind the others; one that ends early.
CUTS = (
    LeafPartition.into_runs(2**31), LeafPartition(384, 1536, 2**30, 2**31), LeafPartition.into_runs(2**31),
    LeafPartition(2**31 - 2**10, 2**31, 2**40, 2**41), LeafPartition.into_runs(300),
)  # fmt: skip
PARTS = np.asarray([[0, 0], [1, 1], [0, 0], [7, 1], [1, 0]], np.int32)


def sizes_of(platform):
    """On a GPU so many that each warp takes several chunks of a tile."""
    large = 4_300_001 if platform == "cuda" else 9_001
    return (large, 384 * 30, 128 * 77, 70_001, 300)


def leaves(rng, make, sizes):
    return tuple(make(rng, n) for n in sizes)


def operands_of(rng, sizes, mode, grad, param, stored):
    params = leaves(
        rng, lambda r, n: plain_array(r, n, F32 if mode == "step_split" else param), sizes
    )
    for x in params:
        x[7::5003] = [np.nan, np.inf, -np.inf, 0][len(x) % 4]  # a gradient does not look at it
        x[8::5003] = -0.0
        x[9::7001] = 3e38  # near what float32 ends at, as are its halves
    out = ()
    if mode == "step_split":
        params, out = halves_of(params)
    grads = leaves(rng, lambda r, n: plain_array(r, n, grad), sizes)
    mu = leaves(rng, lambda r, n: random_moment(r, n, stored, "mu"), sizes)
    nu = leaves(rng, lambda r, n: random_moment(r, n, stored, "nu"), sizes)
    for g, m, v in zip(grads, mu, nu, strict=True):
        untouched = slice(len(g) // 3, len(g) // 2)  # with blocks in which all is zero
        g[untouched] = 0
        g[untouched.start : untouched.stop : 3] = -0.0
        g[len(g) // 4 :: 100_003] = 1e25  # out of the ordinary: their chunks are left out
        for x in (m, v):
            array = x.codes if isinstance(stored, Codec) else x
            array[untouched.start + 128 : untouched.stop - 128] = 0
        if isinstance(stored, Codec):
            make_faint(rng, g, m, v)
            draw_codes(rng, g, m, v)
    return Operands(grads, params, mu, nu, out)


def make_faint(rng, g, m, v):
    """Blocks below the smallest scales of 16 bits, 2^-86 of mu and 2^-54 of nu, not of 8."""
    first = len(g) // 2 // 128 + 1
    for name, moment, log, start in (("mu", m, -91, first), ("nu", v, -60, first + 8)):
        some = slice(128 * start, min(128 * (start + 4), len(g) // 128 * 128))
        if some.start < some.stop:
            x = np.exp2(rng.uniform(log - 3, log + 3, some.stop - some.start)).astype(F32)
            faint = codec_of(moment).encode(name, x, None, np)
            g[some] = 0
            moment.codes[some] = faint.codes
            moment.scales[start : start + len(faint.scales)] = faint.scales


def draw_codes(rng, g, m, v):
    """Blocks with every code, subnormal ones and the numbers beside them, where a step decays them."""
    some = slice(len(g) // 8 // 128 * 128, len(g) // 6 // 128 * 128)
    g[some] = 0
    for x in (m, v):
        top = np.iinfo(x.codes.dtype).max
        x.codes[some] = rng.integers(0, top, some.stop - some.start, x.codes.dtype, endpoint=True)


def chunk_rows(**others):
    """Coefficients of which chunks are stepped, but for the others."""
    rows = random_rows(count=40)
    for key, value in (dict(l2=0, eps_root=0) | others).items():
        rows[:, hyperparameters.NAMES.index(key)] = value
    return rows


@few(10)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("inv_scale", [1.0, 0.37])
def test_chunks_equal_the_reference_bitwise(platform, name, inv_scale):
    mode, is_stochastic, grad, param, stored = VARIANTS[name]
    sizes = sizes_of(platform)
    operands = operands_of(np.random.default_rng(7), sizes, mode, grad, param, stored)
    flags = frozenset({"cautious_weight_decay"} if inv_scale == 1.0 else ())
    tables = (-1, -1, 0, -1, -1)
    rounding = RoundingSpec(is_stochastic, (0, 2, 4, 6, 8), cuts=CUTS, tables=tables)
    out_dtype = BF16 if mode == "step_and_cast" else None
    spec = Spec(mode, (0, 1, 0, 1, 1), flags, out_dtype, rounding=rounding)
    blocks = np.asarray([[3 + k // 9, 2**27 + k] for k in range(77)], np.uint32)
    places = LeafPositions(PARTS, blocks)
    args = spec, scalars(chunk_rows(), inv_scale), operands, rounded(places)
    assert_trees_same_bits(adam_of_parts(*args)._asdict(), by_reference(*args)._asdict())


CHANGES = (
    dict(c1=1.0), dict(c2=1.0, eps=1e-15), dict(eps=0.0), dict(eps_root=1e-10), dict(l2=0.02),
    dict(learning_rate=300.0), dict(weight_decay=300.0), dict(weight_decay=0.0),
    dict(b1=np.nan, c1=1.0, c2=1.0), dict(one_minus_b1=np.inf), dict(learning_rate=np.nan),
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("name", ["bf16", "remainder16"])
def test_unusual_coefficients_equal_the_reference_bitwise(platform, name, change):
    """Late steps, whose c1 and c2 are one, an eps of zero, with which 0 / 0 is divided, and others."""
    mode, is_stochastic, grad, param, stored = VARIANTS[name]
    sizes = (70_001, 1024)
    operands = operands_of(np.random.default_rng(8), sizes, mode, grad, param, stored)
    spec = Spec(mode, (0, 1), rounding=RoundingSpec(is_stochastic, (0, 1)))
    places = jax.tree.map(np.asarray, LeafPositions.of_shards(np.zeros(2, np.int32)))
    args = spec, scalars(chunk_rows(**change)), operands, rounded(places)
    assert_trees_same_bits(adam_of_parts(*args)._asdict(), by_reference(*args)._asdict())
