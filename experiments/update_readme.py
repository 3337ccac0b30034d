"""Writes README's tables from the files under experiments/results.

python experiments/update_readme.py           # rewrites README.md
python experiments/update_readme.py --check   # exit code 1 if README.md is out of date
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"


def training_table() -> str:
    """One line for each run of train_lm.py, from its run.json."""
    lines = [
        "| devices | model | optimizer | seed | bytes seen | validation loss, nats a byte "
        "| zlib -9 | tokens/s | params and state per device | peak memory per device |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("train_lm_*/run.json")):
        run = json.loads(path.read_text())
        r = run["results"]
        device = run["machine"]["devices"][0].split(" ", 1)[1]
        peak = r["peak_bytes_per_device"]
        cells = (
            f"{r['devices']} x {device}",
            f"{r['preset']}, {r['parameters'] / 1e6:.1f} M",
            r["optimizer"],
            f"{r['seed']}",
            f"{r['tokens'] / 1e6:.1f} M",
            f"{r['validation_loss']:.3f}",
            f"{r['zlib_entropy']:.3f}",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['state_bytes_per_device'] / 1e6:,.1f} MB",
            f"{peak / 1e9:,.1f} GB" if peak else "not counted",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kernel_table() -> str:
    """One line for each tree and dtype of bench_kernel.py, ours beside optax."""
    run = json.loads((RESULTS / "bench_kernel_h200.json").read_text())["results"]
    lines = [
        f"In-place copy in the same run: {run['copy_gb_per_second']:,.0f} GB/s.",
        "",
        "| tree | gradients | jdistadam, us a step | of copy | compile, s "
        "| jitted optax.adamw, us a step | of copy | compile, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = run["rows"]
    for ours, optax in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{ours['tree']} ({ours['leaves']} arrays)", ours["gradients"]]
        for row in (ours, optax):
            cells += [
                f"{row['microseconds']:,.0f}",
                f"{100 * row['share_of_copy']:.1f} %",
                f"{row['compile_seconds']:.1f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {"training": training_table, "kernel": kernel_table}


def render(text: str) -> str:
    """Replaces what stands between each pair of markers."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S
        )
        if count != 1:
            raise SystemExit(f"README.md needs one pair of markers for table {name}, has {count}")
    return text


def main() -> int:
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = render(old)
    if "--check" in sys.argv:
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
