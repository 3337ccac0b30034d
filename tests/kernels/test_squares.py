"""Sums of squares that the kernels take equal the reference to the last bit."""

import functools
import itertools

import jax
import numpy as np
import pytest

from jdistadam.core.codecs import BLOCK8, BLOCK16
from jdistadam.kernels import native, reference
from jdistadam.kernels.adam import adam
from jdistadam.kernels.operands import LeafPositions, Operands, RoundingSpec, Spec
from jdistadam.kernels.reference_step import squares_reference
from support.bits import assert_same_bits, assert_trees_same_bits
from support.operands import BF16, F16, F32, halves_of, random_array, random_rows, scalars
from support.quantized import plain_array, rounded
from support.samples import few

SIZES = (1, 3, 127, 128, 129, 511, 1025, 131_072 + 77)  # around lanes, runs, tiles; over 1024 runs
FLAGS = frozenset({"nesterov", "cautious_weight_decay"})
step = jax.jit(adam, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_squares(spec, by_element, segments, scalars, operands, rounding=None):
    request = reference.SquaresRequest(by_element, segments)
    return adam(spec, scalars, operands, rounding, request)


def squares_request(sizes, by_element):
    """A segment for each leaf; then some that overlap, are empty or reach beyond the runs."""
    ends = np.cumsum([0, *map(reference.num_runs, sizes, by_element)])
    total = ends[-1]
    others = [(1, total - 1), (0, total), (5, 5), (7, 3), (-4, 9), (total - 2, total + 10)]
    segments = [*itertools.pairwise(ends), *others, (total, total + 1)]
    return reference.SquaresRequest(by_element, np.asarray(segments, np.int32))


def operands_of(rng, mode, grad, param, mu, array=random_array):
    params = [array(rng, n, F32 if mode == "step_split" else param) for n in SIZES]
    out = ()
    if mode == "step_split":
        params, out = halves_of(params)
    return Operands(
        [array(rng, n, grad) for n in SIZES],
        params,
        [array(rng, n, mu) for n in SIZES],
        [array(rng, n, F32, nonnegative=True) for n in SIZES],
        out,
    )


CASES = {
    "float32": ("step", F32, F32, F32),
    "bfloat16": ("step", BF16, BF16, BF16),
    "bfloat16 gradients": ("step", BF16, F32, F32),
    "float16": ("step", F16, F16, F32),
    "main": ("step_and_cast", BF16, F32, F32),
    "main, float32 gradients": ("step_and_cast", F32, F32, BF16),
    "remainder16": ("step_split", BF16, BF16, F32),
}


@few(9)
@pytest.mark.parametrize("found_inf", [False, True], ids=["stepped", "skipped"])
@pytest.mark.parametrize("values", ["special", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_sums_equal_the_reference_bitwise(platform, case, values, found_inf):
    """The step beside them has the bits of one without, of runs and of single elements."""
    mode, *dtypes = CASES[case]
    array = {"special": random_array, "plain": plain_array}[values]
    operands = operands_of(np.random.default_rng(3), mode, *dtypes, array=array)
    groups = tuple(i % 2 for i in range(len(SIZES)))
    flags = (
        FLAGS if values == "special" else FLAGS - {"cautious_weight_decay"}
    )  # specialized kernels
    spec = Spec(mode, groups, flags, BF16 if mode == "step_and_cast" else None)
    given = scalars(random_rows(count=3), found_inf=found_inf)
    request = squares_request(SIZES, tuple(i % 3 == 1 for i in range(len(SIZES))))
    results = with_squares(spec, *request, given, operands)
    sums = results.squares
    assert_trees_same_bits(results._replace(squares=None), step(spec, given, operands))
    want = squares_reference(spec, given, operands, request, xp=np)
    assert_same_bits(sums, want)
    if values == "plain":
        assert np.isfinite(want).all() and (want[len(SIZES) - 1] > 0)[:2].all()
        assert (want[len(SIZES) - 1, 2] == 0) == found_inf


@pytest.mark.parametrize("found_inf", [False, True], ids=["stepped", "skipped"])
@pytest.mark.parametrize("gap", [0, 1])
def test_sums_of_misaligned_flat_arrays_equal_the_reference_bitwise(platform, gap, found_inf):
    """Leaves begin anywhere."""
    rng = np.random.default_rng(4)
    offsets = tuple(np.cumsum([0, *SIZES])[:-1].tolist())
    offsets = tuple(x + gap * (i + 1) for i, x in enumerate(offsets))
    total = offsets[-1] + SIZES[-1] + 2
    flat = lambda dtype, n=total, **kw: [plain_array(rng, n, dtype, **kw)]  # noqa: E731
    groups = (0, 1) * (len(SIZES) // 2)
    spec = Spec(
        "step_and_cast", groups, FLAGS, BF16, sizes=SIZES, offsets=offsets,
        flat=frozenset({"grads", "params", "mu", "nu", "out"}),
    )  # fmt: skip
    operands = Operands(flat(BF16), flat(F32), flat(F32), flat(F32, nonnegative=True))
    given = scalars(random_rows(count=3), found_inf=found_inf)
    request = squares_request(SIZES, tuple(i % 2 == 1 for i in range(len(SIZES))))
    sums = with_squares(spec, *request, given, operands).squares
    assert_same_bits(sums, squares_reference(spec, given, operands, request, xp=np))


@pytest.mark.slow
@pytest.mark.parametrize("found_inf", [False, True], ids=["stepped", "skipped"])
def test_fallback_sums_are_close(monkeypatch, found_inf):
    monkeypatch.setattr(native, "choose", lambda compiled, fallback: fallback)
    operands = operands_of(np.random.default_rng(6), *CASES["remainder16"], array=plain_array)
    spec = Spec("step_split", tuple(i % 2 for i in range(len(SIZES))), FLAGS)
    given = scalars(random_rows(count=3), found_inf=found_inf)
    request = squares_request(SIZES, tuple(i % 3 == 1 for i in range(len(SIZES))))
    sums = adam(spec, given, operands, request=request).squares
    want = squares_reference(spec, given, operands, request, xp=np)
    np.testing.assert_allclose(sums, want, rtol=1e-5)


QUANTIZED = {
    "block8": ("step", BF16, F32, BLOCK8, BLOCK8, False),
    "block8, stochastic": ("step", F32, BF16, BLOCK8, BLOCK16, True),
    "block16, remainder16": ("step_split", BF16, BF16, BLOCK16, BLOCK16, True),
    "main, stochastic": ("step_and_cast", BF16, F32, BF16, F32, True),
}


@pytest.mark.parametrize("found_inf", [False, True], ids=["stepped", "skipped"])
@pytest.mark.parametrize("case", QUANTIZED)
def test_sums_of_quantized_steps_equal_the_reference_bitwise(platform, case, found_inf):
    mode, grad, param, mu, nu, is_stochastic = QUANTIZED[case]
    rng = np.random.default_rng(5)
    operands = operands_of(rng, mode, grad, param, F32, plain_array)
    stored = {}
    for name, codec in (("mu", mu), ("nu", nu)):
        plain = getattr(operands, name)
        encode = getattr(codec, "encode", None)
        stored[name] = [encode(name, x, None, np) if encode else x.astype(codec) for x in plain]
    operands = operands._replace(**stored)
    groups = tuple(i % 2 for i in range(len(SIZES)))
    out_dtype = BF16 if mode == "step_and_cast" else None
    rounding = RoundingSpec(is_stochastic, tuple(range(len(SIZES))))
    spec = Spec(mode, groups, FLAGS, out_dtype, rounding=rounding)
    given = scalars(random_rows(count=3), found_inf=found_inf)
    positions = jax.tree.map(np.asarray, LeafPositions.of_shards(np.zeros(len(SIZES), np.int32)))
    args = given, operands, rounded(positions)
    request = squares_request(SIZES, tuple(i % 3 == 1 for i in range(len(SIZES))))
    results = with_squares(spec, *request, *args)
    sums = results.squares
    assert_trees_same_bits(results._replace(squares=None), step(spec, *args))
    want = squares_reference(spec, given, operands, request, xp=np)
    assert_same_bits(sums, want)
    assert np.isfinite(want).all() and (want[len(SIZES) - 1, 2] == 0) == found_inf
