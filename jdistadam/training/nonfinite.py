"""Non-finite gradients: which parameters had them, and ``SkipLimit``, which ends a run."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, trees
from jdistadam.core.arguments import check_count
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed.checks import check_inside
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import DtypeError, NonfiniteError, ShapeError, TreeError


def leaves_not_finite(grads: Grads) -> jax.Array:
    """Whether each leaf has a non-finite value; shape (leaves,), bool."""
    found = [~jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grads)]
    return jnp.stack(found) if found else jnp.zeros((0,), jnp.bool_)


def count_nonfinite(grads: Grads, tx: DistributedTransformation) -> jax.Array:
    """Counts, for each leaf, the devices whose own gradient is non-finite; inside shard_map.

    Costs one more read of the gradients and one all-reduce of four bytes per leaf. ``train_step``
    calls it with ``report_nonfinite=True``.

    Args:
      grads: Tree of local gradients, before the reduction.
      tx: A distributed optimizer.

    Returns:
      Shape (leaves,), int32, the same on all devices; see ``nonfinite_paths``.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "count_nonfinite", over_data_alone=True)
    trees.check_arrays(grads, name="grads")
    return sum_over_devices(leaves_not_finite(grads), tx)


def sum_over_devices(found: jax.Array, tx: DistributedTransformation) -> jax.Array:
    """Counts devices; each device with a part of the same tensor-parallel leaf counts.

    If XLA partitions the model, their parts are one gradient and count once.
    """
    parallel = tx.config.parallel
    everyone = parallel.data_axes + parallel.tensor_axes
    left_to_xla = collectives.unbound(parallel.tensor_axes)
    everyone = tuple(axis for axis in everyone if axis not in left_to_xla)
    count = collectives.to_varying(found.astype(jnp.int32), everyone)
    return collectives.all_reduce(count, everyone)


def nonfinite_paths(counts: Any, params: Params) -> dict[str, int]:
    """Names the parameters with a non-finite gradient on any device.

    Args:
      counts: The result of ``count_nonfinite``, or ``metrics["nonfinite"]``.
      params: The params, or a tree of their shapes.

    Returns:
      The number of devices by path, for parameters with any.

    Raises:
      ShapeError, DtypeError: ``counts`` is something else, or is traced.

    Example:
      >>> nonfinite_paths(np.array([0, 2]), {"b": jnp.ones(3), "w": jnp.ones((2, 3))})
      {"params['w']": 2}
    """
    paths = trees.paths(params, "params")
    array = counts if hasattr(counts, "dtype") else np.asarray(counts, object)
    if array.shape != (len(paths),):
        raise ShapeError(
            "counts: not one number for each leaf of params: "
            f"got {array.shape or type(counts).__name__}, expected {(len(paths),)}. "
            'Pass metrics["nonfinite"] of train_step(..., report_nonfinite=True).'
        )
    can_be_read = not isinstance(counts, jax.core.Tracer)
    if not can_be_read or not all(map(trees.is_number, np.asarray(array).tolist())):
        got = type(counts).__name__ if array.dtype == object else array.dtype
        raise DtypeError(
            f"counts: not numbers that can be read: got {got}, expected an array of whole numbers, "
            'outside of jit. Return metrics["nonfinite"] from the program, and pass it then.'
        )
    found = zip(paths, np.asarray(array).tolist(), strict=True)
    return {path: count for path, count in found if count}


class SkipLimit:
    r"""Raises after too many lost steps in a row: skipped, or with a non-finite loss.

    A ``loss_scale`` skips steps with non-finite gradients, a ``norm_guard`` those whose gradient
    norm is above its limits: both count. A dynamic loss scale that halves at every skip reaches 1
    after some 15 skips in a row; a run that keeps skipping does not recover, and costs as much as
    one that learns. Without a ``loss_scale`` no step is skipped: non-finite gradients reach the
    parameters, and all later losses are NaN. Call it after each step::

        limit = jda.SkipLimit(50)
        for batch in batches:
            state, metrics = step(state, batch)
            limit(metrics)

    It reads a step's metrics after ``lag`` more steps were started, so the host keeps feeding the
    device. With :math:`n` = ``most_in_a_row``, and call :math:`i` the last one before all steps are
    lost, call :math:`i + n + 1 + \mathrm{lag}` raises.

    Args:
      most_in_a_row: How many steps in a row may be lost.
      lag: How many further calls pass before the metrics of a step are read. If the device is
        further behind, the call waits for it.

    Raises:
      HyperparameterError: An argument is not a positive integer.
      TreeError: On use, if metrics are not those of ``train_step``.
      NonfiniteError: On use, if more steps in a row were lost.

    Example:
      >>> limit = SkipLimit(2, lag=1)
      >>> for skipped in (0, 1, 1, 2, 3):  # what train_step counts: never three in a row
      ...     limit({"loss": 0.5, "skipped": skipped, "loss_scale": 8.0})
      >>> limit.in_a_row
      1
    """

    def __init__(self, most_in_a_row: int, *, lag: int = 4) -> None:
        check_count("most_in_a_row", most_in_a_row)
        check_count("lag", lag)
        self.most_in_a_row, self.lag = most_in_a_row, lag
        self.in_a_row = 0
        """Consecutive lost steps, up to the last step whose metrics were read."""
        self._skipped_of_these = 0
        self._waiting: collections.deque[Mapping[str, Any]] = collections.deque()
        self._skipped: int | None = None  # in all, so far
        self._spikes: int | None = None  # those skipped by a norm_guard
        self._spikes_of_these = 0

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics that ``train_step`` returned for one step."""
        if not set(_READ) <= set(metrics):
            raise TreeError(
                "metrics: not the metrics of train_step: got the entries "
                f"{', '.join(metrics) or 'of nothing'}, expected {', '.join(_READ)} among them. "
                "Pass the metrics that the step returned, as they are."
            )
        read = (*_READ, *({"skipped_spikes"} & set(metrics)))
        self._waiting.append({name: metrics[name] for name in read})
        if len(self._waiting) <= self.lag:
            return
        oldest = self._waiting.popleft()
        skipped = int(oldest["skipped"])
        is_finite = math.isfinite(float(oldest["loss"]))
        # A run that continues from a checkpoint starts with a count above zero.
        first = skipped if is_finite else 0
        is_skip = skipped > (first if self._skipped is None else self._skipped)
        spikes = int(oldest.get("skipped_spikes", 0))
        is_spike = is_skip and spikes > (0 if self._spikes is None else self._spikes)
        self._skipped, self._spikes = skipped, spikes
        if is_skip or not is_finite:
            self.in_a_row += 1
            self._skipped_of_these += is_skip
            self._spikes_of_these += is_spike
        else:
            self.in_a_row = self._skipped_of_these = self._spikes_of_these = 0
        if self.in_a_row > self.most_in_a_row:
            raise self._error(float(oldest["loss_scale"]))

    def _error(self, loss_scale: float) -> NonfiniteError:
        """Says which it was: skipped steps or losses."""
        num_skipped = self._skipped_of_these
        if self._spikes_of_these:
            return NonfiniteError(
                "gradient norm: above the limits of norm_guard in too many steps in a row: got "
                f"{self.in_a_row} steps, of which {self._spikes_of_these} were skipped for it and "
                f"{self.in_a_row - self._spikes_of_these} were non-finite, "
                f"expected at most {self.most_in_a_row}. Look at metrics['grad_norm']: the mean "
                "does not follow a lasting change of its level. Restore a checkpoint from before, "
                "or pass a NormGuard with a larger max_ratio, or with max_norm alone."
            )
        num_taken = self.in_a_row - num_skipped
        what = "gradients" if not num_taken else "gradients or loss" if num_skipped else "loss"
        scale = f", the loss scale at {loss_scale:g}" if num_skipped else ""
        skips = "" if num_skipped else " With loss_scale=1.0 such steps are skipped."
        return NonfiniteError(
            f"{what}: non-finite in too many steps in a row: "
            f"got {self.in_a_row} steps, of which {num_skipped} were skipped{scale}, "
            f"expected at most {self.most_in_a_row}. Restore a checkpoint from before, and look "
            f"for the cause with train_step(..., report_nonfinite=True) and nonfinite_paths.{skips}"
        )


_READ = ("loss", "skipped", "loss_scale")
