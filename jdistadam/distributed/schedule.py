"""The collectives of each bucket in a step, in the order in which they run.

Only this module decides how gradients are summed and parameters gathered under each strategy and
policy. A step runs these collectives (``communication.py``), ``plan`` counts their bytes and
``audit`` compares them with the compiled program. They are made from shapes alone.

A bucket passes through four phases; a strategy leaves out some of them::

    reduce         gradients, over shard_axes: every micro-batch if gradients are sharded
                   ("no_shard": over all data axes at once)
    reduce_outer   that sum, over replica_axes: once per step
    gather_outer   new parameters, over replica_axes, if the state is sharded over them too
    gather         parameters, over shard_axes: after the update, or before the forward pass if
                   devices hold shards of them ("optim_grads_params")

[Note: sums in float32] With ``grad_reduce_dtype`` a reduce-scatter is an all-to-all along one axis
at a time, the last one first, each followed by a sum of adjacent pairs in float32. If such a sum is
sent on to replicas, it is sent in float32. An all-reduce is this reduce-scatter, followed by an
all-gather of the sums.

Scalars (norm, loss, weights) are not listed.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core.collectives import Axes
from jdistadam.core.precision import MixedPrecisionPolicy, sent_dtype
from jdistadam.distributed.layers import BLOCK
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.transport import Transport
from jdistadam.kernels.copies import Groups

_SMALL = 0.01  # share of a layer's parameters: biases and norm scales are smaller, matrices larger


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a step.

    Attributes:
      op: "reduce-scatter", "all-gather", "all-reduce" or "all-to-all".
      dtype: The dtype that is sent.
      elements: Size of the whole array that every device adds to, exchanges, or holds at the end.
      axes: The mesh axes it runs over.
      devices: Number of devices along them.
      times: How often it runs in one step.
      leaves: Paths of the parameters.
      is_optional: Whether it may be left out: the backward pass of a scanned layer needs its
        factors again, but not every bias.
      when: "step": once; "micro-batch": in each; "layer": for each layer of a scan, in each
        micro-batch.
      groups: Groups of devices along the axes, if they copy from memory to memory
        (kernels/copies.py). (): a collective of XLA.
    """

    op: str
    dtype: jnp.dtype
    elements: int
    axes: Axes
    devices: int
    times: int
    leaves: tuple[str, ...]
    is_optional: bool = False
    when: str = "step"
    groups: Groups = ()

    @property
    def name(self) -> str:
        """The first of its leaves, and how many more: for profiles and ``step.order``.

        A leaf that the model gathers itself has no name.
        """
        if not self.leaves:
            return "model"
        first = ".".join(re.findall(r"[\w-]+", self.leaves[0].removeprefix("params")))
        return first + (f" and {len(self.leaves) - 1} more" if len(self.leaves) > 1 else "")

    @property
    def transport(self) -> str:
        """How bytes move between devices: "xla" or "peer"."""
        return "peer" if self.groups else "xla"

    @property
    def result_elements(self) -> int:
        """Size of the array that a device receives."""
        return self.elements // (self.devices if self.op == "reduce-scatter" else 1)

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends in one step: in a ring, or directly for an all-to-all."""
        passes = 2 if self.op == "all-reduce" else 1
        size = self.elements * self.dtype.itemsize * self.times * passes
        return size * (self.devices - 1) // self.devices

    def as_dict(self) -> dict[str, Any]:
        """Returns its fields but ``groups``, and ``bytes_sent``, in types of JSON."""
        added = dict(dtype=self.dtype.name, transport=self.transport, bytes_sent=self.bytes_sent)
        return {name: x for name, x in (vars(self) | added).items() if name != "groups"}


Phase = tuple[Collective, ...]
"""Collectives that run in sequence."""

COPIED_BYTES = 128 << 20
"""Parameters of a kernel call over peer memory: less, and the first copies could start earlier."""

MERGED_BYTES = 256 << 20
"""``train_step`` lets XLA merge collectives up to this many bytes of results.

Kernel calls are split accordingly: [Note: gathers beside updates] in calls.py.

XLA's own limit of 30 MiB counts shards: it merges most models into one collective that starts when
the last gradient is ready. This is large enough for bandwidth and leaves work to overlap.
"""


@dataclasses.dataclass(frozen=True)
class BucketSchedule:
    """The collectives of one bucket; see the module for the four phases.

    Attributes:
      bucket: The bucket.
      reduce: Sums gradients over shard_axes.
      reduce_outer: Sums the results of ``reduce`` over replica_axes.
      gather_outer: Gathers new parameters over replica_axes.
      gather: Gathers parameters over shard_axes.
      gather_again: The same in the backward pass of layers that the model gathers and does not
        keep.
    """

    bucket: Bucket
    reduce: Phase
    reduce_outer: Phase
    gather_outer: Phase
    gather: Phase
    gather_again: Phase = ()

    @property
    def after_update(self) -> Phase:
        """The gathers that turn new parameters into what devices hold between steps."""
        return self.gather_outer + (() if self.bucket.is_sharded_param else self.gather)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that the last gather of ``after_update`` returns; 0 if nothing is sent."""
        sent = [x for x in self.after_update if x.devices > 1]
        return sent[-1].elements * sent[-1].dtype.itemsize if sent else 0

    @property
    def whole_bytes(self) -> int:
        """Bytes of its parameters."""
        return max((x.elements for x in self.collectives), default=0) * self.bucket.dtype.itemsize

    @property
    def collectives(self) -> Phase:
        """All phases."""
        reductions = self.reduce + self.reduce_outer
        return reductions + self.gather_outer + self.gather + self.gather_again


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A layout and the collectives of each bucket.

    Attributes:
      layout: The positions of all leaves and buckets.
      buckets: One entry for each bucket of the layout, in its order.
      treedef: The structure of the params.
      order: The leaves in the order in which a backward pass in the step's program makes their
        gradients; (): there is one, in an unknown order. None: gradients exist before.
    """

    layout: Layout
    buckets: tuple[BucketSchedule, ...]
    treedef: Any = None
    order: tuple[int, ...] | None = None

    def whole(self) -> Any:
        """Returns the tree of shapes of unsharded params on a device."""
        return jax.tree.unflatten(self.treedef, self.layout.shapes())

    @property
    def collectives(self) -> Phase:
        """All collectives of a step that are larger than scalars."""
        return tuple(c for entry in self.buckets for c in entry.collectives)


def make_schedule(
    layout: Layout,
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    accumulate_steps: int,
    transport: Transport,
) -> Schedule:
    """Decides what every bucket of a layout sends.

    Args:
      layout: The layout.
      parallel: The axes and the strategy.
      policy: The dtypes.
      accumulate_steps: Number of micro-batches; affects only ``times``.
      transport: How they travel.

    Example:
      >>> import jax
      >>> from jdistadam.distributed.layout import make_layout
      >>> from jdistadam.distributed.layout import Leaf
      >>> from jdistadam.distributed.transport import OVER_XLA
      >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
      >>> layout = make_layout([Leaf("w", (512, 64), jnp.dtype("float32"), 0)], 4, 1 << 20)
      >>> parallel = DataParallel(mesh, ("data",))
      >>> schedule = make_schedule(layout, parallel, MixedPrecisionPolicy(), 1, OVER_XLA)
      >>> for c in schedule.collectives:
      ...     print(c.op, c.dtype, c.axes, c.elements, c.when)
      reduce-scatter float32 ('data',) 32768 step
      all-gather float32 ('data',) 32768 step
    """
    layer_sizes: dict[int | None, int] = {}
    for bucket in layout.buckets:
        size = layer_sizes.get(bucket.num_layers, 0)
        layer_sizes[bucket.num_layers] = size + bucket.shard_size
    num_reductions = accumulate_steps if parallel.shards_grads else 1
    maker = _PhaseMaker(parallel, policy, num_reductions, transport)
    entries = []
    for bucket in layout.buckets:
        paths = tuple(layout.leaves[i].path for i in bucket.leaves)
        leaf = layout.leaves[bucket.leaves[0]]
        entry = maker.bucket_schedule(bucket, paths, layout.whole_size(bucket))
        if leaf.layers == BLOCK and bucket.is_sharded_param and parallel.gathers_layers:
            # In the backward pass again if the model uses jax.checkpoint.
            gather = _repeated(entry.gather, "micro-batch", num_reductions)
            again = tuple(dataclasses.replace(c, is_optional=True) for c in gather)
            entry = dataclasses.replace(entry, gather=gather, gather_again=again)
        if bucket.num_layers is not None:
            is_small = bucket.shard_size < _SMALL * layer_sizes[bucket.num_layers]
            again = tuple(dataclasses.replace(c, is_optional=is_small) for c in entry.gather)
            entry = dataclasses.replace(entry, gather_again=again)
        entries.append(entry)
    return Schedule(layout, tuple(entries))


def phases_of_shard(
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    elements: int,
    dtype: Any,
    transport: Transport,
) -> tuple[Phase, Phase]:
    """Returns how a sharded parameter is gathered, and its gradients summed.

    These are the phases "gather" and "reduce" of its bucket, which a part of a model cannot see.

    Args:
      parallel: The axes and the strategy.
      policy: The dtypes.
      elements: Size of the whole parameter, or of one layer of it.
      dtype: The dtype of the parameter.
      transport: How they travel.
    """
    maker = _PhaseMaker(parallel, policy, num_reductions=1, transport=transport)
    axes = parallel.shard_axes
    gather = maker.all_gather((), elements, axes, dtype)
    return gather, maker.reduce_scatter((), elements, axes, policy.comm_dtype)


@dataclasses.dataclass(frozen=True)
class _PhaseMaker:
    """Makes the phases of buckets; stores what all of them share."""

    parallel: DataParallel
    policy: MixedPrecisionPolicy
    num_reductions: int  # how often a step reduces gradients over shard_axes
    transport: Transport

    def bucket_schedule(
        self, bucket: Bucket, paths: tuple[str, ...], whole_size: int
    ) -> BucketSchedule:
        """The phases of one bucket under the strategy."""
        parallel, policy = self.parallel.without(bucket.tensor_axes), self.policy
        shard_axes, replica_axes = parallel.shard_axes, parallel.replica_axes
        sent, summed = policy.comm_dtype, policy.reduced_dtype
        if parallel.strategy == "no_shard":
            in_float32 = policy.grad_reduce_dtype is not None
            axes = replica_axes + shard_axes if in_float32 else parallel.data_axes
            everywhere = self._all_reduce(paths, whole_size, axes, sent)
            return BucketSchedule(bucket, everywhere, (), (), ())
        num_layers = bucket.num_layers or 1
        layer_size, inner_size = whole_size // num_layers, whole_size // parallel.num_inner_shards
        reduce = self.reduce_scatter(paths, layer_size, shard_axes, sent)
        gather = self.all_gather(paths, layer_size, shard_axes, bucket.dtype)
        if bucket.num_layers is not None:
            times = num_layers * self.num_reductions
            reduce, gather = (_repeated(phase, "layer", times) for phase in (reduce, gather))
        elif parallel.shards_grads:
            reduce = _repeated(reduce, "micro-batch", self.num_reductions)
        reduce_outer: Phase = ()
        gather_outer: Phase = ()
        if parallel.outer_strategy == "optim":
            reduce_outer = self.reduce_scatter(paths, inner_size, replica_axes, summed)
            gather_outer = self.all_gather(paths, inner_size, replica_axes, bucket.dtype)
        elif replica_axes:
            reduce_outer = self._all_reduce(paths, inner_size, replica_axes, summed)
        return BucketSchedule(bucket, reduce, reduce_outer, gather_outer, gather)

    def reduce_scatter(
        self, paths: tuple[str, ...], elements: int, axes: Axes, dtype: Any
    ) -> Phase:
        """Sums an array; each device keeps a shard. Nothing is sent along no axes."""
        if self.policy.grad_reduce_dtype is None and axes:
            return (self._one("reduce-scatter", paths, elements, axes, dtype),)
        exchanges = []
        for axis in reversed(axes):
            exchange = self._one("all-to-all", paths, elements, (axis,), dtype)
            exchanges.append(exchange)
            elements //= exchange.devices
            dtype = self.policy.grad_reduce_dtype  # [Note: sums in float32]
        return tuple(exchanges)

    def all_gather(self, paths: tuple[str, ...], elements: int, axes: Axes, dtype: Any) -> Phase:
        """Gathers parameters of this dtype."""
        if not axes:
            return ()
        return (self._one("all-gather", paths, elements, axes, sent_dtype(self.policy, dtype)),)

    def _all_reduce(self, paths: tuple[str, ...], elements: int, axes: Axes, dtype: Any) -> Phase:
        """Sums an array; each device gets all of it."""
        if self.policy.grad_reduce_dtype is None:
            return (self._one("all-reduce", paths, elements, axes, dtype),)
        elements += -elements % self.parallel.size(axes)
        summed = self.policy.grad_reduce_dtype
        return (
            *self.reduce_scatter(paths, elements, axes, dtype),
            self._one("all-gather", paths, elements, axes, summed),
        )

    def _one(
        self, op: str, paths: tuple[str, ...], elements: int, axes: Axes, dtype: Any
    ) -> Collective:
        devices, dtype = self.parallel.size(axes), jnp.dtype(dtype)
        groups = self.transport.groups_along(axes)
        return Collective(op, dtype, elements, axes, devices, 1, paths, groups=groups)


def _repeated(phase: Phase, when: str, times: int) -> Phase:
    return tuple(dataclasses.replace(c, when=when, times=times) for c in phase)
