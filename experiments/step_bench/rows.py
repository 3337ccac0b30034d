"""Names of rows, such as "unrolled-8/optim+clip": a workload, a variant and its modifiers."""

import dataclasses
import fnmatch
import re

from jdistadam.tools import bench
from step_bench.model import Workload

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ANNOTATED = ("annotated_zero1", "annotated_fsdp")
FLOOR = "floor"


def merging(limit):
    """Options with which XLA merges collectives up to this many bytes."""
    ops = ("reduce_scatter", "all_gather", "all_reduce")
    return {f"xla_gpu_{op}_combine_threshold_bytes": limit for op in ops}


# Annotations cut a leaf's largest dimension; "first_dim": the first that divides, like ours.
_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
OPTIONS = {  # modifiers that are compiler options; they replace those of a variant
    "early": {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    },
    "pipelined": {  # for scanned layers; train_step has these and "early" over XLA
        "xla_gpu_pipeline_all_gather": _PIPELINED,
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    },
    "pipelined_sums": {"xla_gpu_pipeline_reduce_scatter": _PIPELINED},
    "merge_nothing": merging(1),
    "merge_128": merging(128 << 20),
    # Results of an all-gather are N times those of the reduce-scatter of its gradients.
    "sums_32": {"xla_gpu_reduce_scatter_combine_threshold_bytes": 32 << 20},
    # NCCL reads and writes arrays in place, with fewer of the GPU's processors.
    "symmetric": {
        "xla_gpu_enable_nccl_user_buffers": True,
        "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    },
    # Those of MaxText's configs/a3/llama_2_7b/1vm.sh, as far as this XLA has them. XLA's defaults
    # have the scheduler that hides latency.
    "maxtext": merging(128 << 20)
    | {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 << 20,
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_command_buffer": "",
        "xla_gpu_pipeline_all_gather": _PIPELINED,
        "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
        "xla_gpu_pipeline_all_reduce": _PIPELINED,
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
        "xla_disable_hlo_passes": "rematerialization",
    },
}
# What a row of annotations with "best_flags" tries: the fastest is the row, the others are in its
# record. "none" is what every row of annotations has: collectives of up to 256 MiB.
BEST = "best_flags"
MOST_FLAGS = 8
FLAGS = {  # by whether layers are scanned
    False: (
        "none",
        "early",
        "merge_128",
        "early+merge_128",
        "sums_32",
        "symmetric",
        "maxtext",
    ),
    True: (
        "none",
        "pipelined",
        "early+pipelined",
        "early+pipelined+pipelined_sums",
        "early+pipelined+pipelined_sums+sums_32",
        "early+pipelined+sums_32",
        "early+pipelined+symmetric",
        "maxtext",
    ),
}
# Options of ours; annotations have float32 main parameters, and XLA's own sums. On GPUs that reach
# each other "float32sum" uses peer memory, except with "over_xla". "sent_wide" sends gradients in
# float32, as by default, instead of bfloat16. "gathered_once" is reshard_after_forward=False;
# "whole_6" leaves the embedding and 6 blocks whole between steps (reshard_after_backward). In an
# unrolled model "block_by_block" gathers each block where it is used, after the activations that
# enter the previous block; "at_any_time" without that condition. "ema" averages the parameters,
# "guard" looks for spikes of the norm (and skips no step here), "norms" and "norms_of_leaves"
# return norms of parameters and updates. "host" keeps the state in host memory, "host_moments" only
# its moments, "host_ema" only the average. "early" updates during the backward pass. "no_main" has
# no main parameters, "block8" 8-bit moments and stochastic rounding.
BY_BLOCK = {"block_by_block", "at_any_time"}
WHOLE = {f"whole_{n}": n for n in (0, 2, 4, 6, 8)}
SETTINGS = {"clip", "float32sum", "sent_wide", "remainder16", "over_xla"}
SETTINGS |= {"gathered_once", *BY_BLOCK}
SETTINGS |= {"ema", "guard", "norms", "norms_of_leaves", "no_main", "block8"}
SETTINGS |= {"host", "host_moments", "host_ema", "early"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    ``workload`` is a ``model.Workload``, or the name of a tree of ``jdistadam bench`` for the
    optimizer step alone.
    """

    name: str
    group: str
    workload: Workload | str
    variant: str
    modifiers: frozenset[str]

    @property
    def is_alone(self):
        return isinstance(self.workload, str)

    @property
    def options(self):
        """Compiler options for a GPU in addition to those of ``train_step``."""
        # The best known option for annotations.
        chosen = merging(256 << 20) if self.variant in ANNOTATED else {}
        for modifier in sorted(self.modifiers & OPTIONS.keys()):
            chosen = chosen | OPTIONS[modifier]
        return chosen

    def choices(self, flags=None):
        """Rows with each of the flags that this one tries, by their name; {"": itself} if none.

        ``flags``: names of OPTIONS joined by "+", instead of those in FLAGS.
        """
        if BEST not in self.modifiers:
            return {"": self}
        fixed = self.modifiers - {BEST}
        tried = flags or FLAGS[self.workload.is_scanned]
        added = {name: set(name.split("+")) - {"none"} for name in tried}
        if unknown := set().union(*added.values()) - OPTIONS.keys():
            raise SystemExit(f"no flags {', '.join(sorted(unknown))}; there are {[*OPTIONS]}")
        if len(added) > MOST_FLAGS:
            raise SystemExit(f"{len(added)} flags to try; at most {MOST_FLAGS}")
        return {
            name: dataclasses.replace(self, modifiers=fixed | more) for name, more in added.items()
        }


def parse(name, checkpoint="none"):
    """The row with this name; exits if there is none."""
    group, _, rest = name.partition("/")
    variant, *modifiers = rest.split("+")
    tree = group.removeprefix("step-")
    is_tree = group.startswith("step-") and tree in bench.TREES
    workload = tree if is_tree else Workload.parse(group, checkpoint)
    if workload is None:
        raise SystemExit(
            f"{name}: no workload {group!r}, such as unrolled-8, scanned-2x4, step-gpt2xl"
        )
    annotated = {"clip", "first_dim", BEST, *OPTIONS}
    ours = SETTINGS | OPTIONS.keys()
    allowed = {FLOOR: set(), **{x: annotated for x in ANNOTATED}, **{x: ours for x in STRATEGIES}}
    # "gathered_once": bfloat16 parameters rest as shards, and are whole from the start of a step
    # on. "products_kept": a block keeps what blocks of train_step keep.
    allowed["annotated_fsdp"] = annotated | WHOLE.keys() | {"gathered_once", "products_kept"}
    allowed["annotated_zero1"] = annotated | {"fused"}  # fused_adamw, its state sharded
    if "fused" in modifiers:
        allowed["annotated_zero1"] |= {"remainder16", "no_main", "block8"}
    for strategy in STRATEGIES[:3]:
        allowed[strategy] = ours - {"gathered_once", *BY_BLOCK}
    allowed[STRATEGIES[3]] = ours | WHOLE.keys()
    if workload != tree and workload.is_scanned:
        allowed["optim_grads_params"] = ours - BY_BLOCK
    if workload == tree:  # params are whole before and after
        allowed = {x: allowed[x] - {BEST} for x in ("annotated_zero1", *STRATEGIES[:3])}
    if variant not in allowed:
        raise SystemExit(f"{name}: no variant {variant!r}; there are {', '.join(allowed)}")
    if unknown := set(modifiers) - allowed[variant]:
        raise SystemExit(
            f"{name}: {variant} has no {', '.join(sorted(unknown))}; "
            f"it has {', '.join(sorted(allowed[variant]))}"
        )
    return Row(name, group, workload, variant, frozenset(modifiers))


def _group(group, *variants):
    return [f"{group}/{variant}" for variant in variants]


_SHORT = ("annotated_zero1", "annotated_fsdp", "optim", "optim_grads", "optim_grads_params")
_LONG = (
    "annotated_zero1",
    "annotated_fsdp",
    *STRATEGIES,
    "annotated_zero1+clip",
    "optim+clip",
    "optim_grads_params+clip",
    "optim+float32sum",
    "optim+float32sum+clip",
    "optim+float32sum+over_xla",
    "optim+remainder16",
    "optim_grads_params+gathered_once",
    "annotated_zero1+early",
    "optim+early",
)
_STEP = (
    "annotated_zero1",
    "optim",
    "optim+clip",
    "optim+float32sum",
    "optim+float32sum+clip",
    "optim+float32sum+over_xla",
    "optim+remainder16",
)
_BLOCKS = (
    "optim_grads_params",
    "optim_grads_params+block_by_block",
    "optim_grads_params+at_any_time",
    "annotated_fsdp",
    "annotated_fsdp+merge_nothing",
)
_TUNED = f"first_dim+clip+{BEST}"
_OURS_ZERO3 = "optim_grads_params+float32sum"
SETS = {
    # Clipped steps beside the best annotations; --tokens says how many sequences.
    "zero1": _group(
        "unrolled",
        f"annotated_zero1+{_TUNED}",
        f"annotated_fsdp+{_TUNED}",
        f"annotated_fsdp+gathered_once+{_TUNED}",
        "optim+float32sum+clip",
    ),
    "zero3": _group(
        "unrolled",
        f"annotated_fsdp+{_TUNED}",
        f"annotated_fsdp+gathered_once+whole_6+{_TUNED}",
        f"{_OURS_ZERO3}+gathered_once+whole_6+clip",
        f"{_OURS_ZERO3}+block_by_block+clip",
    ),
    "zero3_scanned": _group(
        "scanned",
        f"annotated_fsdp+{_TUNED}",
        f"annotated_fsdp+products_kept+{_TUNED}",
        f"annotated_fsdp+gathered_once+products_kept+{_TUNED}",
        f"{_OURS_ZERO3}+clip",
    ),
    # Ways to send gradients of 16-bit parameters: --tokens says how many sequences.
    "sent": _group(
        "unrolled",
        "optim+sent_wide+clip",
        "optim+clip",
        "optim+float32sum+over_xla+clip",
        "optim+float32sum+clip",
    ),
    # All ways to gather the layers of a model.
    "layers": [
        *_group("unrolled-8", *_BLOCKS),
        *_group("scanned-8", "optim_grads_params", "annotated_fsdp"),
    ],
    # Storage of the state, in device and in host memory.
    "host": _group(
        "unrolled-8",
        *(
            f"optim{storage}{memory}"
            for storage in ("", "+remainder16", "+remainder16+block8", "+no_main+block8")
            for memory in ("", "+host")
        ),
        "optim+remainder16+host_moments",
        "optim+remainder16+block8+host_moments",
    ),
    # Everyday options of a training run, with the same step without them.
    "everyday": _group(
        "unrolled-8",
        "optim",
        "optim+clip",
        "optim+clip+guard",
        "optim+ema",
        "optim+clip+ema+guard",
        "optim+norms",
        "optim+norms_of_leaves",
        "optim+clip+norms",
        "optim+remainder16",
        "optim+remainder16+norms",
    ),
}
KNOWN = [
    *_group("unrolled-8", *_LONG),
    *_group("scanned-8", *_LONG),
    *(row for batch in ("2", "1", "2x4", "8x4") for row in _group(f"unrolled-{batch}", *_SHORT)),
    *(row for batch in ("2", "1", "2x4", "8x4") for row in _group(f"scanned-{batch}", *_SHORT)),
    *_group("step-gpt2xl", *_STEP),
]


def with_tokens(name, tokens, length):
    """A row such as "unrolled/optim" for each number of tokens per device, else the row itself."""
    found = re.fullmatch(r"(unrolled|scanned)/(.*)", name)
    if not found:
        return [name]
    if wrong := [n for n in tokens if n % length or n < length]:
        raise SystemExit(f"--tokens: {wrong} are no sequences of {length} tokens")
    if not tokens:
        raise SystemExit(f"{name}: say how many --tokens, or sequences, such as {found[1]}-8")
    return [f"{found[1]}-{n // length}/{found[2]}" for n in tokens]


def select(patterns, *, tokens=(), length=1024, checkpoint="none"):
    """Rows by group, each with its floor first, from patterns or names.

    A pattern selects known rows; a name without a wildcard may be any possible row, or one of SETS.

    Args:
      patterns: Names or patterns, by commas.
      tokens: Tokens per device and step, for names without a number of sequences.
      length: Tokens of a sequence.
      checkpoint: Of ``model.CHECKPOINTS``.
    """
    names = []
    for pattern in patterns.split(","):
        found = SETS.get(pattern) or fnmatch.filter(KNOWN, pattern)
        found = found or ([] if "*" in pattern else [pattern])
        if not found:
            raise SystemExit(f"no known row is like {pattern!r}; see --list")
        names += found
    names = [row for name in names for row in with_tokens(name, tokens, length)]
    groups = {}
    for name in dict.fromkeys(names):
        row = parse(name, checkpoint)
        floor = [] if row.is_alone else [parse(f"{row.group}/{FLOOR}", checkpoint)]
        rows = groups.setdefault(row.group, floor)
        if row not in rows:
            rows.append(row)
    return groups
