"""Draws README's plot from the record of bench_step.py: the time of a step against its model's.

python experiments/plot_step.py   # writes results/bench_step/h200_x2/default_above_floor.png
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from update_readme import RESULTS, step_rows

NAME = "bench_step/h200_x2/default"
LABELS = {
    "annotated_zero1": "optax.adamw, sharding annotations",
    "optim": 'jdistadam "optim", XLA collectives',
    "optim+float32sum": 'jdistadam "optim", peer memory',
    "optim+float32sum+clip": "jdistadam, peer memory, clipped",
}


def main():
    rows = step_rows("unrolled-8")
    values = [rows[name]["above_floor_ms"] for name in LABELS]
    colors = ["tab:gray" if name.startswith("annotated") else "tab:blue" for name in LABELS]
    figure, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    bars = axes.barh(list(LABELS.values()), values, color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set(
        xlabel="ms per step beyond forward and backward pass",
        title="GPT with 1.31e9 parameters, two H200s",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / f"{NAME}_above_floor.png", dpi=130)


if __name__ == "__main__":
    main()
