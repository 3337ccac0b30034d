"""Draws the pictures of the pages: from records, from plans and schedules, and a diagram.

python experiments/plot_pages.py               # writes into experiments/results/plots
python experiments/plot_pages.py --out FOLDER  # into another folder
"""

import argparse
import itertools
import pathlib

import jax
import matplotlib

matplotlib.use("Agg")
import jax.numpy as jnp
import matplotlib.pyplot as plt
from lm.report import validation_losses
from records import RESULTS
from speed_tables import of_host_runs
from step_bench import model
from step_bench.budget import bfloat16_shapes

import jdistadam as jda

GRAY, DARK, LIGHT, BLUE = "#c8c8c8", "#767676", "#8fbbe0", "#1f68a8"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = (0, 1, 2)


def _bare(axes):
    axes.spines[["top", "right"]].set_visible(False)


def host_steps():
    """Time of a whole step with the state on one device and in host memory."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    of_runs = {name: rows for gpus, name, rows in of_host_runs() if gpus == "1"}
    labels = ("state on the device", "state in host memory", "only moments in host memory")
    for kind, (label, color) in enumerate(zip(labels, (DARK, BLUE, LIGHT), strict=True)):
        pairs = [(i + 0.27 * kind, x[kind]) for i, x in enumerate(of_runs.values()) if x[kind]]
        axes.barh(
            *zip(*((i, x["ms"]) for i, x in pairs), strict=True), 0.25, color=color, label=label
        )
        for place, row in pairs:
            at = dict(textcoords="offset points", va="center", fontsize="small")
            axes.annotate(f"{row['ms']:.1f}", (row["ms"], place), (4, 0), **at)
    axes.set_yticks([i + 0.27 for i in range(len(of_runs))], list(of_runs))
    axes.set(xlabel="ms per training step", xlim=(0, 490))
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    axes.invert_yaxis()
    _bare(axes)
    return figure


BLOCK8 = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=0)
STORED = {  # name: policy, arguments of fused_adamw, line
    "float32 main parameters and moments": ({}, {}, "-"),
    '"remainder16" main parameters, "block8" moments': (
        dict(main_params_dtype="remainder16"),
        BLOCK8,
        "--",
    ),
}
STRATEGIES = {
    "no_shard": DARK,
    "optim": BLUE,
    "optim_grads": "#d9822b",
    "optim_grads_params": "#3a8f5c",
}


def planned_bytes(strategy, devices, policy, storage):
    """Bytes per device between steps, and of the accumulated gradients, by ``jda.plan``."""
    tx = jda.distributed(
        jda.fused_adamw(1e-3, **storage),
        mesh=jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices]),
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16, **policy),
    )
    params = bfloat16_shapes(model.shapes(model.SIZES["gpt-1.3b"], is_scanned=False))
    plan = jda.plan(params, tx, accumulate_steps=2)
    return plan.held_bytes + plan.sums


def strategy_bytes():
    """Bytes per device against the number of devices."""
    figure, axes = plt.subplots(figsize=(7, 3.9), layout="constrained")
    for strategy, color in STRATEGIES.items():
        for policy, storage, line in STORED.values():
            values = [planned_bytes(strategy, n, policy, storage) / 1e9 for n in COUNTS]
            axes.plot(COUNTS, values, line, color=color, marker="o", ms=3)
            if line == "-":
                axes.annotate(
                    f'"{strategy}"', (COUNTS[-1], values[-1]), (8, 0), color=color,
                    textcoords="offset points", va="center",
                )  # fmt: skip
    for name, (_, _, line) in STORED.items():
        axes.plot([], [], line, color="black", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(COUNTS, [str(n) for n in COUNTS])
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.set(xlabel="devices", ylabel="GB per device,\nwith accumulated gradients")
    axes.legend(frameon=False, loc="lower left")
    _bare(axes)
    return figure


def _box(axes, left, right, low, text, color):
    style = dict(facecolor=color, edgecolor="black", lw=0.8)
    axes.add_patch(plt.Rectangle((left, low), right - left, 1.3, **style))
    ink = "white" if color == BLUE else "black"
    axes.text((left + right) / 2, low + 0.65, text, ha="center", va="center", color=ink, fontsize=9)


def step_flow():
    """Boxes in the order of a step, with XLA's collectives and with peer memory."""
    figure, axes = plt.subplots(figsize=(7, 3.3), layout="constrained")
    backward = "backward pass:\ngradients of the\ndevice's batch"
    xla = {
        backward: GRAY,
        "reduce-scatter:\nsum of the\ndevice's shard": LIGHT,
        "kernel: update of\nthe shard's state\nand parameters": BLUE,
        "all-gather:\nparameters to\nall devices": LIGHT,
    }
    places = [(2.5 * i, 2.5 * i + 2.1) for i in range(4)]
    for (left, right), (text, color) in zip(places, xla.items(), strict=True):
        _box(axes, left, right, 3.6, text, color)
    for one, other in itertools.pairwise(places):
        axes.annotate(
            "", (other[0], 4.25), (one[1], 4.25), arrowprops=dict(arrowstyle="-|>", color="black")
        )
    _box(axes, 0, 4.4, 1.5, backward, GRAY)
    _box(
        axes,
        4.6,
        9.0,
        1.5,
        "kernels: add the parts, update\nthe shard's state and parameters",
        BLUE,
    )
    _box(axes, 0.8, 4.6, 0, "copies: parts of gradients\nto the device that adds them", LIGHT)
    _box(axes, 5.8, 9.6, 0, "copies: parameters\nto all devices", LIGHT)
    axes.text(0, 5.0, "XLA's collectives", weight="bold")
    axes.text(0, 2.9, "Peer memory", weight="bold")
    axes.set(xlim=(-0.05, 9.65), ylim=(-0.1, 5.4))
    axes.axis("off")
    return figure


NUM_BLOCKS, BLOCK_SHAPE, MICRO_BATCHES, DEVICES = 4, (1024, 1024), 2, 4
BLOCK_BYTES = 2 * BLOCK_SHAPE[0] * BLOCK_SHAPE[1]  # in bfloat16; sent in one unit of time
UNITS = {"forward": 1, "backward": 2, "update": 0.25}  # of a block; update: of its 1/DEVICES


def step_bars(strategy):
    """Bars of a step: of computations and of communication, each (kind, block, start, length).

    The schedule says what is sent, how often, and whether in each micro-batch. What is sent starts
    when its data are there and the links are free.
    """
    tx = jda.distributed(
        jda.fused_adamw(1e-3),
        mesh=jax.make_mesh((DEVICES,), ("data",), devices=jax.devices()[:DEVICES]),
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16),
    )
    shape = jax.ShapeDtypeStruct(BLOCK_SHAPE, jnp.bfloat16)
    blocks = tx.config.schedule([shape] * NUM_BLOCKS, accumulate_steps=MICRO_BATCHES).buckets
    computed, sent = [], []

    def add(bars, kind, block, start, length):
        start = max([start, *(begin + size for *_, begin, size in bars[-1:])])
        bars.append((kind, block, start, length))
        return start + length

    def send(kind, block, phase, start):
        for c in phase:
            start = add(sent, kind, block, start, c.bytes_sent / c.times / BLOCK_BYTES)
        return start

    now = 0
    for i, entry in enumerate(blocks):
        if entry.bucket.is_sharded_param:
            now = send("gather", i, entry.gather, now)
    for _ in range(MICRO_BATCHES):
        done = now
        for i in range(NUM_BLOCKS):
            done = add(computed, "forward", i, done, UNITS["forward"])
        for i in reversed(range(NUM_BLOCKS)):
            done = add(computed, "backward", i, done, UNITS["backward"])
            if any(c.when == "micro-batch" for c in blocks[i].reduce):
                now = send("reduce", i, blocks[i].reduce, done)
        now = max(now, done)  # a micro-batch ends with its sums
    for i, entry in enumerate(blocks):
        if all(c.when == "step" for c in entry.reduce):
            now = send("reduce", i, entry.reduce, now)
    share = sum(x.bucket.shard_size for x in blocks) * 2 * DEVICES / BLOCK_BYTES
    now = add(computed, "update", None, now, share * UNITS["update"])
    for i, entry in enumerate(blocks):
        now = send("gather", i, entry.after_update, now)
    return computed, sent


KINDS = {  # kind: its name in the legend, color
    "forward": ("forward pass of a block", GRAY),
    "reduce": ("sum of its gradients", LIGHT),
    "backward": ("backward pass", DARK),
    "gather": ("gather of its parameters", "white"),
    "update": ("update", BLUE),
}


def _bar(kind, place=(0, 0), length=1):
    color = KINDS[kind][1]
    return plt.Rectangle(place, length, 0.9, facecolor=color, edgecolor="black", lw=0.6)


def step_timeline():
    """Computation and communication of a step under each strategy."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row, strategy in enumerate(STRATEGIES):
        top = -3 * row
        lanes = step_bars(strategy)
        for low, bars in zip((top, top - 1), lanes, strict=True):
            for kind, block, start, length in bars:
                axes.add_patch(_bar(kind, (start, low), length))
                ink = "white" if kind in ("backward", "update") else "black"
                text, at = "" if block is None else str(block + 1), (start + length / 2, low + 0.43)
                axes.annotate(text, at, ha="center", va="center", color=ink, fontsize=8)
        sent = sum(bar[-1] for bar in lanes[1]) * 2 / NUM_BLOCKS
        axes.text(0, top + 1.08, f'"{strategy}"', weight="bold")
        axes.text(34, top + 1.08, f"sends {sent:g} bytes per parameter", ha="right")
    for i in range(MICRO_BATCHES):
        axes.text(12 * i + 6, -0.57, f"micro-batch {i + 1}", ha="center", va="center", color=DARK)
    axes.legend(
        [_bar(kind) for kind in KINDS], [name for name, _ in KINDS.values()], frameon=False,
        loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3,
    )  # fmt: skip
    axes.set(xlim=(-0.1, 34.1), ylim=(-10.2, 1.9))
    axes.axis("off")
    return figure


def _apart(run, base):
    """The validation losses of one run of train_lm.py minus those of another, by step."""
    losses, others = (validation_losses(RESULTS / "train_lm" / x) for x in (run, base))
    return {step: losses[step] - others[step] for step in losses}


def _draw_differences(axes, lines, columns):
    """Differences of pairs of runs by name, and a line at zero."""
    for name, (*pair, color, line) in lines.items():
        points = zip(*_apart(*pair).items(), strict=True)
        axes.plot(*points, line, color=color, marker="o", ms=3, label=name)
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xlabel="steps", xlim=(0, None))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns)
    _bare(axes)


def optax_losses():
    """jdistadam minus optax with each of three seeds; a band as wide as optax's seeds are apart."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    folder = "h100_x4/600_steps_3e-4/"
    runs = [RESULTS / "train_lm" / f"{folder}optax_sharded_seed{i}" for i in SEEDS]
    seeds = [validation_losses(run) for run in runs]
    widths = {step: max(x[step] for x in seeds) - min(x[step] for x in seeds) for step in seeds[0]}
    low, size = [-x for x in widths.values()], [2 * x for x in widths.values()]
    axes.bar(
        list(widths), size, min(widths), low, color="#e4e4e4", zorder=0,
        label="most that optax differs between seeds",
    )  # fmt: skip
    pairs = {
        f"seed {i}": (f"{folder}jdistadam_seed{i}", f"{folder}optax_sharded_seed{i}", color, "-")
        for i, color in zip(SEEDS, (LIGHT, BLUE, DARK), strict=True)
    }
    _draw_differences(axes, pairs, columns=2)
    axes.set(ylim=(-0.055, 0.055), ylabel="jdistadam minus optax,\nnats per byte")
    return figure


def strategy_losses():
    """Each strategy and mesh minus "optim" over four devices."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    runs = {
        '"no_shard", 4 or 2 x 2': ("no_shard_1", DARK, "-"),
        '"optim", 2 x 2': ("optim_2", BLUE, "--"),
        '"optim_grads", 4': ("optim_grads_1", STRATEGIES["optim_grads"], "-"),
        '"optim_grads", 2 x 2': ("optim_grads_2", STRATEGIES["optim_grads"], "--"),
    }
    folder = "h200_x4/strategies/"
    pairs = {
        name: (folder + run, folder + "optim_1", *style) for name, (run, *style) in runs.items()
    }
    _draw_differences(axes, pairs, columns=2)
    axes.set(ylabel='minus "optim", 4,\nnats per byte')
    return figure


PICTURES = {
    "cpu/strategy_bytes": strategy_bytes,
    "cpu/step_flow": step_flow,
    "cpu/step_timeline": step_timeline,
    "h100/host_steps": host_steps,
    "h100_x4/optax_losses": optax_losses,
    "h200_x4/strategy_losses": strategy_losses,
}


def content(figure):
    """The bars, boxes, lines and texts of a picture, as one text."""
    shapes = [x for axes in figure.axes for x in axes.patches]
    lines = [x for axes in figure.axes for x in axes.lines]
    boxes = [[x.get_x(), x.get_y(), x.get_width(), x.get_height()] for x in shapes]
    values = boxes + [[*x.get_xdata(), *x.get_ydata()] for x in lines]
    texts = [x.get_text() for axes in figure.axes for x in axes.texts]
    return "; ".join([*(" ".join(f"{x:.6g}" for x in row) for row in values), *texts])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "plots", help="folder")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    for name, draw in PICTURES.items():
        path = args.out / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure = draw()
        figure.savefig(path, dpi=200, metadata={"Description": content(figure)})
        plt.close(figure)


if __name__ == "__main__":
    main()
