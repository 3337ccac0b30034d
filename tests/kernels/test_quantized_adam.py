"""The step with coded moments and stochastic rounding equals its reference to the last bit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistadam.core.codecs import BLOCK, BLOCK8, BLOCK16, BLOCK_CODECS, BlockCodes, Codec, codec_of
from jdistadam.kernels import reference
from jdistadam.kernels.operands import LeafPositions, Operands, RoundingSpec, Spec
from jdistadam.kernels.reference import LeafPartition
from jdistadam.kernels.sharded_adam import sharded_adam
from support.bits import assert_same_bits, assert_trees_same_bits
from support.operands import (
    BF16,
    F16,
    F32,
    by_reference,
    halves_of,
    random_array,
    random_rows,
    scalars,
)
from support.quantized import adam_of_parts, plain_array, random_moment, rounded
from support.samples import few, often

SIZES = (1, 3, 127, 128, 129, 511, 512, 4099, 65_536)  # around lanes, blocks, tiles
PARTS = np.arange(len(SIZES), dtype=np.int32) * 5 % 7  # of 1, 128 and 65,536 elements and so on
adam = jax.jit(sharded_adam, static_argnums=0)


def spread_array(rng, size, dtype, nonnegative=False):
    """Blocks whose numbers differ by 2^100: more than codes of 16 bits can."""
    x = np.exp2(rng.uniform(-100, 0, size)) * rng.choice([1] if nonnegative else [-1, 1], size)
    return x.astype(dtype)


ARRAYS = {
    "spread": spread_array,
    "special": random_array,
    "wide": functools.partial(random_array, specials=False),
    "plain": plain_array,
}


def name_of(x):
    return getattr(x, "name", str(x))


def random_operands(seed, dtypes, mode, values="plain"):
    rng = np.random.default_rng(seed)
    grad, param, mu, nu = dtypes
    array = ARRAYS[values]
    make = lambda f: tuple(f(n) for n in SIZES)  # noqa: E731
    params = make(lambda n: array(rng, n, F32 if mode == "step_split" else param))
    out = ()
    if mode == "step_split":
        params, out = halves_of(params)
    return Operands(
        make(lambda n: array(rng, n, grad)),
        params,
        make(lambda n: random_moment(rng, n, mu, "mu", array)),
        make(lambda n: random_moment(rng, n, nu, "nu", array)),
        out,
    )


def spec_of(mode, is_stochastic, dtypes, flags=()):
    out_dtype = {"step_and_cast": BF16, "update": dtypes[0]}.get(mode)
    groups = tuple(i % 2 for i in range(len(SIZES)))
    ids = tuple(3 * i + 1 for i in range(len(SIZES)))
    rounding = RoundingSpec(is_stochastic, ids)
    return Spec(mode, groups, frozenset(flags), out_dtype, rounding=rounding)


def of_parts(parts):
    return jax.tree.map(np.asarray, LeafPositions.of_shards(np.asarray(parts)))


PLACES, WHOLE = of_parts(PARTS), of_parts(0 * PARTS)


def assert_equals_reference(spec, scalars, operands):
    want = by_reference(spec, scalars, operands, rounded(PLACES))
    got = adam_of_parts(spec, scalars, operands, rounded(PLACES))
    assert_trees_same_bits(got._asdict(), want._asdict())
    whole = by_reference(spec, scalars, operands, rounded(WHOLE))
    assert_trees_same_bits(adam(spec, scalars, operands, rounded())._asdict(), whole._asdict())


STORED = [BLOCK8, BLOCK16, F32, BF16, F16]
CASES = list(itertools.product([False, True], ["step", "step_and_cast", "step_split", "update"], STORED, STORED))  # fmt: skip


@few(1)
@pytest.mark.parametrize("param", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("is_stochastic", "mode", "mu", "nu"), CASES, ids=name_of)
@often(  # all modes of each dtype of moments, rounded stochastically and not; all dtypes of parameters
    lambda param, mode, mu, nu, is_stochastic: (
        (mu is nu and param == BF16 and (mode == "step" or is_stochastic == (mu in (BLOCK8, F32))))
        or (mu is nu and param != BF16 and mode == "step" and is_stochastic)
        or ({mu, nu} == {BLOCK8, BLOCK16} and mode == "step_split" and param == BF16)
    )
)
def test_kernel_equals_the_reference_bitwise(platform, is_stochastic, mode, mu, nu, param):
    """Values over the whole exponent range, with infinities, NaN and subnormals in some blocks."""
    dtypes = (BF16, F32 if mode == "step_and_cast" else param, mu, nu)
    for values, grad in (("special", F32), ("plain", BF16), ("wide", F16)):
        dtypes = (grad, *dtypes[1:])
        operands = random_operands(5, dtypes, mode, values)
        flags = {F32: (), BF16: ("nesterov",), F16: ("nesterov", "cautious_weight_decay")}[grad]
        spec = spec_of(mode, is_stochastic, dtypes, flags)
        assert_equals_reference(spec, scalars(random_rows(count=3)), operands)


@few(1)
@pytest.mark.parametrize("is_stochastic", [False, True])
@pytest.mark.parametrize(("mu", "nu"), [(BLOCK8, BLOCK16), (BLOCK16, BLOCK8)], ids=name_of)
def test_kernel_equals_the_reference_in_blocks_that_span_more_than_codes(
    platform, is_stochastic, mu, nu
):
    """What is below the smallest codes, which of nu does not become zero."""
    dtypes = (F32, F32, mu, nu)
    spec, operands = (
        spec_of("step", is_stochastic, dtypes),
        random_operands(4, dtypes, "step", "spread"),
    )
    operands = operands._replace(grads=tuple(1024 * x for x in operands.grads))  # scales grow
    assert_equals_reference(spec, scalars(random_rows(count=3)), operands)
    new = by_reference(spec, scalars(random_rows(count=3)), operands, rounded(PLACES))
    codes = [np.asarray(x.codes) for x in new.nu if x.codes.size > 1]
    assert all((x > 0).all() for x in codes) and any((x == 1).any() for x in codes)


def test_philox_is_that_of_its_authors():
    """Their known answers for 7 rounds."""
    of = lambda word: [np.full(1, word, np.uint32)] * 4  # noqa: E731
    for word, want in (
        (0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (0xFFFFFFFF, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    ):
        got = reference.philox(np.full(2, word, np.uint32), of(word), np)
        assert [int(x[0]) for x in got] == want


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_random_bits_of_parts_are_those_of_the_whole(xp):
    key = np.asarray([7, 11], np.uint32)

    def bits(size, part, shape, xp):
        index = reference.indices(size, LeafPartition.into_runs(size), (part, 0), xp)
        return reference.random_bits(key, 3, 5, index, shape, xp)

    whole = bits(1001 * 7, 0, (1001 * 7,), np)
    for part in (0, 1, 5, 6):
        got = bits(1001, part, (7, 143), xp)
        for a, b in zip(got, whole, strict=True):
            assert_same_bits(np.asarray(a), b[part * 1001 : (part + 1) * 1001].reshape(7, 143))
    # Where the index has more than 32 bits, and where a quarter of it, the counter, has.
    for size, low, high in ((5, 2**30 + 2**28, 0), (20, 2**30, 1)):
        far = bits(size, 2**30, (size,), xp)
        words = reference.philox(key, [np.full(1, x, np.uint32) for x in (low, high, 5, 3)], np)
        assert [int(x[0]) for x in words] == np.asarray(far.nu)[:4].tolist()


each_format = pytest.mark.parametrize("form", BLOCK_CODECS, ids=name_of)
each_name = pytest.mark.parametrize("name", ["mu", "nu"])


@each_format
@each_name
def test_decoded_codes_encode_to_themselves(form, name):
    """Every code with every scale: decoded and encoded again it is the same, rounded in any way."""
    rng, code = np.random.default_rng(0), form.code(name)
    every = rng.permutation(np.arange(1 << form.bits)).astype(form.dtype)
    rows = np.resize(every, (-(-every.size // 127), 127))  # the last ones once more
    top = np.full((len(rows), 1), code.magnitude, form.dtype)  # of the highest exponent, as it must
    codes = np.concatenate([rows[:, :7], top, rows[:, 7:]], axis=1)
    assert np.unique(codes).size == every.size
    for exponent in (code.smallest_scale, code.smallest_scale + 1, -30, -1, 0, 1, 60, 126):
        moment = BlockCodes(codes, np.full(len(codes), 2.0**exponent, np.float32))
        x = codec_of(moment).decode(name, moment, np)
        assert np.isfinite(x).all()
        assert np.array_equal(x == 0, codes & code.magnitude == 0)
        for random in (None, rng.integers(0, 2**32, codes.shape, np.uint32)):
            assert_trees_same_bits(form.encode(name, x, random, np), moment)


@few(1)
@each_format
@each_name
def test_codes_decode_as_their_definition_says(form, name):
    """Sign, exponent and mantissa by their definition, in exact arithmetic, and by jax.numpy too."""
    exponent_bits = {"block8": {"mu": 4, "nu": 5}, "block16": {"mu": 5, "nu": 6}}[form.name][name]
    mantissa_bits = {"block8": 3, "block16": 10}[form.name]
    codes = np.arange(1 << form.bits)
    sign = np.where(codes >> exponent_bits + mantissa_bits & 1, -1, 1)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = codes & (1 << mantissa_bits) - 1
    whole = np.where(exponent > 0, (1 << mantissa_bits) + fraction, fraction)
    highest = (1 << exponent_bits) - 1
    want = sign * np.ldexp(np.float64(whole), np.maximum(exponent, 1) - highest - mantissa_bits)
    moment = BlockCodes(codes.astype(form.dtype), np.ones(codes.size // 128, np.float32))
    for xp in (np, jnp):
        assert_same_bits(np.asarray(codec_of(moment).decode(name, moment, xp)), np.float32(want))


def in_blocks(x):
    """The largest magnitude of each element's block."""
    blocks = np.abs(x).reshape(-1, BLOCK).max(axis=1)
    return np.repeat(blocks, BLOCK)


@few(1)
@each_format
@each_name
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_rounding_error_of_codes_is_bounded(form, name, is_stochastic):
    """Half a unit of the mantissa, a whole one at random, down to the smallest exponent.

    Below it a first moment loses up to a unit, and does not become larger but at random.
    """
    rng, code, is_nu = np.random.default_rng(1), form.code(name), name == "nu"
    below = code.highest_exponent + form.mantissa  # the smallest code is 2^(1 - below)
    x = np.float32(rng.normal(size=1 << 14) * np.exp2(rng.uniform(-1.2 * below, 0, 1 << 14)))
    x = np.abs(x) if is_nu else x
    x[::5] = 0
    random = rng.integers(0, 2**32, x.size, np.uint32) if is_stochastic else None
    moment = form.encode(name, x, random, np)
    assert_trees_same_bits(jax.jit(lambda x: form.encode(name, x, random, jnp))(x), moment)
    y = codec_of(moment).decode(name, moment, np)
    unit = 1 if is_stochastic else 0.5
    # A scale is at most twice the largest of a block; times 2^(1 - below) it is the distance of the
    # smallest codes, by which nu may be rounded up so that it is not zero.
    step = 2 * in_blocks(x) * 2.0 ** (1 - below)
    subnormal = np.abs(x) < np.repeat(moment.scales, 128) * 2.0 ** (1 - code.highest_exponent)
    assert subnormal.any()
    if not is_stochastic:
        assert (y >= x if is_nu else np.abs(y) <= np.abs(x))[subnormal].all()
    assert (np.abs(y - x) <= np.maximum(unit * np.abs(x) / 2**form.mantissa, step)).all()
    assert np.array_equal(y == 0, x == 0) if is_nu else (y[x == 0] == 0).all()


@pytest.mark.parametrize(
    ("form", "b2", "staying"),
    [
        (BLOCK16, 0.9995, 0),  # 5e-4 of any number is more than half a unit, 2^-11
        (BLOCK16, 0.9996, 0.2207),  # 2^-11 / 4e-4 is 1.2207
        (BLOCK16, 0.9998, 1),  # 2e-4 of none is, 2^-12
        (BLOCK8, 0.9375, 0),
        (BLOCK8, 0.95, 0.25),  # 2^-4 / 0.05 is 1.25
        (BLOCK8, 0.97, 1),
    ],
    ids=name_of,
)
def test_second_moments_below_a_computed_share_stop_decaying(form, b2, staying):
    """In a step without a gradient, rounded to nearest: those below a share of an octave.

    x in [1, 2) stays where (1 - b2) x is less than half a unit, 2^-(mantissa + 1), or equal to it and
    even; one is left out, as the next number below it is at half the distance.
    """
    number = 1 << form.mantissa
    x = np.full((number, 128), 4, F32)  # which keeps the scale
    x[:, 5] = 1 + np.arange(number) / number
    y = form.decode("nu", form.encode("nu", np.float32(b2) * x, None, np), np)
    stays = y[1:, 5] == x[1:, 5]
    assert stays.sum() == (number - 1 if staying == 1 else round(staying * number))
    assert (np.diff(stays.astype(int)) <= 0).all()  # those at the octave's beginning


@each_format
@each_name
def test_codes_of_numbers_beyond_their_range_are_nan(form, name):
    """Below 2^127 all is kept; what is more, or rounds up to it, makes its block NaN, not less."""
    rng = np.random.default_rng(2)
    largest = np.float32(2.0**127 - 2.0 ** (126 - form.mantissa))  # of a code
    tie = np.float32(2.0**127 - 2.0 ** (125 - form.mantissa))  # from here on up to even, 2^127
    x = np.float32(np.exp2(rng.uniform(113, 126, (2, 128))))  # codes of mu have 15 exponents or 31
    for value in (largest, np.nextafter(tie, np.float32(0))):
        x[0, 7] = value
        y = form.decode(name, form.encode(name, x, None, np), np)
        assert y[0, 7] == largest
        assert (np.abs(y - x) <= x / 2 ** (form.mantissa + 1)).all()
    for value in (tie, 2.0**127, np.finfo(np.float32).max, np.inf, np.nan):
        x[0, 7] = value
        y = form.decode(name, form.encode(name, x, None, np), np)
        assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


@pytest.mark.parametrize("dtype", [BF16, F16, *BLOCK_CODECS], ids=name_of)
def test_rounding_at_random_has_no_bias(platform, dtype):
    """The mean over 2000 counts, in units of its own standard error, of 1000 elements.

    Each value is one of two neighbours a < b, with P(b) = q: its variance is (b - a)^2 q (1 - q).
    Of 1000 normal numbers the largest is above 5.5 with a probability of 4e-5.
    """
    rng = np.random.default_rng(3)
    n, counts = 1024, 2000
    param = np.float32(rng.normal(size=n)).astype(BF16)
    grads = np.float32(rng.normal(size=n))
    spec = Spec("step", (0,), rounding=RoundingSpec(True, (4,)))
    param_dtype = F32 if isinstance(dtype, Codec) else dtype
    zeros = tuple(random_moment(rng, n, dtype, name) for name in ("mu", "nu"))
    start = [jax.tree.map(np.zeros_like, x) for x in zeros]
    exact = by_reference(
        Spec("step", (0,), rounding=RoundingSpec(False, (4,))), scalars(random_rows()),
        Operands((grads,), (param.astype(F32),), (np.zeros(n, F32),), (np.zeros(n, F32),)), rounded(of_parts([0])),
    )  # fmt: skip
    operands = Operands((grads,), (param.astype(param_dtype),), *[(x,) for x in start])

    def after(count):
        new = adam(spec, scalars(random_rows()), operands, rounded()._replace(count=count))
        return jax.tree.map(bits_of, (new.params[0], new.mu[0], new.nu[0]))

    def bits_of(x):  # XLA's CPU backend would convert all of a result of 16 bits at every count
        x = jax.lax.optimization_barrier(x)  # and that of GPUs have the kernel write into all of it
        return jax.lax.bitcast_convert_type(x, np.uint16) if x.dtype in (BF16, F16) else x

    new = jax.jit(lambda: jax.lax.map(after, jnp.arange(counts, dtype=np.int32)))()
    like = (operands.params[0], *start)
    flat = jax.tree.map(lambda x, y: np.asarray(x).reshape(-1).view(y.dtype), new, like)
    got = (flat[0], widened("mu", flat[1]), widened("nu", flat[2]))
    stored = (operands.params[0], operands.mu[0], operands.nu[0])
    exact = (exact.params[0], exact.mu[0], exact.nu[0])
    for name, column, like, x in zip((None, "mu", "nu"), got, stored, exact, strict=True):
        a, b = neighbours(name, like, x)
        column, x = column.astype(np.float64).reshape(counts, n), np.float64(x)
        assert ((column == a) | (column == b)).all()
        width = np.where(a == b, 1, np.abs(b - a))
        q = np.maximum(np.abs(x - a) / width, 2.0**-17)
        error = np.abs(column.mean(axis=0) - x) / width
        assert (error <= 5.5 * np.sqrt(q * (1 - np.minimum(q, 1 - 2.0**-17)) / counts)).all()


def neighbours(name, like, x):
    """The two numbers between which x is, in the dtype of ``like``: with no bits set, and with all."""
    found = []
    for bits in (0, 0xFFFFFFFF):
        random = np.full(x.shape, bits, np.uint32)
        codec = codec_of(like)
        y = codec.decode(name, codec.encode(name, x, random, np), np)
        found.append(np.asarray(y, np.float64))
    return found


def widened(name, x):
    return codec_of(x).decode(name, x, np) if isinstance(x, BlockCodes) else x


@each_format
def test_a_skipped_step_changes_nothing(platform, form):
    dtypes = (BF16, BF16, form, form)
    operands = random_operands(9, dtypes, "step")
    skip = scalars(random_rows(), found_inf=True)
    got = adam(spec_of("step", True, dtypes), skip, operands, rounded())
    for name in ("params", "mu", "nu"):
        assert_trees_same_bits(getattr(got, name), getattr(operands, name))


@each_format
def test_untouched_elements_stay_zero(platform, form):
    """Without gradients nothing moves: 20 steps at random of moments that are zero."""
    n = 4096
    zeros = np.zeros(n, F32)
    codes = BlockCodes(np.zeros(n, form.dtype), np.zeros(n // 128, F32))
    grads = zeros.copy()
    grads[::7] = 0.5
    operands = Operands((grads,), (zeros,), (codes,), (codes,))
    spec = Spec("step", (1,), rounding=RoundingSpec(True, (0,)))
    for count in range(20):
        new = adam(spec, scalars(random_rows()), operands, rounded(count=count))
        operands = Operands((grads,), new.params, new.mu, new.nu)
    untouched = grads == 0
    assert (np.asarray(new.params[0])[untouched] == 0).all()
    for name, x in (("mu", new.mu[0]), ("nu", new.nu[0])):
        assert (np.asarray(widened(name, x))[untouched] == 0).all()
        assert (np.asarray(widened(name, x))[~untouched] != 0).all()


@each_format
def test_a_nonfinite_gradient_spoils_its_block_alone(platform, form):
    grads = np.full(512, 0.25, F32)
    grads[200] = np.inf
    codes = BlockCodes(np.zeros(512, form.dtype), np.zeros(4, F32))
    operands = Operands((grads,), (np.ones(512, F32),), (codes,), (codes,))
    spec = Spec("step", (1,), rounding=RoundingSpec(False, (0,)))
    new = adam(spec, scalars(random_rows()), operands, rounded())
    for name, x in (("mu", new.mu[0]), ("nu", new.nu[0])):
        is_nan = np.isnan(np.asarray(widened(name, x))).reshape(4, 128)
        assert is_nan[1].all() and not is_nan[[0, 2, 3]].any()


# A part of a leaf in one piece; one of pieces, of an array that was cut itself; several leaves in
# one; the last block of a whole leaf.
FLAT_SIZES, FLAT_OFFSETS = (1024, 768, 900, 4099), (128, 1280, 2176, 3200)
OWN_OFFSETS = {"mu": (0, 1024, 1792, 2816), "nu": (256, 1536, 2304, 3328)}
FLAT_CUTS = (
    LeafPartition(1024, 4096, 4096, 4096),
    LeafPartition(256, 1024, 512, 2048),
    LeafPartition.into_runs(900),
    LeafPartition(4099, 4099, 4099, 4099),
)
FLAT_PLACES = LeafPositions(
    np.asarray([[3, 0], [2, 1], [0, 0], [0, 0]], np.int32),
    np.asarray(
        [[9, 9], *([5, 2**27 + k] for k in range(3)), *([8, k] for k in range(5))], np.uint32
    ),
)


@pytest.mark.parametrize("mode", ["step", "step_and_cast", "step_split"])
@pytest.mark.parametrize(
    ("mu", "nu"),
    [(BLOCK8, F32), (F32, BLOCK8), (BLOCK8, BLOCK8), (BLOCK16, F32), (BLOCK8, BLOCK16), (BLOCK16, BLOCK16)],
    ids=name_of,
)  # fmt: skip
@often(lambda mode, mu, nu: mu is nu or (mode == "step_split" and nu is not F32))
def test_kernel_on_cut_or_packed_leaves_equals_the_reference_bitwise(platform, mode, mu, nu):
    """Elements between the leaves keep their bits."""
    rng, total = np.random.default_rng(2), 8192
    param = {"step": BF16, "step_and_cast": F32, "step_split": BF16}[mode]
    params, out = tuple(plain_array(rng, n, param) for n in FLAT_SIZES), ()
    if mode == "step_and_cast":
        params = (plain_array(rng, total, F32),)
    if mode == "step_split":
        out = (rng.integers(0, 2**16, total).astype(np.uint16),)
    moments = {
        name: (random_moment(rng, total, dtype, name),) for name, dtype in (("mu", mu), ("nu", nu))
    }
    operands = Operands(
        tuple(plain_array(rng, n, BF16) for n in FLAT_SIZES), params, *moments.values(), out
    )
    flat = {"mu", "nu", *(["params"] if mode == "step_and_cast" else ["out"] if out else [])}
    spec = Spec(
        mode, (0, 1, 0, 1), out_dtype=BF16 if mode == "step_and_cast" else None,
        flat=frozenset(flat), sizes=FLAT_SIZES, offsets=FLAT_OFFSETS,
        mu_offsets=OWN_OFFSETS["mu"], nu_offsets=OWN_OFFSETS["nu"],
        rounding=RoundingSpec(True, (0, 2, 4, 6), cuts=FLAT_CUTS, tables=(-1, -1, 1, -1)),
    )  # fmt: skip
    args = spec, scalars(random_rows(count=3)), operands, rounded(FLAT_PLACES)
    got = adam_of_parts(*args)
    assert_trees_same_bits(got._asdict(), by_reference(*args)._asdict())
    between = np.ones(total, bool)
    for offset, size in zip(OWN_OFFSETS["mu"], FLAT_SIZES, strict=True):
        between[offset : offset + size] = False
    old, new = operands.mu[0], got.mu[0]
    old, new = (x.codes if isinstance(x, BlockCodes) else x for x in (old, new))
    assert_same_bits(np.asarray(new)[between], old[between])


@few(2)
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (2, 0), (1, 1)], ids=str)
def test_parts_draw_the_bits_of_the_whole(dims):
    """Of a leaf (6, 4, 1024), cut in two along one dimension and then along another."""
    shape = (6, 4, 1024)
    size = int(np.prod(shape))
    whole = reference.indices(size, LeafPartition.into_runs(size), (0, 0), np).low.reshape(shape)
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
            got = reference.indices(part.size, LeafPartition(*inner, *cut), numbers, xp)
            assert np.array_equal(np.asarray(got.low).reshape(part.shape), part)
            assert not np.asarray(got.high).any()
    far = reference.indices(4, LeafPartition(2, 2**33, 2**34, 2**40), (3, 1), np)
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
def test_wrong_offsets_and_cuts_raise(change, message):
    rng = np.random.default_rng(3)
    codes = BlockCodes(np.zeros(8192, np.uint8), np.zeros(64, F32))
    arrays = tuple(plain_array(rng, n, F32) for n in FLAT_SIZES)
    spec = Spec(
        "step", (0,) * 4, flat=frozenset({"mu", "nu"}), sizes=FLAT_SIZES, offsets=FLAT_OFFSETS,
        mu_offsets=OWN_OFFSETS["mu"], nu_offsets=OWN_OFFSETS["nu"],
    )  # fmt: skip
    places = dict(cuts=FLAT_CUTS, tables=(-1, -1, 1, -1))
    places |= {name: change[name] for name in places if name in change}
    offsets = {name: value for name, value in change.items() if name not in places}
    rounding = RoundingSpec(True, (0, 1, 2, 3), **places)
    spec = dataclasses.replace(spec, **offsets, rounding=rounding)
    operands = Operands(arrays, arrays, (codes,), (codes,))
    args = scalars(random_rows()), operands, rounded(FLAT_PLACES)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(adam_of_parts(spec, *args))
