"""A folder of checkpoints: a folder and a header for each step, and a lock for the saver.

One process, or the first of several, saves at a time. The file ``.jdistadam.lock`` names it. The
operating system's lock on this file ends with the process, however it ends; so a file left behind
does not block others on the same machine. Other machines may not see the lock on some network file
systems: there a file that names another machine counts until it is five minutes old, and the saving
process renews it every minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdistadam.errors import CheckpointError, HyperparameterError

LOCK = ".jdistadam.lock"
STALE_AFTER = 300.0  # seconds until a file of another machine no longer counts
_RENEWED_EVERY = 60.0
_UNFINISHED = ".orbax-checkpoint-tmp"  # suffix of folders that orbax has not finished


def check_step(step: Any, name: str = "step") -> None:
    """Raises HyperparameterError unless a step is a nonnegative integer."""
    if not isinstance(step, int | np.integer) or isinstance(step, bool) or step < 0:
        raise HyperparameterError(
            f"{name}: not the number of a checkpoint: got {step!r}, "
            "expected a whole number, 0 or more. Pass how many steps were taken, or leave it out."
        )


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns an absolute path; raises CheckpointError unless it is on a file system."""
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
    return sorted(int(name) for name in names if name.isdecimal())


def roll_back(folder: Path, step: int) -> None:
    """Deletes the checkpoints that are newer than a step, newest first.

    Raises CheckpointError if there are newer ones and none of this step.
    """
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


def remove_unfinished(folder: Path) -> None:
    """Deletes unfinished saves of this process, unless others may be writing into the folder."""
    if jax.process_count() == 1:
        for path in folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other savers; raises CheckpointError if another one holds the lock."""
    path, done = folder / LOCK, threading.Event()
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        _check_free(path, file)
        stack.callback(os.truncate, file, 0)  # not removed: another process may have opened it
        os.truncate(file, 0)
        os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        stack.callback(done.set)
        threading.Thread(target=_renew, args=(path, done), daemon=True).start()
        yield


def _renew(path: Path, done: threading.Event) -> None:
    while not done.wait(_RENEWED_EVERY):
        with contextlib.suppress(OSError):
            os.utime(path)


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
        f"Close it, or choose another folder. The file counts for another {STALE_AFTER:.0f} s "
        "after a machine has failed; remove it if you know that one has."
    )
