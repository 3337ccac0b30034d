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
        "| run | parameters | devices | validation loss, nats a byte | bigram entropy | tokens/s "
        "| optimizer state per device, sharded / replicated |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("train_lm_*/run.json")):
        run = json.loads(path.read_text())
        r = run["results"]
        memory = r["optimizer_bytes_per_device"]
        memory = (
            f"{memory['sharded'] / 1e6:,.1f} / {memory['replicated'] / 1e6:,.1f} MB"
            if memory
            else "-"
        )
        device = run["machine"]["devices"][0].split(" ", 1)[1]
        lines.append(
            f"| {r['preset']}, {r['optimizer']} | {r['parameters']:,} | {r['devices']} x {device} "
            f"| {r['validation_loss']:.3f} | {r['bigram_entropy']:.3f} | {r['tokens_per_second']:,.0f} | {memory} |"
        )
    return "\n".join(lines)


TABLES = {"training": training_table}


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
