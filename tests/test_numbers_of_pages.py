"""Numbers in sentences of docs/benchmarks.md follow from the records that they are about.

Tables are made from records: experiments/update_readme.py. A case is a sentence with "{}" for each
number, and the numbers with their digits.
"""

import functools
import json
import statistics

import pytest

from support.paths import ROOT

RESULTS = ROOT / "experiments" / "results"


@functools.cache
def of(record):
    return json.loads((RESULTS / f"{record}.json").read_text())["results"]


def row(record, **wanted):
    return next(x for x in of(record)["rows"] if wanted.items() <= x.items())


def exposed(name, *phases):
    """Milliseconds of phases beyond those of the model alone, on two H200s."""
    pair = (
        row("bench_step/h200_x2/clipped", name=f"unrolled-8/{x}")["phases"] for x in (name, "floor")
    )
    mine, floor = (
        sum(found.get(phase, {"exposed_ms": 0})["exposed_ms"] for phase in phases) for found in pair
    )
    return mine - floor


ZERO1, FSDP = (f"annotated_{x}+first_dim+clip+best_flags" for x in ("zero1", "fsdp"))
OPTAX, OPTIM = "annotated_zero1+first_dim+clip", "optim+float32sum+clip"
ONCE = "optim_grads_params+gathered_once+float32sum+whole_6+clip"
WORK, WAITS = ("update", "norm", "sum"), ("reduce-scatter", "all-gather", "all-reduce", "idle")


def waits(name):
    return exposed(name, "peer copies", *WAITS)


def less_time(tree, record="default"):
    """By how many percent a step of the kernel is shorter than optax's."""
    mine, theirs = (
        row(f"bench_kernel/h200/{record}", tree=tree, variant=v) for v in ("float32", "optax.adamw")
    )
    return 100 * (1 - mine["wall_microseconds"] / theirs["wall_microseconds"])


def trial(record, flags, name=f"unrolled-1/{ZERO1}", than="none"):
    """By how many percent optax's step takes longer with some flags than with others."""
    tried = {x["flags"]: x["ms"] for x in row(f"bench_step/h200_x2/{record}", name=name)["tried"]}
    return 100 * (tried[flags] / tried[than] - 1)


def more(record, rival, ours):
    """Percent more tokens/s: the median of the rounds."""
    pair = (row(f"bench_step/h200_x2/{record}", name=x)["rounds_ms"] for x in (rival, ours))
    return statistics.median(100 * (x / y - 1) for x, y in zip(*pair, strict=True))


def least_of_long(choose):
    """The least or largest gain of those with 4,096 tokens or more per GPU, in one process or two."""
    records = (("tokens", 4), ("ways_8192", 8), ("tokens", 32), ("two_processes", 8))
    groups = ((record, f"unrolled-{n}") for record, n in records)
    return choose(more(record, f"{group}/{ZERO1}", f"{group}/{OPTIM}") for record, group in groups)


def default_policy(record, group):
    """By how many percent a step of the default policy takes longer."""
    default, mine = (
        row(f"bench_step/h200_x2/{record}", name=f"{group}/{x}")["ms"]
        for x in ("optim+sent_wide+clip", OPTIM)
    )
    return 100 * (default / mine - 1)


def norm_kernel(record):
    return row(f"bench_step/h200/{record}", name="unrolled-8/optim+float32sum+clip")["phases"][
        "norm"
    ]


def trained(folder):
    return of(f"train_lm/{folder}/run")


def losses_of_seeds(optimizer):
    folders = [f"h100_x4/600_steps_3e-4/{optimizer}_seed{i}" for i in range(3)]
    return [trained(folder)["validation_loss"] for folder in folders]


def above_optax():
    return statistics.mean(losses_of_seeds("jdistadam")) - statistics.mean(
        losses_of_seeds("optax_sharded")
    )


def error_above_optax():
    pairs = zip(losses_of_seeds("jdistadam"), losses_of_seeds("optax_sharded"), strict=True)
    return statistics.stdev(x - y for x, y in pairs) / 3**0.5


def between_seeds():
    losses = losses_of_seeds("optax_sharded")
    return max(losses) - min(losses)


def speed(work):
    return row("peer_bound/h200_x2/default", work=work)["gb_per_second"]


SEED0 = "h100_x4/600_steps_3e-4/jdistadam_seed0"
LOSSES = "losses_over_seeds/h200/default"
SENTENCES = {
    "and by {} to {} % with 4,096 or more": [
        (lambda: least_of_long(min), ".0f"), (lambda: least_of_long(max), ".0f"),
    ],
    "than a trial of the same program differs from another one ({} % with 8,192 tokens, {} % with "
    "1,024)": [
        (lambda: abs(trial("ways_8192", "latency_hiding+sol", f"unrolled-8/{ZERO1}")), ".1f"),
        (lambda: abs(trial("ways_1024", "latency_hiding+sol")), ".1f"),
    ],
    "flags are pipelined gathers; XLA's defaults take {} % longer": [
        (lambda: trial("scanned", "none", f"scanned-8/{FSDP}", than="pipelined"), ".0f"),
    ],
    "is {} higher, with a standard error of {} from three seeds; seeds of optax differ by {}.": [
        (above_optax, ".3f"), (error_above_optax, ".3f"), (between_seeds, ".3f"),
    ],
    "With 8,192 and 1,024 tokens, its steps take {} % and {} % longer.": [
        (lambda: default_policy("ways_8192", "unrolled-8"), ".1f"),
        (lambda: default_policy("ways_1024", "unrolled-1"), ".1f"),
    ],
    "takes {} to {} % less time than XLA's program for `optax.adamw` on GPT-2.": [
        (lambda: less_time("gpt2xl"), ".0f"), (lambda: less_time("gpt2s"), ".0f"),
    ],
    "takes {} % less time than XLA's program for `optax.adamw` on GPT-2 small (gpt2s), {} % less on "
    "GPT-2 XL (gpt2xl), {} % less on a Llama": [
        (lambda: less_time("gpt2s"), ".0f"), (lambda: less_time("gpt2xl"), ".0f"),
        (lambda: less_time("llama1B", "llama1b"), ".0f"),
    ],
    "optax takes {} ms for the norm and the update, and waits {} ms for collectives": [
        (lambda: exposed(OPTAX, *WORK), ".1f"), (lambda: waits(OPTAX), ".1f"),
    ],
    '"optim" takes {} ms for both, because it reads the gradients of both GPUs, and waits {} ms': [
        (lambda: exposed(OPTIM, *WORK), ".1f"), (lambda: waits(OPTIM), ".1f"),
    ],
    '"Gathered once" takes {} ms, and waits {} ms': [
        (lambda: exposed(ONCE, *WORK), ".1f"), (lambda: waits(ONCE), ".1f"),
    ],
    "copy engines read {} GB/s, and a kernel reads {} and writes {}": [
        (lambda: speed("fetched, copy engines"), ".0f"),
        (lambda: speed("loads, kernel of 1056 blocks"), ".0f"),
        (lambda: speed("stores, kernel of 132 blocks"), ".0f"),
    ],
    "its clock fell from {} MHz to {} in this run": [
        (lambda: max(x["mhz_highest"] for x in of("bench_kernel/h200/default")["power"].values()), ".0f"),
        (lambda: min(x["mhz_lowest"] for x in of("bench_kernel/h200/default")["power"].values()), ".0f"),
    ],
    "GPT-2 small ({} M parameters) on {} M bytes": [
        (lambda: trained(SEED0)["parameters"] / 1e6, ".1f"),
        (lambda: trained(SEED0)["tokens"] / 1e6, ".1f"),
    ],
    "in {} steps of {} sequences on one H200": [
        (lambda: int(of(LOSSES)["steps"]), "d"), (lambda: int(of(LOSSES)["batch"]), "d"),
    ],
    "took [{} ms](../experiments/results/bench_step/h200/norm_by_blocks.json) on an H200; today's "
    "takes [{}](": [
        (lambda: norm_kernel("norm_by_blocks")["exposed_ms"], ".2f"),
        (lambda: norm_kernel("norm_by_warps")["exposed_ms"], ".2f"),
    ],
    "a model of {} M parameters ends at [{}](../experiments/results/train_lm/cpu/jdistadam/run.json), "
    "and with optax at [{}](": [
        (lambda: trained("cpu/jdistadam")["parameters"] / 1e6, ".1f"),
        (lambda: trained("cpu/jdistadam")["validation_loss"], ".3f"),
        (lambda: trained("cpu/optax")["validation_loss"], ".3f"),
    ],
    "training on more than {} M bytes": [
        (lambda: max(of(p.relative_to(RESULTS).with_suffix("").as_posix())["tokens"] for p in RESULTS.glob("train_lm/**/run.json")) / 1e6, ".1f"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("sentence", SENTENCES)
def test_numbers_follow_from_records(sentence):
    page = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    numbers = [format(number(), digits) for number, digits in SENTENCES[sentence]]
    assert sentence.format(*numbers) in page
