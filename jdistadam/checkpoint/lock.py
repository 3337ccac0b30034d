"""One process, or the first of several, saves into a folder at a time.

The file ``.jdistadam.lock`` names who saves. Its lock, of the operating system, ends with the
process however that ends, so that on one machine a file that was left behind is no obstacle. Other
machines may not see the lock, on some network file systems: a file that names another machine
counts until it is five minutes old, and who saves renews it every minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from jdistadam.errors import CheckpointError

FILE = ".jdistadam.lock"
STALE_AFTER = 300.0
"""Seconds after which a file that another machine wrote no longer counts."""

_RENEWED_EVERY = 60.0


class FolderLock:
    """Holds a folder from when it is made until ``release``, or until the process ends.

    Raises:
      CheckpointError: Another one holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock."""
        self._path = folder / FILE
        self._file: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_machine()
        except (OSError, CheckpointError) as error:
            holder = self._holder()
            os.close(self._file)
            self._file = None
            raise (
                error
                if isinstance(error, CheckpointError)
                else self._taken(holder, f"{error.strerror or error}")
            ) from None
        me = {"pid": os.getpid(), "host": socket.gethostname()}
        os.truncate(self._file, 0)
        os.pwrite(self._file, json.dumps(me).encode(), 0)
        self._done = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def release(self) -> None:
        """Lets others save."""
        if self._file is None:
            return
        self._done.set()
        os.truncate(self._file, 0)  # not removed: another process may have opened it
        os.close(self._file)
        self._file = None

    def _check_machine(self) -> None:
        """Raises where another machine saves, whose lock this one may not see."""
        holder = self._holder()
        other = holder.get("host", socket.gethostname()) != socket.gethostname()
        age = time.time() - self._path.stat().st_mtime
        if other and age < STALE_AFTER:
            raise self._taken(holder, f"renewed {age:.0f} s ago")

    def _renew(self) -> None:
        while not self._done.wait(_RENEWED_EVERY):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _taken(self, holder: dict[str, Any], detail: str) -> CheckpointError:
        return CheckpointError(
            str(self._path),
            "another one saves into this folder",
            got=f"pid {holder.get('pid', 'unknown')} on {holder.get('host', 'unknown')} ({detail})",
            expected="one that saves at a time",
            action="Close it, or choose another folder. The file counts for another "
            f"{STALE_AFTER:.0f} s after a machine has failed; remove it if you know that one has.",
        )
