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


def ms(record, name):
    return row(f"bench_step/{record}", name=f"unrolled-8/{name}")["ms"]


def tokens(record, name):
    return row(f"bench_step/{record}", name=name)["tokens_per_second"]


def exposed(name, *phases):
    """Milliseconds of phases beyond those of the model alone, on two H200s."""
    pair = (
        row("bench_step/h200_x2/clipped", name=f"unrolled-8/{x}")["phases"] for x in (name, "floor")
    )
    mine, floor = (
        sum(found.get(phase, {"exposed_ms": 0})["exposed_ms"] for phase in phases) for found in pair
    )
    return mine - floor


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


def early_starts():
    """By how many percent optax's step with 1,024 tokens per GPU takes longer with them."""
    name = "unrolled-1/annotated_zero1+first_dim+clip+best_flags"
    tried = {x["flags"]: x["ms"] for x in row("bench_step/h200_x2/tuned", name=name)["tried"]}
    return 100 * (tried["early"] / tried["none"] - 1)


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


def between_seeds():
    losses = losses_of_seeds("optax_sharded")
    return max(losses) - min(losses)


def speed(work):
    return row("peer_bound/h200_x2/default", work=work)["gb_per_second"]


def more_scanned_tokens(name):
    record = "h100_x2/scanned"
    theirs = tokens(record, "scanned-8/annotated_fsdp+first_dim")
    return 100 * (tokens(record, f"scanned-8/{name}") / theirs - 1)


SEED0 = "h100_x4/600_steps_3e-4/jdistadam_seed0"
LOSSES = "losses_over_seeds/h200/default"
SENTENCES = {
    "early starts of collectives took {} % longer": [(early_starts, ".0f")],
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
    "sums in bfloat16 take {} ms, and optax takes {}.": [
        (lambda: ms("h100_x2/rivals", "optim"), ".1f"),
        (lambda: ms("h100_x2/rivals", "annotated_zero1+first_dim+latency_hiding"), ".1f"),
    ],
    "and optax with ZeRO-1 takes {}.": [
        (lambda: ms("h100_x4/four_processes", "annotated_zero1+first_dim"), ".1f")
    ],
    "trains on {} % more tokens than optax with FSDP. With sums in float32 it trains on {} % fewer": [
        (lambda: more_scanned_tokens("optim_grads_params"), ".1f"),
        (lambda: -more_scanned_tokens("optim_grads_params+float32sum"), ".1f"),
    ],
    "copy engines read {} GB/s and a kernel {}": [
        (lambda: speed("fetched, copy engines"), ".0f"),
        (lambda: speed("loads, kernel of 1056 blocks"), ".0f"),
    ],
    "its clock fell from {} MHz to {} in this run": [
        (lambda: max(x["mhz_highest"] for x in of("bench_kernel/h200/default")["power"].values()), ".0f"),
        (lambda: min(x["mhz_lowest"] for x in of("bench_kernel/h200/default")["power"].values()), ".0f"),
    ],
    "GPT-2 small ({} M parameters) on {} M bytes": [
        (lambda: trained(SEED0)["parameters"] / 1e6, ".1f"),
        (lambda: trained(SEED0)["tokens"] / 1e6, ".1f"),
    ],
    "the last loss of jdistadam is {} higher; seeds of optax differ by {}.": [
        (above_optax, ".3f"), (between_seeds, ".3f"),
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
