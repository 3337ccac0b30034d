"""Images per second of a ResNet's training step on one GPU, row-major and with formats.

    python experiments/bench_resnet.py --out experiments/results/bench_resnet/h200/default.json
    python experiments/bench_resnet.py --preset tiny --batch 8 --rounds 2 --out /tmp/try.json  # CPU

ResNet-50 in bfloat16 with float32 parameters and 128 random images of 224 x 224. Compared are
``optax.adamw`` and ``fused_adamw`` under ``jax.jit``, and ``train_step``; ours row-major and with
what ``preferred_formats`` returns. All of them run in one process, in turns: each round times some
steps of every program, so that a drift of the clocks meets all alike. The median, the fastest and
the slowest round are recorded, and how far apart the parameters are after two steps with formats
and without.
"""

import argparse
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lm import report
from vision import resnet

import jdistadam as jda

HYPER = dict(b1=0.9, b2=0.99, weight_decay=1e-2)
RATE = 1e-3


class Jitted:
    """A step under jax.jit, with optax or with fused_adamw."""

    def __init__(self, loss, params, stats, tx, formats):
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=formats)
        params = copy(params)
        state = tx.init(params)
        self.state = (params, state, jax.tree.map(jnp.copy, stats))

        def step(params, state, stats, batch):
            grads, stats = jax.grad(loss, has_aux=True)(params, batch, stats)
            if isinstance(tx, jda.FusedTransformation):
                return *tx.step(grads, state, params), stats
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, stats

        results = jda.formats_of(self.state)
        self.step = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=results)

    def run(self, batch):
        self.state = self.step(*self.state, batch)

    def params(self):
        return jax.device_get(self.state[0])


class Trained:
    """``train_step``."""

    def __init__(self, loss, params, stats, formats):
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self.tx = jda.distributed_fused_adamw(RATE, **HYPER, mesh=mesh, formats=formats)
        self.state = jda.TrainState.create(params, self.tx, model_state=stats)
        self.step = jda.train_step(loss, self.tx)

    def run(self, batch):
        self.state, _ = self.step(self.state, batch)

    def params(self):
        return jax.device_get(self.state.params)


def programs(loss, params, stats, formats):
    fused = lambda given: jda.fused_adamw(RATE, **HYPER, formats=given)  # noqa: E731
    return {
        "optax.adamw": Jitted(loss, params, stats, optax.adamw(RATE, **HYPER), None),
        "fused_adamw": Jitted(loss, params, stats, fused(None), None),
        "fused_adamw, formats": Jitted(loss, params, stats, fused(formats), formats),
        "train_step": Trained(loss, params, stats, None),
        "train_step, formats": Trained(loss, params, stats, formats),
    }


def timed(program, batch, steps):
    """Seconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
        program.run(batch)
    jax.block_until_ready(program.state)
    return (time.perf_counter() - began) / steps


def differences(found):
    """The largest relative difference of params after the first steps, with formats and without.

    The optimizer gives the same bits; the gradients come of other programs, whose convolutions may
    add in another order.
    """
    largest = {}
    for name in ("fused_adamw", "train_step"):
        one, two = found[name].params(), found[f"{name}, formats"].params()
        distances = jax.tree.map(
            lambda a, b: np.abs(a - b).max() / (np.abs(a).max() + 1e-9), one, two
        )
        largest[name] = float(max(jax.tree.leaves(distances)))
    return largest


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--preset", choices=resnet.PRESETS, default="resnet50")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of each program in a round")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
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
    formats = jda.preferred_formats(loss, params, batch, stats)
    found = programs(loss, params, stats, formats)
    for program in found.values():  # compiles
        timed(program, batch, 2)
    difference = differences(found)
    seconds = {name: [] for name in found}
    for _ in range(args.rounds):
        for name, program in found.items():
            seconds[name].append(timed(program, batch, args.steps))
    orders = [f.layout.major_to_minor for f in jax.tree.leaves(formats)]
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
        not_row_major=sum(x != tuple(range(len(x))) for x in orders),
        difference_after_two_steps=difference,
    )


if __name__ == "__main__":
    main()
