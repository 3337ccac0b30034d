"""Checks before a run: the train state, where it came from, and whether processes agree."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib

import jdistadam
from jdistadam import compat
from jdistadam.core import trees
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.state import differences
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import AgreementError, TreeError

# Whether all processes of a run are about to do the same, checked once before they begin.
#
# Processes with different programs wait for each other in collectives forever, or add values that
# do not belong together. So before the first step each process sends a summary of its program to
# the first one, over the key-value store of ``jax.distributed``, which needs no collective. The
# first one compares, and all raise the same error. After a time limit it names a process that has
# ended or never came.

LIMIT_SECONDS = 300
"""How long processes wait for the slowest one to reach its first step."""

# How many agreements each set of processes has made; its processes make them in the same order.
_NUMBERS: collections.defaultdict[tuple[int, ...], itertools.count[int]] = collections.defaultdict(
    itertools.count
)
_MAX_SHOWN = 3  # processes in one message

Facts = dict[str, str]


def agree(config: DistributedConfig, params: Any, lower: Callable[[], Any] | None = None) -> None:
    """Compares the params and programs of a mesh's processes; a no-op for one process.

    Args:
      config: The optimizer's.
      params: Global params, or their shapes.
      lower: Lowers the program. An exception becomes a fact for the other processes.

    Raises:
      AgreementError: Processes differ, or one does not come.
    """
    processes = sorted({device.process_index for device in config.mesh.devices.flat})
    if len(processes) > 1:
        check_agreement(_facts(config, params, lower), processes)


def _facts(config: DistributedConfig, params: Any, lower: Callable[[], Any] | None) -> Facts:
    """What must be equal in all processes, as texts by name; the program last."""
    mesh, parallel = config.mesh, config.parallel
    facts = {
        "versions": f"jdistadam {jdistadam.__version__}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}",
        "mesh": f"{dict(mesh.shape)} of devices {[device.id for device in mesh.devices.flat]}",
        "sharding_strategy": f"{parallel.strategy} over {parallel.data_axes}",
        "policy": repr(config.policy),
        "moments": str(config.algorithm),
        "communication": config.communication.transport,
        "state_memory": ", ".join(config.on_host) or "device",
        "early_updates": str(config.early_updates),
        "layout": config.layout_text(config.layout(config.tensor_local(params))),
    }
    if lower is None:
        return facts
    try:
        text = lower().as_text()
    except Exception as error:  # the loss may raise; the caller will see it again
        return facts | {"program": f"{type(error).__name__}: {error}"}
    return facts | {"program": hashlib.sha256(text.encode()).hexdigest()}


def check_agreement(facts: Facts, processes: Sequence[int]) -> None:
    """Returns when all processes have sent the same facts; call it in each of them.

    Args:
      facts: The facts of this process.
      processes: The participating processes.

    Raises:
      AgreementError: A process sends other facts, or does not come.
    """
    client = compat.coordination_client()
    if client is None:
        return
    name = f"{'-'.join(map(str, processes))}/{next(_NUMBERS[tuple(processes)])}"
    # The key must not grow with the number of processes.
    prefix = f"jdistadam/agreement/{hashlib.sha256(name.encode()).hexdigest()}"
    store = _Store(client, prefix)
    leader = processes[0]
    store.put(str(jax.process_index()), facts)
    if jax.process_index() == leader:
        verdict = _verdict({process: store.take(str(process)) for process in processes})
        store.put("verdict", verdict)
    else:
        # The first process waits as long for the others, so give it time to name missing ones.
        verdict = store.take("verdict", 2 * LIMIT_SECONDS)
    if verdict is None:
        verdict = _missing([leader], 2 * LIMIT_SECONDS)
    if verdict:
        raise AgreementError(verdict)


class _Store:
    """Texts by name in the key-value store, for one agreement."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def put(self, name: str, value: Any) -> None:
        self._client.key_value_set(f"{self._prefix}/{name}", json.dumps(value))

    def take(self, name: str, limit: int | None = None) -> Any:
        """Waits for a value, at most ``limit`` or ``LIMIT_SECONDS``; None if it does not come."""
        milliseconds = 1000 * (limit or LIMIT_SECONDS)
        try:
            text = self._client.blocking_key_value_get(f"{self._prefix}/{name}", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return json.loads(text)


def _verdict(said: dict[int, Facts | None]) -> str:
    """The error message; empty if all agree."""
    missing = [process for process, facts in said.items() if facts is None]
    if missing:
        return _missing(missing, LIMIT_SECONDS)
    first, *others = said
    mine: Facts = said[first] or {}
    for name in mine:  # the program comes last: its inputs explain more
        differ = [process for process in others if (said[process] or {})[name] != mine[name]]
        if differ:
            theirs = (said[differ[0]] or {})[name]
            return _difference(name, first, mine[name], differ, theirs)
    return ""


def _missing(processes: Sequence[int], limit: int) -> str:
    return (
        f"{_names(processes)}: did not come to its first step within {limit} s: got no word, "
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


_FLAX_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}


def check_created(params: Params, model_state: Any, rng: Any) -> None:
    """Raises TreeError or DtypeError unless these are a model's params, other arrays and key."""
    names = set(params) if isinstance(params, Mapping) else set()
    others = names & _FLAX_COLLECTIONS
    if "params" in names and others:
        raise TreeError(
            "params: all variables of a Flax model: the others would be trained as parameters: "
            f'got {", ".join(map(str, params))}, expected variables["params"]. '
            f"Pass these as params, and the rest, such as {sorted(others)[0]!r}, as model_state."
        )
    shapes = "Use TrainState.shapes(params, tx) for shapes."
    trees.refuse_shapes(params, name="params", action=shapes)
    trees.check_dtypes(params, name="params")
    trees.check_arrays(model_state, name="model_state")
    if rng is not None:
        trees.check_key("rng", rng)


def check_structure(opt_state: OptState, tx: DistributedTransformation) -> None:
    """Raises TreeError unless a state has the parts of its optimizer, such as those of a chain."""
    specs = tx.state_specs()
    if _has_structure(specs, opt_state):
        return
    others = ""
    if type(specs) is type(opt_state) and hasattr(specs, "_fields"):
        pairs = zip(specs._fields, specs, opt_state, strict=True)
        names = [name for name, spec, part in pairs if not _has_structure(spec, part)]
        others = f" with another {', '.join(names)}"
    raise TreeError(
        f"opt_state: not the state of this optimizer: got {type(opt_state).__name__}{others}, "
        f"expected {type(specs).__name__}, of the structure that init returns. "
        "Make it with TrainState.create(params, tx) or from_optax_state."
    )


def _has_structure(specs: Any, tree: Any) -> bool:
    """Whether ``specs`` are a prefix of a tree."""
    try:
        jax.tree.broadcast(specs, tree)
    except ValueError:
        return False
    return True


# What a train state remembers, outside its fields, of its origin.
#
# A state remembers the very arrays with which it was made and that are the rounded main parameters.
# So a step sees at no cost that they were not replaced. A state made otherwise, by a tree map or a
# checkpoint, remembers nothing, and is compared once. A state that a step returned also remembers
# its layout and its other arrays; no array is there twice.

_KNOWN, _RETURNED = "_params_made_with", "_returned"


class Returned(NamedTuple):
    """What a state that a step returned remembers.

    Attributes:
      others: Its arrays apart from the params.
      tx: The optimizer of the step.
      digest: The digest of its layout.
    """

    others: tuple[Any, ...]
    tx: DistributedTransformation
    digest: bytes


def remember_params(state: Any, leaves: Sequence[Any] | None = None) -> Any:
    """Records that the params of a state are its rounded main parameters; returns the state.

    Args:
      state: The state.
      leaves: The leaves of its params, if known.
    """
    leaves = jax.tree.leaves(state.params) if leaves is None else leaves
    object.__setattr__(state, _KNOWN, (tuple(leaves), jax.tree.structure(state.params)))
    return state


def remember_returned(state: Any, tx: DistributedTransformation, digest: bytes) -> Any:
    """Records that a step returned all arrays of a state but its params; returns the state."""
    object.__setattr__(state, _RETURNED, Returned(tuple(_others(state)), tx, digest))
    return state


def returned(state: Any) -> Returned | None:
    """What a state that a step returned remembers; None for other states."""
    found: Returned | None = state.__dict__.get(_RETURNED)
    return found if found is not None and same_arrays(_others(state), found.others) else None


def _others(state: Any) -> list[Any]:
    return jax.tree.leaves((state.opt_state, state.model_state, state.rng))


def same_arrays(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences contain the very same arrays."""
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def same_params(params: Any, others: Any) -> bool:
    """Whether two trees contain the very same arrays under the same paths."""
    mine: Any = jax.tree.structure(params)
    theirs: Any = jax.tree.structure(others)
    return bool(mine == theirs) and same_arrays(jax.tree.leaves(params), jax.tree.leaves(others))


def is_known(state: Any, leaves: Sequence[Any], treedef: Any = None) -> bool:
    """Whether the params, with these leaves, are the arrays with which the state was made.

    Paths must match too: under others they belong to another layout.
    """
    arrays, structure = state.__dict__.get(_KNOWN, (None, None))
    treedef = jax.tree.structure(state.params) if treedef is None else treedef
    return arrays is not None and treedef == structure and same_arrays(leaves, arrays)


def returned_arrays(state: Any) -> tuple[Any, ...]:
    """Returns the arrays of the step result from which this state was made, if any."""
    found: Returned | None = state.__dict__.get(_RETURNED)
    return () if found is None else (*state.__dict__.get(_KNOWN, ((), None))[0], *found.others)


def keep_memory(state: Any, new: Any) -> None:
    """Copies the memory of a state to another one with the same params and optimizer state."""
    if _KNOWN in state.__dict__:
        object.__setattr__(new, _KNOWN, state.__dict__[_KNOWN])
        object.__setattr__(new, _RETURNED, state.__dict__.get(_RETURNED))
