"""The files of one checkpoint: arrays that orbax writes and reads, and a header with checksums.

orbax does what is hard about files: arrays of which each process writes its shards, a folder that
gets its name when all is in it, writing in the background, and deleting old steps. Beside that this
module makes the arrays a few at a time, so that they are never there all at once, and compares a
checksum of each: orbax loads changed bits, casts and pads without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jdistadam.checkpoint.checksum import PartialSums, totals
from jdistadam.checkpoint.header import Entry, header_text, read_header
from jdistadam.errors import CheckpointError

OLDEST_ORBAX = "0.12.1"
"""The first release of orbax-checkpoint that asks our handler for arrays which are not made yet."""

ITEM = "state"
"""Name of the folder with the arrays, in that of a step."""

FILE = "header.json"

BATCH_BYTES = 32 << 20
"""Arrays are made and written so many bytes of a device at once, or one alone if it is larger."""

FILE_BYTES = 64 << 20
"""Size of the files. With orbax's 2 GiB nearly all goes into one, which one thread writes."""

SMALL_BYTES = 1 << 16
"""Of an array that all processes have, each writes a part, unless the part is smaller than this."""

compiled = jax.disable_jit(False)
"""Makes a function compile its programs, which say where results are, under jax_disable_jit too."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays that are made together: ``make`` returns those of ``entries``, in this order."""

    entries: tuple[Entry, ...]
    make: Callable[[], Sequence[jax.Array]]
    nbytes: int = 0  # of a device, which they take beside the state or as a part of it


@dataclasses.dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds."""

    groups: tuple[Group, ...]
    about: dict[str, Any]  # what the header says: the count, kind of main parameters, layout

    def filled(self) -> list[Group]:
        """Returns the groups without those of empty arrays, which orbax does not take."""
        return [g for g in self.groups if all(math.prod(entry.shape) for entry in g.entries)]


def batches(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields items in lists of at most so many bytes, or of one alone.

    Example:
      >>> list(batches([2, 1, 9, 1], lambda x: x, limit=3))
      [[2, 1], [9], [1]]
    """
    batch: list[T] = []
    filled = 0
    for item in items:
        if batch and filled + nbytes(item) > limit:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += nbytes(item)
    if batch:
        yield batch


def orbax() -> Any:
    """Returns the module ``orbax.checkpoint``, imported on use.

    Raises:
      CheckpointError: It is not installed, or too old.
    """
    try:
        ocp = importlib.import_module("orbax.checkpoint")
        got, what = ocp.__version__, "is too old"
        found, oldest = (re.findall(r"\d+", version)[:3] for version in (got, OLDEST_ORBAX))
        if [*map(int, found)] >= [*map(int, oldest)]:
            return ocp
    except ImportError as error:
        got, what = f"{type(error).__name__}: {error}", "cannot be imported"
    raise CheckpointError(
        f"orbax-checkpoint: needed for checkpoints, and {what}: got {got}, "
        f'expected orbax-checkpoint >= {OLDEST_ORBAX}. Run pip install "jdistadam[checkpoint]".'
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps orbax's warnings about its own future, and its reports of what we raise, off."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class Writer:
    """Writes the checkpoints of a folder with orbax's CheckpointManager.

    Args:
      folder: The folder of steps; what a save left unfinished in it is deleted.
      keep: How many of the newest checkpoints to keep. None: all.
      in_background: Whether ``save`` returns when the state may change, before all is written.
    """

    def __init__(self, folder: Path, *, keep: int | None, in_background: bool) -> None:
        """Makes the manager."""
        ocp = orbax()
        self._handler = _array_handler()(waits=not in_background)
        types = ocp.type_handlers.create_type_handler_registry((Entry, self._handler))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=in_background,
            cleanup_tmp_directories=True,
        )
        with quiet():
            handler = ocp.PyTreeCheckpointHandler(
                use_zarr3=True, use_compression=False, type_handler_registry=types
            )
            self.manager = ocp.CheckpointManager(
                folder, options=options, item_handlers={ITEM: handler}
            )

    def save(self, step: int, contents: Contents) -> None:
        """Saves a step."""
        tree = {
            _escaped(entry.name): entry for group in contents.filled() for entry in group.entries
        }
        self._handler.contents = contents
        ocp = orbax()
        args = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=FILE_BYTES)
        with quiet():
            saved = self.manager.save(step, args=ocp.args.Composite(**{ITEM: args}), force=True)
        if not saved:
            raise OSError(f"orbax did not save step {step}")

    def wait(self) -> None:
        """Waits until all is written; raises what failed."""
        with quiet():  # what failed is told by this alone; check_for_errors has lost it by then
            self.manager.wait_until_finished()
            self.manager.check_for_errors()


@functools.cache
def _array_handler() -> Any:
    """The class that makes arrays as orbax writes them: orbax is needed to define it."""
    ocp: Any = orbax()

    class ArrayHandler(ocp.type_handlers.ArrayHandler):
        def __init__(self, *, waits: bool) -> None:
            # One file for all shardings, and one for all metadata, do not go with batches. Of one
            # process no device needs help to write what all have: slices of it would be copies.
            super().__init__(
                enable_write_sharding_file=False,
                array_metadata_store=None,
                use_replica_parallel=jax.process_count() > 1,
                min_slice_bytes_for_replica_parallel=SMALL_BYTES,
            )
            self._waits = waits
            self.contents: Any = None  # what is saved next

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            """Writes the arrays in batches; if it waits, one is made while another is written."""
            contents, self.contents = self.contents, None
            for info in infos:  # it has a lock of one event loop, and each batch has another one;
                info.byte_limiter = None  # without it each batch is written as one transaction
            known = {entry.name: pair for entry, *pair in zip(values, infos, args, strict=True)}
            sums: dict[str, PartialSums] = {}
            running: list[Any] = []
            try:
                for batch in batches(contents.filled(), lambda g: g.nbytes, BATCH_BYTES):
                    arrays, names = _made(batch, sums)
                    pairs = [known[name] for name in names]
                    started = await super().serialize(arrays, *zip(*pairs, strict=True))
                    del arrays
                    for name in names:  # whose sums hold the arrays until they are there
                        sums[name].value()
                    before, running = running, running + started  # with the copies on the host
                    if self._waits:
                        for future in before:
                            future.result()
                        running = started
                    del before, started
            except Exception:
                for future in running:  # nothing is written when this has raised
                    with contextlib.suppress(Exception):
                        future.result()
                raise
            entries = [entry for group in contents.groups for entry in group.entries]
            absent = PartialSums(jnp.zeros(0))
            found = totals([sums.get(entry.name, absent) for entry in entries])
            text = header_text(contents.about, entries, found)
            if jax.process_index() == 0:
                future = ocp.future.CommitFutureAwaitingContractedSignals
                running.append(future(_write(infos[0], text), name="header"))
            return running

    return ArrayHandler


@compiled  # here too: where the caller is in an event loop, orbax takes another thread
def _made(
    batch: Sequence[Group], sums: dict[str, PartialSums]
) -> tuple[list[jax.Array], list[str]]:
    """The arrays of a batch and their names; notes their checksums."""
    arrays = [x for group in batch for x in group.make()]
    names = [entry.name for group in batch for entry in group.entries]
    sums.update((name, PartialSums(x)) for name, x in zip(names, arrays, strict=True))
    return arrays, names


async def _write(info: Any, text: str) -> None:
    await info.await_path_creation()
    (info.parent_dir / FILE).write_text(text)


class Read(NamedTuple):
    """Arrays of a checkpoint that are read together: names and places, and what takes them."""

    wanted: Sequence[tuple[str, Sharding]]
    use: Callable[[list[jax.Array]], Any]


class Reader:
    """Reads arrays of one checkpoint, and compares their checksums.

    orbax's readers of a whole tree parse what they know of every array once per batch: of GPT-2 XL
    that takes longer than to read the batch.

    Attributes:
      path: The file of the header.
      entries: What there is to read, by name.
      extra: What the header says of the tree beside the state, by name.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the header in the folder of the arrays."""
        kinds = orbax().type_handlers
        self.path = folder / FILE
        self.entries, self.extra = read_header(self.path)
        self._folder = importlib.import_module("etils.epath").Path(folder)
        self._handler = kinds.ArrayHandler(array_metadata_store=None)
        self._context = kinds.get_ts_context(use_ocdbt=True)  # which keeps the index of all files

    def read(self, reads: Iterable[Read]) -> None:
        """Reads arrays, as many at once as BATCH_BYTES hold, and hands them over.

        Raises:
          CheckpointError: One of them is damaged.
        """
        for batch in batches(reads, self._nbytes, BATCH_BYTES):
            wanted = [one for read in batch for one in read.wanted]
            arrays = self._load(wanted)
            for (name, _), got in zip(wanted, totals([*map(PartialSums, arrays)]), strict=True):
                if got != self.entries[name].sum:
                    raise self._damaged(name, f"checksum {got}", self.entries[name].sum)
            for read in batch:  # each array is free as soon as it was used
                read.use([arrays.pop(0) for _ in read.wanted])

    def _nbytes(self, read: Read) -> int:
        """Returns what a device holds of arrays that are read together."""
        entries = [(self.entries[name], place) for name, place in read.wanted]
        return sum(
            math.prod(place.shard_shape(entry.shape)) * jnp.dtype(entry.dtype).itemsize
            for entry, place in entries
        )

    def _load(self, wanted: Sequence[tuple[str, Sharding]]) -> list[jax.Array]:
        filled = [one for one in wanted if math.prod(self.entries[one[0]].shape)]
        try:
            with quiet():
                found = iter(self.load(filled) if filled else [])
        except Exception as error:  # orbax's own are of many kinds, and thousands of lines long
            # Of several processes each would read others again.
            for one in filled if len(filled) > 1 and jax.process_count() == 1 else []:
                self._load([one])  # says which it is
            text, _, _ = f"{type(error).__name__}: {str(error).strip()}".partition("\n")
            raise self._damaged(filled[0][0], text[:200], "an array that can be read") from None
        arrays = []
        for name, place in wanted:
            entry = self.entries[name]
            x = next(found) if math.prod(entry.shape) else empty(entry.shape, entry.dtype, place)
            if not isinstance(x, jax.Array) or (x.shape, x.dtype) != (entry.shape, entry.dtype):
                raise self._damaged(name, f"{x!r:.100}", f"{entry.dtype}, shape {entry.shape}")
            # On Explicit axes shardings come back spelled in another way; nothing is copied.
            arrays.append(jax.device_put(x, place))
        return arrays

    def load(self, wanted: Sequence[tuple[str, Sharding]]) -> list[Any]:
        """Returns arrays as orbax reads them."""
        kinds = orbax().type_handlers
        infos, args = [], []
        for name, place in wanted:
            info = kinds.ParamInfo(
                name=_escaped(name),
                parent_dir=self._folder,
                skip_deserialize=False,
                is_ocdbt_checkpoint=True,
                use_zarr3=True,
                ts_context=self._context,
            )
            entry = self.entries[name]
            infos.append(info)
            args.append(
                kinds.ArrayRestoreArgs(sharding=place, global_shape=entry.shape, dtype=entry.dtype)
            )

        async def run() -> Any:
            try:
                return await self._handler.deserialize(infos, args)
            except Exception:
                # orbax raises at the first error. A read that is left half done would print a page
                # when it is deleted, or when it finds its event loop closed.
                left = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*left, return_exceptions=True)
                raise

        found: list[Any] = _result_of(run())
        return found

    def _damaged(self, name: str, got: str, expected: Any) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {name}: damaged in the files: got {got}, expected {expected}. "
            "Restore another step."
        )


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine; also for a caller in an event loop, as a notebook's is."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    has_64_bits = bool(jnp.result_type(float) == jnp.float64)

    def run() -> Any:
        with jax.enable_x64(has_64_bits):  # which holds for one thread, if set as a context
            return asyncio.run(coroutine)

    # Not always in a thread: malloc keeps for each thread what it has freed.
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def cast(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array in another dtype, placed as it is."""
    if array.dtype == dtype or array.size:
        return array.astype(dtype)
    return empty(array.shape, dtype, array.sharding)


def empty(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    """Returns an array without elements.

    Not a program's result: XLA gives each device one of the whole shape, also where JAX says that
    it has a part of it, and whoever reads such an array finds that the shapes differ.
    """
    zeros = np.zeros(shape, dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: zeros[index])


def _escaped(name: str) -> str:
    """A name that orbax can use as a part of a path."""
    return name.replace("%", "%25").replace("/", "%2F")
