"""The output of bench_step.py: rows, gains, phases with their prediction."""

import json
import statistics

from step_bench.trace import PHASES


def read(path):
    return json.loads(path.read_text())


def gain(rival, ours):
    """Percent more tokens per second, round by round: the median, least and most.

    Both are records of rows that were timed in the same rounds.
    """
    pairs = zip(rival["rounds_ms"], ours["rounds_ms"], strict=True)
    percent = [100 * (theirs / mine - 1) for theirs, mine in pairs]
    return {
        "percent": statistics.median(percent),
        "percent_least": min(percent),
        "percent_most": max(percent),
    }


def text(found):
    """All tables of a run."""
    parts = [_rows(found["rows"])]
    traced = [row for row in found["rows"] if row.get("phases")]
    if traced:
        parts += [_phases(traced)]
    parts += [_tried(row) for row in found["rows"] if row.get("tried")]
    if found.get("gains"):
        parts.append(_gains(found["gains"]))
    if found["left_out"]:
        parts.append("not begun in time: " + ", ".join(found["left_out"]))
    return "\n\n".join(parts)


def _number(value, form):
    return "-" if value is None else format(value, form)


def _rows(records):
    columns = (
        ("ms", "ms", 8, ".2f", 1),
        ("least", "ms_least", 8, ".2f", 1),
        ("most", "ms_most", 8, ".2f", 1),
        ("above", "above_floor_ms", 7, ".2f", 1),
        ("ratio", "ratio_to_floor", 7, ".4f", 1),
        ("tokens/s", "tokens_per_second", 9, ",.0f", 1),
        ("MFU %", "model_flops_utilization", 6, ".1f", 100),
        ("held GB", "argument_bytes", 8, ".2f", 1e-9),
        ("temp GB", "temporary_bytes", 8, ".2f", 1e-9),
        ("compile s", "compile_seconds", 9, ".1f", 1),
    )
    lines = [f"{'row':<44}" + "".join(f"{title:>{width + 1}}" for title, _, width, *_ in columns)]
    for record in records:
        cells = [f"{record['name']:<44}"]
        for _, key, width, form, scale in columns:
            value = record.get(key)
            shown = _number(None if value is None else value * scale, form)
            cells.append(f"{shown:>{width + 1}}")
        if record.get("check", {}).get("passed") is False:
            cells.append("  WRONG")
        if "failed" in record:
            cells.append("  FAILED: " + record["failed"][:60])
        lines.append("".join(cells))
    return "\n".join(lines)


def _tried(record):
    """The compiler flags that a row tried, the fastest first."""
    tried = sorted(record["tried"], key=lambda x: x.get("ms", float("inf")))
    cells = (f"{x['flags']} {_number(x.get('ms'), '.2f')}" for x in tried)
    return f"{record['name']}, ms in a trial: " + ", ".join(cells)


def _gains(gains):
    lines = ["percent more tokens/s beside annotations: median of the rounds (least to most)"]
    for x in gains:
        spread = f"{x['percent_least']:+.2f} to {x['percent_most']:+.2f}"
        lines.append(f"{x['percent']:+.2f} ({spread}) {x['row']} beside {x['beside']}")
    return "\n".join(lines)


def _phases(records):
    """Exposed and overlapped ms of every phase, and the predicted ones."""
    lines = ["ms per step of the first GPU: exposed + overlapped (predicted)"]
    for record in records:
        cells = []
        predicted = record.get("predicted_ms", {})
        for phase in (*PHASES, "idle"):
            found = record["phases"].get(phase)
            if found is None and phase not in predicted:
                continue
            found = found or {"exposed_ms": 0.0, "overlapped_ms": 0.0}
            cell = f"{phase} {found['exposed_ms']:.2f}+{found['overlapped_ms']:.2f}"
            cells.append(cell + (f" ({predicted[phase]:.2f})" if phase in predicted else ""))
        lines.append(f"{record['name']}\n    " + ", ".join(cells))
    return "\n".join(lines)
