"""Tables of records of low precision and of a ResNet."""

import json
import pathlib

from lm import markdown

RESULTS = pathlib.Path(__file__).parent / "results"
LOW_PRECISION = (  # row, bytes moved per parameter, how it is called here
    ("float32", "28", "float32 parameters and state"),
    ("bf16, remainder16", "26", '"remainder16", float32 moments'),
    ("bf16, remainder16, 16-bit moments", "18.1", '"remainder16", "block16"'),
    ("bf16, remainder16, 8-bit moments", "14.1", '"remainder16", "block8"'),
    ("bf16, stochastic, 16-bit moments", "14.1", 'stochastic rounding, "block16"'),
    ("bf16, stochastic, bf16 moments", "14", "stochastic rounding, bfloat16 moments"),
    ("bf16, stochastic, 8-bit moments", "10.1", 'stochastic rounding, "block8"'),
    ("torch fused, CUDA graph", "28", "`torch.optim.AdamW(fused=True)`, CUDA graph, float32"),
    ("bitsandbytes AdamW8bit", "10.1", "`bitsandbytes` `AdamW8bit`"),
)


def _results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def low_precision_speed() -> str:
    """One line for each kind of state: time of a step of gpt2xl and share of the copy."""
    rows = {row["variant"]: row for row in _results("bench_kernel/h200/low_precision")["rows"]}
    first = rows["float32"]["wall_microseconds"]
    table = []
    for variant, nbytes, name in LOW_PRECISION:
        row = rows[variant]
        share, micro = row["device_share_of_copy"], row["wall_microseconds"]
        alone = "-" if share is None else f"{100 * share:.0f} %"
        cells = (
            name,
            nbytes,
            f"{micro / 1e3:.2f}",
            f"{100 * row['wall_share_of_copy']:.0f} %",
            alone,
            f"{first / micro:.2f}",
        )
        table.append(cells)
    columns = (
        "step", "bytes per parameter", "ms", "share of a copy's speed", "of the kernels alone",
        "times as fast as float32",
    )  # fmt: skip
    return markdown.table(columns, table)


def resnet_speed() -> str:
    """One line for each program of bench_resnet.py."""
    results = _results("bench_resnet/h200/default")
    rows = [
        (row["program"], f"{row['images_per_second']:,.0f}", f"{row['milliseconds']:.2f}",
         f"{row['fastest']:.2f} to {row['slowest']:.2f}")
        for row in results["rows"]
    ]  # fmt: skip
    columns = ("program", "images per second", "ms per step", "fastest to slowest round")
    return markdown.table(columns, rows)


def gathered_once() -> str:
    """One line for each workload and strategy of gathered_once.py, without more options."""
    table = []
    for row in _results("gathered_once/h200/default")["rows"]:
        if row["options"]:
            continue
        sizes = [f"{row[name] / 1e6:.0f} MB" for name in ("arguments", "temporary", "peak")]
        beside = f"{row['beside']} of {row['gathers']}"
        table.append((row["workload"], row["strategy"], *sizes, beside))
    columns = ("workload", "strategy", "arguments", "temporary", "peak", "gathers beside the model")
    return markdown.table(columns, table)
