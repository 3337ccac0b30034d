"""Norm, pairwise sums, packing and unpacking: bitwise equal to the reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.kernels import multi_tensor, reference
from support.bits import assert_same_bits
from support.operands import BF16, DTYPES, F16, F32, random_array
from support.samples import few

SIZES = (0, 1, 3, 1023, 1024, 8191, 8192, 8193, 40_000)
sum_of_squares = jax.jit(multi_tensor.sum_of_squares)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_equals_the_reference_bitwise(platform, dtype):
    """Ordinary values, so that the order of the sum shows, and many tiles of leaves of all sizes."""
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=n).astype(dtype) for n in SIZES]
    squares, found_inf = sum_of_squares(grads, np.float32(0.37))
    want, _ = reference.sum_of_squares([g for g in grads if g.size], np.float32(0.37))
    assert_same_bits(squares, want)
    assert not found_inf
    exact = sum(np.square(g.astype(np.float64) * np.float32(0.37)).sum() for g in grads)
    terms = sum(SIZES)  # a sum of n positive terms, each rounded: off by n roundings at most
    np.testing.assert_allclose(squares, exact, rtol=terms * 2.0**-24)


def test_norm_of_more_tiles_than_lanes_equals_the_reference_bitwise(platform):
    """Tiles are summed over lanes too: 1100 of them, the last one short."""
    grads = [np.random.default_rng(1).normal(size=1100 * reference.NORM_TILE - 5).astype(F32)]
    squares, _ = sum_of_squares(grads, np.float32(1))
    assert_same_bits(squares, reference.sum_of_squares(grads, np.float32(1))[0])


def test_norm_of_many_leaves_equals_the_reference_bitwise(platform):
    """More leaves than one table of kernel parameters holds."""
    rng = np.random.default_rng(2)
    grads = [rng.normal(size=n).astype(F32) for n in rng.integers(1, 40, 1100)]
    squares, _ = sum_of_squares(grads, np.float32(1))
    assert_same_bits(squares, reference.sum_of_squares(grads, np.float32(1))[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 1022, 8191, 8192, 20_000, 39_999])
def test_found_inf_sees_every_element(platform, dtype, where):
    """One non-finite value, anywhere; or that overflows only when it is scaled."""
    clean = np.ones(40_000, dtype)
    for value, inv_scale, expected in (
        (np.inf, 1, True), (-np.inf, 1, True), (np.nan, 1, True), (60_000, 1, False), (60_000, 1e35, True), (60_000, 1e30, False),
    ):  # fmt: skip
        grads = [np.ones(7, dtype), clean.copy()]
        grads[1][where] = value
        squares, found_inf = sum_of_squares(grads, np.float32(inv_scale))
        assert bool(found_inf) == expected, value
        want, want_found = reference.sum_of_squares(grads, np.float32(inv_scale))
        assert_same_bits(squares, want)
        assert want_found == expected


def test_norm_accepts_no_leaves_and_mixed_dtypes(platform):
    squares, found_inf = sum_of_squares([])
    assert float(squares) == 0 and not found_inf
    grads = [np.full(3, 2, t) for t in (F32, BF16, F16)] + [np.zeros((0, 4), F32)]
    squares, found_inf = sum_of_squares(grads)
    assert float(squares) == 36 and not found_inf
    grads[2][1] = np.inf
    assert sum_of_squares(grads)[1]


@few(13)
@pytest.mark.parametrize("contributions", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_equals_the_reference_bitwise(platform, dtype, contributions):
    rng = np.random.default_rng(contributions)
    stacked = [
        np.stack([random_array(rng, n, dtype) for _ in range(contributions)])
        for n in (0, 1, 5, 513, 4096)
    ]
    got = jax.jit(multi_tensor.sum_contributions)(stacked)
    for x, y in zip(got, stacked, strict=True):
        with np.errstate(all="ignore"):
            want = reference.pairwise_sum(y.astype(F32), np)
            assert_same_bits(x, reference.store(want, F32, np))


@pytest.mark.parametrize(("dtype", "out"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_unpack_inverts_pack_and_gaps_are_zero(platform, dtype, out):
    """Leaves of any shape and alignment; gaps are zero; unpacking is the inverse."""
    rng = np.random.default_rng(3)
    shapes = ((5,), (), (3, 7), (0, 2), (64, 33), (1,))
    leaves = [np.reshape(random_array(rng, int(np.prod(s)), dtype), s) for s in shapes]
    offsets, size = (0, 5, 16, 37, 128, 2300), 2400
    packed = jax.jit(lambda xs: multi_tensor.pack(xs, offsets, size, out))(leaves)
    want = np.zeros(size, out)
    with np.errstate(all="ignore"):
        for leaf, offset in zip(leaves, offsets, strict=True):
            cast = reference.store(leaf.astype(F32), out, np)
            want[offset : offset + leaf.size] = cast.ravel()
    assert_same_bits(packed, want)
    unpacked = jax.jit(lambda x: multi_tensor.unpack(x, shapes, offsets, out))(want)
    for i, (leaf, offset) in enumerate(zip(leaves, offsets, strict=True)):
        assert_same_bits(unpacked[i], want[offset : offset + leaf.size].reshape(leaf.shape))


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_vary_where_their_operands_do(cpu_mesh, check_vma):
    """In a shard_map each device has its own norm: a result that claimed to be equal would be wrong."""
    mesh = cpu_mesh(4)

    def local(x):
        squares, found_inf = multi_tensor.sum_of_squares([x])
        flat = multi_tensor.pack([x, x], (0, 4), 8, jnp.bfloat16)
        (again, _) = multi_tensor.unpack(flat, ((4,), (4,)), (0, 4), jnp.float32)
        (summed,) = multi_tensor.sum_contributions([x.reshape(2, 2)])
        return squares[None], found_inf[None], again, summed

    x = np.arange(16.0, dtype=F32)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    run = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    squares, found_inf, again, summed = jax.jit(run)(placed)
    np.testing.assert_array_equal(squares, (x.reshape(4, 4) ** 2).sum(1))
    np.testing.assert_array_equal(again, x)
    np.testing.assert_array_equal(summed, x.reshape(4, 2, 2).sum(1).ravel())
    assert not found_inf.any()


def test_fallbacks_equal_the_kernels():
    """Exact sums, so that their order is irrelevant."""
    rng = np.random.default_rng(4)
    grads = [rng.integers(-8, 8, n).astype(F32) for n in (5, 8193)]
    got = multi_tensor._norm_fallback(multi_tensor._tiles_fallback(np.float32(0.5), grads))
    assert [float(x) for x in got] == [float(x) for x in reference.sum_of_squares(grads, 0.5)]
    for flat, shapes, arrays, n in (
        (0, ((2,), (3,)), [rng.integers(0, 9, (3, k)).astype(F32) for k in (2, 3)], 3),
        (multi_tensor._FLAT_OUTPUT, ((9,),), [np.ones(2, F32), np.ones(3, F32)], 1),
        (multi_tensor._FLAT_INPUT, ((2,), (3,)), [np.arange(9, dtype=F32)], 1),
    ):
        spec = multi_tensor._SumSpec(shapes, (2, 3), (1, 5), jnp.bfloat16, n, flat)
        got, want = multi_tensor._sum(spec, arrays), multi_tensor._sum_fallback(spec, *arrays)
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("inv_scale", [np.inf, np.nan, 0.0, -1.0])
def test_norm_with_a_nonfinite_scale_equals_the_reference(platform, inv_scale):
    """A loss scale that underflowed: what is beyond a leaf must not turn 0 * inf into a NaN."""
    for grads in ([np.ones(3, F32)], [np.zeros(3, F32), np.ones(8193, F32)]):
        got = sum_of_squares(grads, np.float32(inv_scale))
        for x, y in zip(got, reference.sum_of_squares(grads, np.float32(inv_scale)), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("order", [1, -1])
def test_one_varying_operand_makes_the_result_vary(cpu_mesh, order):
    """Replicated and local operands in one call: the result may not pass for replicated."""
    mesh = cpu_mesh(4)
    fixed = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, P()))
    local = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, P("data")))
    tx = jda.fused_adamw(1e-3)

    functions = {
        "norm": lambda a, b: multi_tensor.sum_of_squares([a, b][::order])[0],
        "scale": lambda a, b: multi_tensor.sum_of_squares([a], b[0])[0],
        "pack": lambda a, b: multi_tensor.pack([a, b][::order], (0, 4), 8, jnp.float32),
        "step": lambda a, b: tx.step({"w": b}, tx.init({"w": a}), {"w": a})[0]["w"],
    }
    for function in functions.values():
        for out, legal in ((P(), False), (P("data"), True)):
            one = lambda a, b, f=function: jnp.atleast_1d(f(a, b))  # noqa: E731
            run = jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=out)
            if legal:
                assert jax.jit(run)(fixed, local).shape[0] % 4 == 0
            else:
                with pytest.raises(ValueError, match=r"out_specs|replicat"):
                    jax.jit(run)(fixed, local)


def raw_sum(results, *operands, **change):
    good = dict(contributions=np.int32(1), flat=np.int32(0), sizes=np.asarray([8]), offsets=np.asarray([0]))  # fmt: skip
    call = jax.ffi.ffi_call("jdistadam_sum", results)
    return jax.block_until_ready(jax.jit(lambda *xs: call(*xs, **(good | change)))(*operands))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(contributions=np.int32(0)), "contributions must be"),
        (dict(contributions=np.int32(3)), "does not divide"),
        (dict(contributions=np.int32(2)), "has 8 elements, expected 16"),
        (dict(flat=np.int32(4)), "flat must be"),
        (dict(sizes=np.asarray([8, 1])), "one entry a leaf"),
        (dict(sizes=np.asarray([-1])), "negative size or offset"),
        (dict(sizes=np.asarray([2**63 - 1]), offsets=np.asarray([5])), "has 8 elements, expected"),
        (dict(flat=np.int32(1), sizes=np.asarray([4, 4]), offsets=np.asarray([0, 3])), "offsets must ascend"),
        (dict(flat=np.int32(1), offsets=np.asarray([1])), "ends beyond the flat array"),
        (dict(flat=np.int32(2), offsets=np.asarray([1])), "ends beyond the flat array"),
        (dict(sizes=np.asarray([4, 4]), offsets=np.asarray([0, 4])), "has 8 elements, expected 4"),
    ],
    ids=str,
)  # fmt: skip
def test_the_sum_handler_raises_for_bad_attributes(change, message):
    results, x = [jax.ShapeDtypeStruct((8,), jnp.float32)], np.ones(8, F32)
    assert_same_bits(raw_sum(results, x)[0], x)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        raw_sum(results, x, **change)


def test_the_sum_handler_raises_for_bad_arrays_and_fills_an_empty_output():
    result = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="dtype must be"):
        raw_sum([result], np.ones(8, np.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="dtype must be"):
        raw_sum([jax.ShapeDtypeStruct((8,), jnp.uint16)], np.ones(8, F32))
    empty = dict(sizes=np.zeros(0, np.int64), offsets=np.zeros(0, np.int64), flat=np.int32(2))
    (zeros,) = raw_sum([jax.ShapeDtypeStruct((4096,), jnp.float32)], **empty)
    assert not np.asarray(zeros).any()


def test_the_norm_handler_raises_for_bad_arrays():
    scalars = [jax.ShapeDtypeStruct((), t) for t in (jnp.float32, jnp.bool_)]
    sum_tiles = jax.jit(jax.ffi.ffi_call("jdistadam_norm", scalars))

    def tiles_of(shape, *grads):
        call = jax.ffi.ffi_call("jdistadam_norm_tiles", jax.ShapeDtypeStruct(shape, jnp.uint32))
        return jax.block_until_ready(jax.jit(call)(np.float32(1), *grads))

    x = np.ones(8193, F32)
    assert float(sum_tiles(tiles_of((2, 2), x))[0]) == 8193
    assert float(sum_tiles(np.zeros((0, 2), np.uint32))[0]) == 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected 2 words, got 3"):
        jax.block_until_ready(sum_tiles(np.zeros((2, 3), np.uint32)))
    for tiles, grads, message in (
        ((1, 2), (x,), "expected 2 tiles"), ((2, 3), (x,), "expected 2 tiles"), ((3, 2), (x, x.astype(F16)), "dtypes differ"),
        ((2, 2), (x.astype(np.int32),), "dtype must be"),
    ):  # fmt: skip
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            tiles_of(tiles, *grads)


def test_sum_of_no_arrays_is_empty():
    assert multi_tensor.sum_contributions([]) == []
