"""The layout covers every element once, on any number of devices, and comes back exactly."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jdistadam.distributed import layout, packing
from jdistadam.distributed.layout import make_layout
from support import flat

shapes = st.lists(
    st.one_of(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from([(128, 128), (24, 1000), (7, 3000), (3, 64, 100), (20_011,)]),
    ),
    max_size=6,
)


def leaves_of(shapes, groups=None):
    dtypes = [jnp.float32, jnp.bfloat16]
    groups = groups or [i % 2 for i in range(len(shapes))]
    return [
        layout.Leaf(f"p{i}", s, jnp.dtype(dtypes[i % 3 == 2]), g)
        for i, (s, g) in enumerate(zip(shapes, groups, strict=True))
    ]


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([1, 2, 3, 4, 8, 13]), st.sampled_from([4, 300, 1 << 20]))
def test_every_element_has_one_place(shapes, num_shards, bucket_bytes):
    leaves = leaves_of(shapes)
    made = make_layout(leaves, num_shards, bucket_bytes)
    placed = sorted(i for bucket in made.buckets for i in bucket.leaves)
    assert placed == [i for i, leaf in enumerate(leaves) if leaf.size]
    end = 0
    for bucket in made.buckets:
        assert bucket.offset % layout.ALIGNMENT == 0
        assert bucket.offset >= end, "shards overlap"
        end = bucket.offset + bucket.shard_size
        sizes = [leaves[i].size for i in bucket.leaves]
        assert bucket.shard_size * num_shards == sum(sizes) + bucket.padding
        assert 0 <= bucket.padding < num_shards
        assert len({(leaves[i].dtype, leaves[i].group) for i in bucket.leaves}) == 1
        if bucket.dim is None and len(bucket.leaves) > 1:
            assert sum(n * bucket.dtype.itemsize for n in sizes) <= bucket_bytes
    assert end <= made.flat_size


def test_layout_equals_the_picture_in_the_docstring():
    leaves = [
        layout.Leaf("w", (256, 128), jnp.dtype(jnp.bfloat16), 0),
        layout.Leaf("s", (128, 128), jnp.dtype(jnp.float32), 0),
        layout.Leaf("b", (3,), jnp.dtype(jnp.bfloat16), 0),
    ]
    made = make_layout(leaves, 2, 1 << 20, keeps_main=lambda dtype, is_held: dtype == jnp.bfloat16)
    assert [leaves[i].path for bucket in made.buckets for i in bucket.leaves] == ["w", "b", "s"]
    assert [bucket.offset for bucket in made.buckets] == [0, 16384, 16512]
    assert [bucket.shard_shape for bucket in made.buckets] == [(128, 128), (2,), (64, 128)]
    assert [bucket.padding for bucket in made.buckets] == [0, 1, 0]
    assert (made.flat_size, made.main_size) == (24704, 16512)
    for number in ("16384", "16512", "24704"):
        assert number in layout.__doc__


@settings(max_examples=20, deadline=None)
@given(shapes, st.sampled_from([1, 3, 4]))
def test_leaves_come_back_exactly(shapes, num_shards):
    """On the host; and a device cuts and packs them to the same place."""
    leaves = leaves_of(shapes)
    made = make_layout(leaves, num_shards, 1000)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    by_device = np.zeros((num_shards, made.flat_size), np.float32)
    flat.put_leaves(made, arrays, by_device)
    for i, mine in enumerate(by_device):
        whole = [packing.bucket_array(b, arrays, jnp.float32) for b in made.buckets]
        pairs = list(zip(made.buckets, whole, strict=True))
        shards = [packing.shard_of(x, i, num_shards, b.cut_dim) for b, x in pairs]
        assert np.array_equal(packing.flat_of(made.buckets, shards), mine)
    back = flat.leaves_of_flat(made, by_device)
    for array, again in zip(arrays, back, strict=True):
        assert np.array_equal(array, again)


def test_sizes_beyond_32_bits():
    """Static arithmetic only: no array of this size is made."""
    made = make_layout([layout.Leaf("huge", (1 << 40, 6), jnp.dtype(jnp.float32), 0)], 8, 1 << 25)
    assert made.buckets[0].shard_size == 6 << 37
    assert made.flat_size >= 6 << 37


def test_large_leaves_are_scattered_where_they_lie():
    made = make_layout(leaves_of([(12, 1, 4096), (4096, 12), (3,)], [0, 0, 0]), 8, 1 << 20)
    assert [(b.leaves, b.dim) for b in made.buckets] == [((0,), 2), ((1,), 0), ((2,), None)]
    assert made.buckets[0].shard_shape == (12, 1, 512)


def test_layout_prints_as_a_table():
    text = str(make_layout(leaves_of([(128, 128), (3,), (5,)], [0, 0, 0]), 4, 1 << 20))
    assert text.splitlines()[0].split() == ["bucket", "dtype", "dim", "shard", "pad", "%", "leaves"]
    assert "p0" in text and "pack" in text


def test_frozen_leaves_have_no_place_in_the_layout():
    leaves = leaves_of([(128, 128), (3,), (128, 256)], [0, 0, 0])
    frozen = [dataclasses.replace(leaves[0], group=None), *leaves[1:]]
    made = make_layout(frozen, 4, 1 << 20)
    assert sorted(i for bucket in made.buckets for i in bucket.leaves) == [1, 2]


def test_leaves_of_different_tensor_axes_are_not_packed_together():
    leaves = leaves_of([(5,), (3,), (7,)], [0, 0, 0])
    leaves[1] = dataclasses.replace(leaves[1], tensor_axes=("model",))
    leaves[2] = dataclasses.replace(leaves[2], dtype=leaves[0].dtype)
    made = make_layout(leaves, 4, 1 << 20)
    assert [bucket.leaves for bucket in made.buckets] == [(0, 2), (1,)]


def test_buckets_with_main_params_come_first():
    leaves = leaves_of([(128, 128), (3,), (5,)], [0, 0, 0])
    keeps_main = lambda dtype, is_held: not is_held  # noqa: E731
    made = make_layout(leaves, 4, 1 << 20, keeps_main=keeps_main, shards_params=True)
    assert [(b.dim, b.has_main) for b in made.buckets] == [(None, True), (None, True), (0, False)]
    assert made.main_size == made.buckets[2].offset
