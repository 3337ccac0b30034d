"""The collectives of a schedule in numpy, on the arrays of all devices of a mesh at once.

An array of all devices has the dimensions of the mesh first, then those of a device's array.
"""

import functools
import math

import numpy as np

from jdistadam.kernels.reference import pairwise_sum

F32 = np.float32


class VirtualDevices:
    """A mesh of devices that are only numbers; ``sizes``: of its axes by name, in order."""

    def __init__(self, sizes):
        self.sizes = dict(sizes)
        self.shape = tuple(self.sizes.values())

    def on_each(self, x):
        """The same array on every device."""
        return np.broadcast_to(x, (*self.shape, *np.shape(x)))

    def _by_axes(self, x, axes):
        """The devices along ``axes`` first, as one dimension, the first axis most significant."""
        places = [list(self.sizes).index(axis) for axis in axes]
        x = np.moveaxis(x, places, range(len(axes)))
        return x.reshape(math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :])

    def _by_mesh(self, x, axes):
        """The inverse of ``_by_axes``."""
        places = [list(self.sizes).index(axis) for axis in axes]
        x = x.reshape(*(self.sizes[axis] for axis in axes), *x.shape[1:])
        return np.moveaxis(x, range(len(axes)), places)

    def local_size(self, x):
        """Elements of one device's array."""
        return math.prod(x.shape[len(self.shape) :])

    def check(self, c, elements):
        """Checks a collective's number of elements and of devices."""
        devices = math.prod(self.sizes[axis] for axis in c.axes)
        assert (c.elements, c.devices) == (elements, devices), f"{c}: {elements} on {devices}"

    def part(self, x, axes, dim):
        """Each device's part of an array that is cut along ``dim``."""
        return self.scatter(x, axes, dim, lambda rows: rows)

    def scatter(self, x, axes, dim, combine, outer=1):
        """Device i keeps part i along ``dim`` of the combination of all contributions.

        ``combine`` takes and returns rows, one per device; it returns one row for all, or one for
        each. ``outer``: how many parts remain for other devices, each to be cut likewise.
        """
        rows = self._by_axes(x, axes)
        n, dim = len(rows), rows.ndim - x.ndim + len(self.shape) + dim
        rows = combine(rows)
        before, length, after = rows.shape[:dim], rows.shape[dim], rows.shape[dim + 1 :]
        assert length % (n * outer) == 0, f"{length} elements are not cut into {n} x {outer} parts"
        rows = rows.reshape(*before, outer, n, length // (n * outer), *after)
        rows = np.stack([rows[i % len(rows)].take(i, dim) for i in range(n)])
        return self._by_mesh(rows.reshape(n, *before[1:], length // n, *after), axes)

    def concatenated(self, x, axes, dim):
        """The arrays of all devices along ``axes``, concatenated along ``dim``, on each of them."""
        rows = self._by_axes(x, axes)
        whole = np.concatenate(list(rows), rows.ndim - 1 - x.ndim + len(self.shape) + dim)
        return self._by_mesh(np.stack([whole] * len(rows)), axes)

    def everywhere(self, x, axes, combine):
        """The combination of all contributions along ``axes``, on each of them."""
        rows = self._by_axes(x, axes)
        return self._by_mesh(np.concatenate([combine(rows)] * len(rows)), axes)


def first(rows):
    """Combines arrays that are the same on all devices: nothing is added."""
    return rows[:1]


def pairwise(rows):
    """Combines contributions as a float32 sum of adjacent pairs in device order."""
    return pairwise_sum(rows, np)[None]


def rounded(x, dtype):
    """Float32 numbers, rounded to a dtype."""
    with np.errstate(all="ignore"):
        return x.astype(dtype).astype(F32)


def in_dtype(dtype):
    """Combines contributions as a sequential sum in a dtype: any order, if it is exact."""

    def combine(rows):
        total = rows[0]
        for row in rows[1:]:
            total = rounded(total + row, dtype)
        return total[None]

    return combine


def sum_phase(devices, phase, x, dim):
    """Runs collectives that sum: each device gets its part of the sum along ``dim``, or all."""
    return _each_layer(devices, phase, x, dim, functools.partial(_sum, places_alone=False))


def place_phase(devices, phase, x, dim):
    """Each device's part, as of a sum, of an array that is equal on all: nothing is added."""
    return _each_layer(devices, phase, x, dim, functools.partial(_sum, places_alone=True))


def gather_phase(devices, phase, x, dim):
    """Runs all-gathers along ``dim``; everything is rounded as if sent, even the own part."""
    return _each_layer(devices, phase, x, dim, _gather)


def _each_layer(devices, phase, x, dim, run):
    """Treats each layer of a stacked array separately, if the phase says so."""
    if not phase or phase[0].when != "layer":
        return run(devices, phase, x, dim)
    layers = np.moveaxis(x, len(devices.shape), 0)
    return np.stack([run(devices, phase, x, dim - 1) for x in layers], len(devices.shape))


def _sum(devices, phase, x, dim, places_alone):
    if (
        len(phase) > 1 and phase[-1].op == "all-gather"
    ):  # for an array that is cut as if it were flat
        size, shape = devices.local_size(x), x.shape
        flat = x.reshape(*devices.shape, size)
        padding = phase[0].elements - size
        flat = np.concatenate([flat, np.zeros_like(flat[..., :1]).repeat(padding, -1)], -1)
        part = _sum(devices, phase[:-1], flat, 0, places_alone)
        return _gather(devices, phase[-1:], part, 0)[..., :size].reshape(shape)
    for i, c in enumerate(phase):
        devices.check(c, devices.local_size(x))
        combine = first if places_alone else _combination(c)
        if not places_alone:
            x = rounded(x, c.dtype)
        if c.op == "all-reduce":
            x = devices.everywhere(x, c.axes, combine)
        else:
            remaining = math.prod(later.devices for later in phase[i + 1 :])
            x = devices.scatter(x, c.axes, dim, combine, remaining)
    return x


def _combination(c):
    """How a collective sums: kernels pairwise in float32, the collective library in its dtype."""
    by_library, by_kernels = ("all-reduce", "reduce-scatter"), ("all-to-all", "collective-permute")
    assert c.op in by_library + by_kernels, f"{c} sums nothing"
    return in_dtype(c.dtype) if c.op in by_library else pairwise


def _gather(devices, phase, x, dim):
    dtype = x.dtype
    for c in phase:
        assert c.op == "all-gather", f"{c} gathers nothing"
        if dtype != np.int64:  # numbers of elements
            x = x.astype(c.dtype)
        x = devices.concatenated(x, c.axes, dim)
        devices.check(c, devices.local_size(x))
    return x.astype(dtype)
