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


OPTIM = "optim+float32sum+clip"
ONCE = "optim_grads_params+float32sum+gathered_once+whole_6+clip"
TUNED = "+first_dim+clip+best_flags"
PLAIN_ONCE, PLAIN_ZERO1 = (
    "annotated_fsdp+gathered_once+first_dim+clip",
    "annotated_zero1+first_dim+clip",
)
BLOCKS = "optim_grads_params+float32sum+block_by_block+clip"
OPTAX_ZERO1, OPTAX_ONCE = f"annotated_zero1{TUNED}", f"annotated_fsdp+gathered_once{TUNED}"
SENT_OVER_XLA = "optim+float32sum+over_xla+clip"
SCANNED, OPTAX_KEPT = "optim_grads_params+float32sum+clip", f"annotated_fsdp+products_kept{TUNED}"


def less_time(tree, record="default"):
    """By how many percent a step of the kernel is shorter than optax's."""
    mine, theirs = (
        row(f"bench_kernel/h200/{record}", tree=tree, variant=v) for v in ("float32", "optax.adamw")
    )
    return 100 * (1 - mine["wall_microseconds"] / theirs["wall_microseconds"])


def lead(record, group, ours, choose=statistics.median):
    """Percent more tokens/s than optax's fastest row: one of the rounds, or their median."""
    rows = [x for x in of(f"bench_step/{record}")["rows"] if x["name"].startswith(f"{group}/")]
    rivals = [x for x in rows if "annotated" in x["name"]]
    rival = min(rivals, key=lambda x: x["ms"])["rounds_ms"]
    mine = next(x for x in rows if x["name"] == f"{group}/{ours}")["rounds_ms"]
    return choose(100 * (x / y - 1) for x, y in zip(rival, mine, strict=True))


def over_xla(record, group, variant="optim+clip"):
    """By how many percent a step takes longer by XLA's collectives than by copies."""
    xla, copies = (
        row(f"bench_step/h200_x2/{record}", name=f"{group}/{x}")["rounds_ms"]
        for x in (variant, OPTIM)
    )
    return statistics.median(100 * (x / y - 1) for x, y in zip(xla, copies, strict=True))


def four():
    return of("bench_step/h200_x4/traced")["rows"]


def of_gpus(found, *phases):
    """Milliseconds that these phases take on each of four GPUs."""
    listed = (found["phases"], *found["phases_of_other_gpus"])
    return [sum(x[p]["exposed_ms"] for p in phases if p in x) for x in listed]


def longer_than_traced(choose):
    """By how many percent a step of many takes longer than a traced one: one of all rows."""
    traced = ((x["ms"], max(of_gpus(x, *x["phases"]))) for x in four())
    return 100 * (choose(ms / of_one for ms, of_one in traced) - 1)


def apart(choose):
    """How many ms longer the slowest GPU takes for the model: one of all rows."""
    times = [of_gpus(x, "model", "copies") for x in four()]
    return choose(max(x) - min(x) for x in times)


def of_four(name):
    return row("bench_step/h200_x4/traced", name=f"unrolled-8/{name}")


def updates(found):
    return of_gpus(found, "update", "sum", "norm", "other")


def update(name):
    return statistics.mean(updates(of_four(name)))


def with_barrier(tokens, variant):
    """A row on two GPUs with vectors behind a barrier, and as arguments."""
    record = f"vectors_behind_barrier/h200_x2/tokens_{tokens}"
    return row(record, name=f"unrolled-{tokens // 1024}/{variant}")


def kernels(way, variant):
    return with_barrier(32768, variant)[way]["phases_of_gpus"][0]["model"]["kernels"]


def kernels_either_way():
    """Of FSDP gathered once."""
    (found,) = {kernels(way, PLAIN_ONCE) for way in ("behind_barrier", "as_arguments")}
    return found


def of_step_on_two(tokens, *phases):
    """ms of the first of two GPUs."""
    found = with_barrier(tokens, OPTIM)["behind_barrier"]["phases_of_gpus"][0]
    return sum(found[x]["exposed_ms"] for x in phases)


UPDATE = "update", "sum", "norm", "other"


def utilizations_1024():
    """Percent of the peak of all rows on two GPUs with 1,024 tokens; the first is the floor."""
    rows = of("bench_step/h200_x2/tokens_1024")["rows"]
    return [100 * x["model_flops_utilization"] for x in rows]


def ahead_in_four_rounds():
    ours, theirs = (
        with_barrier(8192, x)["behind_barrier"]["rounds_ms"] for x in (OPTIM, PLAIN_ZERO1)
    )
    return [100 * (x / y - 1) for x, y in zip(theirs, ours, strict=True)]


def ms_ahead(tokens):
    rows = of(f"bench_step/h200_x2/tokens_{tokens}")["rows"]
    rival = min(x["ms"] for x in rows if "annotated" in x["name"])
    return rival - next(x["ms"] for x in rows if x["name"].endswith(f"/{OPTIM}"))


def with_maxtext(record):
    """By how many percent optax's ZeRO-1 took less time with MaxText's flags than with none."""
    found = row(f"bench_step/h200_x2/{record}", name=f"unrolled-8/{OPTAX_ZERO1}")["tried"]
    ms = {x["flags"]: statistics.median(x["rounds_ms"]) for x in found if "rounds_ms" in x}
    return 100 * (1 - ms["maxtext"] / ms["none"])


def by_symmetric_memory():
    """By how many percent torch takes less time with it on two GPUs."""
    plain, symmetric = (
        row("bench_step/h200_x2/fsdp2", name=f"unrolled-8/torch_fsdp2+pairs+prefetch{x}+local+clip")
        for x in ("", "+symmetric")
    )
    return 100 * (1 - symmetric["ms"] / plain["ms"])


def gradients_of_torch(gpus):
    return row(f"bench_step/h200_x{gpus}/fsdp2", name="unrolled-1/torch_floor")["ms"]


def fsdp2(group, key):
    """Of the fastest row on four GPUs."""
    rows = [
        x for x in of("bench_step/h200_x4/fsdp2")["rows"] if f"{group}/torch_fsdp2" in x["name"]
    ]
    return min(rows, key=lambda x: x["ms"])[key]


def gain(record, ours, beside, key="percent", gpus=4):
    wanted = {"row": ours, "beside": beside}
    found = of(f"bench_step/h200_x{gpus}/{record}")["gains"]
    return next(x for x in found if wanted.items() <= x.items())[key]


def of_scans(key, gpus):
    return gain("scanned", f"scanned-8/{SCANNED}", f"scanned-8/{OPTAX_KEPT}", key, gpus)


def scanned_phase(name, phase, gpus=4):
    """ms of the first GPU."""
    found = row(f"bench_step/h200_x{gpus}/scanned", name=f"scanned-8/{name}")
    return of_gpus(found, phase)[0]


def once(key):
    return gain("tokens_8192", f"unrolled-8/{ONCE}", f"unrolled-8/{OPTAX_ONCE}", key)


def llama(name):
    return row("bench_step/h200_x2/llama_7b", name=f"scanned-2/{name}")


def of_llama(name):
    """GB during a step."""
    return gigabytes(llama(name))


def gigabytes(found):
    return (found["argument_bytes"] + found["temporary_bytes"]) / 1e9


def of_4096(name):
    """A row on two GPUs with 4,096 tokens."""
    return row("bench_step/h200_x2/tokens_4096", name=f"unrolled-4/{name}")


def of_8192(name):
    """A row on two GPUs with 8,192 tokens."""
    return row("bench_step/h200_x2/tokens_8192", name=f"unrolled-8/{name}")


def longer_than_whole():
    """By how many percent FSDP takes longer on four GPUs with all leaves sharded."""
    ways = (f"annotated_fsdp{x}{TUNED}" for x in ("", "+gathered_once+whole_6"))
    cut, whole = (row("bench_step/h200_x4/tokens_1024", name=f"unrolled-1/{x}") for x in ways)
    return 100 * (cut["ms"] / whole["ms"] - 1)


def with_policy():
    """By how many percent optax's fastest scan is shorter with the policy than without."""
    plain, kept = (
        row("bench_step/h200_x4/scanned", name=f"scanned-8/annotated_fsdp{x}{TUNED}")["ms"]
        for x in ("", "+products_kept")
    )
    return 100 * (1 - kept / plain)


def clock(choose, key):
    return choose(x["power"][key] for x in four())


def above_floor(name, record="traced"):
    return row(f"bench_step/h200_x4/{record}", name=f"unrolled-8/{name}")["above_floor_ms"]


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


def by_chance():
    """Percent: Student's t with two degrees of freedom is farther from 0 than the mean."""
    t = above_optax() / error_above_optax()
    return 100 * (1 - t / (2 + t**2) ** 0.5)


def between_seeds():
    losses = losses_of_seeds("optax_sharded")
    return max(losses) - min(losses)


def speed(work):
    return row("peer_bound/h200_x2/default", work=work)["gb_per_second"]


SEED0 = "h100_x4/600_steps_3e-4/jdistadam_seed0"
LOSSES, LOSSES_OF_FOUR = "losses_over_seeds/h200/default", "losses_over_seeds/cpu/default"
WAYS = "optax, reversed", "jdistadam", "jdistadam, float32 parameters"


def distances_on_two():
    """How far parameters on two GPUs are from optax's, by way and number of steps."""
    return of("losses_over_seeds/h200_x2/default")["distances"]


SENTENCES = {
    'it trains on {} % more tokens per second on two H200s ("optim"), and on {} % more on four': [
        (lambda: lead("h200_x2/tokens_1024", "unrolled-1", OPTIM), ".1f"),
        (lambda: lead("h200_x4/tokens_1024", "unrolled-1", ONCE), ".1f"),
    ],
    "these are {} % ahead on two, and {} % on four. **With 32,768 tokens, there is none**: {} % on two, where "
    "rounds range from {} to {} %. "
    "With scanned layers and 8,192 tokens, it is {} % ahead on two and {} % on four": [
        (lambda: lead("h200_x2/tokens_8192", "unrolled-8", OPTIM), ".1f"),
        (lambda: lead("h200_x4/tokens_8192", "unrolled-8", ONCE), ".1f"),
        *(
            (lambda choose=choose: lead("h200_x2/tokens_32768", "unrolled-32", OPTIM, choose), digits)
            for choose, digits in ((statistics.median, ".1f"), (min, "+.1f"), (max, "+.1f"))
        ),
        (lambda: lead("h200_x2/scanned", "scanned-8", SCANNED), ".1f"),
        (lambda: lead("h200_x4/scanned", "scanned-8", SCANNED), ".1f"),
    ],
    "the model has {} kernels instead of {}.": [
        (lambda: kernels("behind_barrier", OPTIM), ",.0f"),
        (lambda: kernels("as_arguments", OPTIM), ",.0f"),
    ],
    "{} % with [1,024](../experiments/results/vectors_behind_barrier/h200_x2/tokens_1024.json) tokens, {} % with "
    "[8,192](../experiments/results/vectors_behind_barrier/h200_x2/tokens_8192.json) and {} % with": [
        (lambda tokens=tokens: with_barrier(tokens, OPTIM)["percent"], ".1f")
        for tokens in (1024, 8192, 32768)
    ],
    "ZeRO-1 gains {} % with 1,024 tokens and {} % with 8,192. FSDP gathered once, whose scales come out of "
    "all-gathers, gains nothing with 32,768 ({} %)": [
        (lambda: with_barrier(1024, PLAIN_ZERO1)["percent"], ".1f"),
        (lambda: with_barrier(8192, PLAIN_ZERO1)["percent"], ".1f"),
        (lambda: with_barrier(32768, PLAIN_ONCE)["percent"], ".1f"),
    ],
    "its model has {} kernels either way.": [(kernels_either_way, ".0f")],
    "in jdistadam's traced step {} ms, and kernels of the model {}.": [
        (lambda: of_step_on_two(1024, *UPDATE), ".1f"),
        (lambda: of_step_on_two(1024, "model"), ".1f"),
    ],
    "GPU 0 waits {} ms for them in optax's fastest step.": [
        (lambda: scanned_phase(OPTAX_KEPT, "reduce-scatter", gpus=2), ".1f"),
    ],
    '"optim" trains on {} % more tokens per second than FSDP gathered once with collectives of up to 128 MiB '
    "with 1,024 tokens, and on {} % more with 8,192, where rounds range from {} to {} %.": [
        (lambda: lead("h200_x2/two_processes", "unrolled-1", OPTIM), ".1f"),
        *(
            (lambda choose=choose: lead("h200_x2/two_processes", "unrolled-8", OPTIM, choose), digits)
            for choose, digits in ((statistics.median, ".1f"), (min, "+.1f"), (max, "+.1f"))
        ),
    ],
    "A [Llama-like model](../experiments/results/bench_step/h200_x2/llama_7b.json) of {}e9 parameters": [
        (lambda: of("bench_step/h200_x2/llama_7b")["rows"][0]["parameters"] / 1e9, ".2f"),
    ],
    "trains on {} % more tokens per second than optax's FSDP with the faster of two sets of flags, and "
    "rounds range from {} to {} %: steps take {} and {} ms, and {} with no optimizer.": [
        *(
            (lambda choose=choose: lead("h200_x2/llama_7b", "scanned-2", SCANNED, choose), digits)
            for choose, digits in ((statistics.median, ".1f"), (min, "+.1f"), (max, "+.1f"))
        ),
        *(
            (lambda name=name: llama(name)["ms"], ".1f")
            for name in (SCANNED, f"annotated_fsdp{TUNED}", "floor")
        ),
    ],
    "jdistadam takes {} ms and {} GB with [blocks](#ways-to-step), and {} ms with whole parameters.": [
        (lambda: of_8192(BLOCKS)["ms"], ".1f"), (lambda: gigabytes(of_8192(BLOCKS)), ".1f"),
        (lambda: of_8192(OPTIM)["ms"], ".1f"),
    ],
    "which in one process takes {} % longer than with 6 blocks whole": [(longer_than_whole, ".1f")],
    "jdistadam takes {} GB during a step, optax {}: sums": [
        (lambda: of_llama(SCANNED), ".1f"), (lambda: of_llama(f"annotated_fsdp{TUNED}"), ".1f"),
    ],
    "it takes {} % longer on two GPUs with 1,024 tokens per GPU, and {} % with 8,192; with sums in bfloat16, "
    "{} % and {} %.": [
        (lambda: over_xla("sums_over_xla_1024", "unrolled-1", SENT_OVER_XLA), ".0f"),
        (lambda: over_xla("sums_over_xla_8192", "unrolled-8", SENT_OVER_XLA), ".0f"),
        (lambda: over_xla("tokens_1024", "unrolled-1"), ".0f"),
        (lambda: over_xla("tokens_8192", "unrolled-8"), ".0f"),
    ],
    "but for ZeRO-1 with 8,192, which took {} % less time with MaxText's than with none, and in a [later "
    "run](../experiments/results/bench_step/h200_x2/sums_over_xla_8192.json) {} % more.": [
        (lambda: with_maxtext("flags_8192"), ".1f"),
        (lambda: -with_maxtext("sums_over_xla_8192"), ".1f"),
    ],
    "in four rounds of [another run](../experiments/results/vectors_behind_barrier/h200_x2/tokens_8192.json) "
    "with 8,192 tokens, jdistadam was {} to {} % ahead of ZeRO-1.": [
        (lambda: min(ahead_in_four_rounds()), ".1f"), (lambda: max(ahead_in_four_rounds()), ".1f"),
    ],
    "jdistadam is ahead by {}, {} and {} ms": [
        (lambda tokens=tokens: ms_ahead(tokens), ".1f") for tokens in (1024, 8192, 32768)
    ],
    "Symmetric memory, which brings {} % on two GPUs": [(by_symmetric_memory, ".1f")],
    "torch's gradients alone take {} ms, on two GPUs of another host {}.": [
        (lambda gpus=gpus: gradients_of_torch(gpus), ".1f") for gpus in (4, 2)
    ],
    "no step with an update exceeds {} % of the peak** FLOP/s, and gradients alone reach {} %.": [
        (lambda: max(utilizations_1024()[1:]), ".0f"), (lambda: utilizations_1024()[0], ".0f"),
    ],
    "where jdistadam reaches {} % and was not traced, updates and waits take {} ms more than no optimizer.": [
        (lambda: 100 * of_4096(OPTIM)["model_flops_utilization"], ".1f"),
        (lambda: of_4096(OPTIM)["above_floor_ms"], ".1f"),
    ],
    "jdistadam gathered once trains on {} % more tokens per second than optax with 1,024 tokens, and takes as "
    "long with 8,192: rounds range from {} to {} %.": [
        (lambda: lead("h200_x4/four_processes", "unrolled-1", ONCE), ".1f"),
        *(
            (lambda choose=choose: lead("h200_x4/four_processes", "unrolled-8", ONCE, choose), "+.1f")
            for choose in (min, max)
        ),
    ],
    "Over the four rounds with 8,192 tokens, it is {} to {} % ahead.": [
        (lambda: once("percent_least"), ".1f"), (lambda: once("percent_most"), ".1f"),
    ],
    "FSDP2 adds {} ms to it, jdistadam {}.": [
        (lambda: fsdp2("unrolled-8", "above_floor_ms"), ".1f"),
        (lambda: above_floor(ONCE, "tokens_8192"), ".1f"),
    ],
    'it takes {} ms above "no optimizer", and optax {}.': [
        (lambda: above_floor(ONCE, "tokens_8192"), ".1f"),
        (lambda: above_floor(OPTAX_ONCE, "tokens_8192"), ".1f"),
    ],
    "its clock was between {} and {} MHz.": [
        (lambda: clock(min, "mhz_lowest"), ",.0f"), (lambda: clock(max, "mhz_highest"), ",.0f"),
    ],
    "in the rounds, steps take {} to {} % longer": [
        (lambda: longer_than_traced(min), ".0f"), (lambda: longer_than_traced(max), ".0f"),
    ],
    'Above "no optimizer", jdistadam gathered once and optax gathered once both took {} ms': [
        (lambda: above_floor(ONCE), ".1f"),
    ],
    "optax gathered once both took {} ms": [(lambda: above_floor(OPTAX_ONCE), ".1f")],
    "It takes {} to {} ms longer for the model than the fastest": [
        (lambda: apart(min), ".0f"), (lambda: apart(max), ".0f"),
    ],
    "which with norm and update takes {} ms longer than norm and update of optax's FSDP": [
        (lambda: update(ONCE) - update(OPTAX_ONCE), ".1f"),
    ],
    "Copies and memsets within a GPU take {} ms in optax's ZeRO-1:": [
        (lambda: statistics.mean(of_gpus(of_four(OPTAX_ZERO1), "copies")), ".1f"),
    ],
    'the update beside which "optim" gathers takes {} ms instead of {}.': [
        (lambda: update(OPTIM), ".1f"), (lambda: of_step_on_two(8192, *UPDATE), ".1f"),
    ],
    "probably by Python: rounds range from {} to {} ms": [
        (lambda: fsdp2("unrolled-1", "ms_least"), ".0f"),
        (lambda: fsdp2("unrolled-1", "ms_most"), ".0f"),
    ],
    "On two GPUs, rounds range from {} to {} %, on four from {} to {} %.": [
        (lambda gpus=gpus, key=key: of_scans(key, gpus), "+.1f")
        for gpus in (2, 4) for key in ("percent_least", "percent_most")
    ],
    "optax takes {} % less time with the same policy": [(with_policy, ".1f")],
    "GPU 0 of four waits {} ms for them, and copies within itself for {} ms. In jdistadam's step, it waits "
    "{} ms for copies between GPUs, is idle for {} ms, and copies within itself for {} ms.": [
        (lambda: scanned_phase(OPTAX_KEPT, "reduce-scatter"), ".1f"),
        (lambda: scanned_phase(OPTAX_KEPT, "copies"), ".1f"),
        (lambda: scanned_phase(SCANNED, "peer copies"), ".1f"),
        (lambda: scanned_phase(SCANNED, "idle"), ".1f"),
        (lambda: scanned_phase(SCANNED, "copies"), ".1f"),
    ],
    "is {} higher, with a standard error of {} from three seeds; seeds of optax differ by {}.": [
        (above_optax, ".3f"), (error_above_optax, ".3f"), (between_seeds, ".3f"),
    ],
    "the mean loss is {} above optax's for the control, {} for jdistadam and {} with float32 parameters, with "
    "standard errors of {}, {} and {}.": [
        (lambda way=way, key=key: of(LOSSES_OF_FOUR)["differences"][way][key], ".3f")
        for key in ("mean", "error")
        for way in WAYS
    ],
    "after {} steps, the distances are {} for the control, {} for jdistadam and {} with float32 parameters": [
        (lambda: int(max(distances_on_two()[WAYS[0]], key=int)), "d"),
        *((lambda way=way: distances_on_two()[way]["200"], ".4f") for way in WAYS),
    ],
    "From three seeds, chance alone gives so many standard errors in {} % of cases.": [(by_chance, ".0f")],
    "takes {} to {} % less time than XLA's program for `optax.adamw` on GPT-2.": [
        (lambda: less_time("gpt2xl"), ".0f"), (lambda: less_time("gpt2s"), ".0f"),
    ],
    "takes {} % less time than XLA's program for `optax.adamw` on GPT-2 small (gpt2s), {} % less on "
    "GPT-2 XL (gpt2xl), {} % less on a Llama": [
        (lambda: less_time("gpt2s"), ".0f"), (lambda: less_time("gpt2xl"), ".0f"),
        (lambda: less_time("llama1B", "llama1b"), ".0f"),
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
