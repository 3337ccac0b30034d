"""Compares validation losses of runs of train_lm.py: a plot, and how far each is from the first.

python experiments/compare_runs.py optax=results/a jdistadam=results/b --out compare.png
"""

import argparse
import json
import pathlib

from lm import report


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="image to write")
    args = parser.parse_args(argv)
    runs = {label: pathlib.Path(folder) for label, folder in (x.split("=", 1) for x in args.runs)}
    first, *others = (report.validation_losses(folder) for folder in runs.values())
    for label, losses in zip(list(runs)[1:], others, strict=True):
        apart = {step: losses[step] - first[step] for step in first}
        step = max(apart, key=lambda step: abs(apart[step]))
        print(f"{label}: furthest from the first at step {step}, {apart[step]:+.4f} nats")
    result = json.loads((next(iter(runs.values())) / "run.json").read_text())["results"]
    marks = {
        "bigram entropy of the text": result["bigram_entropy"],
        "zlib -9": result["zlib_entropy"],
    }
    report.plot_comparison(runs, args.out, marks)


if __name__ == "__main__":
    main()
