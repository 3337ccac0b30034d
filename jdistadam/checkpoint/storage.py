"""The files of one checkpoint, which orbax writes and reads.

orbax does what is hard about files: arrays of which each process writes its shards, a folder that
gets its name when all is in it, writing in the background, and deleting old steps. Beside that this
module makes the arrays a few at a time, so that they are never there all at once, and computes and
compares a checksum of each: orbax loads changed bits, casts and pads without a word.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jdistadam.checkpoint import array_files, header
from jdistadam.checkpoint.array_files import FILE_BYTES, ArrayReader, Lazy, array_handler, orbax
from jdistadam.checkpoint.checksum import PartialSums, totals
from jdistadam.checkpoint.contents import Contents
from jdistadam.errors import CheckpointError

ITEM = "state"
"""Name of the folder with the arrays, in that of a step."""

_UNFINISHED = ".orbax-checkpoint-tmp"  # how the names of folders end that orbax has not finished


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns a folder as an absolute path.

    Raises:
      CheckpointError: It is no folder of a file system.
    """
    text = os.fspath(folder)
    if "://" in text:
        raise CheckpointError(
            text,
            "not a folder of a file system",
            got=text,
            expected="a path",
            action="Save into a file system, and copy the complete folders of steps.",
        )
    return Path(os.path.abspath(text))


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of which a folder has complete checkpoints, in order."""
    names = [x.name for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def roll_back(folder: Path, step: int) -> None:
    """Deletes the checkpoints that are newer than that of a step, the newest one first.

    Raises:
      CheckpointError: There are newer ones, and none of this step; nothing is deleted.
    """
    found = steps_in(folder)
    newer = [x for x in found if x > step]
    if newer and step not in found:
        raise CheckpointError(
            str(folder),
            f"no checkpoint of step {step} to roll back to; nothing was deleted",
            got=f"steps {found}",
            expected="one of these",
            action="Pass the step of the checkpoint that was restored as rollback_to=.",
        )
    for x in reversed(newer):
        # The name of an unfinished one: what is left of it, if this is interrupted, is deleted.
        old = (folder / str(x)).rename(folder / f"{x}{_UNFINISHED}")
        shutil.rmtree(old, ignore_errors=True)


# orbax is imported on use, and its classes are needed to define these.


@functools.cache
def _handler() -> Any:
    """The class that writes a state."""
    ocp: Any = orbax()

    class Handler(ocp.PyTreeCheckpointHandler):
        """Writes the arrays of a state, and a header beside them."""

        def __init__(self, waits: bool = True) -> None:
            self._arrays = array_handler()(waits)
            super().__init__(
                use_zarr3=True,
                use_compression=False,
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (Lazy, self._arrays)
                ),
            )
            self._text = ""

        async def async_save(self, directory: Any, args: Any) -> Any:
            """Starts to write; returns when the state may change."""
            futures = await super().async_save(directory, args=args)
            contents: Contents = args.contents
            sums = self._arrays.sums
            names = [entry.name for group in contents.groups for entry in group.entries]
            empty = PartialSums(jnp.zeros(0))
            self._text = header.text_of(contents, totals([sums.get(n, empty) for n in names]))
            return futures

        def finalize(self, directory: Any) -> None:
            """Writes the header, before the folder gets its name."""
            super().finalize(directory)
            if jax.process_index() == 0:
                (directory / header.FILE).write_text(self._text)

    return Handler


def _save() -> Any:
    """The class of the arguments of a save."""
    ocp: Any = orbax()

    class Save(ocp.args.PyTreeSave):
        """The arguments of a save."""

        def __init__(self, contents: Contents) -> None:
            super().__init__(
                {
                    escaped(entry.name): Lazy(entry, group, i)
                    for group in contents.groups
                    for i, entry in enumerate(group.entries)
                    if math.prod(entry.shape)
                },
                ocdbt_target_data_file_size=FILE_BYTES,
            )
            self.contents = contents

    return Save


@functools.cache
def _classes() -> Any:
    """The handler and the arguments of a save, which orbax knows to belong together."""
    ocp: Any = orbax()
    handler, save = _handler(), _save()
    ocp.args.register_with_handler(handler, for_save=True)(save)
    restore = type("Restore", (ocp.args.PyTreeRestore,), {})
    ocp.args.register_with_handler(handler, for_restore=True)(restore)
    return handler, save


def manager(folder: Path, *, keep: int | None, in_background: bool) -> Any:
    """Returns the CheckpointManager of a folder of steps; what a save left unfinished is deleted.

    Args:
      folder: The folder.
      keep: How many of the newest checkpoints to keep. None: all.
      in_background: Whether ``save`` returns when the state may change, before all is written.
    """
    ocp = orbax()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=in_background,
        cleanup_tmp_directories=True,
    )
    handler, _ = _classes()
    with _quiet():
        return ocp.CheckpointManager(
            folder, options=options, item_handlers={ITEM: handler(not in_background)}
        )


def save(checkpoints: Any, step: int, contents: Contents) -> None:
    """Saves a step with a CheckpointManager."""
    _, save_args = _classes()
    args = orbax().args.Composite(**{ITEM: save_args(contents)})
    with _quiet():
        is_saved = checkpoints.save(step, args=args, force=True)
    if not is_saved:
        raise OSError(f"orbax did not save step {step}")


def wait(checkpoints: Any) -> None:
    """Waits until a CheckpointManager has written all; raises what failed."""
    with _quiet():  # what failed is told by this alone; check_for_errors has lost it by then
        checkpoints.wait_until_finished()
        checkpoints.check_for_errors()


def remove_unfinished(folder: Path) -> None:
    """Deletes what a save of this process left, unless others may be writing into it."""
    if jax.process_count() == 1:
        for path in folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)


class Reader:
    """Reads arrays of one checkpoint, a few at a time."""

    def __init__(self, folder: Path, head: header.Header) -> None:
        """Takes the folder of the arrays, and what its header says."""
        self._folder, self.head = folder, head
        self._arrays = ArrayReader(folder)

    def read(self, wanted: Sequence[tuple[str, Sharding]]) -> list[jax.Array]:
        """Returns arrays by name, placed as asked for, after comparing their checksums.

        Raises:
          CheckpointError: One of them is damaged.
        """
        entries = [self.head.entries[name] for name, _ in wanted]
        filled = [(n, s) for (n, s), e in zip(wanted, entries, strict=True) if math.prod(e.shape)]
        found = iter(self._load(filled))
        arrays = [
            next(found) if math.prod(e.shape) else _empty(e.shape, e.dtype, sharding)
            for (_, sharding), e in zip(wanted, entries, strict=True)
        ]
        sums = totals([PartialSums(x) for x in arrays])
        for entry, got in zip(entries, sums, strict=True):
            if got != self.head.sums[entry.name]:
                raise self._damaged(entry.name, f"checksum {got}", self.head.sums[entry.name])
        return arrays

    def read_many(self, wanted: Sequence[tuple[str, Sharding]]) -> list[jax.Array]:
        """The same for many arrays, of which some are read at once."""
        found: list[jax.Array] = []
        batch: list[tuple[str, Sharding]] = []
        filled, limit = 0, array_files.batch_limit(self._bytes(*one) for one in wanted)
        for name, sharding in wanted:
            nbytes = self._bytes(name, sharding)
            if batch and filled + nbytes > limit:
                found += self.read(batch)
                batch, filled = [], 0
            batch.append((name, sharding))
            filled += nbytes
        return found + self.read(batch)

    def _bytes(self, name: str, sharding: Sharding) -> int:
        """Of an array, what a device holds."""
        entry = self.head.entries[name]
        return math.prod(sharding.shard_shape(entry.shape)) * jnp.dtype(entry.dtype).itemsize

    def _load(self, wanted: Sequence[tuple[str, Sharding]]) -> list[jax.Array]:
        if not wanted:
            return []
        try:
            return self._load_all(wanted)
        except CheckpointError:
            raise
        except Exception as error:  # orbax's own are of many kinds, and thousands of lines long
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        # Of several processes each would read others again.
        for one in wanted if len(wanted) > 1 and jax.process_count() == 1 else []:
            self._load([one])  # says which it is
        raise self._damaged(wanted[0][0], text, "an array that can be read")

    def _load_all(self, wanted: Sequence[tuple[str, Sharding]]) -> list[jax.Array]:
        entries = [(escaped(name), self.head.entries[name], place) for name, place in wanted]
        with _quiet():
            found = self._arrays.read(entries)
        # On Explicit axes shardings come back spelled in another way: device_put copies nothing.
        arrays = [jax.device_put(x, place) for x, (_, place) in zip(found, wanted, strict=True)]
        for (name, _), x in zip(wanted, arrays, strict=True):
            entry = self.head.entries[name]
            if not isinstance(x, jax.Array) or (x.shape, x.dtype) != (entry.shape, entry.dtype):
                raise self._damaged(name, f"{x!r:.100}", f"{entry.dtype}, shape {entry.shape}")
        return arrays

    def _damaged(self, name: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {name}",
            "damaged in the files",
            got=got,
            expected=expected,
            action="Restore another step.",
        )


def escaped(name: str) -> str:
    """Returns a name that orbax can use as a part of a path."""
    return name.replace("%", "%25").replace("/", "%2F")


def cast(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array in another dtype, placed as it is."""
    if array.dtype == dtype or array.size:
        return array.astype(dtype)
    return _empty(array.shape, dtype, array.sharding)


def _empty(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    """Returns an array without elements.

    Not a program's result: XLA gives each device one of the whole shape, also where JAX says that
    it has a part of it, and whoever reads such an array finds that the shapes differ.
    """
    zeros = np.zeros(shape, dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: zeros[index])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax's warnings about its own future, and its reports of what we raise, off."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
