"""The arrays of one checkpoint, as orbax writes and reads them: in batches, and whole in an error.

orbax is imported here alone, on use. It writes each array that a batch has into files of up to
``FILE_BYTES``, several at once; while a batch is written, the next one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import math
import re
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jdistadam.checkpoint.checksum import PartialSums
from jdistadam.checkpoint.contents import Entry, Group
from jdistadam.errors import CheckpointError

OLDEST_ORBAX = "0.12.1"
"""The first release of orbax-checkpoint that asks our handler for arrays which are not made yet."""

BATCH_BYTES = 32 << 20
"""Arrays are made and written so many bytes of a device at once, or one alone if it is larger."""

FILE_BYTES = 64 << 20
"""Size of the files. With orbax's 2 GiB nearly all goes into one, which one thread writes."""

SMALL_BYTES = 1 << 16
"""Of an array that all processes have, each writes a part, unless the part is smaller than this."""

compiled = jax.disable_jit(False)
"""Makes a function compile its programs, which say where results are, under jax_disable_jit too."""


def batch_limit(sizes: Iterable[int]) -> int:
    """Returns how many bytes of a device are read at once: as many as the largest array needs.

    A save keeps to ``BATCH_BYTES``: there a batch is made while the one before it is written.

    Args:
      sizes: Bytes of each of the arrays, or of what cannot be apart.

    Example:
      >>> batch_limit([1, 2]) == BATCH_BYTES, batch_limit([1, 3 * BATCH_BYTES]) // BATCH_BYTES
      (True, 3)
    """
    return max(BATCH_BYTES, *sizes, 0)


def orbax() -> Any:
    """Returns the module ``orbax.checkpoint``.

    Raises:
      CheckpointError: It is not installed, or too old.
    """
    try:
        ocp = importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise _no_orbax("cannot be imported", f"{type(error).__name__}: {error}") from error
    if _numbers(ocp.__version__) < _numbers(OLDEST_ORBAX):
        raise _no_orbax("is too old", ocp.__version__)
    return ocp


def _no_orbax(what: str, got: str) -> CheckpointError:
    return CheckpointError(
        "orbax-checkpoint",
        f"needed for checkpoints, and {what}",
        got=got,
        expected=f"orbax-checkpoint >= {OLDEST_ORBAX}",
        action='Run pip install "jdistadam[checkpoint]".',
    )


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)[:3]]


class Lazy:
    """Stands for an array of a group, which is not made yet."""

    def __init__(self, entry: Entry, group: Group, index: int) -> None:
        """Takes what it is, and its place in its group."""
        self.shape, self.dtype, self.size = entry.shape, entry.dtype, math.prod(entry.shape)
        self.group, self.index = group, index


# orbax's classes are needed to define this.


@functools.cache
def array_handler() -> Any:
    """The class that makes arrays as orbax writes them, and reads them."""
    ocp: Any = orbax()

    class ArrayHandler(ocp.type_handlers.ArrayHandler):
        """Makes arrays as it writes them; when it returns, what it wrote is on the host."""

        def __init__(self, waits: bool = True) -> None:
            # One file for all shardings, and one for all metadata, do not go with batches. Of one
            # process no device needs help to write what all have: slices of it would be copies.
            super().__init__(
                enable_write_sharding_file=False,
                array_metadata_store=None,
                use_replica_parallel=jax.process_count() > 1,
                min_slice_bytes_for_replica_parallel=SMALL_BYTES,
            )
            self._waits = waits
            self.sums: dict[str, PartialSums] = {}

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            """Writes the arrays in batches; if it waits, one is made while another is written."""
            self.sums = {}
            futures: list[Any] = []
            where = {_key(value): i for i, value in enumerate(values)}
            try:
                for batch in _batches(values):
                    places = [where[id(g), k] for g in batch for k in range(len(g.entries))]
                    before, new = futures, await self._start(batch, infos, args, places)
                    futures = before + new  # which hold the copies on the host
                    if self._waits:
                        for future in before:
                            future.result()
                        futures = new
                    del before, new
            except Exception:
                for future in futures:  # nothing is written when this has raised
                    with contextlib.suppress(Exception):
                        future.result()
                raise
            return futures

        async def _start(
            self, batch: list[Group], infos: Any, args: Any, places: list[int]
        ) -> list[Any]:
            """Starts to write a batch; returns when the state may change."""
            arrays, sums = _made(batch)
            self.sums |= sums
            new: list[Any] = await super().serialize(
                arrays, _of_a_batch(infos, places), [args[i] for i in places]
            )
            del arrays
            for one in sums.values():  # which hold the arrays until they are there
                one.value()
            return new

        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            """Reads arrays; where one cannot be read, raises when the others are done."""
            before = asyncio.all_tasks()
            try:
                return await super().deserialize(infos, args)
            except Exception:
                # orbax raises at the first error. A read that is left half done would print a page
                # when it is deleted, or when it finds its event loop closed.
                left = asyncio.all_tasks() - before
                await asyncio.gather(*left, return_exceptions=True)
                raise

    return ArrayHandler


class ArrayReader:
    """Reads arrays of one checkpoint by their names, in batches.

    orbax's readers of a whole tree parse what they know of every array once per batch: of GPT-2 XL
    that takes longer than to read the batch.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the folder of the arrays."""
        kinds = orbax().type_handlers
        self._folder = importlib.import_module("etils.epath").Path(folder)
        self._handler = array_handler()()
        self._context = kinds.get_ts_context(use_ocdbt=True)  # which keeps the index of all files

    def read(self, wanted: Sequence[tuple[str, Entry, Sharding]]) -> list[Any]:
        """Returns arrays by the names that orbax knows them by, placed as asked for."""
        kinds = orbax().type_handlers
        infos = [
            kinds.ParamInfo(
                name=name,
                parent_dir=self._folder,
                path=self._folder / name,
                skip_deserialize=False,
                byte_limiter=_NoLimit(),
                is_ocdbt_checkpoint=True,
                use_zarr3=True,
                ts_context=self._context,
            )
            for name, _, _ in wanted
        ]
        args = [
            kinds.ArrayRestoreArgs(sharding=sharding, global_shape=entry.shape, dtype=entry.dtype)
            for _, entry, sharding in wanted
        ]
        found: list[Any] = _result_of(self._handler.deserialize(infos, args))
        return found


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


class _NoLimit:
    """Stands for orbax's limit of bytes in flight: the size of a batch is the limit here.

    That one is a lock of one event loop, and each batch has its own.
    """

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        """Begins a write."""

    async def release_bytes(self, requested_bytes: int) -> None:
        """Ends a write."""


def _of_a_batch(infos: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """What orbax knows of the arrays of a batch, changed for it to be written by itself."""
    found = [copy.copy(infos[i]) for i in places]
    for info in found:
        info.byte_limiter = _NoLimit()
    wait = found[0].await_path_creation

    async def begin() -> Any:
        _finish_before_closing(asyncio.get_running_loop())
        return await wait()

    found[0].await_path_creation = begin  # what orbax calls first in the event loop of a batch
    return found


def _finish_before_closing(loop: Any) -> None:
    """Makes an event loop wait for what still runs in it when it is closed.

    When a write fails, orbax closes the loop at once, and each of those that go on would print a
    page when it finds the loop closed.
    """
    close = loop.close

    def close_when_done() -> None:
        left = asyncio.all_tasks(loop)
        if left:
            loop.run_until_complete(asyncio.wait(left))
        close()

    loop.close = close_when_done


@compiled  # here too: where the caller is in an event loop, orbax takes another thread
def _made(batch: Sequence[Group]) -> tuple[list[jax.Array], dict[str, PartialSums]]:
    """The arrays of a batch, and their checksums by name."""
    arrays = [x for group in batch for x in group.make()]
    names = [entry.name for group in batch for entry in group.entries]
    return arrays, {name: PartialSums(x) for name, x in zip(names, arrays, strict=True)}


def _batches(values: Sequence[Lazy]) -> Iterator[list[Group]]:
    """The groups of arrays, as many at once as fit in a batch."""
    batch: list[Group] = []
    seen: set[int] = set()
    filled = 0
    for value in values:
        group = value.group
        if id(group) in seen:
            continue
        seen.add(id(group))
        if batch and filled + group.nbytes > BATCH_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(group)
        filled += group.nbytes
    if batch:
        yield batch


def _key(value: Lazy) -> tuple[int, int]:
    return id(value.group), value.index
