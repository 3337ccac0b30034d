"""Saves one state after another until it is killed, or its disk is full; resumes from the newest.

Usage: save_again_and_again.py FOLDER [full]
       save_again_and_again.py serve

"serve" starts a process for each line that it reads, from one that has imported everything and
started no backend, which takes a fraction of a second: "FOLDER" saves until it is killed, "FOLDER
N" saves once and ends with os._exit at the Nth step. A step is a line of jdistadam/checkpoint/ or a
function of orbax that had not run before in this process. It prints the process's number first and
"ended CODE" last.

Every array in the state of step n is n + 1/2, so that a mix of two checkpoints is detected.
"""

import os
import pathlib
import resource
import sys
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint

import jdistadam as jda

SHAPES = {"a": (256, 1024), "b": (300_000,), "c": (5,)}
OURS = str(pathlib.Path(jda.__file__).parent / "checkpoint")
ORBAX = str(pathlib.Path(orbax.checkpoint.__file__).parent)
EXIT_CODE = 77


def state_of(step):
    params = {
        name: jnp.asarray(np.full(shape, step + 0.5, np.float32)) for name, shape in SHAPES.items()
    }
    adam = optax.ScaleByAdamState(jnp.int32(step), params, params)
    return {"params": params, "opt_state": adam}


def save_until_killed(folder, is_full=False):
    first = max(jda.checkpoint_steps(folder), default=0) + 1
    with jda.Checkpointer(folder, every=1, keep=2) as checkpointer:
        for step in range(first, 10_000):
            if is_full and step == 3:
                checkpointer.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            checkpointer.after_step(step, state_of(step))
            print(step, flush=True)


class ExitAt:
    """Ends the process at the Nth step of a save, in any thread; otherwise counts the steps."""

    def __init__(self, number):
        self.number, self.seen = number, set()
        self.lock = threading.Lock()

    def __call__(self, frame, event, arg):
        file = frame.f_code.co_filename
        if file.startswith(ORBAX):
            self.step(frame.f_code)
        elif file.startswith(OURS):
            self.step((file, frame.f_lineno))
            return self
        return None

    def step(self, what):
        with self.lock:
            if what not in self.seen:
                self.seen.add(what)
                if len(self.seen) == self.number:
                    os._exit(EXIT_CODE)


def save_once(folder, number):
    step = max(jda.checkpoint_steps(folder), default=0) + 1
    state, trace = state_of(step), ExitAt(number)
    threading.settrace(trace)
    sys.settrace(trace)
    with jda.Checkpointer(folder, keep=2) as checkpointer:
        checkpointer.save(state)
    sys.settrace(None)
    threading.settrace(None)
    print("steps", len(trace.seen), flush=True)


def serve():
    cache = tempfile.TemporaryDirectory()  # otherwise compiling takes half the time
    jax.config.update("jax_compilation_cache_dir", cache.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for line in sys.stdin:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                print("process", os.getpid(), flush=True)
                folder, *number = line.split()
                save_once(folder, int(*number)) if number else save_until_killed(folder)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(process, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


def main():
    if sys.argv[1] == "serve":
        serve()
    else:
        save_until_killed(sys.argv[1], is_full="full" in sys.argv)


if __name__ == "__main__":
    main()
