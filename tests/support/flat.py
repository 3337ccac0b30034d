"""The flat arrays of all devices by leaf, in numpy: the definition of a layout."""

import numpy as np


def leaves_of_flat(layout, flat):
    """Joins the leaves from all devices' flat arrays, on the host.

    Args:
      layout: The layout.
      flat: Shape ``(num_shards * flat_size,)``. If it is shorter, missing leaves are zero, and so
        are leaves in no bucket.
    """
    by_device = np.asarray(flat).reshape(layout.num_shards, -1)
    leaves = [np.zeros(leaf.shape, by_device.dtype) for leaf in layout.leaves]
    for bucket in layout.buckets:
        if bucket.offset >= by_device.shape[1]:
            continue
        shards = by_device[:, bucket.offset : bucket.offset + bucket.shard_size]
        shards = shards.reshape(layout.num_shards, *bucket.shard_shape)
        whole = np.concatenate(list(shards), bucket.cut_dim)
        for i, where in _places_in(layout, bucket):
            leaves[i] = whole[where].reshape(layout.leaves[i].shape)
    return leaves


def put_leaves(layout, leaves, by_device):
    """Puts leaves into all devices' flat arrays, on the host: the inverse of ``leaves_of_flat``.

    Args:
      layout: The layout.
      leaves: All leaves.
      by_device: Shape ``(num_shards, flat_size)``; gaps stay as they are.
    """
    for bucket in layout.buckets:
        shape = list(bucket.shard_shape)
        shape[bucket.cut_dim] *= layout.num_shards
        whole = np.zeros(shape, by_device.dtype)
        for i, where in _places_in(layout, bucket):
            whole[where] = leaves[i].reshape(whole[where].shape)
        shards = np.split(whole, layout.num_shards, bucket.cut_dim)
        rows = by_device[:, bucket.offset : bucket.offset + bucket.shard_size]
        rows[...] = np.reshape(shards, rows.shape)


def _places_in(layout, bucket):
    """Which leaves the whole content of a bucket has, and where."""
    if not bucket.is_packed:
        return [(bucket.leaf, ...)]
    sizes = [layout.leaves[i].size for i in bucket.leaves]
    starts = zip(bucket.starts(sizes), sizes, strict=False)
    slices = [slice(start, start + size) for start, size in starts]
    return list(zip(bucket.leaves, slices, strict=True))
