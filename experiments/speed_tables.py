"""Tables of the records of bench_step.py, bench_kernel.py, bench_one_gpu.py and others."""

import statistics

from lm import markdown
from records import results_of
from step_bench import tables

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


def low_precision_speed() -> str:
    """One line for each kind of state: time of a step of gpt2xl and share of the copy."""
    rows = {row["variant"]: row for row in results_of("bench_kernel/h200/low_precision")["rows"]}
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


def group_rows(record, group) -> dict[str, dict]:
    """Rows of a record of bench_step.py for a workload such as "unrolled-8", by variant."""
    names = ((row, row["name"].split("/")) for row in results_of(record)["rows"])
    return {name: row for row, (of, name) in names if of == group}


CODED = "+remainder16+block8"


def sharded_state() -> str:
    """One line for each way to shard the state over two H100s; a column for each workload."""
    rows = group_rows("bench_step/h200_x2/sharded_state", "unrolled-8")
    names = (
        ("annotated_zero1+first_dim+clip", "`optax.adamw`, `NamedSharding`s"),
        ("annotated_zero1+fused+clip", "`fused_adamw`, `state_shardings`"),
        (f"annotated_zero1+fused{CODED}+clip", "the same, remainder16, block8"),
        (f"optim+float32sum{CODED}+clip", "`jda.distributed`, remainder16, block8"),
    )
    table = [
        (
            name,
            f"{rows[row]['ms']:.1f} ({rows[row]['ms_least']:.1f} to {rows[row]['ms_most']:.1f})",
            f"{bytes_of_step(rows[row])[0] / 1e9:.1f}",
        )
        for row, name in names
    ]
    return markdown.table(("clipped step", "ms", "GB between steps"), table)


ZERO3 = "optim_grads_params"
ZERO1, FSDP = "annotated_zero1+first_dim", "annotated_fsdp+first_dim"
OPTAX_ONCE, OPTAX_WHOLE = f"{FSDP}+gathered_once", f"{FSDP}+gathered_once+whole_6"
OPTIM, OPTIM_CODED = "optim+float32sum", "optim+block8+float32sum+remainder16"
OPTIM_REMAINDERS = "optim+float32sum+remainder16"
ONCE = f"{ZERO3}+float32sum+gathered_once+whole_6"
BLOCKS = f"{ZERO3}+block_by_block+float32sum"
FSDP2 = "torch_fsdp2"
OF_STEPS = {  # variants, as _variant writes them, and their names
    "floor": "no optimizer",
    ZERO1: "optax, ZeRO-1 by `NamedSharding`",
    OPTAX_ONCE: "optax, FSDP by `NamedSharding`, gathered once",
    OPTAX_WHOLE: "optax, FSDP, gathered once, 6 blocks whole",
    FSDP: "optax, FSDP by `NamedSharding`",
    "torch_floor": "torch, no optimizer",
    FSDP2: "torch: FSDP2, fused AdamW",
    OPTIM: 'jdistadam, "optim"',
    OPTIM_REMAINDERS: 'jdistadam, "optim", remainder16',
    OPTIM_CODED: 'jdistadam, "optim", remainder16, block8',
    ONCE: "jdistadam, gathered once",
    BLOCKS: "jdistadam, blocks gathered one by one",
}
LONG, SHORT = "unrolled-8", "unrolled-1"
WAYS = {  # GPUs: records of both workloads
    gpus: {
        LONG: (f"h200_x{gpus}/tokens_8192", f"h200_x{gpus}/fsdp2"),
        SHORT: (f"h200_x{gpus}/tokens_1024", f"h200_x{gpus}/fsdp2"),
    }
    for gpus in ("2", "4")
}


def _variant(name) -> str:
    """A variant with its modifiers in order, without those that all clipped rows have."""
    variant, *modifiers = name.split("+")
    if variant == FSDP2:  # its fastest way is the row
        return variant
    return "+".join([variant, *sorted({*modifiers} - {"clip", "best_flags"})])


def clipped_steps(records, group) -> dict[str, dict]:
    """Clipped steps and floors of a workload: of each variant the fastest, with its "batch".

    Rows of one batch, which begins with a floor, were timed in the same rounds.
    """
    found: dict[str, dict] = {}
    for record in records:
        batch = 0
        for row in results_of(f"bench_step/{record}")["rows"]:
            of, name = row["name"].split("/")
            batch += name.endswith("floor")
            is_shown = name.endswith("floor") or "clip" in name.split("+")
            key = _variant(name)
            if of == group and is_shown and "ms" in row:
                if key not in found or row["ms"] < found[key]["ms"]:
                    run = f"{record}, torch" if key.startswith("torch") else record
                    found[key] = row | {"batch": (run, batch)}
    return found


def bytes_of_step(row) -> tuple[int, int]:
    """Bytes of a device between steps, and during a step."""
    held = row.get("argument_bytes", 0)
    return held, held + row["temporary_bytes"] if held else row["peak_bytes"]


def _beside(rival, ours) -> str:
    """Percent more tokens/s: by the rounds, or by ratios to the floors of two batches."""
    if rival["batch"] == ours["batch"]:
        percent = round(tables.gain(rival, ours)["percent"], 1) + 0.0  # no -0.0
    elif rival["batch"][0] == ours["batch"][0]:
        percent = 100 * (rival["ratio_to_floor"] / ours["ratio_to_floor"] - 1)
    else:
        return ""  # other runs are not compared
    return f"{percent:+.1f} %"


def rival_of(rows) -> str:
    """The variant of optax's fastest step."""
    return min((x for x in rows if x.startswith("annotated")), key=lambda x: rows[x]["ms"])


def _step_cell(rows, variant) -> str:
    """ms, and percent more tokens/s than optax's fastest step."""
    if variant not in rows:
        return "-"
    rival = rival_of(rows)
    row = rows[variant]
    more = _beside(rows[rival], row) if variant not in (rival, "floor") else ""
    return f"{row['ms']:.1f}" + (f" ({more})" if more else "")


def ways() -> str:
    """One line for each way to step: time, and tokens/s beside the fastest optax."""
    table = []
    for gpus, records in WAYS.items():
        of_groups = {group: clipped_steps(names, group) for group, names in records.items()}
        for variant, name in OF_STEPS.items():
            if any(variant in rows for rows in of_groups.values()):
                cells = (_step_cell(rows, variant) for rows in of_groups.values())
                row = of_groups[LONG].get(variant)
                is_known = row and variant != "floor"  # whose results take bytes, too
                nbytes = f"{bytes_of_step(row)[1] / 1e9:.1f}" if is_known else "-"
                table.append((gpus, name, *cells, nbytes))
    columns = ("GPUs", "step", "8,192 tokens: ms (tokens/s)", "1,024 tokens: ms (tokens/s)")
    return markdown.table((*columns, "GB, 8,192 tokens"), table)


OVER_XLA = f"{OPTIM}+over_xla"
POLICIES = {  # variants, their names, and the first part of their records' names
    OPTIM: ("sent in bfloat16, summed in float32, by copies", "tokens"),
    OVER_XLA: ("the same, by XLA's collectives", "sums_over_xla"),
    "optim": ("sent and summed in bfloat16, by XLA's collectives", "tokens"),
    "optim+sent_wide": ("the default: sent and summed in float32, by XLA's collectives", "tokens"),
}


def longer(record, group, variant) -> float:
    """By how many percent a step takes longer than that over copies: the median of the rounds."""
    rows = clipped_steps((record,), group)
    return tables.gain(rows[variant], rows[OPTIM])["percent"]


def policies() -> str:
    """One line for each way to send gradients under "optim" on two H200s."""
    table = []
    for variant, (name, records) in POLICIES.items():
        cells = []
        for group, tokens in ((LONG, 8192), (SHORT, 1024)):
            record = f"h200_x2/{records}_{tokens}"
            ms = f"{clipped_steps((record,), group)[variant]['ms']:.1f}"
            more = "" if variant == OPTIM else f" ({longer(record, group, variant):+.1f} %)"
            cells.append(ms + more)
        table.append((name, *cells))
    return markdown.table(("gradients", "8,192 tokens: ms (longer)", "1,024 tokens"), table)


TRACED = "h200_x4/traced"
OF_MODEL, OF_UPDATE = ("model", "copies"), ("update", "sum", "norm", "other")


def _split(phases_of_gpus) -> tuple[str, ...]:
    """ms of the model, of the update, of all else, which waits, and of the step on the last GPU."""
    of_gpus = []
    for found in phases_of_gpus:
        ms = {name: x["exposed_ms"] for name, x in found.items()}
        model, update = (sum(ms.get(x, 0.0) for x in part) for part in (OF_MODEL, OF_UPDATE))
        of_gpus.append((model, update, sum(ms.values()) - model - update))
    parts = (f"{min(x):.1f} to {max(x):.1f}" for x in zip(*of_gpus, strict=True))
    return *parts, f"{max(sum(x) for x in of_gpus):.1f}"


PARTS = ("model, ms", "sums, norm, update", "waits", "traced step")


def phases() -> str:
    """One line for each way to step on four H200s: where a traced step spends its time."""
    rows = clipped_steps((TRACED,), LONG)
    table = []
    for variant, name in OF_STEPS.items():
        if variant in rows and variant != BLOCKS:  # with an older jda.remat_policy
            row = rows[variant]
            of_gpus = (row["phases"], *row["phases_of_other_gpus"])
            table.append((name, *_split(of_gpus), f"{row['ms']:.1f}"))
    return markdown.table(("step, 8,192 tokens", *PARTS, "step in the rounds"), table)


def phases_of_two() -> str:
    """The same on two H200s, for each number of tokens."""
    table = []
    for tokens in (1024, 8192, 32768):
        rows = results_of(f"vectors_behind_barrier/h200_x2/tokens_{tokens}")["rows"]
        found = {_variant(row["name"].split("/")[1]): row["behind_barrier"] for row in rows}
        for variant, name in OF_STEPS.items():
            if variant in found:
                row = found[variant]
                ms = f"{statistics.median(row['rounds_ms']):.1f}"
                table.append((f"{tokens:,}", name, *_split(row["phases_of_gpus"]), ms))
    return markdown.table(("tokens per GPU", "step", *PARTS, "step in the rounds"), table)


def _with_range(rival, ours) -> str:
    found = tables.gain(rival, ours)
    least, most = found["percent_least"], found["percent_most"]
    return f"{found['percent']:+.1f} % ({least:+.1f} to {most:+.1f})"


def by_tokens() -> str:
    """One line for each number of tokens per GPU: ours beside the best of several sets of flags."""
    table = []
    for tokens in (1024, 4096, 8192, 32768):
        rows = clipped_steps((f"h200_x2/tokens_{tokens}",), f"unrolled-{tokens // 1024}")
        three = [rows[x] for x in ("floor", rival_of(rows), OPTIM)]
        shares = (f"{100 * row['model_flops_utilization']:.1f}" for row in three)
        ms = (f"{row['ms']:.1f}" for row in three)
        nbytes = (f"{bytes_of_step(row)[1] / 1e9:.1f}" for row in three[1:])
        gain = _with_range(*three[1:])
        table.append((f"{tokens:,}", *ms, gain, " / ".join(shares), " / ".join(nbytes)))
    columns = ("tokens per GPU", "no optimizer, ms", "optax", "jdistadam")
    columns += ("tokens/s (least to most of the rounds)",)
    units = ("% of the peak FLOP/s: the three steps", "GB in a step: optax / jdistadam")
    return markdown.table((*columns, *units), table)


SCANNED_FLOAT32 = f"{ZERO3}+float32sum"
OF_SCANNED = {  # variants, as _variant writes them, and their names
    "floor": "no optimizer",
    FSDP: "optax, FSDP by `NamedSharding`",
    OPTAX_ONCE: "optax, FSDP, gathered once",
    f"{FSDP}+products_kept": "optax, FSDP, with `jda.remat_policy`",
    f"{OPTAX_ONCE}+products_kept": "optax, FSDP, gathered once, with `jda.remat_policy`",
    SCANNED_FLOAT32: "jdistadam, ZeRO-3, with `jda.remat_policy`",
}
SCANNED = {gpus: (f"h200_x{gpus}/scanned", "scanned-8") for gpus in ("2", "4")}


def scanned() -> str:
    """One line for each way to step with scanned layers: time, tokens/s beside optax, memory."""
    found = {gpus: clipped_steps((record,), group) for gpus, (record, group) in SCANNED.items()}
    table = [
        (
            gpus,
            name,
            _step_cell(rows, variant),
            *(
                "-" if variant == "floor" else f"{nbytes / 1e9:.1f}"
                for nbytes in bytes_of_step(rows[variant])
            ),
        )
        for gpus, rows in found.items()
        for variant, name in OF_SCANNED.items()
        if variant in rows
    ]
    columns = ("GPUs", "step, 8,192 tokens per GPU", "ms (tokens/s)")
    return markdown.table((*columns, "GB between steps", "GB during a step"), table)


EVERY_STRATEGY = (  # record, workload, variant without its transport, its name
    ("every_strategy", "unrolled-8", "floor", "forward and backward pass alone"),
    ("every_strategy", "unrolled-8", f"{ZERO3}+gathered_once+float32sum+whole_6", "gathered once"),
    ("every_strategy", "unrolled-8", f"{ZERO3}+block_by_block+float32sum", "blocks"),
    (
        "every_strategy",
        "unrolled-8",
        "optim+float32sum+remainder16+block8",
        '"optim", 8-bit moments, 16 bits of main parameters',
    ),
    ("host_state", "unrolled-8", "floor", "on another machine: alone"),
    (
        "host_state",
        "unrolled-8",
        "optim+float32sum+remainder16+host",
        '"optim", state in host memory, 16 bits of main parameters',
    ),
    ("one_sequence", "unrolled-1", "floor", "1 sequence: forward and backward pass alone"),
    (
        "one_sequence",
        "unrolled-1",
        f"{ZERO3}+gathered_once+float32sum+whole_6",
        "1 sequence, gathered once",
    ),
    ("one_sequence", "unrolled-1", f"{ZERO3}+block_by_block+float32sum", "1 sequence, blocks"),
    ("loops", "scanned-8", "floor", "scanned layers: forward and backward pass alone"),
    ("loops", "scanned-8", f"{ZERO3}+float32sum", "scanned layers"),
    ("loops", "scanned-1", "floor", "the same with 1 sequence: alone"),
    ("loops", "scanned-1", f"{ZERO3}+float32sum", "scanned layers, 1 sequence"),
    ("loops", "unrolled-8x4", "floor", "4 micro-batches: forward and backward passes alone"),
    ("loops", "unrolled-8x4", "optim+float32sum", '4 micro-batches, "optim"'),
    ("loops", "unrolled-8x4", "optim_grads+float32sum", '4 micro-batches, "optim_grads"'),
)


def every_strategy() -> str:
    """One line for each kind of step on four H100s: ms with each transport, and memory."""
    table = []
    for record, workload, variant, name in EVERY_STRATEGY:
        rows = group_rows(f"bench_step/h100_x4/{record}", workload)
        row, over_xla = rows[variant], rows.get(f"{variant}+over_xla")
        times = (f"{row['ms']:.1f}", f"{over_xla['ms']:.1f}" if over_xla else "")
        table.append((name, *times, f"{row['temporary_bytes'] / 1e9:.1f} GB"))
    return markdown.table(("", "by copies", "by XLA's collectives", "temporary memory"), table)


def processes() -> str:
    """One line for each kind of step on four GPUs: in one process and in four."""
    table = []
    for variant in ("floor", ONCE):
        cells = []
        for group, records in WAYS["4"].items():
            ways = (records, ("h200_x4/four_processes",))
            both = (clipped_steps(way, group)[variant] for way in ways)
            cells.append(" / ".join(f"{row['ms']:.1f}" for row in both))
        table.append((OF_STEPS[variant], *cells))
    columns = ("step", "8,192 tokens, ms: one process / four", "1,024 tokens: one / four")
    return markdown.table(columns, table)


ONE_H200 = ("h200/scanned", "h200/unrolled")


def bytes_on_one_gpu() -> str:
    """One line for each way to keep parameters and moments: time and memory on one H200."""
    names = {
        "bytes/optax": "float32, `optax.adamw`",
        "plain/step": "float32",
        "bytes/float32 main": "bfloat16, `main_params_dtype=jnp.float32`",
        "bytes/remainders": 'bfloat16, `main_params_dtype="remainder16"`',
        "bytes/remainders, 8-bit moments": 'the same, "block8" moments, stochastic rounding',
        "bytes/no main, 8-bit moments": 'bfloat16, "block8" moments, stochastic rounding',
    }
    table = []
    for way, name in names.items():
        cells = []
        for record in ONE_H200:
            (listed,) = results_of(f"bench_one_gpu/{record}")["workloads"].values()
            rows = {row["name"]: row for row in listed}
            cells.append(f"{rows[way]['ratio_to_optax']:.3f}")
        cells += [f"{rows[way][x] / 1e9:.1f}" for x in ("held_bytes", "temporary_bytes")]
        table.append((name, *cells))
    columns = ("parameters and arguments", "scanned: time beside optax's", "unrolled")
    return markdown.table((*columns, "GB between steps", "more in an unrolled step"), table)


def one_gpu() -> str:
    """One line for each workload of bench_one_gpu.py; a column for each way to step."""
    found = [
        (f"{record[:4].upper()}: {workload}", {row["name"]: row for row in listed})
        for record in ("h100/default", *ONE_H200)
        for workload, listed in results_of(f"bench_one_gpu/{record}")["workloads"].items()
    ]
    ways = {
        "plain/step": "`step`",
        "clip/step": "with a clip",
        "norms/step_with_norms": "`step_with_norms`",
        "MultiSteps/step": "`MultiSteps`",
        "apply_if_finite/step": "`apply_if_finite`",
        "inside/step": "casts in the scan",
    }
    table = []
    for workload, rows in found:
        layers, sequences = workload.split("-")
        cells = [
            f"{rows[way]['ratio_to_optax']:.3f} ({rows[way]['least_ratio']:.3f} to "
            f"{rows[way]['most_ratio']:.3f})"
            if way in rows
            else "-"
            for way in ways
        ]
        ms = f"{rows['plain/optax']['ms']:.1f} ms"
        plural = "" if sequences == "1" else "s"
        table.append((f"{layers} layers, {sequences} sequence{plural}", ms, *cells))
    return markdown.table(("time beside optax's", "`optax.adamw`", *ways.values()), table)


def images() -> str:
    """One line for each program of bench_resnet.py that keeps the layout of its weights."""
    table = [
        (
            f"`{row['program']}`",
            f"{row['images_per_second']:,.0f}",
            f"{row['milliseconds']:.1f} ({row['fastest']:.1f} to {row['slowest']:.1f})",
        )
        for row in results_of("bench_resnet/h200/default")["rows"]
        if "formats" not in row["program"]
    ]
    return markdown.table(("program", "images per second", "ms per step"), table)


STORAGES = {  # modifiers of rows of bench_step.py
    "": "float32",
    "+remainder16": "remainder16, float32 moments",
    "+remainder16+block8": "remainder16, block8",
    "+no_main+block8": "no main parameters, block8",
}


HOST_RUNS = (("1", "h100/host"), ("1", "h100/host_codes"), ("2", "h100_x2/host_codes"))
MEMORIES = ("", "+host", "+host_moments")


def in_memories(record, group, row) -> list:
    """A row with the state on the device, in host memory, and with only moments there; or None."""
    rows = group_rows(f"bench_step/{record}", group)
    return [rows.get(f"{row}{memory}") for memory in MEMORIES]


def of_host_runs() -> list:
    """(GPUs, storage, rows of ``in_memories``)."""
    found = [
        (gpus, name, in_memories(record, "unrolled-8", f"optim{storage}"))
        for gpus, record in HOST_RUNS
        for storage, name in STORAGES.items()
    ]
    return [x for x in found if all(x[2][:2])]


def _memory_cells(rows) -> list[str]:
    here, cells = rows[0], []
    for row in rows:
        text = "-"
        if row:
            text = f"{row['ms']:.1f} ({row['ms_least']:.1f} to {row['ms_most']:.1f})"
            if here and row is not here:
                change = 100 * (row["ms"] / here["ms"] - 1)
                text += f": {abs(change):.1f} % {'longer' if change >= 0 else 'shorter'}"
        cells.append(text)
    return cells


IN_MEMORIES = (
    "state on the device, ms",
    "in host memory, ms",
    "only moments in host memory, ms",
)


def host_steps() -> str:
    """One line for each storage, with the bytes of the compiled step."""
    table = []
    for gpus, name, rows in of_host_runs():
        held = [
            f"{(x['argument_bytes'] + x['temporary_bytes']) / 1e9:.1f}" if x else "-" for x in rows
        ]
        table.append((gpus, name, *_memory_cells(rows), ", ".join(held)))
    columns = ("GPUs", "storage", *IN_MEMORIES, "GB of a step on a device: the three in turn")
    return markdown.table(columns, table)


LARGEST = {  # methods and their names
    "optax": "`optax.adamw`, float32 parameters and moments",
    "optax_host": "`optax.adamw`, float32, state moved by `jax.device_put`",
    "main": "bfloat16 parameters, float32 main parameters and moments",
    "codes": "remainder16, block8",
    "codes_early": "remainder16, block8, early updates",
    "codes_host": "remainder16, block8, in host memory",
}


LARGEST_RUNS = ("default", "device", "edges", "host", "early")


def largest_rows() -> dict[str, dict]:
    """For each kind of state of largest_model.py: the row of the largest model that fits."""
    largest = {}
    for record in LARGEST_RUNS:
        for row in results_of(f"largest_model/h100/{record}")["rows"]:
            kind = row["name"].partition("-")[0]
            if "seconds" in row and row["parameters"] >= largest.get(kind, row)["parameters"]:
                largest[kind] = row
    return largest


def largest_model() -> str:
    """One line for each kind of state: the largest model that fits with it."""
    table = [
        (
            LARGEST[kind],
            f"{row['parameters'] / 1e9:.2f}e9",
            f"{row['seconds']:.2f}",
            f"{row['peak_bytes'] / 1e9:.1f} GB",
            f"{row['host_bytes'] / 1e9:.1f} GB" if row["host_bytes"] else "-",
        )
        for kind, row in sorted(largest_rows().items(), key=lambda x: x[1]["parameters"])
    ]
    columns = ("state", "parameters", "s per step", "peak on the device", "on the host")
    return markdown.table(columns, table)


def everyday() -> str:
    """One line for each option of everyday.json."""
    names = (
        ("optim", "none of them"),
        ("optim+ema", "`ema_decay`"),
        ("optim+clip", "`max_grad_norm`"),
        ("optim+clip+guard", "`max_grad_norm`, `norm_guard`"),
        ("optim+clip+ema+guard", "`max_grad_norm`, `norm_guard`, `ema_decay`"),
    )
    rows = group_rows("bench_step/h100/everyday", "unrolled-8")
    table = [
        (name, f"{x['ms']:.2f}", f"{x['ms_least']:.2f} to {x['ms_most']:.2f}")
        for x, name in ((rows[variant], name) for variant, name in names)
    ]
    return markdown.table(("options", "ms", "fastest to slowest round"), table)


def _more(tokens, record, group, ours) -> str:
    """How many percent more tokens/s than optax's fastest step, linked to its record."""
    rows = clipped_steps((record,), group)
    more = _beside(rows[rival_of(rows)], rows[ours])
    return f"{tokens}: [{more}](experiments/results/bench_step/{record}.json)"


def _in_step(record, group, ours) -> str:
    """GB of a GPU during a step: ours, and optax's fastest."""
    rows = clipped_steps((record,), group)
    pair = (rows[x] for x in (ours, rival_of(rows)))
    return " / ".join(f"{bytes_of_step(row)[1] / 1e9:.1f}" for row in pair)


def _on_one_gpu() -> tuple[str, str]:
    """Percent more tokens/s than optax on one H200, and GB of both."""
    parts, sizes = [], []
    for record, name in zip(ONE_H200, ("scanned", "unrolled"), strict=True):
        (listed,) = results_of(f"bench_one_gpu/{record}")["workloads"].values()
        rows = {row["name"]: row for row in listed}
        more = 100 * (1 / rows["plain/step"]["ratio_to_optax"] - 1)
        parts.append(f"[{more:+.1f} %](experiments/results/bench_one_gpu/{record}.json) {name}")
        pair = (rows[f"plain/{x}"] for x in ("step", "optax"))
        gb = (f"{(x['held_bytes'] + x['temporary_bytes']) / 1e9:.1f}" for x in pair)
        sizes.append(" / ".join(gb))
    return ", ".join(parts) + "; without a clip", "; ".join(sizes)


def decision() -> str:
    """Who gains, how much beside optax, and with how many bytes: the first table of README."""
    two, four = (
        (("1,024", f"h200_x{x}/tokens_1024", SHORT), ("8,192", f"h200_x{x}/tokens_8192", LONG))
        for x in ("2", "4")
    )
    long = ("32,768", "h200_x2/tokens_32768", "unrolled-32")
    fits = [largest_rows()[kind] for kind in ("codes_early", "optax", "main")]
    sizes = [f"{row['parameters'] / 1e9:.2f}e9" for row in fits]
    page = "docs/out_of_memory.md#the-largest-model-on-one-gpu"
    largest = f"[{sizes[0]} parameters on 80 GB]({page})"
    peaks = " / ".join(f"{row['peak_bytes'] / 1e9:.1f}" for row in fits[:2])
    table = [
        (
            "one GPU, and the model fits", "no need: as fast as optax, and as large",
            *_on_one_gpu(),
        ),
        (
            "one GPU, and it does not fit",
            "**yes**: [8-bit moments](docs/precision.md#which-should-i-choose) and [early "
            "updates](docs/out_of_memory.md#early-updates)",
            f"{largest}, {sizes[2]} without 8-bit moments; {sizes[1]} with optax in float32", peaks,
        ),
        (
            "2 GPUs with NVLink", "**yes** with few tokens per GPU",
            ", ".join(_more(*x, OPTIM) for x in (*two, long)), _in_step(*two[1][1:], OPTIM),
        ),
        (
            "4 GPUs with NVLink",
            "**yes** with few tokens per GPU, [gathered "
            "once](docs/gathering.md#leaves-that-stay-unsharded)",
            ", ".join(_more(*x, ONCE) for x in four), _in_step(*four[1][1:], ONCE),
        ),
        (
            "2 or 4 GPUs, FSDP with scanned layers",
            "**yes**, if you need a scan: [without, both are "
            "faster](docs/benchmarks.md#scanned-layers)",
            ", ".join(
                _more(f"8,192 on {gpus}", *record, SCANNED_FLOAT32)
                for gpus, record in SCANNED.items()
            ),
            "; ".join(_in_step(*x, SCANNED_FLOAT32) for x in SCANNED.values()),
        ),
        (
            "GPUs without NVLink", "for its memory and dtypes", "not measured", "not measured",
        ),
        (
            "8 GPUs, or several hosts", "not yet: tested on CPUs only",
            "not measured", "not measured",
        ),
    ]  # fmt: skip
    columns = ("you train on", "use it?", "tokens/s beside tuned optax, by tokens per GPU")
    return markdown.table((*columns, "GB of a GPU in a step: ours / optax's"), table)
