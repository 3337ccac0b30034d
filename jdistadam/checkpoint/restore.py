"""Restoring: what a template asks for, found in a checkpoint and compared, before it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.checkpoint import folder as folders
from jdistadam.checkpoint import parts, storage
from jdistadam.checkpoint.request import Request
from jdistadam.checkpoint.restored import Restored, place_of
from jdistadam.checkpoint.restored_extra import restored_extra
from jdistadam.checkpoint.storage import compiled, orbax
from jdistadam.core import trees
from jdistadam.distributed import host_memory
from jdistadam.distributed.state import is_distributed_state
from jdistadam.distributed.transformation import check_distributed
from jdistadam.errors import CheckpointError, TreeError
from jdistadam.training.checks import remember_params
from jdistadam.training.train_state import TrainState

Predicate = Callable[[str], bool]


def checkpoint_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of which a folder has checkpoints, in order; of those that are complete.

    Example:
      >>> import tempfile
      >>> checkpoint_steps(tempfile.mkdtemp())
      []
    """
    return folders.steps_in(folders.local_folder(folder))


@compiled
def restore(
    folder: str | os.PathLike[str],
    template: Any,
    tx: Any = None,
    *,
    step: int | None = None,
    cast: bool = False,
    new: Predicate | None = None,
    unused: Predicate | None = None,
) -> Any:
    """Returns the state of a checkpoint, for any number of devices, mesh and strategy.

    Main parameters and moments come back bit for bit, and where the kind of main parameters is the
    same, training goes on as if it had not stopped; on another number of devices sums may be added
    in another order, and the loss gets other random keys. All is compared with the checksums that
    were computed on the devices that saved. All processes call this.

    Args:
      folder: What ``save`` or ``Checkpointer`` wrote.
      template: A state of shapes, ``TrainState.shapes(params, tx)``, or of arrays; a TrainState of
        Flax, or a dictionary with ``params`` and ``opt_state``, of optax's Adam. Where its
        ``model_state`` or ``rng`` are None, they are as they were saved.
      tx: The distributed optimizer. None for a state of ``fused_adamw`` or of optax.
      step: Which checkpoint. None: the newest.
      cast: Whether arrays that were saved in another dtype are cast where that loses bits.
      new: ``new(path)``: whether a parameter, its moments or another array need not be in the file
        in the shape of the template. It stays as the template has it, which must have arrays then;
        moments that the file lacks are zero, and an average begins with the parameter. Paths as in
        errors: ``params['head']['kernel']`` stands for the moments too; ``ema['w']``,
        ``opt_state[0].x``, ``model_state['mean']``.
      unused: ``unused(path)``: whether what the file has need not be in the template.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
      TreeError, ShapeError, DtypeError: It is not one of such a state; the message names the file
        and the leaf.
    """
    host_memory.check_memory(getattr(tx, "config", None), template=template)
    reader = _reader(folder, step)
    fields = parts.fields_of(template)
    request = Request(reader, cast=cast, new=new, unused=unused)
    if is_distributed_state(parts.adam_of(fields["opt_state"])):
        check_distributed(tx)
    restored = Restored(reader, request, fields, tx)
    restored.look()
    unasked = _unasked_of(template, reader)
    request.finish(ignored=[*reader.extra, *(x for _, names in unasked.values() for x in names)])
    values = {name: _as_in(fields[name], x) for name, x in restored.read().items()}
    for field, (structure, names) in unasked.items():
        values[field] = structure.unflatten(restored.others(names))
    treedef: Any = jax.tree.structure(template, is_leaf=lambda x: x is not template)
    state = treedef.unflatten(values[name] for name in fields)
    is_whole = isinstance(state, TrainState) and new is None  # its params are what was saved
    return remember_params(state) if is_whole else state


@compiled
def restore_params(
    folder: str | os.PathLike[str], like: Any = None, *, step: int | None = None, cast: bool = False
) -> Any:
    """Returns the parameters of a checkpoint alone, without an optimizer: for inference.

    Args:
      folder: What ``save`` or ``Checkpointer`` wrote.
      like: Tree of arrays or of ``jax.ShapeDtypeStruct``, whose shardings say where parameters are
        to be placed; without one on the first device. Where its dtype is float32 and the optimizer
        kept main parameters, these are read: the exact values, of which the params are rounded
        copies. None: dictionaries of the params, in the dtypes in which they were saved.
      step: Which checkpoint. None: the newest.
      cast: Whether they are cast to the dtypes of ``like`` where that loses bits.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
      TreeError, ShapeError, DtypeError: It has other parameters.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, jdistadam as jda, optax
      >>> folder, params = tempfile.mkdtemp(), {"w": jnp.ones(3)}
      >>> opt_state = optax.adamw(1e-3).init(params)
      >>> jda.save(folder, {"params": params, "opt_state": opt_state})
      0
      >>> jda.restore_params(folder)["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    trees.check_memory(like=like)
    reader = _reader(folder, step)
    names = [name for name in reader.entries if name.startswith(("params[", "params."))]
    if like is None:
        like = _nested(reader, names)
    request = Request(reader, cast=cast)
    leaves = parts.named("params", like)
    requests = []
    for name, x in leaves.items():
        source = name
        if x.dtype == jnp.float32:
            source = request.exact(name, x, keeps_main=False) or name
        else:
            request.array(name, x)
        requests.append((source, place_of(x)))
    if rest := [name for name in names if name not in leaves]:
        raise request.unexpected(rest)
    found = reader.read(requests)
    new = [storage.cast(x, like.dtype) for x, like in zip(found, leaves.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), new)


@compiled
def restore_extra(
    folder: str | os.PathLike[str], like: Any = None, *, step: int | None = None
) -> Any:
    """Returns the tree that was saved as ``extra`` beside the state of a checkpoint.

    Each leaf comes back as what it was: jax arrays bit for bit, with their checksum compared, numpy
    arrays in numpy, and Python's values.

    Args:
      folder: What ``save`` or ``Checkpointer`` wrote.
      like: A tree like that which was saved, whose jax arrays, or ``jax.ShapeDtypeStruct`` in their
        places, say by their shardings where the new ones go; its other values are ignored. None:
        dictionaries, and jax arrays on the first device.
      step: Which checkpoint. None: the newest.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
      TreeError, ShapeError, DtypeError: ``like`` differs from what was saved; nothing was saved.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, jdistadam as jda, numpy as np, optax
      >>> folder, params = tempfile.mkdtemp(), {"w": jnp.ones(3)}
      >>> state = {"params": params, "opt_state": optax.adamw(1e-3).init(params)}
      >>> jda.save(folder, state, extra={"data": {"epoch": 2, "next": np.arange(3)}})
      0
      >>> jda.restore_extra(folder)
      {'data': {'epoch': 2, 'next': array([0, 1, 2])}}
    """
    return restored_extra(_reader(folder, step), like)


def _as_in(field: Any, value: Any) -> Any:
    """Gives a field the containers of the template, also boxes that the parts of a state had."""
    return jax.tree.unflatten(jax.tree.structure(field), jax.tree.leaves(value))


def _reader(folder: str | os.PathLike[str], step: int | None) -> storage.Reader:
    """Finds a checkpoint, and reads its header."""
    orbax()
    if step is not None:
        folders.check_step(step)
    found = checkpoint_steps(folder)
    path = folders.local_folder(folder)
    if not found or (step is not None and step not in found):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        got = f"steps {found}" if found else "none"
        raise CheckpointError(
            f"{path!s}: {what}: got {got}, expected a folder that save or Checkpointer wrote. "
            "Check the path; it is that of the folder of all steps."
        )
    return storage.Reader(path / str(found[-1] if step is None else step) / storage.ITEM)


def _nested(head: storage.Reader, names: list[str]) -> Any:
    """Shapes of params in dictionaries."""
    tree: dict[str, Any] = {}
    for name in names:
        entry = head.entries[name]
        if not entry.keys:
            raise TreeError(
                f"{head.path}: {name}: not in dictionaries alone: "
                "its tree cannot be told from its path: got a list, a class or a single array, "
                "expected like=. Pass restore_params(folder, like=shapes)."
            )
        inner = tree
        for key in entry.keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[entry.keys[-1]] = jax.ShapeDtypeStruct(entry.shape, entry.dtype)
    return tree


def _unasked_of(template: Any, head: storage.Reader) -> dict[str, tuple[Any, list[str]]]:
    """Of a TrainState without model_state or rng, those that were saved: structure and names."""
    found: dict[str, tuple[Any, list[str]]] = {}
    for field in ("model_state", "rng") if isinstance(template, TrainState) else ():
        if getattr(template, field) is not None:
            continue
        names = [name for name in head.entries if name == field or name.startswith(f"{field}[")]
        if names == [field]:
            found[field] = (jax.tree.structure(0), names)
        elif names and all(head.entries[name].keys for name in names):
            tree = _nested(head, names)
            found[field] = (jax.tree.structure(tree), list(parts.named(field, tree)))
    return found
