"""Whether all processes of a run are about to do the same, compared before they begin.

Processes with different programs wait for each other in collectives forever, or add values that do
not belong together. Before each first call, and before each evaluation and save, every process
therefore sends a summary of its call to the first one. It uses the key-value store of
``jax.distributed``, without a collective. The first one compares, and all raise the same error.
After a time limit, the error names a process that has ended or is missing.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import jdistadam
from jdistadam import compat
from jdistadam.core import trees, waits
from jdistadam.core.trees import Params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout_text import differences
from jdistadam.errors import AgreementError

# How many agreements each set of processes has made; its processes make them in the same order.
_NUMBERS: collections.defaultdict[tuple[int, ...], itertools.count[int]] = collections.defaultdict(
    itertools.count
)
_MAX_SHOWN = 3  # processes in one message
_CALL, _PROGRAM, _LAYOUT = "call", "program", "layout"

Facts = dict[str, str]


def processes_of(config: DistributedConfig) -> list[int]:
    """Returns the processes that hold devices of the mesh, in order."""
    return sorted({device.process_index for device in config.mesh.devices.flat})


def agree(
    call: str,
    config: DistributedConfig,
    params: Params,
    facts: Callable[[], Facts],
    lower: Callable[[], Any] | None = None,
    batch: Any = None,
) -> None:
    """Compares the first call of a function in a mesh's processes; a no-op for one process.

    Args:
      call: The name of the function.
      config: The optimizer's.
      params: Global params, or their shapes.
      facts: Returns the function's own arguments as texts by name.
      lower: Lowers the program. An exception becomes a fact for the other processes.
      batch: The batch of this process. Over XLA's collectives its arrays may have other sizes in
        each process: then programs differ, and are not compared. Copies need equal programs.

    Raises:
      AgreementError: Processes differ, or one does not come.
    """
    processes = processes_of(config)
    if len(processes) == 1:
        return
    of_call = _facts_of(config, params) | facts()
    if lower is not None:
        leaves = dict(trees.named_leaves(batch, "batch"))
        is_copied = config.transport.is_peer
        sizes = {
            path: f"shape {x.shape}" if is_copied else f"{x.ndim} dimensions"
            for path, x in leaves.items()
        }
        lines = [f"{path} {x.dtype} of {sizes[path]}" for path, x in leaves.items()]
        of_call["batch"] = "\n".join(lines)
        shapes = [x.shape for x in leaves.values()]
        of_call[f"{_PROGRAM} for shapes {shapes}"] = _program(lower)
    check_agreement(call, of_call, processes)


def agree_again(call: str, config: DistributedConfig) -> None:
    """Waits until all of a mesh's processes make a call; a no-op for one process.

    Raises:
      AgreementError: A process makes another call, or does not come.
    """
    processes = processes_of(config)
    if len(processes) > 1:
        check_agreement(call, {}, processes, later_limit())


def later_limit() -> float:
    """Returns for how many seconds processes wait before a later evaluation or save."""
    return waits.LATER * waits.wait_limit()


def _facts_of(config: DistributedConfig, params: Params) -> Facts:
    """What must be equal in all processes, as texts by name: versions and all arguments."""
    mesh, parallel = config.mesh, config.parallel
    facts = {
        "versions": f"jdistadam {jdistadam.__version__}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}",
        "mesh": f"{dict(mesh.shape)} of devices {[device.id for device in mesh.devices.flat]}",
        "sharding_strategy": f"{parallel.strategy} over {parallel.data_axes}",
        "policy": repr(config.policy),
        "moments": str(config.algorithm),
        "communication": config.transport.name,
        "state_memory": ", ".join(config.on_host) or "device",
    }
    for label, hyper in config.algorithm.groups.hypers.items():
        where = f"groups[{label!r}]." if label else ""
        facts |= texts_of({where + name: x for name, x in vars(hyper).items()} if hyper else {})
    simple = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    facts |= texts_of({name: simple[name] for name in _OPTIONS})
    return facts | {_LAYOUT: config.layout_text(config.schedule_of(params).layout)}


_OPTIONS = (
    "max_grad_norm loss_scale average_grads bucket_bytes layers ema_decay "
    "norm_guard norms early_updates"
).split()


def texts_of(arguments: dict[str, Any]) -> Facts:
    """Returns arguments as texts by name; functions and arrays only as what they are."""

    def text(x: Any) -> str:
        if isinstance(x, jax.Array):
            return "an array"
        return "a function" if callable(x) else repr(x)

    return {name: text(x) for name, x in arguments.items()}


def values_of(**trees_by_name: Any) -> Facts:
    """Returns dtype, shape and a digest of every leaf of some trees, as texts by name.

    Arrays of which other processes hold shards have no digest: JAX made them the same.
    """

    def text(path: str, x: Any) -> str:
        if trees.is_key(x):
            return text(f"{path} key<{jax.random.key_impl(x)}>", jax.random.key_data(x))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return f"{path} {x.dtype} {x.shape} of all processes"
        values = np.asarray(x)
        digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
        return f"{path} {values.dtype} {values.shape} with digest {digest}"

    def lines(name: str, tree: Any) -> str:
        return "\n".join(itertools.starmap(text, trees.named_leaves(tree, name))) or "none"

    return {f"values of {name}": lines(name, tree) for name, tree in trees_by_name.items()}


def _program(lower: Callable[[], Any]) -> str:
    """The digest of a program, or the error of lowering it, which the caller will see again."""
    try:
        return hashlib.sha256(lower().as_text().encode()).hexdigest()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_agreement(
    call: str, facts: Facts, processes: Sequence[int], limit: float | None = None
) -> None:
    """Returns when all processes make the same call with the same facts; call it in each of them.

    Args:
      call: What this process is about to call.
      facts: The facts of this process.
      processes: The participating processes.
      limit: For how many seconds the first process waits. None: ``waits.wait_limit()``.

    Raises:
      AgreementError: A process sends another call or other facts, or does not come.
    """
    client = compat.coordination_client()
    if client is None:
        return
    limit = limit or waits.wait_limit()
    number = next(_NUMBERS[tuple(processes)])
    store, leader = _store(client, processes, number), processes[0]
    store.put(str(jax.process_index()), {_CALL: call} | facts)
    if jax.process_index() == leader:
        taken = store.take_all(map(str, processes), limit)
        said = {process: taken[str(process)] for process in processes}
        verdict = _verdict(call, said, limit)
        store.put("verdict", verdict)
        if number and None not in said.values():  # so that all have read the verdict before
            _store(client, processes, number - 1).delete()
    else:
        # The first process waits as long for the others, so give it time to name missing ones.
        verdict = store.take("verdict", 2 * limit)
    if verdict is None:
        verdict = _missing(call, [leader], 2 * limit)
    if verdict:
        raise AgreementError(verdict)


def _store(client: Any, processes: Sequence[int], number: int) -> compat.KeyValueStore:
    """The values of one agreement; the key must not grow with the number of processes."""
    name = f"{'-'.join(map(str, processes))}/{number}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    return compat.KeyValueStore(client, f"jdistadam/agreement/{digest}")


def _verdict(call: str, said: dict[int, Facts | None], limit: float) -> str:
    """The error message; empty if all agree."""
    missing = [process for process, facts in said.items() if facts is None]
    if missing:
        return _missing(call, missing, limit)
    all_facts = {process: facts for process, facts in said.items() if facts is not None}
    first, *others = all_facts
    mine = all_facts[first]
    for name in mine:  # the call comes first, the program last: its inputs explain more
        differ = [x for x in others if all_facts[x].get(name, mine[name]) != mine[name]]
        if differ:
            return _difference(name, first, mine[name], differ, all_facts[differ[0]][name])
    return ""


def _missing(call: str, processes: Sequence[int], limit: float) -> str:
    return (
        f"{_names(processes)}: did not come to {call} within {limit:g} s: got no word, "
        "expected the same calls in turn in every process. "
        "Look into the log of that process: it has ended, or does something else."
    )


def _difference(name: str, first: int, mine: str, differ: Sequence[int], theirs: str) -> str:
    action = "Start all processes with the same versions, code and arguments."
    if name == _LAYOUT:
        theirs, mine = differences(theirs, mine) or "", "an equal layout"
    elif name == _CALL:
        action = "Call the same functions in turn in every process, also those that print or save."
    elif name.startswith(_PROGRAM):
        name = _PROGRAM
        action = (
            "All else is the same: look for what loss_fn, or a schedule, takes from the process, "
            "such as its index, time, an unseeded random number or a file."
        )
    elif name.startswith("values of "):
        name = name.removeprefix("values of ")
        action = "Draw them from one seed, or restore one checkpoint, in every process."
    pairs = itertools.zip_longest(theirs.split("\n"), mine.split("\n"), fillvalue="nothing")
    theirs, mine = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"{name}: differs between {_names(differ)} and process {first}: got {theirs}, "
        f"expected {mine}. {action}"
    )


def _names(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:_MAX_SHOWN]))
    more = f" and {len(processes) - _MAX_SHOWN} more" if len(processes) > _MAX_SHOWN else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"
