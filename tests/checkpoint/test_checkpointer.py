"""Saving step after step: what is kept, what fails in the background, who may save, and kill -9."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state as flax_state

import jdistadam as jda
from jdistadam.checkpoint import checkpointer as folder
from jdistadam.checkpoint import storage
from support.paths import TESTS, environment
from support.samples import few

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

WORKER = [sys.executable, str(TESTS / "support" / "save_again_and_again.py")]
ENVIRONMENT = environment(JAX_PLATFORMS="cpu")


def state_of(x):
    params = {"w": jnp.full((4, 3), x), "b": jnp.full(5, -x)}
    opt_state = optax.adamw(0.1).init(params)
    return {"params": params, "opt_state": opt_state}


def test_the_newest_are_kept(tmp_path):
    with jda.Checkpointer(tmp_path / "new" / "folder", every=2, keep=2) as checkpointer:
        saved = [checkpointer.after_step(step, state_of(float(step))) for step in range(1, 8)]
    assert saved == [False, True] * 3 + [False]
    assert jda.checkpoint_steps(checkpointer.folder) == [4, 6]
    for step, want in ((None, 6.0), (4, 4.0)):
        assert jda.restore_params(checkpointer.folder, step=step)["w"].tolist() == [[want] * 3] * 4


def test_a_state_may_change_while_it_is_written(tmp_path):
    """Donated to a step as soon as save returns; a numpy array changed in place."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state, counts = state_of(1.0), np.arange(3, dtype=np.float32)
    state["counts"] = counts
    with jda.Checkpointer(tmp_path) as checkpointer:
        for k in range(4):
            checkpointer.save(state, step=k)
            counts += 1
            state = step({k: v for k, v in state.items() if k != "counts"}) | {"counts": counts}
    for k in range(4):
        got = jda.restore(tmp_path, jax.eval_shape(lambda: state), step=k)
        assert got["params"]["w"].tolist() == [[1.0 + k] * 3] * 4
        assert got["counts"].tolist() == [k, k + 1, k + 2] and int(got["opt_state"][0].count) == k


def test_a_failure_in_the_background_is_raised_by_the_next_step(tmp_path, monkeypatch):
    with jda.Checkpointer(tmp_path, every=20_000) as checkpointer:
        checkpointer.save(state_of(1.0), step=5)
        checkpointer.wait()
        monkeypatch.setattr(storage, "FILE", "no such folder/header.json")
        checkpointer.save(state_of(2.0), step=10)
        with pytest.raises(jda.CheckpointError, match="could not be written; the ones before") as e:
            for step in range(11, 10_000):
                assert not checkpointer.after_step(step, state_of(3.0)) and step < 5_000
                time.sleep(0.01)
        assert str(e.value).startswith(f"{tmp_path}: a checkpoint could not be written; ")
        assert "FileNotFoundError" in str(e.value).split(": got ")[1].split(", expected ")[0]
        monkeypatch.undo()
        assert jda.checkpoint_steps(tmp_path) == [5]
        checkpointer.save(state_of(4.0), step=20)  # and goes on
    assert jda.checkpoint_steps(tmp_path) == [5, 20]
    assert jda.restore_params(tmp_path, step=5)["b"].tolist() == [-1.0] * 5


def test_close_raises_what_failed_last(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILE", "no such folder/header.json")
    with pytest.raises(jda.CheckpointError, match="could not be written"):
        with jda.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state_of(1.0))
    with pytest.raises(ZeroDivisionError):  # which is why the block ended
        with jda.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state_of(1.0))
            raise ZeroDivisionError
    monkeypatch.undo()
    jda.save(tmp_path, state_of(1.0))  # the folder is free


@pytest.mark.parametrize("saves", [False, True])
def test_a_closed_checkpointer_raises(tmp_path, saves):
    checkpointer = jda.Checkpointer(tmp_path, every=1)
    if saves:
        checkpointer.after_step(1, state_of(1.0))
    checkpointer.close()
    with pytest.raises(jda.CheckpointError, match="this Checkpointer is closed"):
        checkpointer.after_step(2, state_of(2.0))
    checkpointer.close()
    assert jda.checkpoint_steps(tmp_path) == [1] * saves


def test_a_step_that_is_still_written_is_saved_once(tmp_path, monkeypatch):
    with jda.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state_of(1.0), step=4)
        monkeypatch.setattr(pathlib.Path, "exists", lambda path: False)  # as until it is written
        with pytest.raises(
            jda.CheckpointError, match="4: there is a checkpoint of this step already"
        ):
            checkpointer.save(state_of(2.0), step=4)
        monkeypatch.undo()
    assert jda.restore_params(tmp_path)["w"][0, 0] == 1


def test_a_step_is_saved_once(tmp_path):
    jda.save(tmp_path, state_of(1.0))
    with pytest.raises(jda.CheckpointError, match="0: there is a checkpoint of this step already"):
        jda.save(tmp_path, state_of(2.0))
    assert jda.restore_params(tmp_path)["w"][0, 0] == 1
    jda.save(tmp_path, state_of(5.0), step=5)
    with pytest.raises(jda.CheckpointError, match=r"got step 3, and checkpoints of \[5\]"):
        jda.save(tmp_path, state_of(3.0), step=np.int64(3))
    assert jda.checkpoint_steps(tmp_path) == [0, 5]
    for step in (-1, 1.5, True):
        with pytest.raises(jda.HyperparameterError, match="step: not the number of a checkpoint"):
            jda.save(tmp_path, state_of(5.0), step=step)
    for call in (jda.restore_params, jda.checkpoint_steps, lambda x: jda.save(x, state_of(1.0))):
        with pytest.raises(jda.CheckpointError, match="gs://bucket/x: not a folder"):
            call("gs://bucket/x")


def test_after_step_says_at_once_what_is_in_the_wrong_place(tmp_path):
    """Not only at the next step that is saved."""
    with jda.Checkpointer(tmp_path, every=1000) as checkpointer:
        for step, state, got in (
            (state_of(1.0), 1, "dict"),
            (2.0, state_of(1.0), "2.0"),
            (None, state_of(1.0), "None"),
            (jnp.int32(3), state_of(1.0), "Array(3, dtype=int32)"),
        ):
            with pytest.raises(jda.HyperparameterError) as error:
                checkpointer.after_step(step, state)
            assert f"got {got}, expected a whole number" in str(error.value)
            assert "Call after_step(step, state), where" in str(error.value)
        with pytest.raises(jda.TreeError, match=r"^state: has no params and opt_state: got int"):
            checkpointer.after_step(1, 1)


def test_restore_into_a_changed_model_shows_what_to_write(tmp_path):
    """`new` and `unused`, as code that then restores."""
    state = state_of(1.0)
    jda.save(tmp_path, state)
    params = {"b": state["params"]["b"], "v": state["params"]["w"]}
    other = {"params": params, "opt_state": optax.adamw(0.1).init(params)}
    given = {}
    for name in ("new", "unused"):
        with pytest.raises(jda.TreeError) as error:
            jda.restore(tmp_path, other, **given)
        code = str(error.value).partition(f" with {name}=")[2].removesuffix(".")
        given[name] = eval(code)
    jda.restore(tmp_path, other, **given)


def saved_at(folder, *steps):
    with jda.Checkpointer(folder) as checkpointer:
        for step in steps:
            checkpointer.save(state_of(float(step)), step=step)


def test_a_new_branch_raises_before_anything_is_deleted(tmp_path):
    """Its checkpoints would be older than those of the abandoned one, which restore takes."""
    saved_at(tmp_path, 5, 10, 15)
    newer = "there are newer checkpoints, which restore .*: got step 6, and checkpoints of .10, 15."
    with jda.Checkpointer(tmp_path, every=5, keep=2) as checkpointer:
        for call in (checkpointer.after_step, lambda i, x: checkpointer.save(x, step=i)):
            with pytest.raises(jda.CheckpointError, match=f"{newer}.*rollback_to=STEP"):
                call(6, state_of(6.0))
    assert jda.checkpoint_steps(tmp_path) == [5, 10, 15]
    with jda.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state_of(20.0), step=20)  # in the background: it has no folder yet
        with pytest.raises(jda.CheckpointError, match=r"got step 16, and checkpoints of \[20\]"):
            checkpointer.save(state_of(16.0), step=16)


def test_rolling_back_deletes_what_is_newer(tmp_path):
    saved_at(tmp_path, 5, 10, 15)
    with jda.Checkpointer(tmp_path, every=5, keep=2, rollback_to=5) as checkpointer:
        assert jda.checkpoint_steps(tmp_path) == [5]  # also if this is killed now
        saved = [checkpointer.after_step(i, state_of(i + 0.5)) for i in range(6, 11)]
    assert saved == [False] * 4 + [True] and jda.checkpoint_steps(tmp_path) == [5, 10]
    assert jda.restore_params(tmp_path)["w"][0, 0] == 10.5
    with pytest.raises(
        jda.CheckpointError, match=r"step 7 to roll back to; .* got steps \[5, 10\]"
    ):
        jda.Checkpointer(tmp_path, rollback_to=7)
    with pytest.raises(
        jda.HyperparameterError, match="rollback_to: not the number of a checkpoint"
    ):
        jda.Checkpointer(tmp_path, rollback_to="5")
    for step in (10, 12):  # nothing is newer; and the folder is free
        jda.Checkpointer(tmp_path, rollback_to=step).close()
    jda.Checkpointer(tmp_path / "new", rollback_to=0).close()
    assert jda.checkpoint_steps(tmp_path) == [5, 10]


def test_a_rollback_that_is_interrupted_leaves_whole_checkpoints(tmp_path, monkeypatch):
    saved_at(tmp_path, 5, 10, 15)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jda.Checkpointer(tmp_path, rollback_to=5)
    monkeypatch.undo()
    assert jda.checkpoint_steps(tmp_path) == [5, 10]
    assert jda.restore_params(tmp_path)["w"][0, 0] == 10
    with jda.Checkpointer(tmp_path, rollback_to=5) as checkpointer:
        checkpointer.save(state_of(6.0), step=6)
    assert sorted(x.name for x in tmp_path.iterdir() if x.is_dir()) == ["5", "6"]


def test_a_second_saver_in_the_process_raises(tmp_path):
    with jda.Checkpointer(tmp_path):
        mine = f"got pid {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(jda.CheckpointError, match=f"another one saves into .*{mine}"):
            jda.save(tmp_path, state_of(1.0))
    jda.save(tmp_path, state_of(1.0))


def test_what_other_machines_say_counts_for_minutes(tmp_path):
    """Their lock may not be seen here; the one of this machine is free."""
    path = tmp_path / folder.LOCK
    path.write_text(json.dumps({"pid": 1, "host": "another machine"}))
    with pytest.raises(jda.CheckpointError, match=r"pid 1 on another machine .renewed 0 s ago"):
        jda.save(tmp_path, state_of(1.0))
    os.utime(path, (time.time() - folder.STALE_AFTER - 1,) * 2)
    jda.save(tmp_path, state_of(1.0))
    path.write_text(json.dumps({"pid": 1, "host": socket.gethostname()}))
    jda.save(tmp_path, state_of(1.0), step=2)  # a process of this machine that ended
    path.write_text("not JSON")
    jda.save(tmp_path, state_of(1.0), step=3)


def test_a_second_saving_process_raises(tmp_path):
    with jda.Checkpointer(tmp_path) as checkpointer:
        done = subprocess.run(
            [*WORKER, str(tmp_path)], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
        )
        assert done.returncode == 1, done.stdout
        assert f"another one saves into this folder: got pid {os.getpid()}" in done.stderr
        checkpointer.save(state_of(1.0))
    assert jda.checkpoint_steps(tmp_path) == [0]


@pytest.mark.parametrize("kind", ["symbolic link", "pipe", "folder"])
def test_lock_that_is_no_file_raises_and_stays(tmp_path, kind):
    """The file to which a symbolic link pointed was emptied; a pipe was waited for."""
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    folder.mkdir()
    other.write_text("kept")
    lock = folder / ".jdistadam.lock"
    {"symbolic link": lambda: lock.symlink_to(other), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()  # fmt: skip
    params = {"w": jnp.ones(3)}
    state = {"params": params, "opt_state": optax.adamw(0.1).init(params)}
    with pytest.raises(
        jda.CheckpointError, match=r"cannot be made or locked: got .*jdistadam\.lock"
    ):
        jda.save(folder, state)
    assert other.read_text() == "kept" and jda.checkpoint_steps(folder) == []


@few(1)
@pytest.mark.parametrize("kind", ["optax", "jdistadam"])
def test_checkpoints_are_numbered_by_the_step_of_the_state(tmp_path, kind):
    """MultiSteps counts every second one alone."""
    params = state_of(1.0)["params"]
    inner, wrapper = {
        "optax": (optax.adamw(0.1), optax.MultiSteps),
        "jdistadam": (jda.fused_adamw(0.1), jda.MultiSteps),
    }[kind]
    state = flax_state.TrainState.create(apply_fn=None, params=params, tx=wrapper(inner, 2))
    for step in (1, 2, 3):
        state = state.apply_gradients(grads=params)
        assert jda.save(tmp_path, state) == step
    assert jda.restore(tmp_path, state, step=2).step == 2
    without = {"params": state.params, "opt_state": state.opt_state}
    assert jda.save(tmp_path / "without", without) == 1  # updates of the optimizer
