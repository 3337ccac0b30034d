"""The calls of a step, of the kernel and then for the average, decided before any of them is made.

A call steps *spans*: the shards of buckets, or ranges of one. What decides the calls:

- A call has buckets of one mix of dtypes.
- [Note: gathers beside updates] It has only as many buckets as XLA can merge into one all-gather of
  new parameters. The gather of one call then overlaps the next call. The call after that waits for
  the gather; otherwise XLA starts all gathers when the last call has ended.
- A state in host memory is updated in *windows*, of consecutive spans, and so is one that is
  updated early, with all gathers at the end. A training step updates windows in the order in which
  the backward pass makes their gradients, as far as it is known. XLA then updates the first ones
  during that pass, unless they depend on all gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdistadam.core.trees import runs_within
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import STEPPED, Window, window_of
from jdistadam.distributed.layout import Bucket, Layout, aligned
from jdistadam.distributed.packing import Span
from jdistadam.distributed.schedule import COPIED_BYTES, MERGED_BYTES, Schedule

WINDOW = 1 << 24
"""Maximum number of state elements in a window, unless a bucket that is not split has more."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the kernel, or of what moves the average.

    Attributes:
      spans: What it steps.
      windows: By field of the state, the window of each span in the flat array that it takes.
      waits_for: Buckets whose gathered parameters must have arrived before it starts.
      gathers: Buckets whose new parameters are complete, and are gathered, when it ends.
    """

    spans: tuple[Span, ...]
    windows: dict[str, list[Window]]
    waits_for: tuple[int, ...] = ()
    gathers: tuple[int, ...] = ()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of its spans."""
        return [span.bucket for span in self.spans]


def make_calls(
    config: DistributedConfig, schedule: Schedule, grad_dtypes: Sequence[Any]
) -> list[Call]:
    """Returns the calls of the kernel, in order.

    Args:
      config: The configuration.
      schedule: The schedule of the params, and the order of their gradients.
      grad_dtypes: The dtype of the summed gradient of each bucket.
    """
    layout, of_kind = schedule.layout, dict[Any, list[int]]()
    overlaps = config.transport.is_peer  # updates and gathers overlap
    for i, bucket in enumerate(layout.buckets):
        copied = overlaps and (bucket.is_sharded_param, bucket.split)
        kind = (bucket.dtype, grad_dtypes[i], bucket.has_main, bucket.is_coded, copied)
        of_kind.setdefault(kind, []).append(i)
    has_windows = config.updates_early or config.steps_on_host
    in_windows, whole = list[list[Span]](), list[list[Span]]()
    for indices in of_kind.values():
        first = Span(indices[0], layout.buckets[indices[0]])
        is_on_host = any(name in config.on_host for name in _call(config, STEPPED, [first]).windows)
        if is_on_host or config.updates_early:
            splits = is_on_host and config.norms is None  # whose sums are of the whole shard
            in_windows += consecutive_spans(layout, indices, splits=splits)
        else:
            groups = [indices] if has_windows else _merged(schedule, indices, overlaps)
            whole += [[Span(i, layout.buckets[i]) for i in group] for group in groups]
    if overlaps:
        whole = _before_their_gathers(whole, needs_all=config.takes_norm_first)
    groups_of_spans = [*_as_gradients_come(in_windows, schedule.order or ()), *whole]
    calls = [_call(config, STEPPED, x) for x in groups_of_spans]
    if has_windows:
        return _gathering_at_the_end(calls, len(layout.buckets))
    indices_of = [tuple(span.bucket_index for span in call.spans) for call in calls]
    is_sent = [x.gathered_bytes > 0 and not overlaps for x in schedule.buckets]
    waits = [(), (), *(tuple(i for i in x if is_sent[i]) for x in indices_of)]
    return [
        dataclasses.replace(call, waits_for=waits[k], gathers=indices_of[k])
        for k, call in enumerate(calls)
    ]


def average_calls(config: DistributedConfig, layout: Layout) -> list[Call]:
    """Returns the calls that move the average: one, or for one in host memory, one per window."""
    if config.ema_decay is None:
        return []
    groups = [[Span(i, bucket) for i, bucket in enumerate(layout.buckets)]]
    if "ema" in config.on_host:
        groups = consecutive_spans(layout, splits=True)
    return [_call(config, ("ema", "main_params"), x) for x in groups if x]


def windows_of(config: DistributedConfig, name: str, spans: Sequence[Span]) -> list[Window]:
    """The windows of spans in a field of the state; of those that have none, there are none."""
    windows = [window_of(config, name, span.bucket) for span in spans]
    return [window for window in windows if window is not None]


def _call(config: DistributedConfig, names: Sequence[str], spans: Sequence[Span]) -> Call:
    """A call that takes some fields of the state, if they have its spans."""
    windows = {name: windows_of(config, name, spans) for name in names}
    return Call(tuple(spans), {name: x for name, x in windows.items() if x})


def _gathering_at_the_end(calls: list[Call], num_buckets: int) -> list[Call]:
    """The same calls; the last one gathers all buckets."""
    gathers = tuple(range(num_buckets))
    return calls and [*calls[:-1], dataclasses.replace(calls[-1], gathers=gathers)]


def _before_their_gathers(calls: list[list[Span]], *, needs_all: bool) -> list[list[Span]]:
    """Puts calls whose parameters are gathered before calls whose parameters stay sharded.

    Gathers then overlap the other updates. If updates need not wait for all gradients, a quarter of
    the other calls come first, until the last gradients have arrived.
    """
    gathered = [call for call in calls if not call[0].bucket.is_sharded_param]
    others = [call for call in calls if call[0].bucket.is_sharded_param]
    first = 0 if needs_all else len(others) // 4
    return [*others[:first], *gathered, *others[first:]]


def _merged(schedule: Schedule, indices: Sequence[int], overlaps: bool) -> list[list[int]]:
    """Splits buckets, in order, into groups whose gathers XLA merges into one.

    If copies overlap updates: in the order of their gradients, into groups of about as many bytes.
    """
    if overlaps:
        spans = [[Span(i, schedule.layout.buckets[i])] for i in indices]
        ordered = _as_gradients_come(spans, schedule.order or ())
        indices = [span.bucket_index for (span,) in ordered]
    entries = (schedule.buckets[i] for i in indices)
    nbytes = (x.whole_bytes if overlaps else x.gathered_bytes for x in entries)
    groups = runs_within(indices, nbytes, COPIED_BYTES if overlaps else MERGED_BYTES)
    return [sorted(group) for group in groups]


def _as_gradients_come(groups: Sequence[list[Span]], order: Sequence[int]) -> list[list[Span]]:
    """Groups in the order in which all their gradients are known; ``order``: that of leaves."""
    rank = {leaf: i for i, leaf in enumerate(order)}

    def last(spans: Sequence[Span]) -> int:
        return max(rank.get(leaf, 0) for span in spans for leaf in span.bucket.leaves)

    return sorted(groups, key=last)


def consecutive_spans(
    layout: Layout, indices: Sequence[int] | None = None, *, splits: bool
) -> list[list[Span]]:
    """Splits buckets, in order, into groups of spans; each is one window of a flat array.

    Windows do not overlap. Either all buckets of a group have main parameters, or none.

    Args:
      layout: The layout.
      indices: Indices of buckets; None: of all.
      splits: Whether to split a bucket of a single leaf that is larger than a window.
    """
    groups: list[list[Span]] = []
    for i in range(len(layout.buckets)) if indices is None else indices:
        for span in _spans(layout, i, splits):
            if not (groups and _may_join(groups[-1], span)):
                groups.append([])
            groups[-1].append(span)
    return groups


def _may_join(group: Sequence[Span], span: Span) -> bool:
    """Whether a group may have a span after its last one.

    Not with a gap between them: windows on their way at the same time must not overlap.
    """
    first, last = group[0].bucket, group[-1]
    follows = span.bucket.offset == last.bucket.offset + aligned(last.bucket.shard_size)
    fits = _size([first, span.bucket]) <= WINDOW
    return follows and fits and first.has_main == span.bucket.has_main


def _spans(layout: Layout, index: int, splits: bool) -> list[Span]:
    """The span of a bucket, or several."""
    bucket = layout.buckets[index]
    if not splits or bucket.is_packed or bucket.shard_size <= WINDOW:
        return [Span(index, bucket)]
    spans = []
    for start in range(0, bucket.shard_size, WINDOW):
        of_span = dataclasses.replace(
            bucket,
            dim=None,  # it is flat
            shard_shape=(min(WINDOW, bucket.shard_size - start),),
            offset=bucket.offset + start,
            moment_offset=bucket.moment_offset + start,
        )
        spans.append(Span(index, of_span, start))
    return spans


def _size(buckets: Sequence[Bucket]) -> int:
    """Elements of the flat state from the first bucket to the end of the last."""
    return buckets[-1].offset + aligned(buckets[-1].shard_size) - buckets[0].offset
