"""What the dtypes of gradients do to training: the same run under four policies.

    python experiments/precision.py --out runs/precision -- --steps 800 --accumulate-steps 2

What follows "--" goes to train_lm.py. Each policy is a run of its own, from the same seed. Prints a
table and writes it with a plot of the losses; `experiments/update_readme.py` reads the same files.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

POLICIES = {
    "float32 wire": ("--grad-comm-dtype", "float32"),
    "bfloat16 wire": ("--grad-comm-dtype", "bfloat16"),
    "bfloat16 wire, float32 sum": (
        "--grad-comm-dtype", "bfloat16", "--grad-reduce-dtype", "float32",
    ),
    "bfloat16 main gradients": ("--grad-comm-dtype", "bfloat16", "--main-grads-dtype", "bfloat16"),
}  # fmt: skip


def folder_of(out, name):
    return out / name.replace(",", "").replace(" ", "_")


def read(folder):
    """The curves of a run by name, and its results."""
    curves = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for key, value in row.items():
            curves.setdefault(key, {})[row["step"]] = value
    return curves, json.loads((folder / "run.json").read_text())["results"]


def table(out):
    """One line for each policy."""
    lines = [
        "| gradients | validation loss, nats a byte | minus float32 wire, last / furthest "
        "| gradient norm, last | tokens/s | sent per device and step | peak memory per device |",
        "|---|---|---|---|---|---|---|",
    ]
    first = None
    for name in POLICIES:
        if not (folder_of(out, name) / "run.json").exists():
            continue
        curves, r = read(folder_of(out, name))
        losses = curves["validation_loss"]
        first = first or losses
        apart = [losses[step] - first[step] for step in losses]
        peak = r["peak_bytes_per_device"]
        cells = (
            name,
            f"{r['validation_loss']:.4f}",
            f"{apart[-1]:+.4f} / {max(apart, key=abs):+.4f}",
            f"{list(curves['train_grad_norm'].values())[-1]:.3f}",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['bytes_sent_per_device'] / 1e6:,.1f} MB",
            f"{peak / 1e9:,.2f} GB" if peak else "not counted",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(out, image):
    """Validation losses minus those of the float32 wire, and gradient norms."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.6), sharex=True, layout="constrained")
    first = None
    for name in POLICIES:
        curves, _ = read(folder_of(out, name))
        losses = curves["validation_loss"]
        first = first or losses
        apart = [losses[step] - first[step] for step in losses]
        top.plot(list(losses), apart, marker="o", ms=3, lw=1, label=name)
        norms = curves["train_grad_norm"]
        bottom.plot(list(norms), list(norms.values()), lw=1, alpha=0.8, label=name)
    top.set(ylabel="validation loss minus float32 wire")
    bottom.set(xlabel="steps", ylabel="gradient norm", yscale="log")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    top.legend()
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
    for name, options in POLICIES.items():
        print(f"== {name}", flush=True)
        out = ("--out", str(folder_of(args.out, name)))
        subprocess.run([sys.executable, str(script), *args.train_lm, *options, *out], check=True)
    plot(args.out, args.out / "precision.png")
    print(table(args.out))


if __name__ == "__main__":
    main()
