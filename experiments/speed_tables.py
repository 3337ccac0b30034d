"""Tables of the low-precision and ResNet records."""

import json
import pathlib

from lm import markdown

RESULTS = pathlib.Path(__file__).parent / "results"
LOW_PRECISION = (  # row, bytes moved per parameter, its name here
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
        "step", "bytes per parameter", "ms", "speed, share of a copy's",
        "the same, kernel time alone", "speed relative to float32",
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


SHARDED = (  # rows of records of two H100s, their names here
    ("floor", "forward and backward pass, no optimizer"),
    ("annotated_zero1", "annotations (ZeRO-1), largest dimension"),
    ("annotated_zero1+first_dim", "annotations (ZeRO-1), first dimension"),
    (
        "annotated_zero1+first_dim+latency_hiding",
        "annotations (ZeRO-1), first dimension, latency-hiding scheduler",
    ),
    (
        "annotated_zero1+first_dim+latency_hiding+clip",
        "annotations (ZeRO-1), first dimension, latency-hiding scheduler, clipped",
    ),
    ("optim+clip", '"optim", sums in bfloat16, over XLA, clipped'),
    ("optim+float32sum+clip", '"optim", sums in float32, over peer memory, clipped'),
    ("annotated_fsdp", "annotations (FSDP), largest dimension"),
    ("annotated_fsdp+first_dim", "annotations (FSDP), first dimension"),
    ("optim", '"optim", sums in bfloat16, over XLA'),
    ("optim+float32sum", '"optim", sums in float32, over peer memory'),
    ("torch_floor", "torch: forward and backward pass, no optimizer"),
    ("torch_fsdp2", "torch: FSDP2 with fused AdamW"),
)


def group_rows(record, group) -> dict[str, dict]:
    """Rows of a record of bench_step.py for a workload such as "unrolled-8", by variant."""
    names = ((row, row["name"].split("/")) for row in _results(record)["rows"])
    return {name: row for row, (of, name) in names if of == group}


def sharded_steps() -> str:
    """One line for each way to shard a step on two H100s."""
    records = (
        ("8 sequences", "rivals", "unrolled-8"),
        ("8 sequences, a second run", "profile", "unrolled-8"),
        ("8 sequences, a third run", "clip", "unrolled-8"),
        ("1 sequence", "1_sequence", "unrolled-1"),
        ("8 sequences, `lax.scan` over layers", "scanned", "scanned-8"),
    )
    table = []
    for workload, record, group in records:
        found = group_rows(f"bench_step/h100_x2/{record}", group)
        named = [(name, found.get(row)) for row, name in SHARDED]
        table += [(workload, *_step_cells(name, row)) for name, row in named if row]
    columns = (
        "batch per GPU",
        "training step",
        "ms",
        "fastest to slowest round",
        "ratio to the floor",
        "tokens/s",
    )
    return markdown.table(columns, table)


PHASES = {  # columns, and the phases of a trace that each contains
    "model": ("model",),
    "reduce-scatter, copies to the peer": ("reduce-scatter", "peer copies"),
    "norm": ("norm", "sum", "all-reduce"),
    "update": ("update", "peer step"),
    "all-gather": ("all-gather",),
    "copies and others": ("copies", "other"),
    "idle": ("idle",),
}


def phases() -> str:
    """One line for each traced step on two H100s: ms in each phase, and their sum."""
    found, table = group_rows("bench_step/h100_x2/profile", "unrolled-8"), []
    for row, name in SHARDED:
        if row in found:
            of_row = found[row]["phases"]
            cells, total = [name], sum(x["exposed_ms"] for x in of_row.values())
            for members in PHASES.values():
                parts = [of_row[x] for x in members if x in of_row]
                exposed, overlapped = (
                    sum(x[f"{kind}_ms"] for x in parts) for kind in ("exposed", "overlapped")
                )
                text = f"{exposed:.1f}" + (f" + {overlapped:.1f}" if overlapped > 0.05 else "")
                cells.append(text if parts else "-")
            table.append((*cells, f"{total:.1f}"))
    return markdown.table(("training step", *PHASES, "sum without overlaps"), table)


def _of_options(record, names) -> str:
    """One line for each named row of a record of one H100."""
    found = {row["name"]: row for row in _results(f"bench_step/h100/{record}")["rows"]}
    table = [_step_cells(name, found[f"unrolled-8/{row}"])[:3] for row, name in names]
    return markdown.table(("options", "ms", "fastest to slowest round"), table)


def norms() -> str:
    """One line for each option of norms.json."""
    names = (
        ("optim", "no norms"),
        ("optim+norms", '`norms="total"`'),
        ("optim+norms_of_leaves", '`norms="leaves"`, 75 leaves'),
        ("optim+clip", "`max_grad_norm`, no norms"),
        ("optim+clip+norms", '`max_grad_norm`, `norms="total"`'),
        ("optim+remainder16", '`"remainder16"`, no norms'),
        ("optim+remainder16+norms", '`"remainder16"`, `norms="total"`'),
    )
    return _of_options("norms", names)


def host_memory() -> str:
    """One line for each storage, size and memory of bench_host_memory.json."""
    table = []
    for row in _results("bench_host_memory/h100/default")["rows"]:
        nbytes = (f"{row[x] / 1e9:.1f} GB" for x in ("state_bytes", "held_bytes", "peak_bytes"))
        state, held, peak = nbytes
        memory = row["memory"] + (", a single window" if "window" in row else "")
        speed = f"{row['state_bytes'] / row['ms'] / 1e6:.0f} GB/s"
        table.append(
            (
                f"{row['parameters'] / 1e9:.2f}e9",
                row["storage"].replace("+", ", "),
                memory,
                f"{row['ms']:.1f}",
                state,
                "-" if row["memory"] == "device" else speed,
                held,
                peak,
            )
        )
    columns = (
        "parameters",
        "storage",
        "`state_memory`",
        "ms",
        "state",
        "state / time",
        "held on the device: params, gradients, state",
        "peak on the device",
    )
    return markdown.table(columns, table)


STORAGES = {  # modifiers of rows of bench_step.py
    "": "float32",
    "+remainder16": "remainder16, float32 moments",
    "+remainder16+block8": "remainder16, block8",
    "+no_main+block8": "no main parameters, block8",
}


def of_both_memories() -> list:
    """(GPUs, storage, row with the state on the device, row with it in host memory)."""
    records = (("1", "h100/host_floats"), ("1", "h100/host_codes"), ("2", "h100_x2/host_codes"))
    found = []
    for devices, record in records:
        rows = group_rows(f"bench_step/{record}", "unrolled-8")
        for storage, name in STORAGES.items():
            pair = [rows.get(f"optim{storage}{memory}") for memory in ("", "+host")]
            if all(pair):
                found.append((devices, name, *pair))
    return found


def host_steps() -> str:
    """One line for each storage: a training step with the state on the device and on the host."""
    table = []
    for devices, name, here, there in of_both_memories():
        cells = [
            f"{row['ms']:.1f} ({row['ms_least']:.1f} to {row['ms_most']:.1f})"
            for row in (here, there)
        ]
        more = there["ms"] - here["ms"]
        longer = f"{more:.1f} ms, {100 * more / here['ms']:.0f} %"
        if more < 0.1 * here["ms"]:
            longer = f"{more:.1f} ms, {100 * more / here['ms']:.1f} %"
        held = [
            f"{(x['argument_bytes'] + x['temporary_bytes']) / 1e9:.1f} GB" for x in (here, there)
        ]
        table.append((devices, name, *cells, longer, *held))
    columns = (
        "GPUs",
        "storage",
        "state on the device, ms",
        "in host memory, ms",
        "longer",
        "bytes of a step on a device",
        "the same, state in host memory",
    )
    return markdown.table(columns, table)


LARGEST = {  # methods and their names
    "optax": "`optax.adamw`, float32 parameters and moments",
    "main": "bfloat16 parameters, float32 main parameters and moments",
    "codes": "remainder16, block8",
    "codes_host": "remainder16, block8, in host memory",
}


def largest_model() -> str:
    """One line for each row of largest_model.py."""
    records = [_results(f"largest_model/h100/{name}") for name in ("more", "default")]
    results, table = records[0], []
    rows = [row for record in records for row in record["rows"] if "failed" not in row]
    for row in sorted(rows, key=lambda row: row["parameters"]):
        cells = (
            f"{row['parameters'] / 1e9:.2f}e9",
            LARGEST[row["name"].partition("-")[0]],
            f"{row['seconds']:.2f} ({min(row['rounds']):.2f} to {max(row['rounds']):.2f})",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peak_bytes'] / 1e9:.1f} GB",
            f"{row['host_bytes'] / 1e9:.1f} GB" if row["host_bytes"] else "-",
            f"{row['start_seconds']:.0f}",
            f"{row['first_step_seconds']:.0f}",
        )
        table.append(cells)
    columns = (
        "parameters",
        "state",
        f"s per step of {results['sequences']} x 1024 tokens (fastest to slowest)",
        "tokens/s",
        "peak on the device",
        "on the host",
        "s to create the state",
        "s of the first step, with compilation",
    )
    return markdown.table(columns, table)


def seeds() -> str:
    """One line for each seed of the runs on two H100s, by the last validation loss."""
    table = []
    for seed in range(3):
        runs = [
            f"train_lm/h100_x2/600_steps_3e-4/{x}_seed{seed}"
            for x in ("jdistadam", "optax_sharded")
        ]
        ours, theirs = (_results(f"{run}/run")["validation_loss"] for run in runs)
        table.append((f"{seed}", f"{ours:.4f}", f"{theirs:.4f}", f"{ours - theirs:+.4f}"))
    return markdown.table(("seed", "jdistadam", "`optax_sharded`", "difference"), table)


def everyday() -> str:
    """One line for each option of everyday.json."""
    names = (
        ("optim", "none of them"),
        ("optim+ema", "`ema_decay`"),
        ("optim+clip", "`max_grad_norm`"),
        ("optim+clip+guard", "`max_grad_norm`, `norm_guard`"),
        ("optim+clip+ema+guard", "`max_grad_norm`, `norm_guard`, `ema_decay`"),
    )
    return _of_options("everyday", names)


def _step_cells(name, row) -> tuple[str, ...]:
    return (
        name,
        f"{row['ms']:.2f}",
        f"{row['ms_least']:.2f} to {row['ms_most']:.2f}",
        f"{row['ratio_to_floor']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
    )


HEADLINE = (  # record, workload, and the rows of each with what README calls them
    (
        "bench_step/h100_x2/rivals",
        "8 sequences",
        {
            "unrolled-8/floor": "no optimizer",
            "unrolled-8/annotated_zero1+first_dim+latency_hiding": "optax, annotations (ZeRO-1)",
            "unrolled-8/optim": "jdistadam (ZeRO-1), XLA, sums in bfloat16",
            "unrolled-8/optim+float32sum": "jdistadam (ZeRO-1), peer memory, sums in float32",
        },
    ),
    (
        "bench_step/h100_x2/1_sequence",
        "1 sequence",
        {
            "unrolled-1/annotated_zero1+first_dim+latency_hiding": "optax, annotations (ZeRO-1)",
            "unrolled-1/optim": "jdistadam (ZeRO-1), XLA, sums in bfloat16",
            "unrolled-1/optim+float32sum": "jdistadam (ZeRO-1), peer memory, sums in float32",
        },
    ),
)


def headline() -> str:
    """What README shows of whole training steps on two GPUs."""
    table = []
    for record, workload, names in HEADLINE:
        found = {row["name"]: row for row in _results(record)["rows"]}
        for row, name in ((found[key], name) for key, name in names.items()):
            memory = row.get("argument_bytes", 0) + row.get("temporary_bytes", 0)
            spread = f"{row['ms_least']:.1f} to {row['ms_most']:.1f}"
            tokens, held = f"{row['tokens_per_second']:,.0f}", f"{memory / 1e9:.1f} GB"
            table.append(
                (workload, name, f"{row['ms']:.1f}", spread, tokens, held if memory else "-")
            )
    columns = (
        "batch per GPU",
        "training step",
        "ms",
        "fastest to slowest round",
        "tokens/s",
        "memory per GPU",
    )
    return markdown.table(columns, table)


def gathered_once() -> str:
    """One line for each workload and strategy of gathered_once.py, without more options."""
    table = []
    for row in _results("gathered_once/h200/default")["rows"]:
        if row["options"]:
            continue
        sizes = [f"{row[name] / 1e6:.0f} MB" for name in ("arguments", "temporary", "peak")]
        beside = f"{row['beside']} of {row['gathers']}"
        table.append((row["workload"], row["strategy"], *sizes, beside))
    columns = (
        "workload",
        "strategy",
        "arguments",
        "temporary memory",
        "peak memory",
        "overlapped gathers",
    )
    return markdown.table(columns, table)
