"""The step with moments of 8 bits and rounding at random equals its reference to the last bit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistadam.core.moments import Block8
from jdistadam.kernels import reference, rounding, sharded_compact_adam
from jdistadam.kernels.adam import Operands, Spec
from jdistadam.kernels.compact_adam import CompactSpec, Places
from jdistadam.kernels.rounding import Cuts
from support.bits import assert_same_bits, assert_trees_same_bits
from support.compact import adam_of_parts, by_reference, plain_array, rounded
from support.operands import BF16, F16, F32, random_array, random_rows, scalars
from support.samples import often

SIZES = (1, 3, 127, 128, 129, 511, 512, 4099, 65_536)  # around lanes, blocks, tiles
PARTS = np.arange(len(SIZES), dtype=np.int32) * 5 % 7  # of 1, 128 and 65,536 elements and so on
adam = jax.jit(sharded_compact_adam.adam, static_argnums=0)


ARRAYS = {
    "special": random_array,
    "wide": functools.partial(random_array, specials=False),
    "plain": plain_array,
}


def moment(rng, n, dtype, code, values="plain"):
    x = ARRAYS[values](rng, n, F32, nonnegative=code is rounding.NU)
    if dtype == "block8":
        return Block8(*rounding.encode(code, x, None, np))
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def random_operands(seed, dtypes, mode, values="plain"):
    rng = np.random.default_rng(seed)
    grad, param, mu, nu = dtypes
    array = ARRAYS[values]
    make = lambda f: tuple(f(n) for n in SIZES)  # noqa: E731
    params = make(lambda n: array(rng, n, F32 if mode == "step_split" else param))
    out = ()
    if mode == "step_split":
        params, out = zip(*(reference.split(x, BF16, np) for x in params), strict=True)
    return Operands(
        make(lambda n: array(rng, n, grad)),
        params,
        make(lambda n: moment(rng, n, mu, rounding.MU, values)),
        make(lambda n: moment(rng, n, nu, rounding.NU, values)),
        out,
    )


def spec_of(mode, is_random, dtypes, nesterov=False):
    out_dtype = {"step_and_cast": BF16, "update": dtypes[0]}.get(mode)
    groups = tuple(i % 2 for i in range(len(SIZES)))
    ids = tuple(3 * i + 1 for i in range(len(SIZES)))
    return CompactSpec(Spec(mode, groups, nesterov, out_dtype), is_random, ids)


def of_parts(parts):
    return jax.tree.map(np.asarray, Places.of_parts(np.asarray(parts)))


def assert_equals_reference(spec, scalars, rounded, operands):
    want = by_reference(spec, scalars, rounded, of_parts(PARTS), operands)
    got = adam_of_parts(spec, scalars, rounded, of_parts(PARTS), operands)
    assert_trees_same_bits(got._asdict(), want._asdict())
    whole = by_reference(spec, scalars, rounded, of_parts(0 * PARTS), operands)
    assert_trees_same_bits(adam(spec, scalars, rounded, operands)._asdict(), whole._asdict())


STORED = ["block8", F32, BF16, F16]
CASES = list(itertools.product([False, True], ["step", "step_and_cast", "step_split", "update"], STORED, STORED))  # fmt: skip


@pytest.mark.parametrize("param", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("is_random", "mode", "mu", "nu"), CASES, ids=str)
@often(lambda param, mode, mu, nu: mu == nu and (mode == "step" or param == BF16))
def test_kernel_equals_the_reference_bitwise(platform, is_random, mode, mu, nu, param):
    """Values over the whole exponent range, with infinities, NaN and subnormals in some blocks."""
    dtypes = (BF16, F32 if mode == "step_and_cast" else param, mu, nu)
    for values, grad in (("special", F32), ("plain", BF16), ("wide", F16)):
        dtypes = (grad, *dtypes[1:])
        operands = random_operands(5, dtypes, mode, values)
        spec = spec_of(mode, is_random, dtypes, nesterov=grad == BF16)
        assert_equals_reference(spec, scalars(random_rows(count=3)), rounded(), operands)


def test_philox_is_that_of_its_authors():
    """Their known answers for 7 rounds."""
    of = lambda word: [np.full(1, word, np.uint32)] * 4  # noqa: E731
    for word, want in (
        (0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (0xFFFFFFFF, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    ):
        got = rounding.philox(np.full(2, word, np.uint32), of(word), np)
        assert [int(x[0]) for x in got] == want


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_random_bits_of_parts_are_those_of_the_whole(xp):
    key = np.asarray([7, 11], np.uint32)

    def bits(size, part, shape, xp):
        index = rounding.indices(size, Cuts.into_runs(size), (part, 0), xp)
        return rounding.random_bits(key, 3, 5, index, shape, xp)

    whole = bits(1001 * 7, 0, (1001 * 7,), np)
    for part in (0, 1, 5, 6):
        got = bits(1001, part, (7, 143), xp)
        for a, b in zip(got, whole, strict=True):
            assert_same_bits(np.asarray(a), b[part * 1001 : (part + 1) * 1001].reshape(7, 143))
    # Where the index has more than 32 bits, and where a quarter of it, the counter, has.
    for size, low, high in ((5, 2**30 + 2**28, 0), (20, 2**30, 1)):
        far = bits(size, 2**30, (size,), xp)
        words = rounding.philox(key, [np.full(1, x, np.uint32) for x in (low, high, 5, 3)], np)
        assert [int(x[0]) for x in words] == np.asarray(far.nu)[:4].tolist()


@pytest.mark.parametrize("code", [rounding.MU, rounding.NU], ids=["mu", "nu"])
def test_codes_are_what_they_encode(code):
    """Every code with every scale: decoded and encoded again it is the same, rounded in any way."""
    rng = np.random.default_rng(0)
    first = code.smallest_scale
    for exponent in (first, first + 1, -60, -1, 0, 1, 60, 126):
        codes = rng.permutation(np.arange(256, dtype=np.uint8)).reshape(2, 128)
        codes[:, 7] = 0x7F if code.is_signed else 0xFF  # the block's largest has the top exponent
        scales = np.full(2, 2.0**exponent, np.float32)
        x = rounding.decode(code, codes, scales, np)
        assert np.isfinite(x).all()
        assert np.array_equal(x == 0, (codes & 0x7F if code.is_signed else codes) == 0)
        for random in (None, rng.integers(0, 2**32, codes.shape, np.uint32)):
            again = rounding.encode(code, x, random, np)
            assert_same_bits(again[0], codes)
            assert_same_bits(again[1], scales)


def in_blocks(x):
    """The largest magnitude of each element's block."""
    blocks = np.abs(x).reshape(-1, rounding.BLOCK).max(axis=1)
    return np.repeat(blocks, rounding.BLOCK)


@pytest.mark.parametrize("code", [rounding.MU, rounding.NU], ids=["mu", "nu"])
@pytest.mark.parametrize("is_random", [False, True])
def test_the_error_of_a_code(code, is_random):
    """Half a unit of 3 bits of mantissa, a whole one at random, down to the smallest exponent."""
    rng = np.random.default_rng(1)
    x = np.float32(rng.normal(size=1 << 14) * np.exp2(rng.uniform(-40, 0, 1 << 14)))
    x = np.abs(x) if code is rounding.NU else x
    x[::5] = 0
    random = rng.integers(0, 2**32, x.size, np.uint32) if is_random else None
    codes, scales = rounding.encode(code, x, random, np)
    y = rounding.decode(code, codes, scales, np)
    unit = 1 if is_random else 0.5
    # A scale is at most twice the largest of a block; times 2^-(highest exponent) - 2 it is the
    # distance of the smallest codes, by which nu may be rounded up so that it is not zero.
    step = 2 * in_blocks(x) * 2.0 ** (-code.highest_exponent - 2)
    smallest = step if code is rounding.NU else unit * step
    assert (np.abs(y - x) <= np.maximum(unit * np.abs(x) / 8, smallest)).all()
    assert np.array_equal(y == 0, x == 0) if code is rounding.NU else (y[x == 0] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, F16, "block8"], ids=str)
def test_rounding_at_random_has_no_bias(platform, dtype):
    """The mean over 2000 counts, in units of its own standard error, of 1000 elements.

    Each value is one of two neighbours a < b, with P(b) = q: its variance is (b - a)^2 q (1 - q).
    Of 1000 normal numbers the largest is above 5.5 with a probability of 4e-5.
    """
    rng = np.random.default_rng(3)
    n, counts = 1024, 2000
    param = np.float32(rng.normal(size=n)).astype(BF16)
    grads = np.float32(rng.normal(size=n))
    spec = CompactSpec(Spec("step", (0,)), True, (4,))
    param_dtype = F32 if dtype == "block8" else dtype
    zeros = tuple(moment(rng, n, dtype, code) for code in (rounding.MU, rounding.NU))
    start = [jax.tree.map(np.zeros_like, x) for x in zeros]
    exact = by_reference(
        CompactSpec(Spec("step", (0,)), False, (4,)), scalars(random_rows()), rounded(), of_parts([0]),
        Operands((grads,), (param.astype(F32),), (np.zeros(n, F32),), (np.zeros(n, F32),)),
    )  # fmt: skip
    operands = Operands((grads,), (param.astype(param_dtype),), *[(x,) for x in start])
    step = functools.partial(adam, spec, scalars(random_rows()))
    got = [[], [], []]
    for count in range(counts):
        new = step(rounded(count=count), operands)
        values = (new.params[0], widened(rounding.MU, new.mu[0]), widened(rounding.NU, new.nu[0]))
        for column, value in zip(got, values, strict=True):
            column.append(np.asarray(value, np.float64))
    stored = (operands.params[0], operands.mu[0], operands.nu[0])
    exact = (exact.params[0], exact.mu[0], exact.nu[0])
    for code, column, like, x in zip(
        (None, rounding.MU, rounding.NU), got, stored, exact, strict=True
    ):
        a, b = neighbours(code, like, x)
        column, x = np.stack(column), np.float64(x)
        assert ((column == a) | (column == b)).all()
        width = np.where(a == b, 1, np.abs(b - a))
        q = np.maximum(np.abs(x - a) / width, 2.0**-17)
        error = np.abs(column.mean(axis=0) - x) / width
        assert (error <= 5.5 * np.sqrt(q * (1 - np.minimum(q, 1 - 2.0**-17)) / counts)).all()


def neighbours(code, like, x):
    """The two numbers between which x is, in the dtype of ``like``: with no bits set, and with all."""
    found = []
    for bits in (0, 0xFFFFFFFF):
        random = np.full(x.shape, bits, np.uint32)
        if isinstance(like, Block8):
            y = rounding.decode(code, *rounding.encode(code, x, random, np), np)
        else:
            y = rounding.round_at_random(x, like.dtype, random, np)
        found.append(np.asarray(y, np.float64))
    return found


def widened(code, x):
    return rounding.decode(code, x.codes, x.scales, np) if isinstance(x, Block8) else x


def test_a_skipped_step_changes_nothing(platform):
    dtypes = (BF16, BF16, "block8", "block8")
    operands = random_operands(9, dtypes, "step")
    skip = scalars(random_rows(), found_inf=True)
    got = adam(spec_of("step", True, dtypes), skip, rounded(), operands)
    for name in ("params", "mu", "nu"):
        assert_trees_same_bits(getattr(got, name), getattr(operands, name))


def test_untouched_elements_stay_zero(platform):
    """Without gradients nothing moves: 20 steps at random of moments that are zero."""
    n = 4096
    zeros = np.zeros(n, F32)
    codes = Block8(np.zeros(n, np.uint8), np.zeros(n // 128, F32))
    grads = zeros.copy()
    grads[::7] = 0.5
    operands = Operands((grads,), (zeros,), (codes,), (codes,))
    spec = CompactSpec(Spec("step", (1,)), True, (0,))
    for count in range(20):
        new = adam(spec, scalars(random_rows()), rounded(count=count), operands)
        operands = Operands((grads,), new.params, new.mu, new.nu)
    untouched = grads == 0
    assert (np.asarray(new.params[0])[untouched] == 0).all()
    for code, x in ((rounding.MU, new.mu[0]), (rounding.NU, new.nu[0])):
        assert (np.asarray(widened(code, x))[untouched] == 0).all()
        assert (np.asarray(widened(code, x))[~untouched] != 0).all()


def test_a_nonfinite_gradient_spoils_its_block_alone(platform):
    grads = np.full(512, 0.25, F32)
    grads[200] = np.inf
    codes = Block8(np.zeros(512, np.uint8), np.zeros(4, F32))
    operands = Operands((grads,), (np.ones(512, F32),), (codes,), (codes,))
    spec = CompactSpec(Spec("step", (1,)), False, (0,))
    new = adam(spec, scalars(random_rows()), rounded(), operands)
    for code, x in ((rounding.MU, new.mu[0]), (rounding.NU, new.nu[0])):
        is_nan = np.isnan(np.asarray(widened(code, x))).reshape(4, 128)
        assert is_nan[1].all() and not is_nan[[0, 2, 3]].any()


# A part of a leaf in one piece; one of pieces, of an array that was cut itself; several leaves in
# one; the last block of a whole leaf.
FLAT_SIZES, FLAT_OFFSETS = (1024, 768, 900, 4099), (128, 1280, 2176, 3200)
OWN_OFFSETS = {"mu": (0, 1024, 1792, 2816), "nu": (256, 1536, 2304, 3328)}
FLAT_CUTS = (
    Cuts(1024, 4096, 4096, 4096),
    Cuts(256, 1024, 512, 2048),
    Cuts.into_runs(900),
    Cuts(4099, 4099, 4099, 4099),
)
FLAT_PLACES = Places(
    np.asarray([[3, 0], [2, 1], [0, 0], [0, 0]], np.int32),
    np.asarray(
        [[9, 9], *([5, 2**27 + k] for k in range(3)), *([8, k] for k in range(5))], np.uint32
    ),
)


@pytest.mark.parametrize("mode", ["step", "step_and_cast", "step_split"])
@pytest.mark.parametrize("coded", ["mu", "nu", "mu nu"])
@often(lambda mode, coded: mode == "step_split" or coded == "mu nu")
def test_flat_state_of_leaves_that_are_cut_or_packed(platform, mode, coded):
    """Elements between the leaves keep their bits."""
    rng, total = np.random.default_rng(2), 8192
    param = {"step": BF16, "step_and_cast": F32, "step_split": BF16}[mode]
    params, out = tuple(plain_array(rng, n, param) for n in FLAT_SIZES), ()
    if mode == "step_and_cast":
        params = (plain_array(rng, total, F32),)
    if mode == "step_split":
        out = (rng.integers(0, 2**16, total).astype(np.uint16),)
    moments = {
        name: (moment(rng, total, "block8" if name in coded else F32, code),)
        for name, code in (("mu", rounding.MU), ("nu", rounding.NU))
    }
    operands = Operands(
        tuple(plain_array(rng, n, BF16) for n in FLAT_SIZES), params, *moments.values(), out
    )
    flat = {"mu", "nu", *(["params"] if mode == "step_and_cast" else ["out"] if out else [])}
    adam = Spec(
        mode, (0, 1, 0, 1), out_dtype=BF16 if mode == "step_and_cast" else None,
        flat=frozenset(flat), sizes=FLAT_SIZES, offsets=FLAT_OFFSETS,
    )  # fmt: skip
    spec = CompactSpec(
        adam, True, (0, 2, 4, 6), mu_offsets=OWN_OFFSETS["mu"], nu_offsets=OWN_OFFSETS["nu"],
        cuts=FLAT_CUTS, tables=(-1, -1, 1, -1),
    )  # fmt: skip
    args = spec, scalars(random_rows(count=3)), rounded(), FLAT_PLACES, operands
    got = adam_of_parts(*args)
    assert_trees_same_bits(got._asdict(), by_reference(*args)._asdict())
    between = np.ones(total, bool)
    for offset, size in zip(OWN_OFFSETS["mu"], FLAT_SIZES, strict=True):
        between[offset : offset + size] = False
    old, new = operands.mu[0], got.mu[0]
    old, new = (x.codes if "mu" in coded else x for x in (old, new))
    assert_same_bits(np.asarray(new)[between], old[between])


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (2, 0), (1, 1)], ids=str)
def test_parts_draw_the_bits_of_the_whole(dims):
    """Of a leaf (6, 4, 1024), cut in two along one dimension and then along another."""
    shape = (6, 4, 1024)
    size = int(np.prod(shape))
    whole = rounding.indices(size, Cuts.into_runs(size), (0, 0), np).low.reshape(shape)
    first, second = dims if len(dims) == 2 else (dims[0], None)
    for parts in itertools.product(range(2), range(2 if second is not None else 1)):
        outer = np.split(whole, 2, first)[parts[0]]
        part = outer if second is None else np.split(outer, 2, second)[parts[1]]
        piece = int(np.prod(outer.shape[first:]))
        cut = (piece, 2 * piece)
        if second is None:
            inner, numbers = (outer.size, outer.size), (0, parts[0])
        else:
            piece = int(np.prod(part.shape[second:]))
            inner, numbers = (piece, 2 * piece), parts[::-1]
        for xp in (np, jnp):
            got = rounding.indices(part.size, Cuts(*inner, *cut), numbers, xp)
            assert np.array_equal(np.asarray(got.low).reshape(part.shape), part)
            assert not np.asarray(got.high).any()
    far = rounding.indices(4, Cuts(2, 2**33, 2**34, 2**40), (3, 1), np)
    want = [(i // 2) * 2**33 + 3 * 2 + i % 2 + 2**34 for i in range(4)]
    assert (np.uint64(far.low) | np.uint64(far.high) << np.uint64(32)).tolist() == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mu_offsets=(0, 1024, 1792, 2800)), "does not begin with a block"),
        (dict(mu_offsets=(0, 512, 1792, 2816)), "without overlap"),
        (dict(nu_offsets=(0,)), "one entry a leaf"),
        (dict(cuts=((100, 200, 4096, 4096),) * 4), "whole blocks"),
        (dict(cuts=((256, 128, 4096, 4096),) * 4), "not more than the whole"),
        (dict(cuts=FLAT_CUTS[:1]), "4 a leaf"),
        (dict(tables=(-1, -1, 2, -1)), "ends beyond"),
        (dict(tables=(0,)), "one entry a leaf"),
    ],
    ids=str,
)
def test_wrong_places_raise(change, message):
    rng = np.random.default_rng(3)
    codes = Block8(np.zeros(8192, np.uint8), np.zeros(64, F32))
    arrays = tuple(plain_array(rng, n, F32) for n in FLAT_SIZES)
    spec = CompactSpec(
        Spec("step", (0,) * 4, flat=frozenset({"mu", "nu"}), sizes=FLAT_SIZES, offsets=FLAT_OFFSETS),
        True, (0, 1, 2, 3), OWN_OFFSETS["mu"], OWN_OFFSETS["nu"], FLAT_CUTS, (-1, -1, 1, -1),
    )  # fmt: skip
    spec = dataclasses.replace(spec, **change)
    args = (
        scalars(random_rows()),
        rounded(),
        FLAT_PLACES,
        Operands(arrays, arrays, (codes,), (codes,)),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(adam_of_parts(spec, *args))
