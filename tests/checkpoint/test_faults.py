"""Savers that are killed, that end at any step of a save, or whose disk is full."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
import pytest

import jdistadam as jda
from jdistadam.checkpoint import checkpointer as folders
from support import save_again_and_again
from support.bits import assert_trees_same_bits
from support.paths import TESTS, environment
from support.samples import few

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

WORKER = [sys.executable, str(TESTS / "support" / "save_again_and_again.py")]
ENVIRONMENT = environment(
    JAX_PLATFORMS="cpu", XLA_FLAGS=""
)  # one device, which takes less time to start than eight


def restored(folder):
    """The newest checkpoint, after comparing all of it with what was saved as this step."""
    newest = jda.checkpoint_steps(folder)[-1]
    want = save_again_and_again.state_of(newest)
    got = jda.restore(folder, jax.eval_shape(lambda: want))
    assert_trees_same_bits(got, want)
    return newest


class Server:
    """A process that starts savers, one after the other."""

    def __init__(self):
        self.process = subprocess.Popen(
            [*WORKER, "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip

    def start(self, *command):
        """Returns the number of the process of a saver."""
        print(*command, file=self.process.stdin, flush=True)
        word, number = self.read()
        assert word == "process"
        return int(number)

    def read(self):
        """Returns the words that the saver has said next."""
        return self.process.stdout.readline().split()

    def until_the_end(self):
        """Returns what the saver says until it ends, and its exit code."""
        said = []
        while (words := self.read())[0] != "ended":
            said.append(words)
        return said, int(words[1])


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.process.stdin.close()
    assert made.process.wait(60) == 0
    made.process.stdout.close()


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_leaves_the_old_checkpoint_or_the_new_one(tmp_path, server, kills):
    """At points spread over more than a save; each process goes on where the last one was killed."""
    before = 0
    for k in range(kills):
        process = server.start(tmp_path)
        for _ in range(2):  # it goes on: the lock and what was left unfinished are no obstacle
            last = int(*server.read())
        time.sleep(0.2 * k / kills)
        os.kill(process, signal.SIGKILL)
        said, code = server.until_the_end()
        assert code == -signal.SIGKILL
        last = max(last, *(int(*words) for words in said), 0)
        newest = restored(tmp_path)
        # Step n begins to be written when step n - 1 is there; the last one said has begun.
        assert before <= last - 1 <= newest <= last + 1, (before, newest, last)
        before = newest
    assert len(jda.checkpoint_steps(tmp_path)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("strides", [(600, 15), (2, 2)])
def test_exit_during_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path, server, strides):
    """os._exit there: the old checkpoint or the new one, and the next saver goes on."""
    for step in (0, 0, 300, 0):  # counted where a saver deletes an old one and what is unfinished
        server.start(tmp_path, step)
        said, code = server.until_the_end()
        assert code == (save_again_and_again.EXIT_CODE if step else 0)
    ((word, last),) = said
    assert word == "steps" and int(last) > 600
    late, found = int(last) - 100, {"old": 0, "new": 0}  # the folder gets its name near the end
    for step in [*range(1, late, strides[0]), *range(late, int(last), strides[1])]:
        before = restored(tmp_path)
        server.start(tmp_path, step)
        _, code = server.until_the_end()
        # Where nothing was left unfinished, it takes fewer steps.
        assert code == save_again_and_again.EXIT_CODE or (code == 0 and step > late), step
        newest = restored(tmp_path)
        assert newest in (before, before + 1), step
        found["old" if newest == before else "new"] += 1
    assert min(found.values()) > 0, found


def small_disk(tmp_path):
    """A disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True
    )
    if not done or done.returncode:
        pytest.skip("needs the right to mount a tmpfs, for a disk that is full")
    return folder


@few(1)
@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_raises_and_keeps_the_old_checkpoint(tmp_path, in_background, capfd):
    """The old checkpoint stays, the error says why, and with space again it goes on."""
    folder = small_disk(tmp_path)
    try:
        small, large = (state_of(x, size) for x, size in ((1.0, 1000), (2.0, 300_000)))
        with jda.Checkpointer(folder, in_background=in_background) as checkpointer:
            checkpointer.save(small, step=1)
            with pytest.raises(jda.CheckpointError, match="the ones before it are whole") as caught:
                checkpointer.save(large, step=2)
                checkpointer.wait()
            assert "No space left on device" in str(caught.value)
            assert jda.checkpoint_steps(folder) == [1]
            assert_trees_same_bits(jda.restore(folder, jax.eval_shape(lambda: small)), small)
            assert {x.name for x in folder.iterdir()} == {"1", folders.LOCK}  # there is space again
            checkpointer.save(small, step=3)
        assert jda.checkpoint_steps(folder) == [1, 3]
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert not re.search("Traceback|never awaited|destroyed", "".join(capfd.readouterr()))


def state_of(x, size):
    params = {"w": jnp.full(size, x), "b": jnp.full(5, -x)}
    return {"params": params, "opt_state": optax.adamw(0.1).init(params)}


@pytest.mark.slow
def test_a_limit_of_file_sizes_keeps_the_old_checkpoint(tmp_path):
    """While writing in the background: the next step raises, and nothing else is said."""
    done = subprocess.run(
        [*WORKER, str(tmp_path), "full"], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )  # fmt: skip
    assert done.returncode == 1 and "CheckpointError" in done.stderr.splitlines()[-1], done.stderr
    assert "Event loop is closed" not in done.stderr
    assert "3" not in done.stdout.split() or "5" not in done.stdout.split()
    assert restored(tmp_path) == 2
