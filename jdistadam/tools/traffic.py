"""What a step sends, as a table; see ``distributed/schedule.py`` for what decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jdistadam.core.types import Params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import Collective


def planned_collectives(
    config: DistributedConfig, params: Params, *, accumulate_steps: int = 1
) -> list[Collective]:
    """Returns the collectives of one call of ``train_step`` that are larger than scalars.

    Args:
      config: ``tx.config``.
      params: Tree of global params or their shapes.
      accumulate_steps: As given to ``train_step``.
    """
    whole = config.tensor_local(params)
    return list(config.schedule(whole, accumulate_steps=accumulate_steps).collectives)


def format_collectives(planned: Sequence[Collective]) -> str:
    """Returns a table, one line for each operation, dtype and set of axes.

    The last column says by which means, where that is not "xla" for all.
    """
    rows: dict[Any, list[int]] = {}
    for c in planned:
        key = c.op, c.dtype.name, c.axes, c.devices, c.times, c.means
        row = rows.setdefault(key, [0, 0, 0])
        for i, value in enumerate((1, c.elements, c.bytes_sent)):
            row[i] += value
    is_said = any(c.means != "xla" for c in planned)
    lines = [
        f"{'collective':<15} {'dtype':<14} {'over':<16} {'devices':>7} {'times':>5} {'arrays':>6} "
        f"{'elements':>13} {'MB sent':>10}{'  means' if is_said else ''}"
    ]
    for (op, dtype, axes, devices, times, means), (count, elements, sent) in rows.items():
        lines.append(
            f"{op:<15} {dtype:<14} {','.join(axes):<16} {devices:>7} {times:>5} {count:>6} "
            f"{elements:>13} {sent / 1e6:>10.2f}{f'  {means}' if is_said else ''}"
        )
    return "\n".join(lines)
