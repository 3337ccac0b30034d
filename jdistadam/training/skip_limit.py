"""``SkipLimit``: ends a run whose gradients stay non-finite, without waiting for the device."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from jdistadam.core.arguments import check_count
from jdistadam.errors import NonfiniteError, TreeError


class SkipLimit:
    r"""Raises when too many steps in a row were skipped, since gradients were non-finite.

    A dynamic loss scale that halves at every skip reaches 1 after some 15 skips in a row; a run
    that goes on skipping does not recover, and costs as much as one that learns. Call it after
    each step::

        limit = jda.SkipLimit(50)
        for batch in batches:
            state, metrics = step(state, batch)
            limit(metrics)

    The metrics of a step are read when ``lag`` more steps were started, so that the host goes on
    feeding the device. With :math:`n` = ``most_in_a_row``, and call :math:`i` the last one before
    all steps are skipped, call :math:`i + n + 1 + \mathrm{lag}` raises.

    It needs an optimizer with a ``loss_scale``: without one no step is skipped, and non-finite
    gradients reach the parameters.

    Args:
      most_in_a_row: How many steps in a row may be skipped.
      lag: After how many further calls the metrics of a step are read. Where the device is further
        behind than that, the call waits for it.

    Raises:
      HyperparameterError: An argument is not a positive whole number.
      TreeError: On use, where metrics are not those of ``train_step``.
      NonfiniteError: On use, when more steps in a row were skipped.

    Example:
      >>> limit = SkipLimit(2, lag=1)
      >>> for skipped in (0, 1, 1, 2, 3):  # what train_step counts: never three in a row
      ...     limit({"skipped": skipped, "loss_scale": 8.0})
      >>> limit.in_a_row
      1
    """

    def __init__(self, most_in_a_row: int, *, lag: int = 4) -> None:
        check_count("most_in_a_row", most_in_a_row)
        check_count("lag", lag)
        self.most_in_a_row, self.lag = most_in_a_row, lag
        self.in_a_row = 0
        """Steps skipped in a row, up to the last one whose metrics were read."""
        self._waiting: collections.deque[Mapping[str, Any]] = collections.deque()
        self._skipped: int | None = None  # in all, so far

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics that ``train_step`` returned for one step."""
        if not {"skipped", "loss_scale"} <= set(metrics):
            raise TreeError(
                "metrics",
                "not those of train_step",
                got=f"the entries {', '.join(metrics) or 'of nothing'}",
                expected="skipped and loss_scale among them",
                action="Pass the metrics that the step returned, as they are.",
            )
        self._waiting.append({name: metrics[name] for name in ("skipped", "loss_scale")})
        if len(self._waiting) <= self.lag:
            return
        oldest = self._waiting.popleft()
        skipped = int(oldest["skipped"])
        # A run that goes on from a checkpoint begins with a count above zero.
        is_skip = skipped > (skipped if self._skipped is None else self._skipped)
        self.in_a_row = self.in_a_row + 1 if is_skip else 0
        self._skipped = skipped
        if self.in_a_row > self.most_in_a_row:
            raise NonfiniteError(
                "gradients",
                "non-finite in too many steps in a row, which were all skipped",
                got=f"{self.in_a_row} steps, the loss scale at {float(oldest['loss_scale']):g}",
                expected=f"at most {self.most_in_a_row}",
                action="Restore a checkpoint from before, and look for the cause with "
                "train_step(..., report_nonfinite=True) and nonfinite_paths.",
            )
