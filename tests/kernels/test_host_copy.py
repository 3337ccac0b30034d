"""Copies of parts of arrays between a device and its host, and calls of them that are wrong.

On CPUs and GPUs; on CPUs both memories are the same.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistadam.kernels import host_copy, native
from jdistadam.kernels.host_copy import Rows


def on_host(x, platform):
    device = jax.devices(platform)[0]
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))


CHOICES = {  # by native.choose: which module is there
    "kernels": lambda compiled, fallback: compiled,
    "no kernels": lambda compiled, fallback: fallback,
    "only for CPUs": lambda compiled, fallback: functools.partial(
        jax.lax.platform_dependent, default=fallback, cpu=compiled
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_of_arrays_are_copied_to_the_device_and_back(platform, choice, monkeypatch):
    """Parts of two arrays, of other dtypes and widths; what lies around them stays."""
    assert all(native.status(x).available for x in {"cpu", {"gpu": "cuda"}.get(platform, "cpu")})
    monkeypatch.setattr(native, "choose", CHOICES[choice])
    floats = np.arange(10 * 128, dtype=np.float32)
    codes = np.arange(10, dtype=np.uint8)
    hosts = [on_host(floats, platform), on_host(codes, platform)]
    parts = [Rows(3, 4, 128), Rows(3, 4, 1)]

    def step(hosts):
        new, started = host_copy.to_device(hosts, parts, 0, [])
        new = host_copy.wait(new, 0, [started], to_host=False)
        new = [-new[0], new[1] + 100]
        for i, (part, x) in enumerate(zip(parts, new, strict=True)):
            hosts[i] = host_copy.to_host(hosts[i], part, x, 0, [])
        for i in range(2):
            (hosts[i],) = host_copy.wait([hosts[i]], 0, new, to_host=True)
        return hosts

    shardings = [x.sharding for x in hosts]
    got = jax.jit(step, donate_argnums=0, out_shardings=shardings)(hosts)
    floats[3 * 128 : 7 * 128] *= -1
    codes[3:7] += 100
    assert [x.sharding.memory_kind for x in got] == ["pinned_host"] * 2
    np.testing.assert_array_equal(np.asarray(got[0]), floats)
    np.testing.assert_array_equal(np.asarray(got[1]), codes)


WRONG = {
    "ends beyond": (2, dict(offsets=[8], index=0, to_host=False), "part 0 of a copy ends beyond"),
    "starts before": (
        2,
        dict(offsets=[-4], index=0, to_host=False),
        "part 0 of a copy ends beyond",
    ),
    "too few results": (1, dict(offsets=[0], index=0, to_host=False), "has too few arrays"),
    "too few operands": (1, dict(offsets=[0], index=0, to_host=True), "has too few arrays"),
}


@pytest.mark.parametrize("case", WRONG)
def test_malformed_calls_raise(case):
    num_results, attributes, message = WRONG[case]
    assert native.status("cpu").available
    types = [jax.ShapeDtypeStruct((4,), jnp.float32)] * num_results
    exact = {
        "offsets": np.asarray(attributes["offsets"], np.int64),
        "index": np.int32(attributes["index"]),
        "to_host": np.bool_(attributes["to_host"]),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.ffi.ffi_call("jdistadam_host_copy", types)(jnp.ones(4), **exact))


def test_arrays_that_are_not_in_place_raise():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    scalars = dict(index=np.int32(0), to_host=np.bool_(True))
    copied = jax.ffi.ffi_call("jdistadam_host_copied", [x])
    with pytest.raises(jax.errors.JaxRuntimeError, match="result 0 of a copy is not aliased"):
        jax.block_until_ready(copied(jnp.ones(4), **scalars))
    copy = jax.ffi.ffi_call("jdistadam_host_copy", [x])
    with pytest.raises(jax.errors.JaxRuntimeError, match="result 0 of a copy is not aliased"):
        jax.block_until_ready(
            copy(jnp.ones(4), jnp.ones(4), offsets=np.zeros(1, np.int64), **scalars)
        )
