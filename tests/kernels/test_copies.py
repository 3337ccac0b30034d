"""Copies between devices have the values of XLA's collectives, and fail loudly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives
from jdistadam.kernels import copies, multi_tensor, native, parts
from support.bits import assert_trees_same_bits
from support.samples import few

native.status("cpu")  # registers the handlers

SHAPES = (((48, 7), 0), ((5, 24, 3), 1), ((24,), 0), ((2, 3, 48), 2))


def mesh_of(devices):
    return jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:devices]), ("d",))


def mapped(local, devices, **options):
    return jax.jit(
        compat.shard_map(local, mesh=mesh_of(devices), in_specs=P("d"), out_specs=P("d"), **options)
    )


def draw(devices, shape, dtype=jnp.float32, seed=0):
    """An array of each device."""
    return jax.random.normal(jax.random.key(seed), (devices, *shape)).astype(dtype)


def by_copies(x, *, dim, devices):
    groups = (tuple(range(devices)),)
    received = copies.exchange(x, dim=dim, groups=groups)
    part = (*x.shape[:dim], x.shape[dim] // devices, *x.shape[dim + 1 :])
    sums = parts.sum_parts([parts.Parts(x, received, parts.Cut(part, dim, groups))]).sums
    return sums[0], copies.gather(x, dim=dim, groups=groups, to="varying")


def by_collectives(x, *, dim, devices):
    parts = x.reshape(*x.shape[:dim], devices, -1, *x.shape[dim + 1 :])
    (total,) = multi_tensor.sum_contributions([lax.all_to_all(parts, "d", dim, 0)])
    return total, lax.all_gather(x, "d", axis=dim, tiled=True)


def on_each(function):
    return lambda x: jax.tree.map(lambda y: y[None], function(x[0]))


@few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
def test_values_are_those_of_collectives(devices, shape, dim, dtype):
    x = draw(devices, shape, dtype)
    got, want = (
        mapped(on_each(functools.partial(f, dim=dim, devices=devices)), devices)(x)
        for f in (by_copies, by_collectives)
    )
    assert_trees_same_bits(got, want)


@few(1)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("devices", [2, 3, 6])
def test_a_gather_in_place_completes_what_each_device_has_written(devices, shape, dim):
    def in_place(x):
        length, start = x.shape[dim], lax.axis_index("d") * x.shape[dim]
        whole = jnp.full((*x.shape[:dim], length * devices, *x.shape[dim + 1 :]), jnp.nan, x.dtype)
        whole = lax.dynamic_update_slice_in_dim(whole, x, start, dim)
        whole = lax.optimization_barrier(collectives.to_varying(whole, ("d",)))
        return copies.gather_in_place(whole, dim=dim, groups=(tuple(range(devices)),))

    x = draw(devices, shape)
    got = mapped(on_each(in_place), devices, check_vma=False)(x)
    want = mapped(on_each(lambda x: lax.all_gather(x, "d", axis=dim, tiled=True)), devices)(x)
    assert_trees_same_bits(got, want)


def test_a_loop_visits_a_start_many_times():
    def local(x, *, function):
        def body(carry, i):
            total, whole = function(carry * (1 + i), dim=0, devices=4)
            return whole[: carry.shape[0]] * 0.5 + jnp.tile(total, (4, 1)), total

        return lax.scan(body, x, jnp.arange(6, dtype=jnp.float32))

    x = draw(4, (48, 7))
    got, want = (
        mapped(on_each(functools.partial(local, function=f)), 4)(x)
        for f in (by_copies, by_collectives)
    )
    assert_trees_same_bits(got, want)


def test_programs_in_flight_do_not_meet():
    """Each depends on the one before, on the same devices."""
    step = mapped(on_each(lambda x: by_copies(x, dim=0, devices=8)[1][: x.shape[0]] + 1), 8)
    x = draw(8, (48, 7))
    want = np.asarray(x[0])
    # XLA for CPUs lets 32 programs of a device be in flight. If it waits to launch another one, it
    # lacks the thread for the last of eight devices.
    for _ in range(10):
        for _ in range(20):
            x, want = step(x), want + np.float32(1)
        jax.block_until_ready(x)
    assert_trees_same_bits(x, np.stack([want] * 8))


def test_equal_starts_are_not_merged():
    def local(x):
        first, second = (copies.exchange(x[0], dim=0, groups=((0, 1),)) for _ in range(2))
        return (first + second)[None]

    x = draw(2, (4, 3))
    program = mapped(local, 2).lower(x).compile()
    assert program.as_text().count(f'custom_call_target="{copies.START}"') == 2
    assert_trees_same_bits(program(x)[:, 0], 2 * x[::-1].reshape(2, 2, 2, 3)[[0, 1], [0, 1]])


def failing(call, match, devices=2):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(mapped(call, devices)(draw(devices, (4, 3))))


def test_a_missing_device_is_named(short_wait):
    failing(
        lambda x: copies.exchange(jnp.tile(x[0], (3, 1)), dim=0, groups=((0, 1, 5),))[None],
        "did not come within 2 s: place 2",
    )


def test_a_device_that_is_not_asked_fails():
    failing(
        lambda x: copies.exchange(x[0], dim=0, groups=((0, 5),))[None],
        "not one of those that copy|not finished",
    )


def test_a_wait_without_a_start_fails():
    """As if the compiler had copied the target between the two."""

    def local(x):
        target = native.type_like(x[0], (1, 2, 3), x.dtype)
        wait = jax.ffi.ffi_call(copies.WAIT, [target], input_output_aliases={0: 0})
        numbers = copies.attributes_of(((0, 1),))
        (out,) = wait(x[:, :2] * 2, x[0], **numbers)
        return out

    failing(local, "were not started, or whose target moved")


def test_after_a_failure_others_work(short_wait):
    test_a_device_that_is_not_asked_fails()
    test_values_are_those_of_collectives(4, (48, 7), 0, jnp.float32)


def test_devices_that_copy_by_different_calls_do_not_meet(short_wait):
    """As if one device ran another program."""

    def local(x):
        start = lambda x: copies.exchange(x, dim=0, groups=((0, 1),)).sum()  # noqa: E731
        is_last = lax.axis_index("d") == 1
        return lax.cond(is_last, start, lambda x: start(x) + 1, x[0])[None]

    failing(local, "did not come within 2 s: place [01]")
