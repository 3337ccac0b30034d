"""A step of N devices in numpy, by the schedule of collectives: the specification of a step.

It uses only the data types of a schedule in ``jdistadam.distributed``: for each bucket its leaves,
its cut, the positions of its shards in the flat arrays, and its collectives. It runs these for all
devices at once (virtual_devices.py), and stores what each device has: flat state and parameters.
Steps of elements, rounding and codes are those of the reference (reference_training.py), which has
whole arrays; ``assert_equal`` compares the two.
"""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core.codecs import BLOCK, split_halves
from jdistadam.kernels.reference import SquaresRequest, num_runs, pairwise_sum, sums_of_runs
from support.bits import assert_same_bits, assert_trees_same_bits
from support.reference_training import CODES, Elements, Training, param_of
from support.virtual_devices import (
    VirtualDevices,
    gather_phase,
    in_dtype,
    pairwise,
    place_phase,
    rounded,
    sum_phase,
)

F32 = np.float32


class Interpreter(Training):
    """Training by a schedule, starting with unsharded float32 ``params``.

    ``sizes``: sizes of the mesh axes by name, in mesh order; ``data_axes``: axes that carry data;
    ``state_axes``: those over which state is sharded, outermost first.
    """

    def __init__(self, config, sizes, data_axes, state_axes, schedule, params):
        super().__init__(config)
        self.is_guarded, self.state_axes = config.guard is not None, state_axes
        self.devices, self.data_axes = VirtualDevices(sizes), data_axes
        self.model_axes = [x for x, n in sizes.items() if x not in data_axes and n > 1]
        self.cutting_axes = [*self.model_axes, *(x for x in state_axes if sizes[x] > 1)]
        self.schedule, self.leaves = schedule, schedule.layout.leaves
        trained = sorted(i for entry in schedule.buckets for i in entry.bucket.leaves)
        self.trained = {i: self.leaves[i].path for i in trained}
        self.wholes, self.treedef = jax.tree.flatten(params)
        self.starts = np.cumsum([0, *(x.size for x in self.wholes)])
        self.numbers = []  # for each bucket, the global number of each element; -1: none
        self.buckets = [self._elements(entry) for entry in schedule.buckets]
        have_main = {i for x in schedule.layout.buckets if x.has_main for i in x.leaves}
        self.held = {
            i: self._cut(i, param_of(config, x, leaf.dtype, i in have_main))
            for i, (leaf, x) in enumerate(zip(self.leaves, self.wholes, strict=True))
        }
        self._check_places()
        for entry in schedule.buckets:
            if entry.bucket.is_sharded_param:
                i, dim = entry.bucket.leaf, entry.bucket.cut_dim
                self.held[i] = place_phase(self.devices, entry.reduce, self.held[i], dim)

    def _check_places(self):
        """Shards are contiguous."""
        ends = collections.Counter()
        for entry in self.schedule.buckets:
            bucket, kind = entry.bucket, "coded" if entry.bucket.is_coded else "uncoded"
            places = ["offset", kind]
            assert [bucket.offset, bucket.moment_offset] == [ends[x] for x in places], bucket
            ends.update(dict.fromkeys(places, _aligned(bucket.shard_size)))

    # How arrays are cut.

    def _cut(self, i, whole):
        """Each device's part of a leaf, which axes of the model may cut."""
        return self._cut_each(i, self.devices.on_each(whole))

    def _cut_each(self, i, x):
        leaf = self.leaves[i]
        for dim, axes in enumerate(leaf.cuts):
            if axes:
                x = self.devices.part(x, [self.cutting_axes[k] for k in axes], dim)
        assert x.shape[len(self.devices.shape) :] == leaf.shape, leaf
        return x

    def _packed(self, bucket, leaves, padding=0):
        """The array of a bucket: its only leaf, or its leaves in sequence."""
        if not bucket.is_packed:
            return leaves[bucket.leaf]
        starts = bucket.starts(self.leaves[i].size for i in bucket.leaves)
        dtype = leaves[bucket.leaves[0]].dtype
        packed = np.full((*self.devices.shape, *self._whole_shape(bucket)), padding, dtype)
        for i, start in zip(bucket.leaves, starts, strict=False):
            flat = self._rows(leaves[i])
            packed[..., start : start + flat.shape[-1]] = flat
        return packed

    def _whole_shape(self, bucket):
        if not bucket.is_packed:
            return self.leaves[bucket.leaf].shape
        ends = bucket.starts(self.leaves[i].size for i in bucket.leaves)
        return (ends[-1] + bucket.padding,)

    def _unpacked(self, bucket, whole):
        """The inverse of ``_packed``: leaves by index."""
        if not bucket.is_packed:
            return {bucket.leaf: whole}
        starts = bucket.starts(self.leaves[i].size for i in bucket.leaves)
        return {
            i: whole[..., start : start + self.leaves[i].size].reshape(
                *self.devices.shape, *self.leaves[i].shape
            )
            for i, start in zip(bucket.leaves, starts, strict=False)
        }

    def _rows(self, x):
        """Each device's elements, as one dimension."""
        shape = self.devices.shape
        return x.reshape(*shape, x.size // math.prod(shape))

    def _flat(self, bucket, shard, padding=0):
        """A shard as in a flat array, padded to the start of the next one."""
        assert shard.shape[len(self.devices.shape) :] == bucket.shard_shape, bucket
        flat = np.full((*self.devices.shape, _aligned(bucket.shard_size)), padding, shard.dtype)
        flat[..., : bucket.shard_size] = self._rows(shard)
        return flat

    def _shard(self, bucket, flat):
        """The inverse of ``_flat``."""
        return flat[..., : bucket.shard_size].reshape(*self.devices.shape, *bucket.shard_shape)

    def _elements(self, entry):
        """A bucket's state on all devices."""
        bucket, numbers = entry.bucket, {}
        for i in bucket.leaves:
            number = np.arange(self.starts[i], self.starts[i + 1]).reshape(self.wholes[i].shape)
            numbers[i] = self._cut(i, number)
        x = self._packed(bucket, numbers, padding=-1)
        for phase in (entry.reduce, entry.reduce_outer):
            x = place_phase(self.devices, phase, x, bucket.cut_dim)
        number = self._flat(bucket, x, padding=-1)
        leaf = np.searchsorted(self.starts, number, side="right") - 1
        (group,) = {self._group(i) for i in bucket.leaves}
        elements = Elements(
            dtype=np.dtype(bucket.dtype),
            keeps_main=bucket.has_main,
            group=group,
            leaf=leaf,
            index=number - self.starts[leaf],
            value=np.concatenate([*(x.ravel() for x in self.wholes), [F32(0)]])[number],
        )
        self.numbers.append(number)
        return elements.start(self.config, bucket.is_coded)

    def _group(self, i):
        path, shape = self.leaves[i].path.removeprefix("params"), self.wholes[i].shape
        return self.config.label(path, shape), self.config.decays(path, shape)

    # A step.

    def step(self, batch):
        """Takes a step on a ``Batch``. Returns metrics."""
        given, main = jax.tree.leaves(batch.grads), self.whole("main_params")
        micro = given[0].shape[1]
        grads = {}
        for i, leaf in enumerate(self.leaves):
            x = self.contributions(leaf.path, leaf.dtype, main[i], given[i], batch.weights)
            grads[i] = self._of_devices(i, x)
        sums = [self._summed(entry, grads, micro) for entry in self.schedule.buckets]

        def update(inv_scale, is_skipped):
            for entry, elements, total in zip(
                self.schedule.buckets, self.buckets, sums, strict=True
            ):
                elements.update(self.config, self.count, total * inv_scale, is_skipped)
                if not is_skipped:
                    self._gather(entry, elements)

        total_weight, totals = self._contributions(micro), self._assembled(sums)
        if batch.weights is not None:
            assert total_weight == batch.weights.size
            total_weight = batch.total_weight
        return self.take_step(total_weight, [totals[i] for i in self.trained], update)

    def _of_devices(self, i, x):
        """Gradients of a leaf for each micro-batch, from each device's data, cut like the leaf."""
        sizes, axes = self.devices.sizes, self.data_axes
        x = np.moveaxis(x, 1, 0)
        x = x.reshape(
            len(x), *(n if axis in axes else 1 for axis, n in sizes.items()), *x.shape[2:]
        )
        x = np.broadcast_to(x, (len(x), *self.devices.shape, *self.wholes[i].shape))
        if split := [axis for axis in self.leaves[i].tensor_axes if axis in axes]:
            # The model brings the contributions to a part to the device that has it, as a tree.
            x = [self.devices.everywhere(micro, split, pairwise) for micro in x]
        return [self._cut_each(i, micro) for micro in x]

    def _contributions(self, micro):
        """The number of terms in a sum: devices that collectives sum over, times micro-batches."""
        found = set()
        for entry in self.schedule.buckets:
            summing = [c for c in entry.reduce + entry.reduce_outer if c.op != "all-gather"]
            found.add(entry.bucket.split * math.prod(c.devices for c in summing))
        (devices,) = found or {1}
        return devices * micro

    def _summed(self, entry, grads, micro):
        """The sum of a bucket's gradients: each device's part."""
        bucket, reduce = entry.bucket, entry.reduce
        parts = [
            self._packed(bucket, {i: grads[i][k] for i in bucket.leaves}) for k in range(micro)
        ]
        dim, devices = bucket.cut_dim, self.devices
        if reduce and reduce[0].when != "step":  # for each micro-batch and layer
            layers = self.leaves[bucket.leaf].shape[0] if reduce[0].when == "layer" else 1
            times, rest = divmod(reduce[0].times, layers)
            assert not rest, reduce
            parts = [sum_phase(devices, reduce, x, dim) for x in parts[:times]]
            x = self._accumulated(parts) if times > 1 or self.config.weighted else parts[0]
        else:
            x = sum_phase(devices, reduce, self._accumulated(parts), dim)
        return self._flat(bucket, sum_phase(devices, entry.reduce_outer, x, dim))

    def _accumulated(self, parts):
        total = np.zeros_like(parts[0])
        for part in parts:
            total = rounded(total + part, jnp.dtype(self.config.main_grads))
        return total

    def _gather(self, entry, elements):
        """Parameters as devices have them."""
        bucket = entry.bucket
        new = self._shard(bucket, elements.rounded(self.config))
        new = gather_phase(self.devices, entry.after_update, new, bucket.cut_dim)
        local = new.shape[len(self.devices.shape) :]
        assert local == (
            bucket.inner_shape if bucket.is_sharded_param else self._whole_shape(bucket)
        )
        self.held |= self._unpacked(bucket, new)

    # Norms, in the order of the kernels, then over leaves and devices.

    def sums_of_squares(self, groups):
        """The float32 sums for all trained leaves, then for each group: of gradients, ..."""
        here = {}
        for entry, elements in zip(self.schedule.buckets, self.buckets, strict=True):
            here |= self._sums_of_leaves(entry.bucket, elements)
        rows = [pairwise_sum(np.stack([here[i] for i in group]), np) for group in groups]
        rows = np.stack(rows, len(self.devices.shape))
        axes = (*self.state_axes, *(x for x in self.devices.sizes if x not in self.data_axes))
        if axes:  # XLA adds devices one after the other on CPUs
            rows = self.devices.everywhere(rows, axes, in_dtype(F32))
        rows = rows.reshape(-1, *rows.shape[-2:])
        for x in rows:
            assert_same_bits(x, rows[0], "norms on two devices")
        return np.concatenate([pairwise_sum(rows[0], np)[None], rows[0]])

    def _sums_of_leaves(self, bucket, elements):
        """For each leaf each device's sums; of devices with the same part, only the first has any."""
        size, shape = bucket.shard_size, self.devices.shape
        squares = np.square([x[..., :size] for x in elements.measured])
        by_element = bucket.is_packed and (len(bucket.leaves) > 1 or bucket.padding > 0)
        sizes = [self.leaves[i].size for i in bucket.leaves]
        starts = np.int64(bucket.starts(sizes)[: len(sizes)]) if by_element else np.int64([0])
        found = np.zeros((len(sizes), *shape, len(squares)), F32)
        for place in np.ndindex(shape):
            index = dict(zip(self.devices.sizes, place, strict=True))
            if any(index[axis] for axis in self.model_axes if axis not in bucket.tensor_axes):
                continue
            number = 0
            for axis in (x for x in self.state_axes if x not in bucket.tensor_axes):
                number = number * self.devices.sizes[axis] + index[axis]
            segments = np.stack([starts, starts + sizes], axis=1) - number * size
            segments = np.clip(segments, 0, size) if by_element else [[0, num_runs(size, False)]]
            request = SquaresRequest((by_element,), np.asarray(segments))
            found[(slice(None), *place)] = sums_of_runs(
                [squares[(slice(None), *place)]], request, np
            )
        return dict(zip(bucket.leaves, found, strict=True))

    # Results on devices.

    def seen(self):
        """The whole leaves with which the model computes."""
        seen = dict(self.held)
        for entry in self.schedule.buckets:
            bucket = entry.bucket
            if bucket.is_sharded_param:
                whole = gather_phase(self.devices, entry.gather, seen[bucket.leaf], bucket.cut_dim)
                seen[bucket.leaf] = whole
        wholes = []
        for i, x in enumerate(self.wholes):
            where = self._cut(i, np.arange(x.size).reshape(x.shape))
            wholes.append(_put_together(where, seen[i], x.size).reshape(x.shape))
        return jax.tree.unflatten(self.treedef, wholes)

    def whole(self, name):
        """Whole leaves of main parameters, a moment or the average, in float32."""
        return self._assembled([elements.floats(name) for elements in self.buckets], name)

    def _assembled(self, arrays, name=""):
        """Leaves from the arrays of buckets on devices, all of which must agree."""
        where, given = [], []
        for i, x in enumerate(self.wholes):
            if all(i not in entry.bucket.leaves for entry in self.schedule.buckets):
                where.append(np.arange(self.starts[i], self.starts[i + 1]))
                is_param = name in ("main_params", "ema")
                dtype = self.leaves[i].dtype
                given.append(
                    x.astype(dtype).astype(F32).ravel() if is_param else np.zeros(x.size, F32)
                )
        for number, x in zip(self.numbers, arrays, strict=True):
            where.append(number[number >= 0])
            given.append(x[number >= 0])
        flat = _put_together(*(np.concatenate(x) for x in (where, given)), self.starts[-1])
        parts = np.split(flat, self.starts[1:-1])
        return [part.reshape(x.shape) for part, x in zip(parts, self.wholes, strict=True)]

    def assert_equal(self, reference):
        """Compares everything on devices with the reference, bit for bit."""
        for name in self.config.arrays:
            want = jax.tree.leaves(reference.floats(name))
            for leaf, a, b in zip(self.leaves, self.whole(name), want, strict=True):
                assert_same_bits(a, b, name + leaf.path)
        if self.count or self.config.param_comm is None:
            # Before the first step the strategy determines whether params are rounded for sending.
            assert_trees_same_bits(self.seen(), reference.params(), "params")
        assert self.count == reference.count and self.guard == reference.guard
        for number, elements in zip(self.numbers, self.buckets, strict=True):
            for name in self.config.arrays:
                assert not elements.floats(name)[number < 0].any(), "gaps and padding are zero"

    def flat(self, name):
        """The flat arrays of this name on all devices."""
        layout = self.schedule.layout
        pairs = list(zip(layout.buckets, self.buckets, strict=True))
        if name == "main_params":
            dtype = np.uint16 if self.config.main == "remainder16" else F32
            flat = np.zeros((*self.devices.shape, layout.main_size), dtype)
            for bucket, elements in pairs:
                if bucket.has_main:
                    x = elements.value
                    _write(
                        flat,
                        bucket.offset,
                        split_halves(x, elements.dtype, np)[1] if dtype != F32 else x,
                    )
            return [flat] if layout.main_size else []
        given = "float32" if name == "ema" else getattr(self.config, name)
        if given not in CODES:
            flat = np.zeros((*self.devices.shape, layout.flat_size), jnp.dtype(given))
            for bucket, elements in pairs:
                _write(flat, bucket.offset, getattr(elements, name))
            return [flat]
        coded = sum(_aligned(bucket.shard_size) for bucket in layout.buckets if bucket.is_coded)
        sizes = coded, layout.flat_size - coded
        coded, uncoded = (max(size, BLOCK) for size in sizes)  # no array is empty
        codes = np.zeros((*self.devices.shape, coded), CODES[given].dtype)
        scales = np.zeros((*self.devices.shape, coded // BLOCK), F32)
        floats = np.zeros((*self.devices.shape, uncoded), F32)
        for bucket, elements in pairs:
            moment, start = getattr(elements, name), bucket.moment_offset
            if bucket.is_coded:
                _write(codes, start, moment.codes)
                of_devices = self._rows(moment.scales)
                _write(scales, start // BLOCK, of_devices)
            else:
                _write(floats, start, moment)
        return [codes, scales, floats]


def _write(flat, start, x):
    """Appends shards, without the padding of the last one."""
    end = min(start + x.shape[-1], flat.shape[-1])
    flat[..., start:end] = x[..., : end - start]


def _aligned(size):
    return -(-size // BLOCK) * BLOCK


def _put_together(where, x, size):
    """One array from elements and their places: all are there, and copies are equal."""
    flat, is_there = np.empty(size, x.dtype), np.zeros(size, bool)
    flat[where], is_there[where] = x, True
    assert is_there.all(), f"{size - is_there.sum()} of {size} elements are on no device"
    assert_same_bits(flat[where], x, "copies on two devices")
    return flat
