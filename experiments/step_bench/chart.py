"""Where the time of a step goes: stacked bars, one per row; and all GPUs on one time axis."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from step_bench.trace import PHASES

COLORS = dict(zip((*PHASES, "idle"), plt.get_cmap("tab20").colors, strict=False))
IN_TURN = ("model", "update", "sum", "norm", "other", "copies")  # the others run beside them


def draw(rows, image):
    """Draws the exposed time of each phase of every row with a trace; False if none has one."""
    traced = [row for row in rows if row.get("phases")]
    if not traced:
        return False
    names = [name for name in (*PHASES, "idle") if any(name in row["phases"] for row in traced)]
    height = 1.2 + 0.32 * len(traced)
    figure, axes = plt.subplots(figsize=(10, height), constrained_layout=True)
    left = [0.0] * len(traced)
    places = range(len(traced))  # not names: a floor is in every batch
    for name in names:
        widths = [row["phases"].get(name, {}).get("exposed_ms", 0.0) for row in traced]
        axes.barh(places, widths, left=left, label=name, color=COLORS[name])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [row["name"] for row in traced])
    axes.invert_yaxis()
    # The model takes most of every bar: the axis starts where the shortest bars differ.
    least = min(row["phases"].get("model", {}).get("exposed_ms", 0.0) for row in traced)
    label = "ms per step of the first GPU; the axis does not begin at 0"
    axes.set(xlabel=label, xlim=(0.8 * least, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(image, dpi=130)
    plt.close(figure)
    return True


def draw_timeline(of_gpus, title, image):
    """Draws a step of all GPUs (``trace.last_step``): kernels above, what is sent below them."""
    figure, axes = plt.subplots(figsize=(14, 1 + 0.9 * len(of_gpus)), constrained_layout=True)
    for place, events in enumerate(of_gpus.values()):
        for phase in PHASES:
            spans = [(start, end - start) for start, end, found, _ in events if found == phase]
            bottom = place - (0.42 if phase in IN_TURN else 0.0)
            label = phase if spans and phase not in axes.get_legend_handles_labels()[1] else None
            axes.broken_barh(spans, (bottom, 0.4), color=COLORS[phase], label=label)
    axes.set_yticks(range(len(of_gpus)), [f"GPU {gpu}" for gpu in of_gpus])
    axes.invert_yaxis()
    axes.set(xlabel="ms of the last traced step", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(image, dpi=130)
    plt.close(figure)
