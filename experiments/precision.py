"""The effect of gradient dtypes on training: the same run under four policies.

    python experiments/precision.py --out runs/precision -- --steps 800 --accumulate-steps 2

Arguments after "--" go to train_lm.py. Each policy is its own run, from the same seed. The first
runs again under other placements, which add the same numbers in another order, to show how far
apart equivalent runs are. Prints a table and writes a plot; experiments/update_readme.py reads the
same files.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from lm import markdown
from records import results_of

POLICIES = {
    "float32 communication": ("--grad-comm-dtype", "float32"),
    "bfloat16 communication": ("--grad-comm-dtype", "bfloat16"),
    "bfloat16 communication, float32 sum": (
        "--grad-comm-dtype", "bfloat16", "--grad-reduce-dtype", "float32",
    ),
    "bfloat16 main gradients": ("--grad-comm-dtype", "bfloat16", "--main-grads-dtype", "bfloat16"),
}  # fmt: skip
FIRST = next(iter(POLICIES))
AGAIN = {
    f"{FIRST}, two replicas": ("--strategy", "optim", "--replicas", "2"),
    f"{FIRST}, optim_grads": ("--strategy", "optim_grads"),
}


def folder_of(out, name):
    return out / name.replace(",", "").replace(" ", "_")


def read(folder):
    """The curves of a run by name, and its results."""
    curves = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for key, value in row.items():
            curves.setdefault(key, {})[row["step"]] = value
    return curves, json.loads((folder / "run.json").read_text())["results"]


def apart(out, folder):
    """Validation losses of a run minus those of the first policy's, by step."""
    (mine, _), (first, _) = read(folder), read(folder_of(out, FIRST))
    key = "validation_loss"
    return {step: loss - first[key][step] for step, loss in mine[key].items()}


def table(out):
    """One line for each policy and for each repetition of the first."""
    columns = (
        "gradients",
        "validation loss, nats per byte",
        "difference from the first row: at the end / largest",
        "gradient norm at the end",
        "tokens/s",
        "sent per device and step",
        "peak memory per device",
    )
    table = []
    for name in (*POLICIES, *again(out)):
        folder = folder_of(out, name)
        curves, r = read(folder)
        differences = list(apart(out, folder).values())
        peak = r["peak_bytes_per_device"]
        cells = (
            name,
            f"{r['validation_loss']:.4f}",
            f"{differences[-1]:+.4f} / {max(differences, key=abs):+.4f}",
            f"{list(curves['train_grad_norm'].values())[-1]:.3f}",
        )
        if name in POLICIES:
            cells += (
                f"{r['tokens_per_second']:,.0f}",
                f"{r['bytes_sent_per_device'] / 1e6:,.1f} MB",
                f"{peak / 1e9:,.2f} GB" if peak else "not counted",
            )
        else:  # another placement: not compared
            cells += ("-",) * 3
        table.append(cells)
    return markdown.table(columns, table)


STATES = (  # what a reader wants, main parameters, both moments, the variant of low_precision.py
    ("no risk", "float32", "float32", "-"),
    ("the same, started a millionth apart", "float32", "float32", "float32 state, other last bits"),
    ("no additional rounding", "remainder16", "float32", "none, given the same gradients"),
    ("half the state", "remainder16", "block16", "remainder16, 16-bit moments"),
    ("a third of the state", "remainder16", "block8", "remainder16, 8-bit moments"),
    ("no main parameters", None, "block16", "not measured"),
    ("no main parameters", None, "bfloat16", "bf16 parameters, stochastic, bf16 moments"),
    ("the least memory", None, "block8", "bf16 parameters, stochastic, 8-bit moments"),
)
SCALE = 4 / 128
"""Bytes per element of the float32 scales of blocks of 128."""
BYTES = {None: 0, "remainder16": 2, "bfloat16": 2, "float32": 4}
BYTES |= {"block8": 1 + SCALE, "block16": 2 + SCALE}


def states_table(*records):
    """One line for each choice of state: its bytes, and changes of the loss by low_precision.py."""
    columns = (
        "you want",
        "main parameters",
        "both moments",
        "bytes of state per parameter",
        "change in validation loss, nats: small model",
        "the same: GPT-2 small",
    )
    summaries = [results_of(record)["summary"] for record in records]
    table = []
    for goal, main, moments, way in STATES:
        size = BYTES[main] + 2 * BYTES[moments]
        changes = []
        for summary in summaries:
            if (r := summary.get(way)) is None:
                changes.append(way)
            else:
                changes.append(f"{r['mean_difference']:+.4f} ± {r['half_interval']:.4f}")
        cells = (goal, quoted(main), quoted(moments), f"{size:.1f}".removesuffix(".0"))
        table.append((*cells, *changes))
    return markdown.table(columns, table)


def quoted(dtype):
    """A dtype as it is passed: names of our own formats in quotation marks."""
    return str(dtype) if dtype in (None, "float32", "bfloat16") else f'"{dtype}"'


def again(out):
    return [name for name in AGAIN if folder_of(out, name).exists()]


def plot(out, image):
    """Validation losses minus those of the float32 communication, and gradient norms."""
    import matplotlib  # here, because the table needs none

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.6), sharex=True, layout="constrained")
    for name, style in zip(again(out), ("--", ":"), strict=False):
        differences = apart(out, folder_of(out, name))
        steps, values = list(differences), list(differences.values())
        top.plot(steps, values, color="0.5", ls=style, lw=1.2, label=name)
    for name in POLICIES:
        folder = folder_of(out, name)
        differences, norms = apart(out, folder), read(folder)[0]["train_grad_norm"]
        top.plot(list(differences), list(differences.values()), marker="o", ms=3, lw=1, label=name)
        bottom.plot(list(norms), list(norms.values()), lw=1, alpha=0.8, label=name)
    top.set(ylabel="validation loss minus the first")
    bottom.set(xlabel="steps", ylabel="gradient norm", yscale="log")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    top.legend(fontsize=8)
    figure.savefig(image, dpi=130)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/precision"))
    parser.add_argument("train_lm", nargs="*", help="arguments of train_lm.py, after --")
    args = parser.parse_args()
    script = pathlib.Path(__file__).parent / "train_lm.py"
    runs = {folder_of(args.out, name): options for name, options in POLICIES.items()}
    for name, options in AGAIN.items():
        runs[folder_of(args.out, name)] = (*POLICIES[FIRST], *options)
    for folder, options in runs.items():
        print(f"== {folder.name}", flush=True)
        command = [sys.executable, str(script), *args.train_lm, *options, "--out", str(folder)]
        subprocess.run(command, check=True)
    plot(args.out, args.out / "precision.png")
    print(table(args.out))


if __name__ == "__main__":
    main()
