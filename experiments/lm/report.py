"""The output of a run: metrics as JSON lines, a plot of the loss, a table of bytes."""

import json
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import jax
import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from jdistadam.tools import diagnostics

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class MetricsFile:
    """Appends one JSON object per line to those of an earlier run, up to a step.

    ``tensorboard`` is an optional folder for TensorBoard's files.
    """

    def __init__(
        self, path: pathlib.Path, last_step: int = 0, tensorboard: pathlib.Path | None = None
    ) -> None:
        self._writer: Any = None
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text().splitlines() if last_step and path.is_file() else []
        self._file = path.open("w")
        for row in map(json.loads, old):
            if row["step"] <= last_step:
                self.write(**row)
        if tensorboard:
            import tensorboardX  # only here: the import is slow

            # Lines that an earlier run wrote after its last checkpoint are no longer shown.
            purge = {"purge_step": last_step + 1} if last_step else {}
            self._writer = tensorboardX.SummaryWriter(str(tensorboard), **purge)

    def write(self, *, step: int, **values: Any) -> None:
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        self._file.close()
        if self._writer:
            self._writer.close()


def shown(values: dict[str, Any]) -> dict[str, str]:
    """The metrics that a progress bar or a log line shows."""
    forms = {
        "loss": ("train_loss", "{:.3f}"),
        "val": ("validation_loss", "{:.3f}"),
        "lr": ("train_learning_rate", "{:.2e}"),
        "grad_norm": ("train_grad_norm", "{:.3f}"),
        "tokens_per_s": ("tokens_per_second", "{:,.0f}"),
        "peak": ("peak_bytes", "{:.3g} bytes"),
    }
    return {to: form.format(values[name]) for to, (name, form) in forms.items() if name in values}


def write_run(path: pathlib.Path, revision: str | None, **results: Any) -> None:
    """Writes the command, the machine and the results of a run."""
    info = diagnostics.info()
    run = {
        "command": _command(),
        "revision": revision or _git_revision(),
        "machine": {
            key: info[key] for key in ("machine", "devices", "driver", "python", "packages")
        },
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n")


def _command() -> str:
    """The command line without the options for the output and its name."""
    options = iter(sys.argv[1:])
    kept = []
    for option in options:
        if option in ("--out", "--revision", "--tensorboard"):
            next(options, None)
        else:
            kept.append(option)
    return shlex.join(["python", f"experiments/{pathlib.Path(sys.argv[0]).name}", *kept])


def _git_revision() -> str:
    """The commit, marked if the code differs. Results do not count: a run rewrites them."""
    git = ["git", "-C", str(pathlib.Path(__file__).parents[2])]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        code = [*git, "diff", "--quiet", "HEAD", "--", ".", ":!experiments/results"]
        dirty = subprocess.run(code, capture_output=True).returncode != 0
    except OSError:
        return "unknown"
    return (
        commit.stdout.strip() + ("-dirty" if dirty else "") if commit.returncode == 0 else "unknown"
    )


def plot_loss(metrics: pathlib.Path, image: pathlib.Path, marks: dict[str, float]) -> None:
    """Draws train and validation loss against tokens, and horizontal lines to compare with."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for key, style in (
        ("train_loss", dict(lw=1, alpha=0.7)),
        ("validation_loss", dict(marker="o", ms=3)),
    ):
        points = [(row["tokens"] / 1e6, row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), label=key.replace("_", " "), **style)
    for (name, value), style in zip(marks.items(), ("--", ":"), strict=False):
        axes.axhline(value, color="0.5", ls=style, lw=1, label=name)
    axes.set(xlabel="million bytes seen", ylabel="loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, dpi=130)
    plt.close(figure)


def validation_losses(folder: pathlib.Path) -> dict[int, float]:
    """Returns the validation loss of a run at each step where it was computed."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def plot_bandwidth(result: pathlib.Path, image: pathlib.Path) -> None:
    """Draws the bandwidth of a step on one leaf against its size, and the copy as the roof."""
    results = json.loads(result.read_text())["results"]
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    sizes = [point["elements"] for point in results["sizes"]]
    for key, label in (("device", "device time"), ("wall", "wall time, in a jitted loop")):
        axes.plot(sizes, [point[key] for point in results["sizes"]], marker="o", ms=4, label=label)
    copy = results["copy_gb_per_second"]
    axes.axhline(copy, color="0.5", ls="--", lw=1, label=f"in-place copy, {copy:,.0f} GB/s")
    axes.set(xscale="log", xlabel="float32 parameters in one leaf", ylabel="GB/s", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, dpi=130)
    plt.close(figure)


def peak_bytes(device: jax.Device) -> int | None:
    """Returns the peak memory in use on a device, None if it is not counted."""
    stats = device.memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def bytes_on_first_device(tree: Any) -> int:
    """Returns the bytes of a tree on one device, from the arrays themselves."""
    total = 0
    for x in jax.tree.leaves(tree):
        device = x.sharding.addressable_devices_indices_map(x.shape)
        first = min(device, key=lambda d: d.id)
        total += sum(s.data.nbytes for s in x.addressable_shards if s.device == first)
    return total


def _whole_bytes(part: Any, num_params: int) -> int:
    """Bytes of a part of the state for all parameters; for a coded moment with its padding."""
    arrays = jax.tree.leaves(part)
    if len(arrays) == 1:
        return num_params * arrays[0].dtype.itemsize
    return sum(x.nbytes for x in arrays)


def print_memory(opt_state: Any, params: Any, num_devices: int) -> dict[str, int]:
    """Prints optimizer bytes per device: as they are here, and unsharded.

    Returns the two totals.
    """
    num_params = sum(x.size for x in jax.tree.leaves(params))
    rows = {
        name: bytes_on_first_device(part)
        for name, part in zip(opt_state._fields, opt_state, strict=True)
        if any(np.ndim(x) for x in jax.tree.leaves(part))
    }
    replicated = {
        name: mine if name in ("layout_digest", "key") else _whole_bytes(part, num_params)
        for name, mine in rows.items()
        for part in [getattr(opt_state, name)]
    }
    table = Table(
        title=f"Optimizer state per device, {num_params:,} parameters, {num_devices} devices"
    )
    for heading in ("", "sharded, bytes", "replicated, bytes", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows["total"], replicated["total"] = sum(rows.values()), sum(replicated.values())
    for name, mine in rows.items():
        table.add_row(name, f"{mine:,}", f"{replicated[name]:,}", f"{mine / replicated[name]:.3f}")
    Console(width=100).print(table)
    return {"sharded": rows["total"], "replicated": replicated["total"]}
