"""The compiled kernels equal the reference to the last bit."""

import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistadam.core import hyperparameters
from jdistadam.kernels import adam as kernel
from jdistadam.kernels import native, reference
from jdistadam.kernels.operands import Operands, Spec
from jdistadam.kernels.reference_step import adam_reference
from support.bits import assert_same_bits, assert_trees_same_bits
from support.operands import (
    BF16,
    DTYPES,
    F16,
    F32,
    SIZES,
    by_reference,
    halves_of,
    random_array,
    random_rows,
    scalars,
)
from support.samples import few, often

adam = jax.jit(kernel.adam, static_argnums=0)
fallback = jax.jit(functools.partial(adam_reference, xp=jnp), static_argnums=0)


def random_operands(rng, sizes, dtypes, **kwargs):
    grad, param, mu, nu = dtypes
    return Operands(
        tuple(random_array(rng, n, grad, **kwargs) for n in sizes),
        tuple(random_array(rng, n, param, **kwargs) for n in sizes),
        tuple(random_array(rng, n, mu, **kwargs) for n in sizes),
        tuple(random_array(rng, n, nu, nonnegative=True, **kwargs) for n in sizes),
    )


def assert_equals_reference(spec, scalars, operands):
    got, want = (step(spec, scalars, operands) for step in (adam, by_reference))
    assert_trees_same_bits(got._asdict(), want._asdict())


def test_compiled_kernels_are_present():
    """Every other test here would pass on the fallback if it happened to be close enough."""
    status = native.status("cpu")
    assert status.available, status.detail


@pytest.mark.gpu
def test_cuda_kernels_are_present():
    status = native.status("cuda")
    assert status.available, status.detail


MODES = ["step", "step_and_cast", "update"]
FLAGS = [(), ("nesterov",), ("cautious_weight_decay",), ("nesterov", "cautious_weight_decay")]


@few(5)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES, DTYPES)), ids=str)
@often(
    # All of every three of mode, grad, param and mu; every flag on and off with each dtype.
    lambda dtypes, mode, flags: (
        (MODES.index(mode) + sum(map(DTYPES.index, dtypes))) % 3 == 0
        and FLAGS.index(flags) == (DTYPES.index(dtypes[0]) + 2 * DTYPES.index(dtypes[1])) % 4
    )
)
def test_kernel_equals_the_reference_bitwise(platform, dtypes, mode, flags):
    """Changed order, contraction, flushed denormals, another rounding or NaN payload all show.

    Values span the exponent range with infinities, NaN, -0.0 and denormals; sizes surround vector
    and tile limits; half of the leaves have weight decay, half have none; nothing is at a default.
    """
    grad, param, mu = dtypes
    rng = np.random.default_rng([*map(DTYPES.index, dtypes)])
    operands = random_operands(rng, SIZES, (grad, param, mu, F32))
    out_dtype = {"step": None, "step_and_cast": mu, "update": grad}[mode]
    spec = Spec(mode, tuple(i % 2 for i in range(len(SIZES))), frozenset(flags), out_dtype)
    assert_equals_reference(spec, scalars(random_rows(count=3)), operands)


@pytest.mark.parametrize("nu", [BF16, F16], ids=str)
def test_second_moment_may_be_stored_in_16_bits(platform, nu):
    operands = random_operands(np.random.default_rng(1), SIZES, (F32, F32, F32, nu))
    assert_equals_reference(Spec("step", (0,) * len(SIZES)), scalars(random_rows()), operands)


def split_operands(rng, sizes, dtypes, **kwargs):
    """Operands of mode "step_split": parameters as a bfloat16 and a remainder."""
    grad, mu, nu = dtypes
    operands = random_operands(rng, sizes, (grad, F32, mu, nu), **kwargs)
    high, low = halves_of(operands.params)
    return operands._replace(params=high, out=low)


@few(1)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES, (F32, BF16))), ids=str)
def test_split_parameters_equal_the_reference_bitwise(platform, dtypes):
    operands = split_operands(np.random.default_rng(7), SIZES, dtypes)
    for flags in FLAGS:
        spec = Spec("step_split", tuple(i % 2 for i in range(len(SIZES))), frozenset(flags))
        assert_equals_reference(spec, scalars(random_rows(count=3)), operands)
    skip = scalars(random_rows(), found_inf=True)
    assert_equals_reference(spec, skip, operands)
    got = adam(spec, skip, operands)
    for name in ("params", "mu", "nu", "out"):
        for before, after in zip(getattr(operands, name), getattr(got, name), strict=True):
            assert_same_bits(after, before, name)


def test_split_is_lossless_over_all_remainders(platform):
    """Every low half beside bfloat16s of all kinds: joined, left alone by a step of 0, split again.

    A high half may change only where the float32 is NaN, and never hides that it is.
    """
    highs = [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x4000, 0x7F7F, 0x7F80, 0x7FC0]
    bits = np.asarray([h ^ sign for h in highs for sign in (0, 0x8000)], np.uint32)
    bits = (bits[:, None] << 16 | np.arange(65_536, dtype=np.uint32)).reshape(-1)
    x = bits.view(F32)
    high, low = reference.split_halves(x, BF16, np)
    number = ~np.isnan(x)
    assert_same_bits(reference.join_halves(high, low, np)[number], x[number])
    assert np.isnan(reference.join_halves(high, low, np)[~number]).all()
    assert np.isnan(high.astype(F32)[~number]).all()
    # nearest, ties away: half a spacing of bfloat16 above the truncated one rounds up
    away = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16).view(BF16)
    assert_same_bits(high[number], away[number])
    with np.errstate(invalid="ignore"):
        even = x.astype(BF16)
    tie = number & (bits & 0xFFFF == 0x8000)
    assert_same_bits(high[number & ~tie], even[number & ~tie])

    rows = random_rows()
    rows[:, list(hyperparameters.NAMES).index("learning_rate")] = 0.0
    zeros = np.zeros(x.shape, F32)
    operands = Operands((zeros,), (high,), (zeros,), (zeros,), (low,))
    got = adam(Spec("step_split", (1,)), scalars(rows), operands)
    assert_same_bits(got.params[0], high)
    assert_same_bits(got.out[0], low)


@pytest.mark.parametrize("moments", [(F32, F32), (BF16, BF16)], ids=str)
def test_split_parameters_are_the_float32_run(platform, moments):
    """20 steps: the two halves always hold the bits of float32 parameters stepped alike."""
    rng = np.random.default_rng(8)
    operands = random_operands(rng, (4099, 5), (BF16, F32, *moments))
    high, low = halves_of(operands.params)
    halves = operands._replace(params=high, out=low)
    for count in range(1, 21):
        grads = random_operands(rng, (4099, 5), (BF16,) * 4).grads
        rows = scalars(random_rows(count))
        full = adam(Spec("step", (0, 1)), rows, operands._replace(grads=grads))
        split = adam(Spec("step_split", (0, 1)), rows, halves._replace(grads=grads))
        for i, want in enumerate(full.params):
            got = reference.join_halves(np.asarray(split.params[i]), np.asarray(split.out[i]), np)
            assert_same_bits(got, want, f"params[{i}] after {count} steps")
        operands = operands._replace(**{k: getattr(full, k) for k in ("params", "mu", "nu")})
        halves = halves._replace(**{k: getattr(split, k) for k in ("params", "mu", "nu", "out")})


def test_flat_moments_may_have_offsets_of_their_own(platform):
    """In a bfloat16 step on split parameters, where everything is flat."""
    rng = np.random.default_rng(9)
    sizes, offsets, total = (100, 3, 64), (4, 107, 128), 200
    flats = split_operands(rng, (total,), (BF16, F32, F32))
    kinds = frozenset(Operands._fields)
    own = dict(mu_offsets=(0, 101, 136), nu_offsets=(33, 133, 136))
    spec = Spec("step_split", (0, 1, 0), frozenset(), None, kinds, sizes, offsets, **own)
    starts = {"mu": own["mu_offsets"], "nu": own["nu_offsets"]}
    got = adam(spec, scalars(random_rows()), flats)
    leaves = (
        tuple(x[0][o : o + s] for o, s in zip(starts.get(name, offsets), sizes, strict=True))
        for name, x in flats._asdict().items()
    )
    of_leaves = Spec("step_split", spec.groups)
    want = by_reference(of_leaves, scalars(random_rows()), Operands(*leaves))
    for i, size in enumerate(sizes):
        for name in ("params", "mu", "nu", "out"):
            offset = starts.get(name, offsets)[i]
            piece = np.asarray(getattr(got, name)[0])[offset : offset + size]
            assert_same_bits(piece, getattr(want, name)[i], f"{name}[{i}]")


def test_pairwise_sum_adds_adjacent_terms():
    names = np.asarray([f"{i}" for i in range(7)], object)

    class Term(str):
        def __add__(self, other):
            return Term(f"({self!s}+{other!s})")

    terms = np.asarray([Term(x) for x in names], object)
    assert str(reference.pairwise_sum(terms, np)) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize("count", [1, 2, 10, 100, 1000, 10**6])
def test_kernel_equals_the_reference_at_every_step_count(platform, count):
    operands = random_operands(
        np.random.default_rng(count), (4099,), (F32, F32, F32, F32), specials=False
    )
    assert_equals_reference(Spec("step", (0,)), scalars(random_rows(count)), operands)


@few(9)
@pytest.mark.parametrize("shift", range(1, 16))
def test_misaligned_leaves_give_the_same_bits(platform, shift):
    """Flat arrays whose leaves begin at any element, with gaps that must not be touched."""
    rng = np.random.default_rng(shift)
    sizes = (257, 3, 4095, 1, 64)
    offsets = tuple(shift + int(x) for x in np.cumsum([0, *(n + shift for n in sizes)])[:-1])
    total = offsets[-1] + sizes[-1] + 5
    grad, param, mu, nu = BF16, F32, F16, F32
    flats = random_operands(rng, (total,), (grad, param, mu, nu))
    kinds = frozenset({"grads", "params", "mu", "nu", "out"})
    spec = Spec("step_and_cast", (0, 1, 0, 1, 0), frozenset(), BF16, kinds, sizes, offsets)
    got = adam(spec, scalars(random_rows()), flats)

    leaves = Operands(
        *(tuple(x[0][o : o + n] for o, n in zip(offsets, sizes, strict=True)) for x in flats[:4])
    )
    of_leaves = Spec("step_and_cast", spec.groups, out_dtype=BF16)
    want = by_reference(of_leaves, scalars(random_rows()), leaves)
    inside = np.zeros(total, bool)
    for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        inside[offset : offset + size] = True
        for name in ("params", "mu", "nu", "out"):
            piece = np.asarray(getattr(got, name)[0])[offset : offset + size]
            assert_same_bits(piece, getattr(want, name)[i], f"{name}[{i}]")
    for name in ("params", "mu", "nu"):
        before, after = getattr(flats, name)[0], np.asarray(getattr(got, name)[0])
        assert_same_bits(after[~inside], before[~inside], f"gaps of {name}")


@pytest.mark.parametrize("mode", ["step", "step_and_cast", "update"])
def test_skipped_step_changes_no_bit(platform, mode):
    operands = random_operands(np.random.default_rng(5), SIZES, (F16, F32, BF16, F32))
    spec = Spec(
        mode, (0,) * len(SIZES), out_dtype={"step": None, "step_and_cast": F16, "update": F16}[mode]
    )
    skip = scalars(random_rows(), found_inf=True)
    assert_equals_reference(spec, skip, operands)
    got = adam(spec, skip, operands)
    for name in ("mu", "nu") if mode == "update" else ("params", "mu", "nu"):
        for i, before in enumerate(getattr(operands, name)):
            assert_same_bits(getattr(got, name)[i], before, f"{name}[{i}]")
    if mode == "update":
        assert all(not np.asarray(u).any() for u in got.out)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_all_16_bit_values_survive_load_and_store(platform, dtype):
    """With a gradient of zero, b1 = 1 and no step, every mu is loaded and stored as it was."""
    values = np.arange(65_536, dtype=np.uint16).view(dtype)
    rows = random_rows()
    for name, value in {"b1": 1.0, "one_minus_b1": 0.0}.items():
        rows[:, list(hyperparameters.NAMES).index(name)] = value
    zeros = np.zeros(values.shape, F32)
    got = adam(Spec("step", (1,)), scalars(rows), Operands((zeros,), (zeros,), (values,), (zeros,)))
    want = values.copy()
    want[np.isnan(values.astype(F32))] = np.float32(np.nan).astype(dtype)
    zero = values.astype(F32) == 0
    want[zero] = 0  # 0 * g + 1 * -0.0 = +0.0
    assert_same_bits(got.mu[0], want)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_stores_round_to_nearest_even(platform, dtype):
    """Values at, just below and just above every midpoint between neighbours of the 16-bit type."""
    grid = np.arange(0, 0x7F80 if dtype == BF16 else 0x7C00, dtype=np.uint16).view(dtype)
    low, high = grid[:-1].astype(np.float64), grid[1:].astype(np.float64)
    middle = ((low + high) / 2).astype(F32)
    tries = np.concatenate(
        [middle, np.nextafter(middle, F32.type(0)), np.nextafter(middle, F32.type(np.inf))]
    )
    tries = np.concatenate([tries, -tries])
    rows = random_rows()
    rows[:, list(hyperparameters.NAMES).index("learning_rate")] = 0.0
    zeros = np.zeros(tries.shape, F32)
    spec = Spec("step_and_cast", (1,), out_dtype=dtype)
    got = adam(spec, scalars(rows), Operands((zeros,), (tries,), (zeros,), (zeros,)))
    assert_same_bits(got.out[0], tries.astype(dtype))


@pytest.mark.parametrize("name", hyperparameters.NAMES)
def test_every_coefficient_reaches_the_result(platform, name):
    """A coefficient that is ignored, or read from a wrong place, leaves the bits as they are."""
    operands = random_operands(np.random.default_rng(2), (1000,), (F32,) * 4, specials=False)
    spec = Spec("step", (0,), frozenset(FLAGS[-1]))
    rows = random_rows(count=2)
    base = adam(spec, scalars(rows), operands)
    rows[0, list(hyperparameters.NAMES).index(name)] *= 1.01
    changed = adam(spec, scalars(rows), operands)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(changed), strict=True)
    )


def test_inv_scale_multiplies_the_gradient(platform):
    operands = random_operands(np.random.default_rng(3), (1000,), (F32,) * 4, specials=False)
    scaled = operands._replace(grads=(operands.grads[0] * F32.type(0.25),))
    a = adam(Spec("step", (0,)), scalars(random_rows(), inv_scale=0.25), operands)
    b = adam(Spec("step", (0,)), scalars(random_rows(), inv_scale=1.0), scaled)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_same_bits(x, y)


@pytest.mark.gpu
def test_cuda_graphs_change_no_bit():
    """A program that XLA captures in a CUDA graph, and the same launched kernel by kernel."""
    operands = random_operands(np.random.default_rng(10), SIZES, (BF16, F32, F32, F32))
    spec = Spec("step_and_cast", (0,) * len(SIZES), out_dtype=BF16)

    def steps(scalars, operands):
        results = []
        for i in range(6):  # enough thunks for a graph
            grads = tuple(g * (i + 1) for g in operands.grads)
            results.append(kernel.adam(spec, scalars, operands._replace(grads=grads)))
            new = results[-1]
            operands = operands._replace(params=new.params, mu=new.mu, nu=new.nu)
        return results

    args = jax.device_put((scalars(random_rows()), operands), jax.devices("gpu")[0])
    runs = []
    for buffers in ("", "FUSION,CUSTOM_CALL"):
        step = jax.jit(steps, compiler_options={"xla_gpu_enable_command_buffer": buffers})
        for _ in range(3):  # a graph is captured, then updated, then launched
            runs.append(jax.tree.leaves(step(*args)))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert_same_bits(b, a)


def test_many_leaves_need_several_launches(platform):
    """More leaves than one table of kernel parameters holds, sizes mixed, some empty."""
    rng = np.random.default_rng(4)
    sizes = tuple(int(n) for n in rng.integers(0, 40, 1100))
    offsets = tuple(int(x) for x in np.cumsum((0, *sizes[:-1])))
    leaves = random_operands(rng, sizes, (F32,) * 4)
    groups = tuple(i % 2 for i in range(len(sizes)))
    flat = leaves._replace(
        **{k: (np.concatenate(getattr(leaves, k)),) for k in ("params", "mu", "nu")}
    )
    kinds = frozenset({"params", "mu", "nu"})
    got = adam(
        Spec("step", groups, frozenset(), None, kinds, sizes, offsets), scalars(random_rows()), flat
    )
    want = by_reference(Spec("step", groups), scalars(random_rows()), leaves)
    for name in ("params", "mu", "nu"):
        assert_same_bits(getattr(got, name)[0], np.concatenate(getattr(want, name)), name)


def test_fallback_is_close_to_the_kernel():
    """What runs without a compiled module: same modes, same results but for contraction."""
    for mode in ("step", "step_and_cast", "update", "step_split"):
        rng = np.random.default_rng(6)
        operands = random_operands(rng, (33, 5), (F32,) * 4, specials=False)
        if mode == "step_split":
            operands = split_operands(rng, (33, 5), (F32,) * 3, specials=False)
        has_out = mode in ("step_and_cast", "update")
        spec = Spec(mode, (0, 1), frozenset(FLAGS[1]), F32 if has_out else None)
        got = fallback(spec, scalars(random_rows()), operands)
        want = adam(spec, scalars(random_rows()), operands)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if mode == "step_split":
                continue
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-30)
        if mode == "step_split":  # neither half means anything by itself
            halves = (zip(z.params, z.out, strict=True) for z in (got, want))
            joined = (
                [reference.join_halves(*map(np.asarray, pair), np) for pair in z] for z in halves
            )
            for x, y in zip(*joined, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-30)


def test_fallback_on_flat_arrays_leaves_gaps_alone():
    flat = np.arange(1.0, 21.0, dtype=np.float32)
    grads = (np.ones(4, np.float32), np.ones((2, 3), np.float32))
    spec = Spec(
        "step_and_cast",
        (0, 1),
        frozenset(),
        BF16,
        frozenset({"params", "mu", "nu"}),
        (4, 6),
        (1, 8),
        nu_offsets=(3, 12),
    )
    operands = Operands(grads, (flat,), (flat,), (flat,))
    got = fallback(spec, scalars(random_rows()), operands)
    want = adam(spec, scalars(random_rows()), operands)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-2)
    assert np.asarray(got.mu[0])[[0, 5, 6, 7, 14]].tolist() == [1.0, 6.0, 7.0, 8.0, 15.0]
    assert np.asarray(got.nu[0])[[0, 2, 7, 11, 18]].tolist() == [1.0, 3.0, 8.0, 12.0, 19.0]


def raw_call(results, *operands, **attributes):
    call = jax.ffi.ffi_call("jdistadam_adam", results, input_output_aliases={4: 0, 5: 1, 6: 2})
    return jax.jit(lambda *xs: call(*xs, **attributes))(*operands)


GOOD_ATTRIBUTES = dict(
    mode=np.int32(0), flags=np.int32(0), groups=np.zeros(1, np.int32), flat=np.int32(0),
    **dict.fromkeys(("sizes", "offsets", "mu_offsets", "nu_offsets"), np.zeros(0, np.int64)),
)  # fmt: skip


@few(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mode=np.int32(7)), "mode must be 0, 1, 2 or 3"),
        (dict(flags=np.int32(4)), "flags has unknown bits"),
        (dict(flags=np.int32(-1)), "flags has unknown bits"),
        (dict(mode=np.int32(3)), "too few arrays"),
        (dict(mode=np.int32(1)), "too few arrays"),
        (dict(groups=np.asarray([5], np.int32)), "no row of coefficients"),
        (dict(groups=np.asarray([-1], np.int32)), "no row of coefficients"),
        (dict(groups=np.zeros(2, np.int32)), "too few arrays|dtypes differ|elements"),
        (dict(groups=np.zeros(0, np.int32)), "too many arrays"),
        (dict(flat=np.int32(2)), "sizes and offsets"),
        (dict(sizes=np.asarray([3]), offsets=np.asarray([0])), "expected 3"),
        (dict(flat=np.int32(2), sizes=np.asarray([8]), offsets=np.asarray([1])), "beyond the flat array"),
        (dict(flat=np.int32(2), sizes=np.asarray([8]), offsets=np.asarray([2**63 - 1])), "beyond the flat array"),
        (dict(flat=np.int32(2), sizes=np.asarray([-8]), offsets=np.asarray([0])), "negative"),
        (dict(flat=np.int32(2), sizes=np.asarray([8]), offsets=np.asarray([0]), nu_offsets=np.asarray([-1])), "negative"),
        (dict(flat=np.int32(4), sizes=np.asarray([8]), offsets=np.asarray([0]), mu_offsets=np.asarray([0, 8])), "one entry a leaf"),
        (dict(mu_offsets=np.asarray([0])), "one entry a leaf"),
        (dict(flat=np.int32(32)), "flat must be"),
        (dict(flat=np.int32(-1)), "flat must be"),
        (dict(mode=np.float32(0)), "Wrong scalar data type|mode"),
    ],
    ids=str,
)  # fmt: skip
def test_handler_raises_for_bad_attributes(change, message):
    """Nothing that reaches the handler may crash the process, whoever built the call."""
    operands = scalars(random_rows()), *(np.ones(8, np.float32) for _ in range(4))
    results = [jax.ShapeDtypeStruct((8,), jnp.float32)] * 3
    flat_operands = (*operands[0], *operands[1:])
    raw_call(results, *flat_operands, **GOOD_ATTRIBUTES)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(raw_call(results, *flat_operands, **(GOOD_ATTRIBUTES | change)))


def test_handler_raises_for_leaves_that_overlap():
    x = np.ones(8, np.float32)
    kinds = frozenset(Operands._fields[:4])
    spec = Spec("step", (0, 0), frozenset(), None, kinds, (4, 4), (0, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="leaf 1: offsets must ascend"):
        jax.block_until_ready(adam(spec, scalars(random_rows()), Operands((x,), (x,), (x,), (x,))))


def test_handler_raises_for_bad_operands():
    good = [*scalars(random_rows()), *(np.ones(8, np.float32) for _ in range(4))]
    results = [jax.ShapeDtypeStruct((8,), jnp.float32)] * 3
    bad_rows, bad_grad, bad_dtype = list(good), list(good), list(good)
    bad_rows[0] = bad_rows[0][:, :5]
    bad_grad[3] = np.ones(7, np.float32)
    bad_dtype[3] = np.ones(8, np.int32)
    for operands, message in (
        (bad_rows, "columns"),
        (bad_grad, "has 8 elements, expected 7"),
        (bad_dtype, "dtype must be"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(raw_call(results, *operands, **GOOD_ATTRIBUTES))


def test_comparison_can_fail():
    for a, b in ((0.0, -0.0), (1.0, np.nextafter(np.float32(1), np.float32(2)))):
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_same_bits(np.float32([a]), np.float32([b]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(np.zeros(1, F32), np.zeros(1, F16))


def test_concurrent_calls_do_not_disturb_each_other(platform):
    """Eight threads, one compiled program, operands of their own."""
    spec = Spec("step", (0, 1, 0))
    many = [
        random_operands(np.random.default_rng(i), (70_001, 5, 4096), (F32,) * 4) for i in range(8)
    ]
    compiled = adam.lower(spec, scalars(random_rows()), many[0]).compile()

    def repeat(operands):
        return [compiled(scalars(random_rows()), operands) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(repeat, many))
    for operands, runs in zip(many, results, strict=True):
        want = by_reference(spec, scalars(random_rows()), operands)
        for got in runs:
            assert_trees_same_bits(got._asdict(), want._asdict())


@pytest.mark.gpu
@pytest.mark.parametrize("flat", [False, True])
def test_leaves_above_2_31_elements(flat):
    """By value: the operands repeat with a period, and so must every result, to the last bit."""
    period, repeats = 8191, 2**31 // 8191 + 2
    size = period * repeats
    needed = 12 * size + (8 << 30)
    limit = jax.devices("gpu")[0].memory_stats()["bytes_limit"]
    if limit < needed:
        pytest.skip(f"needs an NVIDIA GPU with {needed >> 30} GiB for JAX, not {limit >> 30}")
    (small,) = zip(
        *random_operands(np.random.default_rng(11), (period,), (BF16, BF16, F32, F32))[:4],
        strict=True,
    )
    kinds = frozenset(("grads", "params", "mu", "nu")) if flat else frozenset()
    spec = Spec("step", (1,), frozenset(), None, kinds, *(((size,), (0,)) if flat else ()))

    @functools.partial(jax.jit, static_argnums=0)
    def run(spec, scalars, small):
        operands = Operands(*((jnp.tile(x, repeats),) for x in small))
        new = kernel.adam(spec, scalars, operands)
        rows = [getattr(new, name)[0].reshape(repeats, period) for name in ("params", "mu", "nu")]
        bits = [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in rows]
        return [x[0] for x in rows], [jnp.all(x == x[:1]) for x in bits]

    with jax.default_device(jax.devices("gpu")[0]):
        first, repeat = run(spec, scalars(random_rows()), small)
    assert all(map(bool, repeat)), repeat
    want = by_reference(
        Spec("step", (1,)), scalars(random_rows()), Operands(*((x,) for x in small))
    )
    for name, got in zip(("params", "mu", "nu"), first, strict=True):
        assert_same_bits(got, getattr(want, name)[0], name)
