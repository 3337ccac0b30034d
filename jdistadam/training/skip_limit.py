"""``SkipLimit``: ends a run whose steps stay non-finite, without waiting for the device."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any

from jdistadam.core.arguments import check_count
from jdistadam.errors import NonfiniteError, TreeError


class SkipLimit:
    r"""Raises when too many steps in a row were lost: skipped, or with a loss that is non-finite.

    With a ``loss_scale`` steps with non-finite gradients are skipped. A dynamic loss scale that
    halves at every skip reaches 1 after some 15 skips in a row; a run that goes on skipping does
    not recover, and costs as much as one that learns. Without a ``loss_scale`` no step is skipped:
    non-finite gradients reach the parameters, and all later losses are NaN. Call it after each
    step::

        limit = jda.SkipLimit(50)
        for batch in batches:
            state, metrics = step(state, batch)
            limit(metrics)

    The metrics of a step are read when ``lag`` more steps were started, so that the host goes on
    feeding the device. With :math:`n` = ``most_in_a_row``, and call :math:`i` the last one before
    all steps are lost, call :math:`i + n + 1 + \mathrm{lag}` raises.

    Args:
      most_in_a_row: How many steps in a row may be lost.
      lag: After how many further calls the metrics of a step are read. Where the device is further
        behind than that, the call waits for it.

    Raises:
      HyperparameterError: An argument is not a positive whole number.
      TreeError: On use, where metrics are not those of ``train_step``.
      NonfiniteError: On use, when more steps in a row were lost.

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
        """Steps lost in a row, up to the last one whose metrics were read."""
        self._skipped_of_these = 0
        self._waiting: collections.deque[Mapping[str, Any]] = collections.deque()
        self._skipped: int | None = None  # in all, so far

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics that ``train_step`` returned for one step."""
        if not set(_READ) <= set(metrics):
            raise TreeError(
                "metrics: not those of train_step: got the entries "
                f"{', '.join(metrics) or 'of nothing'}, expected {', '.join(_READ)} among them. "
                "Pass the metrics that the step returned, as they are."
            )
        self._waiting.append({name: metrics[name] for name in _READ})
        if len(self._waiting) <= self.lag:
            return
        oldest = self._waiting.popleft()
        skipped = int(oldest["skipped"])
        is_finite = math.isfinite(float(oldest["loss"]))
        # A run that goes on from a checkpoint begins with a count above zero.
        first = skipped if is_finite else 0
        is_skip = skipped > (first if self._skipped is None else self._skipped)
        self._skipped = skipped
        if is_skip or not is_finite:
            self.in_a_row += 1
            self._skipped_of_these += is_skip
        else:
            self.in_a_row = self._skipped_of_these = 0
        if self.in_a_row > self.most_in_a_row:
            raise self._error(float(oldest["loss_scale"]))

    def _error(self, loss_scale: float) -> NonfiniteError:
        """Says which it was, skipped steps or losses."""
        num_skipped = self._skipped_of_these
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
