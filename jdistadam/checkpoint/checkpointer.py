"""Saves one checkpoint, or one every N steps with the newest kept; locks their folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdistadam.checkpoint import storage
from jdistadam.checkpoint.contents import agreed_extra, contents_of
from jdistadam.checkpoint.parts import fields_of
from jdistadam.core import trees
from jdistadam.core.arguments import check_count, shown
from jdistadam.distributed.global_arrays import compiled
from jdistadam.errors import CheckpointError, HyperparameterError, TreeError
from jdistadam.training.agreement import check_agreement, later_limit

LOCK = ".jdistadam.lock"
STALE_AFTER = 300.0  # seconds until a file of another machine no longer counts
_RENEWED_EVERY = 60.0
_UNFINISHED = ".orbax-checkpoint-tmp"  # suffix of folders that orbax has not finished


class Checkpointer:
    """Saves the states of a training run into a folder, one after the other.

    Use it in a ``with`` block, or call ``close``, which waits for pending writes and lets others
    save into the folder. Each checkpoint is a folder, which is named by its step when it is
    complete. Unfinished checkpoints of an earlier process are deleted. A new checkpoint must be the
    newest, because ``restore`` reads the newest, and ``keep`` counts from it.

    Args:
      folder: The folder, on a file system that renames atomically. It is created if missing.
      tx: The distributed optimizer; None for states of ``fused_adamw`` and of optax.
      every: ``after_step`` saves if ``every`` divides the step. None: never.
      keep: How many of the newest checkpoints to keep. None: all.
      rollback_to: The step of an older checkpoint from which training continues differently. All
        newer ones are deleted immediately. Leave it out when restarting the run, because it would
        delete the run's own checkpoints. None: nothing is deleted, and saving an older step raises.
      in_background: Whether to write while training continues. If so, the host holds this process's
        part of the state until it is written. Otherwise the host holds two batches of at most 32
        MiB for each device of the process. In both cases a device holds two batches besides the
        state while ``save`` runs.

    Raises:
      CheckpointError: Another process saves into the folder, it cannot be written, the checkpoint
        ``rollback_to`` does not exist, or orbax-checkpoint is not installed.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
      >>> with Checkpointer(tempfile.mkdtemp(), tx, every=100, keep=2) as checkpointer:
      ...     checkpointer.after_step(99, state), checkpointer.after_step(100, state)
      (False, True)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tx: Any = None,
        *,
        every: int | None = None,
        keep: int | None = None,
        rollback_to: int | None = None,
        in_background: bool = True,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None:
                check_count(name, value)
        check_step(rollback_to, "rollback_to")
        storage.orbax()
        self.folder = local_folder(folder)
        self.every, self._tx = every, tx
        self._last: int | None = None  # may still be being written, and have no folder yet
        self._handler = storage.array_handler()(waits=not in_background)
        with contextlib.ExitStack() as opened:

            def prepare() -> None:
                self.folder.mkdir(parents=True, exist_ok=True)
                opened.enter_context(_locked(self.folder))
                if rollback_to is not None:
                    _roll_back(self.folder, rollback_to)

            _on_first_process(self.folder, prepare)
            self._newest = max(steps_in(self.folder), default=0)
            with storage.quiet():
                self._manager = storage.manager(self.folder, self._handler, keep, in_background)
            opened.callback(self._manager.close)
            self._close, self._is_closed = opened.pop_all().close, False

    @compiled
    def save(self, state: Any, *, step: int | None = None, extra: Any = None) -> int:
        """Saves a state, which may be changed or donated as soon as this returns.

        Args:
          state: A TrainState of this package or of Flax, or a dictionary with ``params`` and
            ``opt_state``.
          step: The number of the checkpoint. None: ``state.step``, or the count of the optimizer if
            the state has no step.
          extra: A tree of your own, for ``restore_extra``: jax arrays, numpy arrays of any dtype
            but object, and Python's bool, int, float, str, bytes and None. Python values are
            written into the header and should be small. Everything but global jax arrays must be
            the same in all processes.

        Returns:
          The number of the checkpoint.

        Raises:
          CheckpointError: A checkpoint of this number, or a newer one, exists; this save failed,
            or the previous one in the background; it is closed.
          LayoutError, TreeError, DtypeError: The state is traced, or cannot be saved with this
            ``tx``; or its params were changed, and its main parameters were not. ``extra`` has a
            leaf that cannot be saved.
          AgreementError: ``step`` or ``extra`` differs between processes, or one does not save.
        """
        self.check()
        check_step(step)
        if trees.is_traced(state):
            raise TreeError(
                "state: traced, so that it holds no values to save: got a state inside of jax.jit, "
                "lax.scan or the like, expected the arrays that a step returned. "
                "Save after the step, outside of the jitted function."
            )
        contents = contents_of(state, self._tx, agreed_extra(step, extra))
        number = _number_of(state, contents.about["count"]) if step is None else int(step)
        if number == self._last or (self.folder / str(number)).exists():
            raise CheckpointError(
                f"{self.folder / str(number)!s}: there is a checkpoint of this step already: "
                f"got step {number}, expected another step. "
                "Pass another step=, or delete that checkpoint."
            )
        self._check_is_newest(number)
        with self._writing():
            self._handler.contents = contents
            if not self._manager.save(number, args=storage.args_of(contents), force=True):
                raise OSError(f"orbax did not save step {number}")
        self._last = number
        return number

    def after_step(self, step: int, state: Any, extra: Any = None) -> bool:
        """Saves if ``every`` divides the step; call it after every step.

        Args:
          step: The number of steps including this one: 1 after the first. It equals ``state.step``
            unless gradients caused a skipped step, and is the number of the checkpoint.
          state: The state that the step returned.
          extra: As in ``save``.

        Returns:
          Whether it saved.

        Raises:
          CheckpointError: A save failed, also one in the background; or newer checkpoints exist,
            even if this step is not saved.
          HyperparameterError, TreeError: ``step`` is no number, or ``state`` no state.
        """
        self.check()
        if not _is_step(step):
            is_swapped = isinstance(state, int | np.integer)
            raise HyperparameterError(
                "after_step: the first argument is not the number of a step: got "
                f"{type(step).__name__ if is_swapped else shown(step)}, expected a whole number, 0 "
                "or more. Call after_step(step, state), where step is counted on the host, or "
                "int(state.step)."
            )
        fields_of(state)
        if self.every is None:
            return False
        if step < self._newest:  # now, instead of after many steps that cannot be saved
            self._check_is_newest(step)
        if step % self.every:
            return False
        self.save(state, step=step, extra=extra)
        return True

    def check(self) -> None:
        """Raises CheckpointError if a background save has failed; does not wait for it.

        Also after ``close``.
        """
        if self._is_closed:
            raise CheckpointError(
                f"{self.folder!s}: this Checkpointer is closed: got a call after close(), expected "
                "none. Make another Checkpointer, or close it after the last save."
            )
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until everything is written; raises CheckpointError if that failed."""
        with self._writing():  # its error says what failed; check_for_errors no longer has it
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits and raises as ``wait`` does; then others may save."""
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._close()

    def __enter__(self) -> Checkpointer:
        """Returns itself."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Closes; after another error, ignores one of a failed save."""
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise

    def _check_is_newest(self, step: int) -> None:
        """Raises CheckpointError if there are newer checkpoints, which restore would read."""
        known = {*steps_in(self.folder), *(() if self._last is None else (self._last,))}
        if newer := sorted(x for x in known if x > step):
            raise CheckpointError(
                f"{self.folder!s}: there are newer checkpoints, which restore would take "
                f"in place of this one: got step {step}, and checkpoints of {newer}, "
                f"expected a step above {newer[-1]}. To go on from an older checkpoint, "
                "delete those that are newer: Checkpointer(folder, tx, rollback_to=STEP) with the "
                "step that was restored. To keep them, save into another folder."
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of orbax and of the system into CheckpointError."""
        try:
            with storage.quiet():
                yield
        except Exception as error:
            self._last = None
            if jax.process_count() == 1:  # or others may be writing
                for path in self.folder.glob(f"*{_UNFINISHED}"):  # it may be what fills the disk
                    shutil.rmtree(path, ignore_errors=True)
            text = str(error).strip().partition("\n")[0]
            if len(text) > 300:  # file names, the system's message, and its end
                code = re.search(r"os_error_code=\W*(\d+)", str(error))
                text = f"{text[:100]} … {os.strerror(int(code[1])) if code else text[-200:]}"
            expected, action = "a folder that can be written", "See to the folder and its disk"
            if jax.process_count() > 1:
                expected += ", and no process that has ended"
                action += ", and to the logs of the other processes"
            raise CheckpointError(
                f"{self.folder!s}: a checkpoint could not be written; the ones before it are "
                f"whole: got {type(error).__name__}: {text}, expected {expected}. "
                f"{action}, and save again."
            ) from error


def save(
    folder: str | os.PathLike[str],
    state: Any,
    tx: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
) -> int:
    """Saves a state into ``folder/STEP`` and returns the step when all of it is written.

    The files do not depend on the mesh, the strategy or the number of processes, so ``restore``
    reads them under any other. All processes must call this. To save every N steps in the
    background, use ``Checkpointer``.

    Args:
      folder: The folder of all checkpoints of a training run.
      state: As in ``Checkpointer.save``.
      tx: The distributed optimizer; None for a state of ``fused_adamw`` or of optax.
      step: The number of the checkpoint, as in ``Checkpointer.save``.
      extra: A tree of your own, for ``restore_extra``.

    Returns:
      The number of the checkpoint.

    Raises:
      CheckpointError: A checkpoint of this step, or a newer one, exists, another process saves
        into the folder, or it cannot be written.
      LayoutError, TreeError, DtypeError: The state cannot be saved, or not with this ``tx``; or its
        params were changed, and its main parameters were not.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> folder = tempfile.mkdtemp()
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> save(folder, jda.TrainState.create({"w": jnp.ones(3)}, tx), tx)
      0
      >>> shapes = jda.TrainState.shapes({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, tx)
      >>> jda.restore(folder, shapes, tx).params["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    with Checkpointer(folder, tx, in_background=False) as checkpointer:
        return checkpointer.save(state, step=step, extra=extra)


def _number_of(state: Any, count: int) -> int:
    """``state.step``: wrappers such as MultiSteps update, and count, in some steps alone."""
    step = getattr(state, "step", count)
    return int(step) if np.ndim(step) == 0 else count


def _is_step(step: Any) -> bool:
    is_number = isinstance(step, int | np.integer) and not isinstance(step, bool)
    return is_number and bool(step >= 0)


def check_step(step: Any, name: str = "step") -> None:
    """Raises HyperparameterError unless a step is a nonnegative integer, or None."""
    if step is not None and not _is_step(step):
        raise HyperparameterError(
            f"{name}: not the number of a checkpoint: got {step!r}, "
            "expected a whole number, 0 or more. Pass how many steps were taken, or leave it out."
        )


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns an absolute path; raises CheckpointError unless it is one of a file system."""
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(
            f"folder: not a path: got {type(folder).__name__}, expected a string or a path. "
            "Pass the folder first: save(folder, state, tx) and restore(folder, template, tx)."
        )
    text = os.fspath(folder)
    if "://" in text:
        raise CheckpointError(
            f"{text}: not a folder of a file system: got {text}, expected a path. "
            "Save into a file system, and copy the complete folders of steps."
        )
    return Path(os.path.abspath(text))


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of a folder's complete checkpoints, in order."""
    names = [x.name for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
    # Only names that orbax writes: not "007", nor digits of other scripts.
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _roll_back(folder: Path, step: int) -> None:
    """Deletes the checkpoints newer than a step, newest first; raises if there is none of it."""
    found = steps_in(folder)
    newer = [x for x in found if x > step]
    if newer and step not in found:
        raise CheckpointError(
            f"{folder!s}: no checkpoint of step {step} to roll back to; nothing was deleted: "
            f"got steps {found}, expected one of these. "
            "Pass the step of the checkpoint that was restored as rollback_to=."
        )
    for x in reversed(newer):
        # Named as unfinished: if this is interrupted, the rest is deleted later.
        old = (folder / str(x)).rename(folder / f"{x}{_UNFINISHED}")
        shutil.rmtree(old, ignore_errors=True)


# One process, or the first of several, saves at a time. The operating system's lock on the file
# ``.jdistadam.lock`` ends with the process, however it ends, so a file left behind does not block
# others on the same machine. On some network file systems other machines may not see the lock.
# There, a file that names another machine counts until it is five minutes old, and the saving
# process renews it every minute.


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other savers; raises CheckpointError if another one holds the lock."""
    path, done = folder / LOCK, threading.Event()

    def renew() -> None:
        while not done.wait(_RENEWED_EVERY):
            with contextlib.suppress(OSError):
                os.utime(path)

    with open(path, "a+", opener=_open_own_file) as file:
        _check_free(path, file.fileno())
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        threading.Thread(target=renew, daemon=True).start()
        try:
            yield
        finally:
            done.set()
            file.truncate(0)  # not removed: another process may have opened it


def _open_own_file(path: str, flags: int) -> int:
    """Opens a file itself, not one to which a symbolic link points; raises OSError for others."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file


def _check_free(path: Path, file: int) -> None:
    """Locks the file; raises if that fails, or if another machine saves, whose lock is unseen."""
    holder: Any = {}
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_text())
    holder = holder if isinstance(holder, dict) else {}
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        age = time.time() - path.stat().st_mtime
        if holder.get("host", socket.gethostname()) == socket.gethostname() or age >= STALE_AFTER:
            return
        detail = f"renewed {age:.0f} s ago"
    except OSError as error:
        detail = error.strerror or str(error)
    raise CheckpointError(
        f"{path!s}: another one saves into this folder: got pid {holder.get('pid', 'unknown')} "
        f"on {holder.get('host', 'unknown')} ({detail}), expected one that saves at a time. "
        "If it is of a run of which another process died, end it; else close it, or choose another "
        f"folder. The file counts for another {STALE_AFTER:.0f} s "
        "after a machine has failed; remove it if you know that one has."
    )


def _on_first_process(folder: Path, function: Callable[[], None]) -> None:
    """Calls a function on the first process; all processes raise if it fails."""
    failure: Any = None
    if jax.process_count() > 1:  # what follows is a collective
        processes = range(jax.process_count())
        check_agreement("save or Checkpointer", {}, processes, later_limit())
    if jax.process_index() == 0:
        try:
            function()
        except (OSError, CheckpointError) as error:
            failure = error
    has_failed = bool(multihost_utils.broadcast_one_to_all(np.asarray(failure is not None)))
    if isinstance(failure, CheckpointError):
        raise failure
    if has_failed:
        raise CheckpointError(
            f"{folder!s}: cannot be made or locked: got "
            f"{failure or 'an error of the first process'}, expected a folder that can be written. "
            "Choose another folder, or see the error of the first process."
        )
