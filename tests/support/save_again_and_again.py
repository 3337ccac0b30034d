"""Saves state after state until it is killed, or its disk is full; goes on from the newest one.

Usage: save_again_and_again.py FOLDER [full]

Every array of the state of step n is n + 1/2, so that a mix of two checkpoints is seen.
"""

import resource
import sys

import jax.numpy as jnp
import optax

import jdistadam as jda

SHAPES = {"a": (256, 1024), "b": (300_000,), "c": (5,)}


def state_of(step):
    params = {name: jnp.full(shape, step + 0.5) for name, shape in SHAPES.items()}
    adam = optax.ScaleByAdamState(jnp.int32(step), params, params)
    return {"params": params, "opt_state": adam}


def main():
    folder = sys.argv[1]
    first = max(jda.checkpoint_steps(folder), default=0) + 1
    with jda.Checkpointer(folder, every=1, keep=2) as checkpointer:
        for step in range(first, 10_000):
            if "full" in sys.argv and step == 3:
                checkpointer.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            checkpointer.after_step(step, state_of(step))
            print(step, flush=True)


if __name__ == "__main__":
    main()
