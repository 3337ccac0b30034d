"""Restoring: what a template asks for, found in a checkpoint and compared, before it is read."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.checkpoint import folder as folders
from jdistadam.checkpoint import parts, storage
from jdistadam.checkpoint.extra import nested, restored_extra
from jdistadam.checkpoint.restored import Predicate, Request, Restored
from jdistadam.checkpoint.storage import compiled, orbax
from jdistadam.core import trees
from jdistadam.distributed import host_memory
from jdistadam.distributed.state import is_distributed_state
from jdistadam.distributed.transformation import check_distributed
from jdistadam.errors import CheckpointError
from jdistadam.training.checks import remember_params
from jdistadam.training.train_state import TrainState


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
    mesh = None
    if is_distributed_state(parts.adam_of(fields["opt_state"])):
        check_distributed(tx)
        mesh = tx.config.mesh
    for field in ("model_state", "rng") if isinstance(template, TrainState) else ():
        if fields[field] is None:
            fields[field] = _saved_shapes(reader, field)
    request = Request(reader, mesh=mesh, cast=cast, new=new, unused=unused)
    restored = Restored(request, fields, tx)
    request.finish(ignored=reader.extra)
    values = restored.read()
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
    names = _names_in(reader, "params")
    if like is None:
        like = nested(reader, {name: reader.entries[name].keys for name in names}, "params")
        like = jax.tree.map(lambda name: reader.entries[name].like, like)
    request = Request(reader, cast=cast)
    leaves = parts.named("params", like)
    for name, x in leaves.items():
        if x.dtype == jnp.float32:
            request.take(name, x, request.exact(name, x, keeps_main=False))
        elif request.array(name, x):
            request.take(name, x)
    request.finish(ignored=reader.entries.keys() - names)
    found = request.read()
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in leaves])


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


def _names_in(reader: storage.Reader, field: str) -> list[str]:
    """The names of what a checkpoint has of a field of the state."""
    return [x for x in reader.entries if x == field or x.startswith((f"{field}[", f"{field}."))]


def _saved_shapes(reader: storage.Reader, field: str) -> Any:
    """Shapes of what a checkpoint has of a field, in dictionaries; None if that cannot be told."""
    keys = {name: reader.entries[name].keys for name in _names_in(reader, field)}
    if not keys or None in keys.values():
        return None
    return jax.tree.map(lambda name: reader.entries[name].like, nested(reader, keys, "state"))
