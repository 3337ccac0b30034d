"""Checksums: of bits and positions, the same however an array is placed on devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.checkpoint import checksum
from jdistadam.checkpoint.checksum import partial_sums, totals
from support.samples import few

DEVICES = jax.devices("cpu")


def of(x):
    return totals(partial_sums([x]))[0]


def mixed(h):
    """MurmurHash3's finalizer, in Python's integers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def reference(x):
    """The definition: one element after the other."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    first = second = 0
    for i, bits in enumerate(np.asarray(x).ravel().view(unsigned).tolist()):
        h = mixed(bits ^ mixed((i + 0x9E3779B9) % 2**32))
        first, second = (first + h) % 2**32, (second + mixed(h ^ 0x85EBCA77)) % 2**32
    return f"{first:08x}{second:08x}"


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_checksum_equals_its_definition_under_any_sharding(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 4)) * 5).astype(dtype)
    want = reference(x)
    assert of(x) == want
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("x", "y"), (kind,) * 2, devices=DEVICES)
        every = (P(), P("x"), P(("y", "x")), P("y", None, "x"), P(None, None, ("x",)))
        for spec in every if dtype == "float32" else every[3:4]:
            assert of(jax.device_put(x, NamedSharding(mesh, spec))) == want, (kind, spec)
    assert of(x.reshape(-1)) == want  # positions are those in C order
    assert of(jax.device_put(x[0, 0, 0])) == reference(x[0, 0, 0])


def test_any_change_of_bits_changes_the_checksum():
    """Each bit of some elements; two of them exchanged; zeros of another sign; another NaN."""
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    want = of(jnp.asarray(x))
    seen = {want}
    for i, bit in itertools.product((0, 1, 500, 999), range(32)):
        y = x.copy()
        y.view(np.uint32)[i] ^= np.uint32(1) << np.uint32(bit)
        seen.add(of(jnp.asarray(y)))
    for i, j in ((0, 1), (3, 900), (998, 999)):
        y = x.copy()
        y[[i, j]] = y[[j, i]]
        seen.add(of(jnp.asarray(y)))
    assert len(seen) == 1 + 4 * 32 + 3
    assert of(jnp.zeros(3)) != of(-jnp.zeros(3))
    assert of(jnp.zeros(0)) == "0" * 16


def test_positions_count_beyond_32_bits():
    """A part of an array of 2**33 elements: its positions are those of the whole, modulo 2**32."""
    x = jnp.arange(6.0).reshape(2, 3)
    starts = np.asarray([[2**31 - 1, 1]], np.uint32)
    got = checksum._local_sums([x], starts, shape=(2**31 + 1, 4))
    first = 0
    for (i, j), value in np.ndenumerate(np.asarray(x)):
        position = ((2**31 - 1 + i) * 4 + 1 + j) % 2**32
        bits = int(np.float32(value).view(np.uint32))
        first += mixed(bits ^ mixed((position + 0x9E3779B9) % 2**32))
    assert int(got[0, 0, 0]) == first % 2**32
