"""The files of one checkpoint: arrays that orbax writes and reads, and a header with checksums.

orbax does the hard parts: each process writes its shards, a folder gets its name when it is
complete, writing runs in the background, and old steps are deleted. This module makes the arrays a
few at a time, so that they never exist all at once. It compares a checksum of each, because orbax
loads changed bits, casts and pads without a warning.

The header is one JSON file::

    {"sha256": "…", "header": {"format": "jdistadam checkpoint", "version": 1, "count": 100,
     "main_params": "float32", "layout_identity": "{…}", "written_by": {"jax": "0.11.2", …},
     "extra": {"extra['epoch']": {"keys": ["epoch"], "kind": "int", "value": 3}},
     "leaves": {"mu['w']": {"shape": [512, 64], "dtype": "float32", "sum": "0123456789abcdef"}}}}
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jdistadam.checkpoint.checksum import PartialSums, partial_sums, totals
from jdistadam.checkpoint.parts import Entry
from jdistadam.core.trees import runs_within
from jdistadam.distributed.global_arrays import compiled
from jdistadam.errors import CheckpointError

FORMAT = "jdistadam checkpoint"
VERSION = 1  # increases when files of the same form would mean something else
# The first release of orbax-checkpoint that asks our handler for arrays that do not exist yet.
OLDEST_ORBAX = "0.12.1"
ITEM = "state"  # the folder with the arrays, within that of a step
FILE = "header.json"
# Bytes of a device that are made and written at once; a single array may be larger.
BATCH_BYTES = 32 << 20
# Size of the files. With orbax's 2 GiB nearly all data goes into one, which one thread writes.
FILE_BYTES = 64 << 20
# Each process writes a part of a replicated array, unless the part is smaller than this.
SMALL_BYTES = 1 << 16

Wanted = tuple[Entry, Sharding]  # an array to read


class Group(NamedTuple):
    """Arrays that are made together: ``make`` returns those of ``entries``, in this order."""

    entries: Sequence[Entry]
    make: Callable[[], Sequence[jax.Array]]
    nbytes: int = 0  # of a device: besides the state, or as a part of it


class Contents(NamedTuple):
    """All contents of a checkpoint, and its header: count, main parameters, layout."""

    groups: list[Group]
    about: dict[str, Any]

    def filled(self) -> list[Group]:
        """Returns the groups without empty arrays, which orbax rejects."""
        return [g for g in self.groups if all(math.prod(entry.shape) for entry in g.entries)]


class Read(NamedTuple):
    """Arrays that are read together, and the function that takes them."""

    wanted: Sequence[Wanted]
    use: Callable[[collections.deque[jax.Array]], Any]

    @property
    def nbytes(self) -> int:
        """The bytes of them that a device holds."""
        return sum(
            math.prod(place.shard_shape(entry.shape)) * entry.dtype.itemsize
            for entry, place in self.wanted
        )


def batches(items: Sequence[Any]) -> list[list[Any]]:
    """Returns groups or reads in lists of at most BATCH_BYTES, or of a single larger one."""
    return runs_within(items, [item.nbytes for item in items], BATCH_BYTES)


def orbax() -> Any:
    """Returns the module ``orbax.checkpoint``; raises CheckpointError without it, or if too old."""
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
    """Silences orbax's warnings about its own future, and its reports of our errors."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def manager(folder: Path, handler: Any, keep: int | None, in_background: bool) -> Any:
    """Returns orbax's CheckpointManager of a folder; it deletes unfinished saves."""
    ocp = orbax()
    types = ocp.type_handlers.create_type_handler_registry((Entry, handler))
    of_trees: Any = dict(use_zarr3=True, use_compression=False, type_handler_registry=types)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=in_background, cleanup_tmp_directories=True
    )
    handlers = {ITEM: ocp.PyTreeCheckpointHandler(**of_trees)}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def args_of(contents: Contents) -> Any:
    """Returns the manager's arguments for saving."""
    tree = {_escaped(entry.name): entry for group in contents.filled() for entry in group.entries}
    saved = orbax().args.PyTreeSave(tree, ocdbt_target_data_file_size=FILE_BYTES)
    return orbax().args.Composite(**{ITEM: saved})


@functools.cache
def array_handler() -> Any:
    """The class that makes arrays as orbax writes them; defining it needs orbax."""
    ocp: Any = orbax()

    class ArrayHandler(ocp.type_handlers.ArrayHandler):
        def __init__(self, *, waits: bool) -> None:
            # A single file for all shardings or for all metadata does not work with batches. With
            # one process, no device helps to write replicated arrays: slices would be copies.
            super().__init__(
                enable_write_sharding_file=False,
                array_metadata_store=None,
                use_replica_parallel=jax.process_count() > 1,
                min_slice_bytes_for_replica_parallel=SMALL_BYTES,
            )
            self._waits = waits
            self.contents: Any = None  # saved next

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            """Writes the arrays in batches; if it waits, it makes one while writing another."""
            contents, self.contents = self.contents, None
            for info in infos:  # its lock belongs to one event loop, each batch has another;
                info.byte_limiter = None  # without it each batch is written as one transaction
            known = {entry.name: pair for entry, *pair in zip(values, infos, args, strict=True)}
            sums: dict[str, PartialSums] = {}
            running: list[Any] = []
            try:
                for batch in batches(contents.filled()):
                    arrays, new = _made(batch)
                    pairs = [known[name] for name in new]
                    started = await super().serialize(arrays, *zip(*pairs, strict=True))
                    del arrays
                    for of_array in new.values():  # they hold the arrays until then
                        of_array.value()
                    sums |= new
                    before, running = running, running + started  # they hold host copies
                    if self._waits:
                        for future in before:
                            future.result()
                        running = started
                    del before, started
            except Exception:
                for future in running:  # nothing is written if this has raised
                    with contextlib.suppress(Exception):
                        future.result()
                raise
            text = _header_text(contents, sums)
            if jax.process_index() == 0:
                future = ocp.future.CommitFutureAwaitingContractedSignals
                running.append(future(_write(infos[0], text), name="header"))
            return running

    return ArrayHandler


@compiled  # here too: if the caller is in an event loop, orbax takes another thread
def _made(batch: list[Group]) -> tuple[list[jax.Array], dict[str, PartialSums]]:
    """The arrays of a batch, and their checksums by name."""
    arrays = [x for group in batch for x in group.make()]
    names = (entry.name for group in batch for entry in group.entries)
    return arrays, dict(zip(names, partial_sums(arrays), strict=True))


async def _write(info: Any, text: str) -> None:
    await info.await_path_creation()
    (info.parent_dir / FILE).write_text(text)


def _header_text(contents: Contents, sums: dict[str, PartialSums]) -> str:
    """The text of the header; all processes add up their sums of arrays for it."""
    entries = [entry for group in contents.groups for entry in group.entries]
    absent = PartialSums(is_of_one_process=True)
    found = totals([sums.get(entry.name, absent) for entry in entries])
    leaves = {}
    for entry, total in zip(entries, found, strict=True):
        said = vars(entry) | {"name": None, "dtype": entry.dtype.name, "sum": total}
        leaves[entry.name] = {key: x for key, x in said.items() if x not in (None, False)}
    versions = dict.fromkeys(("jdistadam", "jax", "orbax-checkpoint", "optax"), "unknown")
    for package in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):  # imported from a source tree
            versions[package] = metadata.version(package)
    header = {"format": FORMAT, "version": VERSION, **contents.about}
    header |= {"written_by": versions, "leaves": leaves}
    return json.dumps({"sha256": _digest(header), "header": header}, indent=1) + "\n"


def _digest(header: dict[str, Any]) -> str:
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The arrays of a checkpoint by name, and the header's entry of the extra tree.

    Raises CheckpointError if the header is missing, damaged, or of another format or version.
    """
    expected, action = "a header", "Restore another step, or another folder."
    try:
        parsed = _typed(json.loads(path.read_text()), dict)
        values, digest = _typed(parsed["header"], dict), parsed["sha256"]
        if values["format"] != FORMAT:
            what, got = "the header of something else", values["format"]
        elif _digest(values) != digest:
            what, got, expected = "damaged: its own checksum differs", _digest(values), digest
        elif values["version"] != VERSION:
            what, expected = "a checkpoint of another version", f"version {VERSION}"
            got = f"version {values['version']}, written by {values.get('written_by')}"
            action = "Read it with the release that wrote it, and save it with to_optax_state."
        else:
            entries = _each(values["leaves"], _entry)
            check = functools.partial(_extra, entries=entries)
            return entries, _each(values.get("extra", {}), check)
    except FileNotFoundError:
        what, got = "missing: this is no checkpoint of jdistadam, or a part of one", "no file"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what, got = "damaged, or of something else", f"{type(error).__name__}: {str(error)[:200]}"
    raise CheckpointError(f"{path!s}: {what}: got {got}, expected {expected}. {action}")


def _typed(value: Any, kind: Any) -> Any:
    """Returns a value of a header; raises TypeError if it has another type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.50} of type {type(value).__name__}, in place of {kind}")
    return value


def _each(items: Any, make: Callable[[str, dict[str, Any]], Any]) -> dict[str, Any]:
    """Makes each entry of a part of a header; raises ValueError with the name of a damaged one."""
    made = {}
    for name, about in _typed(items, dict).items():
        try:
            made[name] = make(name, _typed(about, dict))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    return made


def _sizes(value: Any) -> tuple[int, ...]:
    if any(_typed(size, int) < 0 for size in _typed(value, list)):
        raise ValueError(f"shape {value}")
    return tuple(value)


def _keys(value: Any) -> tuple[str, ...] | None:
    return None if value is None else tuple(_typed(key, str) for key in _typed(value, list))


def _entry(name: str, leaf: dict[str, Any]) -> Entry:
    """An array of a header; raises ValueError, TypeError or KeyError unless it is one."""
    entry = Entry(
        name,
        _sizes(leaf["shape"]),
        jnp.dtype(_typed(leaf["dtype"], str)),
        keys=_keys(leaf.get("keys")),
        is_count=_typed(leaf.get("is_count", False), bool),
        **{key: _typed(leaf.get(key), str | None) for key in ("key", "sent", "sum")},
    )
    if entry.key is not None:
        _ = entry.like  # raises for an implementation of keys that does not exist
    return entry


_KINDS = {"bool": bool, "int": int, "float": float, "str": str, "NoneType": type(None)}
_KINDS |= {"dict": dict, "list": list, "tuple": list}  # if they are empty


def _extra(name: str, about: dict[str, Any], entries: dict[str, Entry]) -> dict[str, Any]:
    """An extra leaf of a header; raises ValueError, TypeError or KeyError unless it is one."""
    _keys(about["keys"])
    kind = _typed(about["kind"], str)
    if kind == "numpy":
        _typed(about.get("is_scalar", True), bool)
        itemsize = np.dtype(_typed(about["dtype"], str)).itemsize
        expected = (math.prod(_sizes(about["shape"])) * itemsize,), np.uint8
        if (entries[name].shape, entries[name].dtype) != expected:
            raise ValueError(f"shape {about['shape']} of {about['dtype']}")
    elif kind == "bytes":
        base64.b64decode(_typed(about["value"], str), validate=True)
    elif kind == "jax":
        _ = entries[name]
    else:
        _typed(about["value"], _KINDS[kind])
    return about


class Reader:
    """Reads arrays of one checkpoint, and compares their checksums.

    orbax's readers of a whole tree parse their metadata of every array once per batch. For GPT-2 XL
    that takes longer than reading the batch.

    ``path`` is the header, ``entries`` are the readable arrays by name, and ``extra`` is the
    header's entry of the extra tree.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.entries, self.extra = _read_header(self.path)
        self._folder = importlib.import_module("etils.epath").Path(folder)
        # With the index of all files.
        self._context = orbax().type_handlers.get_ts_context(use_ocdbt=True)

    def names_in(self, field: str) -> list[str]:
        """Returns the names of the arrays in a field of the state."""
        return [x for x in self.entries if x == field or x.startswith((f"{field}[", f"{field}."))]

    def read(self, reads: Sequence[Read]) -> None:
        """Reads arrays in batches and passes them on; raises CheckpointError for a damaged one."""
        for batch in batches(reads):
            wanted = [one for read in batch for one in read.wanted]
            arrays = collections.deque(self._load(wanted))
            for (entry, _), got in zip(wanted, totals(partial_sums(arrays)), strict=True):
                if got != entry.sum:
                    raise self._damaged(entry, f"checksum {got}", entry.sum)
            for read in batch:  # each array is freed once it is used
                read.use(collections.deque(arrays.popleft() for _ in read.wanted))

    def _load(self, wanted: Sequence[Wanted]) -> list[jax.Array]:
        filled = [one for one in wanted if math.prod(one[0].shape)]
        try:
            with quiet():
                found = iter(self.load(filled) if filled else [])
        except Exception as error:  # orbax raises many kinds of errors, with thousands of lines
            # With several processes, each would read different arrays again.
            for one in filled if len(filled) > 1 and jax.process_count() == 1 else []:
                self._load([one])  # its error names the array
            text, _, _ = f"{type(error).__name__}: {str(error).strip()}".partition("\n")
            raise self._damaged(filled[0][0], text[:200], "an array that can be read") from None
        arrays = []
        for entry, place in wanted:
            shape, dtype = entry.shape, entry.dtype
            x = next(found) if math.prod(shape) else empty(shape, dtype, place)
            if not isinstance(x, jax.Array) or (x.shape, x.dtype) != (shape, dtype):
                raise self._damaged(entry, f"{x!r:.100}", f"{dtype}, shape {shape}")
            arrays.append(x)
        # Replicas are copied. On Explicit axes only the spelling of shardings changes: no copies.
        return jax.device_put(arrays, [place for _, place in wanted])

    def load(self, wanted: Sequence[Wanted]) -> list[Any]:
        """Returns arrays as orbax reads them."""
        kinds, infos, args = orbax().type_handlers, [], []
        about: Any = dict(parent_dir=self._folder, skip_deserialize=False, use_zarr3=True)
        about |= dict(is_ocdbt_checkpoint=True, ts_context=self._context)
        for entry, place in wanted:
            infos.append(kinds.ParamInfo(name=_escaped(entry.name), **about))
            shape, dtype, place = entry.shape, entry.dtype, _read_at(place)
            args.append(kinds.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype))

        async def run() -> Any:
            try:
                return await kinds.ArrayHandler(array_metadata_store=None).deserialize(infos, args)
            except Exception:
                # orbax raises at the first error. An unfinished read would print a page when it is
                # deleted, or when its event loop is closed.
                left = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*left, return_exceptions=True)
                raise

        return _result_of(run())

    def _damaged(self, entry: Entry, got: str, expected: Any) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {entry.name}: damaged in the files: got {got}, expected {expected}. "
            "Restore another step."
        )


def _read_at(place: Sharding) -> Sharding:
    """Where an array is read: replicas of one process are copies of a single one."""
    devices: Any = place.device_set
    if len(devices) > 1 and place.is_fully_replicated and place.is_fully_addressable:
        return SingleDeviceSharding(min(devices, key=lambda x: x.id))
    return place


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine; also if the caller is in an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    has_64_bits = bool(jnp.result_type(float) == jnp.float64)

    def run() -> Any:
        with jax.enable_x64(has_64_bits):  # as a context it holds for one thread
            return asyncio.run(coroutine)

    # Only in a thread if needed: malloc keeps freed memory for each thread.
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def empty(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    """Returns an array without elements.

    It is not a program's result: XLA gives each device an array of the whole shape, even if JAX
    says that it has a part, and readers of such an array find that the shapes differ.
    """
    zeros = np.zeros(shape, dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: zeros[index])


def _escaped(name: str) -> str:
    """A name that orbax can use in a path."""
    return name.replace("%", "%25").replace("/", "%2F")
