"""Saving: once, or every so many steps with the newest checkpoints kept."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdistadam.checkpoint import folder as folders
from jdistadam.checkpoint import storage
from jdistadam.checkpoint.contents import contents_of
from jdistadam.checkpoint.storage import compiled
from jdistadam.core import trees
from jdistadam.core.arguments import check_count
from jdistadam.errors import CheckpointError, TreeError


class Checkpointer:
    """Saves states of a training into a folder, one after the other.

    Use it in a ``with`` block, or call ``close``: it waits for what is being written, and lets
    others save into the folder. Each checkpoint is a folder named by its step, which gets this name
    when it is complete; what an earlier process left unfinished is deleted. A new one must be the
    newest: ``restore`` takes this one, and ``keep`` counts from it.

    Args:
      folder: The folder, on a file system that renames atomically. It is made if it is missing.
      tx: The distributed optimizer; None for states of ``fused_adamw`` and of optax.
      every: ``after_step`` saves where the step divides by it. None: never.
      keep: How many of the newest checkpoints stay. None: all.
      rollback_to: The step of an older checkpoint, from which training goes on in another way: all
        newer ones are deleted, at once. Leave it out when the run is started again, which would
        delete its own. None: none is deleted, and saving before the newest raises.
      in_background: Whether to write while training goes on. A device then holds one bucket beside
        the state while ``save`` runs, and the host this process's part of the state until it is
        written; otherwise the host holds one bucket.

    Raises:
      CheckpointError: Another one saves into the folder, it cannot be written, there is no
        checkpoint ``rollback_to``, or orbax-checkpoint is not installed.

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
        if rollback_to is not None:
            folders.check_step(rollback_to, "rollback_to")
        storage.orbax()
        self.folder = folders.local_folder(folder)
        self.every, self._tx = every, tx
        self._last: int | None = None  # which may still be written, and have no folder
        self._handler = storage.array_handler()(waits=not in_background)
        with contextlib.ExitStack() as opened:

            def prepare() -> None:
                self.folder.mkdir(parents=True, exist_ok=True)
                opened.enter_context(folders.locked(self.folder))
                if rollback_to is not None:
                    folders.roll_back(self.folder, rollback_to)

            _on_first_process(self.folder, prepare)
            self._newest = max(folders.steps_in(self.folder), default=0)
            with storage.quiet():
                self._manager = storage.manager(self.folder, self._handler, keep, in_background)
            opened.callback(self._manager.close)
            self._close = opened.pop_all().close

    @compiled
    def save(self, state: Any, *, step: int | None = None, extra: Any = None) -> int:
        """Saves a state; where it writes in the background, the state may change from then on.

        Args:
          state: A TrainState of this package or of Flax, or a dictionary with ``params`` and
            ``opt_state``.
          step: The number of the checkpoint. None: the count of the optimizer.
          extra: A tree of your own, for ``restore_extra``: jax arrays, numpy arrays of any dtype
            but object, and Python's bool, int, float, str, bytes and None, which are written into
            the header and should be small. All but global jax arrays is the same in all processes.

        Returns:
          The number of the checkpoint.

        Raises:
          CheckpointError: There is a checkpoint of this number, or a newer one; this save failed,
            or the one before it in the background.
          LayoutError, TreeError, DtypeError: The state cannot be saved, or not with this ``tx``; it
            is traced. ``extra`` has a leaf that cannot be saved.
          AgreementError: ``extra`` differs between processes.
        """
        self.check()
        if step is not None:
            folders.check_step(step)
        if trees.is_traced(state):
            raise TreeError(
                "state: traced, so that it holds no values to save: got a state inside of jax.jit, "
                "lax.scan or the like, expected the arrays that a step returned. "
                "Save after the step, outside of the jitted function."
            )
        contents = contents_of(state, self._tx, extra)
        number = contents.about["count"] if step is None else int(step)
        if number == self._last or (self.folder / str(number)).exists():
            raise CheckpointError(
                f"{self.folder / str(number)!s}: there is a checkpoint of this step already: "
                f"got step {number}, expected another step. "
                "Pass another step, or delete that checkpoint."
            )
        self._check_is_newest(number)
        with self._writing():
            self._handler.contents = contents
            if not self._manager.save(number, args=storage.args_of(contents), force=True):
                raise OSError(f"orbax did not save step {number}")
        self._last = number
        return number

    def after_step(self, step: int, state: Any, extra: Any = None) -> bool:
        """Saves if ``every`` divides the step; call it after each step, also between saves.

        Args:
          step: How many steps were taken, with this one: 1 after the first. It is ``state.step``
            where no step was skipped for its gradients, and the number of the checkpoint.
          state: What the step returned.
          extra: As of ``save``.

        Returns:
          Whether it saved.

        Raises:
          CheckpointError: A save failed, also one that ran in the background; or there are newer
            checkpoints, also where this step is not saved.
        """
        self.check()
        if self.every is None:
            return False
        if step < self._newest:  # now, rather than after many steps that cannot be saved
            self._check_is_newest(step)
        if step % self.every:
            return False
        self.save(state, step=step, extra=extra)
        return True

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed; does not wait for it."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until all is written; raises CheckpointError if that failed."""
        with self._writing():  # what failed is told by it; check_for_errors has lost it by then
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits as ``wait`` does, and raises what it does; then others may save."""
        try:
            self.wait()
        finally:
            self._close()

    def __enter__(self) -> Checkpointer:
        """Returns itself."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Closes; after another error, without one about a save that failed."""
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise

    def _check_is_newest(self, step: int) -> None:
        """Raises CheckpointError where there are newer checkpoints, which restore would take."""
        known = {*folders.steps_in(self.folder), *(() if self._last is None else (self._last,))}
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
        """Raises CheckpointError in place of what orbax and the system do."""
        try:
            with storage.quiet():
                yield
        except Exception as error:
            self._last = None
            folders.remove_unfinished(self.folder)  # of a full disk it may be what fills it
            text = str(error).strip().partition("\n")[0]
            if len(text) > 300:  # names of files, what the system says about them, and how it ends
                code = re.search(r"os_error_code=\W*(\d+)", str(error))
                text = f"{text[:100]} … {os.strerror(int(code[1])) if code else text[-200:]}"
            raise CheckpointError(
                f"{self.folder!s}: a checkpoint could not be written; "
                f"the ones before it are whole: got {type(error).__name__}: {text}, expected a "
                "folder that can be written. See to the folder and its disk, and save again."
            ) from error


def _on_first_process(folder: Path, function: Callable[[], None]) -> None:
    """Calls a function on the first process; all raise if that fails."""
    failure: Any = None
    if jax.process_index() == 0:
        try:
            function()
        except (OSError, CheckpointError) as error:
            failure = error
    has_failed = failure is not None
    if jax.process_count() > 1:
        has_failed = bool(multihost_utils.broadcast_one_to_all(np.asarray(has_failed)))
    if isinstance(failure, CheckpointError):
        raise failure
    if has_failed:
        raise CheckpointError(
            f"{folder!s}: cannot be made or locked: got "
            f"{failure or 'an error of the first process'}, expected a folder that can be written. "
            "Choose another folder, or see the error of the first process."
        )


def save(
    folder: str | os.PathLike[str],
    state: Any,
    tx: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
) -> int:
    """Saves a state into ``folder/STEP`` and returns the step when all is written.

    The files do not depend on the mesh, the strategy or the number of processes: ``restore`` reads
    them under any other. All processes call this. To save every so many steps, in the background,
    use ``Checkpointer``.

    Args:
      folder: The folder of all checkpoints of a training.
      state: As of ``Checkpointer.save``; so are ``step`` and ``extra``.
      tx: The distributed optimizer; None for a state of ``fused_adamw`` or of optax.
      step: The number of the checkpoint. None: the count of the optimizer.
      extra: A tree of your own, for ``restore_extra``.

    Raises:
      CheckpointError: There is a checkpoint of this step, or a newer one, another one saves into
        the folder, or it cannot be written.
      LayoutError, TreeError, DtypeError: The state cannot be saved, or not with this ``tx``.

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
