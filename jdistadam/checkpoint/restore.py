"""Restoring: finds a template's arrays in a checkpoint and compares them before reading."""

from __future__ import annotations

import base64
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.checkpoint import parts
from jdistadam.checkpoint.checkpointer import check_step, local_folder, steps_in
from jdistadam.checkpoint.contents import EXTRA, described
from jdistadam.checkpoint.restored import Predicate, Request, restored_leaves
from jdistadam.checkpoint.storage import ITEM, Reader, orbax
from jdistadam.core import trees
from jdistadam.distributed import host_memory
from jdistadam.distributed.global_arrays import compiled
from jdistadam.distributed.state import is_distributed_state
from jdistadam.distributed.transformation import check_distributed
from jdistadam.errors import CheckpointError, DtypeError, ShapeError, TreeError
from jdistadam.training.remembered import remember_params
from jdistadam.training.train_state import TrainState


def checkpoint_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of a folder's complete checkpoints, in order.

    Returns:
      Numbers of steps, ascending; empty if there is no checkpoint or no folder.

    Example:
      >>> import tempfile
      >>> checkpoint_steps(tempfile.mkdtemp())
      []
    """
    return steps_in(local_folder(folder))


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

    Main parameters and moments are restored bit for bit. With the same kind of main parameters,
    training continues as if it had not stopped. On another number of devices, sums may be added in
    another order, and the loss gets other random keys. All arrays are compared with the checksums
    that the saving devices computed. All processes must call this.

    Args:
      folder: The folder that ``save`` or ``Checkpointer`` wrote.
      template: A state of shapes, ``TrainState.shapes(params, tx)``, or of arrays. With optax's
        Adam also a TrainState of Flax, or a dictionary with ``params`` and ``opt_state``. A
        ``model_state`` or ``rng`` of None is restored as it was saved.
      tx: The distributed optimizer. None for a state of ``fused_adamw`` or of optax.
      step: The number of the checkpoint. None: the newest.
      cast: Whether to cast arrays of another dtype even if that loses bits.
      new: ``new(path)``: whether the file may lack a parameter, its moments or another array, or
        have it in another shape. Such an array stays as in the template, which must then have
        arrays. Missing moments are zero, and a missing average begins with the parameter. Paths are
        as in error messages: ``params['head']['kernel']``, which stands for the moments too,
        ``ema['w']``, ``opt_state[0].x``, ``model_state['mean']``.
      unused: ``unused(path)``: whether the template may lack an array of the file.

    Returns:
      A state like ``template``, with new arrays; parts that ``new`` names may be the template's.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
      TreeError, ShapeError, DtypeError: It does not match the template; the message names the file
        and the leaf.
    """
    host_memory.check_memory(getattr(tx, "config", None), template=template)
    reader = _reader(folder, step)
    fields = parts.fields_of(template)
    request = Request(reader, None, cast, new, unused)
    if is_distributed_state(parts.adam_of(fields["opt_state"])):
        check_distributed(tx)
        request.mesh = tx.config.mesh
    for field in ("model_state", "rng") if isinstance(template, TrainState) else ():
        keys = [reader.entries[name].keys for name in reader.names_in(field)]
        if fields[field] is None and keys and None not in keys:
            fields[field] = _likes(reader, field)
    treedef: Any = jax.tree.structure(template, is_leaf=lambda x: x is not template)
    whole: Any = jax.tree.structure(treedef.unflatten(fields.values()))
    state = whole.unflatten(restored_leaves(request, fields, tx))
    is_whole = isinstance(state, TrainState) and new is None  # its params are those that were saved
    return remember_params(state) if is_whole else state


@compiled
def restore_params(
    folder: str | os.PathLike[str], like: Any = None, *, step: int | None = None, cast: bool = False
) -> Any:
    """Returns only the parameters of a checkpoint, without an optimizer: for inference.

    Args:
      folder: The folder that ``save`` or ``Checkpointer`` wrote.
      like: Tree of arrays or of ``jax.ShapeDtypeStruct``, whose shardings place the parameters;
        without a sharding they are put on the first device. A float32 leaf gets the exact value,
        from the main parameters if the optimizer kept them. None: dictionaries of the params, in
        their saved dtypes, without those that are None.
      step: The number of the checkpoint. None: the newest.
      cast: Whether to cast to the dtypes of ``like`` even if that loses bits.

    Returns:
      A tree like ``like``, or nested dictionaries.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
      TreeError, ShapeError, DtypeError: Its parameters differ from ``like``.

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
    trees.check_numbers(like, name="like")
    if like is None:
        like = _likes(reader, "params")
    instead = "Leave like out, or give it the paths and shapes that were saved"
    request = Request(reader, cast=cast, instead=instead)
    leaves = {leaf.name: leaf.value for leaf in parts.leaves("params", like)}
    for name, x in leaves.items():
        for entry in request.find(name, x, is_exact=jnp.result_type(x) == jnp.float32):
            request.take(name, x, entry)
    request.finish(ignored=reader.entries.keys() - reader.names_in("params"))
    reader.read(request.reads)
    return jax.tree.unflatten(jax.tree.structure(like), [request.values[name] for name in leaves])


@compiled
def restore_extra(
    folder: str | os.PathLike[str], like: Any = None, *, step: int | None = None
) -> Any:
    """Returns the tree that was saved as ``extra`` with the state of a checkpoint.

    Each leaf keeps its type: jax arrays are restored bit for bit and compared with their checksum,
    numpy arrays in numpy, and Python values as such.

    Args:
      folder: The folder that ``save`` or ``Checkpointer`` wrote.
      like: A tree of the saved structure. The shardings of its jax arrays, or of
        ``jax.ShapeDtypeStruct`` in their places, place the new ones; its other values are ignored.
        None: dictionaries, and jax arrays on the first device.
      step: The number of the checkpoint. None: the newest.

    Returns:
      A tree like ``like``, or nested dictionaries.

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
    reader = _reader(folder, step)
    saved = reader.extra
    if like is None and not saved:
        raise _not_saved(reader, EXTRA, "any, as of save(..., extra=tree)")
    keys = {name: about["keys"] for name, about in saved.items()}
    tree = parts.nested(keys, reader.path, EXTRA) if like is None else like
    leaves = {leaf.name: leaf.value for leaf in parts.leaves(EXTRA, tree, parts.is_value)}
    if like is not None:
        _check_like(reader, leaves)
    request = Request(reader)
    known = [name for name in leaves if name in saved]  # all but empty containers
    for name in (name for name in known if "value" not in saved[name]):
        request.take(name, leaves[name] if saved[name]["kind"] == "jax" else None)
    reader.read(request.reads)
    values = leaves | {name: _value(saved[name], request.values.get(name)) for name in known}
    structure = jax.tree.structure(tree, is_leaf=parts.is_value)
    return jax.tree.unflatten(structure, values.values())


def _value(about: dict[str, Any], found: Any) -> Any:
    """A leaf: an array, or the header's value."""
    if about["kind"] == "numpy":
        x = np.frombuffer(np.asarray(found).tobytes(), np.dtype(about["dtype"]))
        x = x.reshape(about["shape"]).copy()
        # A header without the entry is of a version that restored np.array(3) as np.int64(3).
        return x[()] if about.get("is_scalar", True) else x
    if about["kind"] == "bytes":
        return base64.b64decode(about["value"])
    if about["kind"] == "tuple":  # an empty one, which JSON does not know
        return ()
    return about.get("value", found)


def _check_like(reader: Reader, leaves: dict[str, Any]) -> None:
    """Raises unless a checkpoint has exactly these leaves, of the same kinds and shapes."""
    for name, like in leaves.items():
        is_jax = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
        asked = _text({"kind": "jax"} if is_jax else described(name, like), like)
        if name not in reader.extra:
            if parts.is_empty(like):  # nothing is missing
                continue
            raise _not_saved(reader, name, asked)
        entry = reader.entries.get(name)
        saved = _text(reader.extra[name], entry and entry.like)
        if saved != asked:
            error = ShapeError if saved.split(" of ")[0] == asked.split(" of ")[0] else DtypeError
            raise error(
                f"{reader.path}: {name}: differs from like: got {saved} in the file, "
                f"expected {asked}. Pass like as it was saved, or leave it out."
            )
    if rest := [name for name in reader.extra if name not in leaves]:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise TreeError(
            f"{reader.path}: {rest[0]}: in the file, and not in like: got {rest[0]}{more}, "
            "expected a tree that has all that was saved. "
            "Leave like out, and take what you need of the dictionaries."
        )


def _not_saved(reader: Reader, name: str, expected: str) -> TreeError:
    return TreeError(
        f"{reader.path}: {name}: not saved: got {', '.join(reader.extra)[:200] or 'no extra'}, "
        f"expected {expected}. Leave like out, and begin anew with what is not there."
    )


def _text(about: dict[str, Any], like: Any) -> str:
    """Kind, dtype and shape of a leaf; for a jax array those of ``like``."""
    if about["kind"] == "jax":
        return f"jax {like.dtype} of shape {tuple(like.shape)}"
    if about["kind"] == "numpy":
        return f"numpy {about['dtype']} of shape {tuple(about['shape'])}"
    return str(about["kind"])


def _reader(folder: str | os.PathLike[str], step: int | None) -> Reader:
    """Finds a checkpoint and reads its header."""
    orbax()
    check_step(step)
    path = local_folder(folder)
    found = steps_in(path)
    if not found or (step is not None and step not in found):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        got = f"steps {found}" if found else "none"
        raise CheckpointError(
            f"{path!s}: {what}: got {got}, expected a folder that save or Checkpointer wrote. "
            "Check the path; it is that of the folder of all steps."
        )
    return Reader(path / str(found[-1] if step is None else step) / ITEM)


def _likes(reader: Reader, field: str) -> Any:
    """Shapes of a checkpoint's field, in dictionaries."""
    keys = {name: reader.entries[name].keys for name in reader.names_in(field)}
    names = parts.nested(keys, reader.path, field)
    return jax.tree.map(lambda name: reader.entries[name].like, names)
