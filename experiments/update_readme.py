"""Writes the tables of README and of the pages in docs: from records, and from docstrings.

python experiments/update_readme.py           # rewrites README.md and docs/*.md
python experiments/update_readme.py --check   # exit code 1 if one of them is out of date
"""

import pathlib
import re
import sys

import layer_tables
import precision
import public_names
import speed_tables
from lm import markdown
from records import RESULTS, results_of

ROOT = pathlib.Path(__file__).parent.parent


def kernel_table() -> str:
    """One line for each tree of bench_kernel.py: every variant as a share of the copy."""
    columns = (
        "tree",
        "float32",
        "bf16, float32 main",
        "bf16, remainder16",
        "flat state, clipped",
        "optax.adamw",
        "torch fused, eager",
        "torch fused, CUDA graph",
        "host time, us: float32 / flat state / optax",
        "compile time, s: float32 / optax",
    )
    table = []
    for name in ("bench_kernel/h200/default", "bench_kernel/h200/llama1b"):
        results = results_of(name)
        for tree, hosts in results["hosts"].items():
            mine = {row["variant"]: row for row in results["rows"] if row["tree"] == tree}
            first = mine["float32"]
            cells = [f"{tree}: {first['leaves']:,} leaves, {first['parameters'] / 1e6:,.1f} M"]
            cells += [_speed(mine.get(variant)) for variant in VARIANTS]
            for key, digits, variants in HOST_COLUMNS:
                values = (hosts.get(variant, {}).get(key) for variant in variants)
                texts = ("-" if x is None else f"{x:,.{digits}f}" for x in values)
                cells.append(" / ".join(texts))
            table.append(cells)
    return markdown.table(columns, table)


VARIANTS = (
    "float32",
    "bf16, float32 main",
    "bf16, remainder16",
    "float32, flat, clipped",
    "optax.adamw",
    "torch fused",
    "torch fused, CUDA graph",
)


HOST_COLUMNS = (
    ("host_microseconds", 0, ("float32", "float32, flat, clipped", "optax.adamw")),
    ("compile_seconds", 1, ("float32", "optax.adamw")),
)


def _speed(row) -> str:
    """Wall time and share of the copy, and the share of device time alone."""
    if row is None:
        return "-"
    text = f"{row['wall_microseconds']:,.0f} us, {100 * row['wall_share_of_copy']:.1f} %"
    share = row["device_share_of_copy"]
    return text if share is None else f"{text} ({100 * share:.1f} %)"


def strategies_table() -> str:
    """One line for each strategy and mesh of four GPUs."""
    columns = (
        "`sharding_strategy`",
        "mesh",
        "validation loss, nats per byte",
        "tokens/s",
        "params and state per device",
        "peak memory per device",
    )
    table = []
    for folder in sorted((RESULTS / "train_lm/h200_x4/strategies").iterdir()):
        strategy, replicas = folder.name.rsplit("_", 1)
        curves, r = precision.read(folder)
        last = {key: curve[max(curve)] for key, curve in curves.items()}
        cells = (
            f"`{strategy!r}`".replace("'", '"'),
            "4" if replicas == "1" else f"{replicas} x {4 // int(replicas)}",
            f"{last['validation_loss']:.3f}",
            f"{last['tokens_per_second']:,.0f}",
            f"{r['state_bytes_per_device'] / 1e6:,.1f} MB",
            f"{r['peak_bytes_per_device'] / 1e9:,.1f} GB",
        )
        table.append(cells)
    return markdown.table(columns, table)


def optax_losses_table() -> str:
    """One line for each seed of train_lm.py on four H100s."""
    table = []
    for seed in (0, 1, 2):
        optax, ours = (
            results_of(f"train_lm/h100_x4/600_steps_3e-4/{optimizer}_seed{seed}/run")
            for optimizer in ("optax_sharded", "jdistadam")
        )
        apart = ours["validation_loss"] - optax["validation_loss"]
        losses = (f"{x['validation_loss']:.4f}" for x in (optax, ours))
        table.append((str(seed), *losses, f"{apart:+.4f}"))
    return markdown.table(("seed", "optax: last loss", "jdistadam", "difference"), table)


def losses_over_seeds_table() -> str:
    """One line for each way to train: how far its last losses are from optax's."""
    results = results_of("losses_over_seeds/h200/default")
    table = [
        (way, str(len(results["losses"][way])), f"{x['mean']:+.4f}", f"{x['error']:.4f}")
        for way, x in results["differences"].items()
    ]
    return markdown.table(("", "seeds", "mean difference", "its standard error"), table)


def distances_table() -> str:
    """One line for each way to train: how far its parameters are from optax's after some steps."""
    found = results_of("losses_over_seeds/cpu/default")["distances"]
    steps = next(iter(found.values()))
    table = [(way, *(f"{x[i]:.5f}" for i in steps)) for way, x in found.items()]
    return markdown.table(("distance from optax's after so many steps", *steps), table)


def _policy(row) -> str:
    """The name of a policy; records from before its renaming contain another word."""
    return row["policy"].replace("wire", "communication")


def plan_memory_table() -> str:
    """One line for each strategy and policy on four GPUs: planned and counted bytes."""
    columns = (
        "`sharding_strategy`",
        "policy",
        "held: plan / allocator",
        "temporary: bound / allocator",
    )
    table = []
    for row in results_of("plan_against_memory/h200_x4/default")["rows"]:
        cells = (
            f'`"{row["strategy"]}"`',
            _policy(row),
            f"{row['held_planned']:,} / {row['held_measured']:,}",
            f"{row['buffers_planned'] / 1e6:,.1f} / {row['temporary_measured'] / 1e6:,.1f} MB",
        )
        table.append(cells)
    return markdown.table(columns, table)


TABLES = {
    "decision": speed_tables.decision,
    "kernel": kernel_table,
    "strategies": strategies_table,
    "optax_losses": optax_losses_table,
    "losses_over_seeds": losses_over_seeds_table,
    "distances": distances_table,
    "precision": lambda: precision.table(RESULTS / "precision/h200_x4/default"),
    "states": lambda: precision.states_table(
        "low_precision/cpu/default", "low_precision/h200/150_steps"
    ),
    "low_precision_speed": speed_tables.low_precision_speed,
    "everyday": speed_tables.everyday,
    "sharded_state": speed_tables.sharded_state,
    "ways": speed_tables.ways,
    "policies": speed_tables.policies,
    "phases": speed_tables.phases,
    "phases_of_two": speed_tables.phases_of_two,
    "every_strategy": speed_tables.every_strategy,
    "processes": speed_tables.processes,
    "scanned": speed_tables.scanned,
    "one_gpu": speed_tables.one_gpu,
    "bytes_on_one_gpu": speed_tables.bytes_on_one_gpu,
    "by_tokens": speed_tables.by_tokens,
    "images": speed_tables.images,
    "host_steps": speed_tables.host_steps,
    "largest_model": speed_tables.largest_model,
    "plan_memory": plan_memory_table,
    "layers": layer_tables.gathered_when,
    "names": public_names.tables,
}


BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def render(text: str) -> str:
    """Replaces the text between each pair of markers."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + "\n" + m[3], text)


def main() -> int:
    docs = sorted((ROOT / "docs").glob("*.md"))
    pages = [ROOT / "README.md", *docs]
    old = {path: path.read_text() for path in pages}
    shown = {name for text in old.values() for _, name, _ in BLOCK.findall(text)}
    if shown != set(TABLES):
        raise SystemExit(f"no page shows, or nothing makes, the tables {shown ^ set(TABLES)}")
    new = {path: render(text) for path, text in old.items()}
    stale = [path for path in pages if new[path] != old[path]]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date")
        return int(bool(stale))
    for path in stale:
        path.write_text(new[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
