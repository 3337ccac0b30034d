"""Whether all processes of a run are about to do the same: looked at once, before they begin.

Processes whose programs differ wait for each other in collectives for ever, or add what does not
belong together. So before the first step each tells what it is about to run to the first of them,
over the key-value store of ``jax.distributed``, which needs no collective; that one compares, and
all raise the same error. A process that has ended, or never came, is named after a limit.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

import jdistadam
from jdistadam import compat
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout_digest import differences
from jdistadam.errors import AgreementError

LIMIT_SECONDS = 300
"""How long processes wait for the slowest to come to its first step."""

# How many agreements each set of processes has made: its processes make them in the same order.
_NUMBERS: collections.defaultdict[tuple[int, ...], itertools.count[int]] = collections.defaultdict(
    itertools.count
)
_MAX_SHOWN = 3  # processes in one message

Facts = dict[str, str]


def agree(config: DistributedConfig, params: Any, lower: Callable[[], Any] | None = None) -> None:
    """Compares what the processes of a mesh hold and are about to run; nothing where it is one.

    Args:
      config: Of the optimizer.
      params: Global params, or their shapes.
      lower: Lowers the program. What it raises becomes a fact, for the others to know.

    Raises:
      AgreementError: They differ, or some process does not come.
    """
    processes = sorted({device.process_index for device in config.mesh.devices.flat})
    if len(processes) > 1:
        check_agreement(_facts(config, params, lower), processes)


def _facts(config: DistributedConfig, params: Any, lower: Callable[[], Any] | None) -> Facts:
    """What must be the same in all processes, as texts by name; the program last."""
    mesh, parallel = config.mesh, config.parallel
    facts = {
        "versions": f"jdistadam {jdistadam.__version__}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}",
        "mesh": f"{dict(mesh.shape)} of devices {[device.id for device in mesh.devices.flat]}",
        "sharding_strategy": f"{parallel.strategy} over {parallel.data_axes}",
        "policy": repr(config.policy),
        "moments": str(config.algorithm),
        "communication": config.communication.means,
        "layout": config.layout_text(config.layout(config.tensor_local(params))),
    }
    if lower is None:
        return facts
    try:
        text = lower().as_text()
    except Exception as error:  # of the loss, perhaps: the caller meets it again
        return facts | {"program": f"{type(error).__name__}: {error}"}
    return facts | {"program": hashlib.sha256(text.encode()).hexdigest()}


def check_agreement(facts: Facts, processes: Sequence[int], *, limit: float | None = None) -> None:
    """Returns when all processes have said the same; call it in each of them.

    Args:
      facts: What this process says.
      processes: Who takes part.
      limit: Seconds to wait for the others; None: ``LIMIT_SECONDS``.

    Raises:
      AgreementError: Some process says something else, or does not come.
    """
    client = compat.coordination_client()
    if client is None:
        return
    name = f"{'-'.join(map(str, processes))}/{next(_NUMBERS[tuple(processes)])}"
    # The key may not grow with the number of processes.
    prefix = f"jdistadam/agreement/{hashlib.sha256(name.encode()).hexdigest()}"
    store = _Store(client, prefix, limit or LIMIT_SECONDS)
    leader = processes[0]
    store.put(str(jax.process_index()), facts)
    if jax.process_index() == leader:
        said = {process: store.take(str(process)) for process in processes}
        verdict = _verdict(said, store.limit)
        store.put("verdict", verdict)
    else:
        # The first process waits for the others for as long, so allow it to say who is missing.
        verdict = store.take("verdict", limit=2 * store.limit)
    if verdict is None:
        verdict = _missing([leader], 2 * store.limit)
    if verdict:
        raise AgreementError(verdict)


class _Store:
    """Texts by name in the key-value store, of one agreement."""

    def __init__(self, client: Any, prefix: str, limit: float) -> None:
        self._client, self._prefix, self.limit = client, prefix, limit

    def put(self, name: str, value: Any) -> None:
        self._client.key_value_set(f"{self._prefix}/{name}", json.dumps(value))

    def take(self, name: str, limit: float | None = None) -> Any:
        """Waits for a value; None if it does not come in time."""
        milliseconds = round(1000 * (limit or self.limit))
        try:
            text = self._client.blocking_key_value_get(f"{self._prefix}/{name}", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return json.loads(text)


def _verdict(said: dict[int, Facts | None], limit: float) -> str:
    """The message of what to raise; empty where all agree."""
    missing = [process for process, facts in said.items() if facts is None]
    if missing:
        return _missing(missing, limit)
    first, *others = said
    mine: Facts = said[first] or {}
    for name in mine:  # the program comes last: of what it is made says more
        differ = [process for process in others if (said[process] or {})[name] != mine[name]]
        if differ:
            theirs = (said[differ[0]] or {})[name]
            return _difference(name, first, mine[name], differ, theirs)
    return ""


def _missing(processes: Sequence[int], limit: float) -> str:
    return (
        f"{_names(processes)}: did not come to its first step within {limit:.0f} s: got no word, "
        "expected the same step in every process. "
        "Look into the log of that process; all have to call the same steps in turn."
    )


def _difference(name: str, first: int, mine: str, differ: Sequence[int], theirs: str) -> str:
    if name == "layout":
        theirs, mine = differences(theirs, mine) or "", "an equal layout"
    action = "Start all processes with the same versions, code and arguments."
    if name == "program":
        action = (
            "All else is the same: look for what loss_fn, or a schedule, takes from the process, "
            "such as its index, time, an unseeded random number or a file."
        )
    return (
        f"{name}: differs between {_names(differ)} and process {first}: got {theirs}, "
        f"expected {mine}. {action}"
    )


def _names(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:_MAX_SHOWN]))
    more = f" and {len(processes) - _MAX_SHOWN} more" if len(processes) > _MAX_SHOWN else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"
