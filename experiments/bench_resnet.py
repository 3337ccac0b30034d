"""Images per second of a ResNet's training step on one GPU.

    python experiments/bench_resnet.py --out experiments/results/bench_resnet/h200/default.json
    python experiments/bench_resnet.py --preset tiny --batch 8 --rounds 2 --out /tmp/try.json  # CPU

ResNet-50 in bfloat16 with float32 parameters and 128 random images of 224 x 224. It compares
``optax.adamw`` and ``fused_adamw`` under ``jax.jit``, and ``train_step``, in one process, in turns:
each round times some steps of every program, so a drift of the clocks affects all alike. The
median, the fastest and the slowest round are recorded. The record of 33c67cf has two more programs,
with parameters in the layouts that the compiler prefers.
"""

import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lm import command_line, report
from vision import resnet

import jdistadam as jda

HYPER = dict(b1=0.9, b2=0.99, weight_decay=1e-2)
RATE = 1e-3


class Jitted:
    """A step under jax.jit, with optax or with fused_adamw."""

    def __init__(self, loss, params, stats, tx):
        params = jax.tree.map(jnp.copy, params)
        state = tx.init(params)
        self.state = (params, state, jax.tree.map(jnp.copy, stats))

        def step(params, state, stats, batch):
            grads, stats = jax.grad(loss, has_aux=True)(params, batch, stats)
            if isinstance(tx, jda.FusedTransformation):
                return *tx.step(grads, state, params), stats
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, stats

        self.step = jax.jit(step, donate_argnums=(0, 1, 2))

    def run(self, batch):
        self.state = self.step(*self.state, batch)


class Trained:
    """``train_step``."""

    def __init__(self, loss, params, stats):
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self.tx = jda.distributed(jda.fused_adamw(RATE, **HYPER), mesh=mesh)
        self.state = jda.TrainState.create(params, self.tx, model_state=stats)
        self.step = jda.train_step(loss, self.tx)

    def run(self, batch):
        self.state, _ = self.step(self.state, batch)


def programs(loss, params, stats):
    return {
        "optax.adamw": Jitted(loss, params, stats, optax.adamw(RATE, **HYPER)),
        "fused_adamw": Jitted(loss, params, stats, jda.fused_adamw(RATE, **HYPER)),
        "train_step": Trained(loss, params, stats),
    }


def timed(program, batch, steps):
    """Seconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
        program.run(batch)
    jax.block_until_ready(program.state)
    return (time.perf_counter() - began) / steps


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--preset", choices=resnet.PRESETS, default="resnet50")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of each program in a round")
    args = parser.parse_args()
    config = resnet.PRESETS[args.preset]
    model = resnet.ResNet(config, jnp.bfloat16)
    loss = resnet.loss_of(model)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(args.batch, *config.image)).astype(np.float32)
    labels = rng.integers(config.classes, size=args.batch).astype(np.int32)
    batch = jax.device_put({"image": images, "label": labels})
    variables = jax.jit(model.init)(jax.random.key(0), images[:1])
    params, stats = variables["params"], variables["batch_stats"]
    found = programs(loss, params, stats)
    for program in found.values():  # compiles
        timed(program, batch, 2)
    seconds = {name: [] for name in found}
    for _ in range(args.rounds):
        for name, program in found.items():
            seconds[name].append(timed(program, batch, args.steps))
    rows = [
        {
            "program": name,
            "images_per_second": args.batch / statistics.median(times),
            "milliseconds": 1e3 * statistics.median(times),
            "fastest": 1e3 * min(times),
            "slowest": 1e3 * max(times),
        }
        for name, times in seconds.items()
    ]
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    report.write_run(
        args.out,
        args.revision,
        rows=rows,
        batch=args.batch,
        rounds=args.rounds,
        steps=args.steps,
    )


if __name__ == "__main__":
    main()
