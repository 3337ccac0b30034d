"""The largest GPT that one GPU trains, by how its optimizer state is stored and where it is.

    python experiments/largest_model.py --out runs/largest_model.json

Blocks of one width are added, recomputed in the backward pass, until a training step of bfloat16
parameters no longer fits: the number doubles, and is then bisected. Every try is a process of its
own. Parameters are zeros: their values do not matter to memory and time.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from lm import gpt, report

import jdistadam as jda

STORAGES = {
    "float32": dict(main_params_dtype=jnp.float32),
    "remainder16, 8-bit moments": dict(
        main_params_dtype="remainder16", mu_dtype="block8", nu_dtype="block8", rounding="stochastic"
    ),
}
MEMORIES = ("device", "pinned_host")
STEPS = 4


def given(layer, after=None):
    """A layer that needs no gathering: it is recomputed as others are."""
    return layer


def train(storage, memory, layers, width, length):
    """Takes steps; returns the number of parameters, the seconds of a step and the peak bytes."""
    config = gpt.GPTConfig(layers, width, max(1, width // 128), length, batch=1)
    policy = jax.checkpoint_policies.nothing_saveable
    model = gpt.GPT(config, jnp.bfloat16, remat_policy=policy)
    tokens = jnp.zeros((1, length), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda x: np.zeros(x.shape, jnp.bfloat16), shapes)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    tx = jda.distributed(jda.fused_adamw(1e-4, **STORAGES[storage]), mesh=mesh, state_memory=memory)
    step = jda.train_step(gpt.loss_fn(model.clone(gather=given)), tx)
    state, times = jda.TrainState.create(params, tx), []
    batch = jda.shard_batch(np.zeros((1, length + 1), np.int32), tx)
    for _ in range(STEPS):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - begin)
    stats = jax.devices()[0].memory_stats() or {}
    return dict(
        parameters=sum(x.size for x in jax.tree.leaves(shapes)),
        seconds=sorted(times[1:])[len(times[1:]) // 2],
        peak=stats.get("peak_bytes_in_use"),
        state=sum(jda.plan(state.params, tx).on_host.values()),
    )


def tried(*args):
    """What ``train`` returns in another process; None where it does not fit."""
    command = [sys.executable, __file__, "--try", json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if not any(text in done.stderr for text in ("RESOURCE_EXHAUSTED", "Out of memory")):
        raise RuntimeError(done.stderr[-2000:])
    return None


def largest(storage, memory, width, length, first, limit):
    """Doubles the number of blocks until a step does not fit, then bisects."""
    fits, best, fails, layers = 0, None, limit + 1, first
    while fails - fits > max(1, fits // 16) and layers <= limit:
        found = tried(storage, memory, layers, width, length)
        print(storage, memory, layers, found, flush=True)
        fits, best, fails = (layers, found, fails) if found else (fits, best, layers)
        layers = 2 * fits if fails > limit else (fits + fails) // 2
    return dict(storage=storage, memory=memory, layers=fits) | (best or {})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--first", type=int, default=16, help="blocks to begin with")
    parser.add_argument("--limit", type=int, default=256, help="blocks to end with")
    parser.add_argument("--try", dest="one", type=json.loads, help="one try, by itself")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/largest_model.json"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train(*args.one)))
        return
    rows = [
        largest(storage, memory, args.width, args.length, args.first, args.limit)
        for storage in STORAGES
        for memory in MEMORIES
    ]
    report.write_run(args.out, args.revision, width=args.width, length=args.length, rows=rows)


if __name__ == "__main__":
    main()
