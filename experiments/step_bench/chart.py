"""Stacked bars: where the time of a step goes, one bar per row."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from step_bench.trace import PHASES


def draw(rows, image):
    """Draws the exposed time of each phase of every row with a trace; False if none has one."""
    traced = [row for row in rows if row.get("phases")]
    if not traced:
        return False
    names = [name for name in (*PHASES, "idle") if any(name in row["phases"] for row in traced)]
    colors = dict(zip((*PHASES, "idle"), plt.get_cmap("tab20").colors, strict=False))
    height = 1.2 + 0.32 * len(traced)
    figure, axes = plt.subplots(figsize=(10, height), constrained_layout=True)
    left = [0.0] * len(traced)
    places = range(len(traced))  # not names: a floor is in every batch
    for name in names:
        widths = [row["phases"].get(name, {}).get("exposed_ms", 0.0) for row in traced]
        axes.barh(places, widths, left=left, label=name, color=colors[name])
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
