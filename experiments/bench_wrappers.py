"""Times a GPT's training step on one device with wrappers around the optimizer, and with norms.

    python experiments/bench_wrappers.py --out experiments/results/bench_wrappers/h100.json
    python experiments/bench_wrappers.py --size tiny --rounds 2 --out /tmp/try.json  # CPU

Float32 parameters, a model in bfloat16 that scans its layers, 8 sequences in a call. Each group is
one thing that trainers do: accumulate over four calls, skip steps with non-finite gradients, log
the norms of gradients, parameters and updates. A row is one way to do it. "step" calls the fused
step, "16-bit gradients" the same with gradients of the parameters after their cast to bfloat16,
"update" the same optimizer's update and ``optax.apply_updates``, "optax" those of
``optax.adamw``. The rows of all groups are timed in turn, one state in memory at a time; times are
medians of the rounds, per call. Each row's parameters after eight calls are compared with those of
the group's "optax" as step_bench/check.py does.
"""

import contextlib
import functools
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import command_line, power, report
from step_bench import check, model
from step_bench.variants import CHECKED_LEARNING_RATE, HYPER, bfloat16

import jdistadam as jda

CALLS = 4  # of one accumulated step
NORMS = ("grad_norm", "param_norm", "update_norm")


def of_optax(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, ()


def with_norms_of_optax(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    return new, state, tuple(map(optax.global_norm, (grads, new, updates)))


def of_step(tx, grads, state, params):
    return *tx.step(grads, state, params), ()


def with_norms_of_updates(tx, grads, state, params):
    new, state, updates = tx.step_with_updates(grads, state, params)
    return new, state, tuple(map(optax.global_norm, (grads, new, updates)))


def with_norms_of_kernel(tx, grads, state, params):
    new, state, norms = tx.step_with_norms(grads, state, params)
    return new, state, tuple(norms[name] for name in NORMS)


def rows():
    """Name: (transformation, how to call it, dtype of the parameters that are differentiated)."""
    ours, theirs = (tx(CHECKED_LEARNING_RATE, **HYPER) for tx in (jda.fused_adamw, optax.adamw))
    wide, narrow = jnp.float32, jnp.bfloat16
    return {
        "plain/optax": (theirs, of_optax, wide),
        "plain/optax, 16-bit gradients": (theirs, of_optax, narrow),
        "plain/step": (ours, of_step, wide),
        "plain/step, 16-bit gradients": (ours, of_step, narrow),
        "MultiSteps/optax": (optax.MultiSteps(theirs, CALLS), of_optax, wide),
        "MultiSteps/update": (optax.MultiSteps(ours, CALLS), of_optax, wide),
        "MultiSteps/step": (jda.MultiSteps(ours, CALLS), of_step, wide),
        "apply_if_finite/optax": (optax.apply_if_finite(theirs, 3), of_optax, wide),
        "apply_if_finite/update": (optax.apply_if_finite(ours, 3), of_optax, wide),
        "apply_if_finite/step": (jda.apply_if_finite(ours, 3), of_step, wide),
        "apply_if_finite/step, 16-bit gradients": (jda.apply_if_finite(ours, 3), of_step, narrow),
        "norms/optax": (theirs, with_norms_of_optax, wide),
        "norms/update": (ours, with_norms_of_optax, wide),
        "norms/step_with_updates": (ours, with_norms_of_updates, wide),
        "norms/step_with_norms": (ours, with_norms_of_kernel, wide),
        "norms/step_with_norms, 16-bit gradients": (ours, with_norms_of_kernel, narrow),
    }


class Row:
    """A way to train, to be compiled."""

    def __init__(self, name, made, loss, shapes, tokens):
        (self.tx, call, dtype), self.name = made, name

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, tokens):
            cast = jax.tree.map(lambda x: x.astype(dtype), params)
            value, grads = jax.value_and_grad(loss)(cast, tokens)
            params, state, norms = call(self.tx, grads, state, params)
            return params, state, value, norms

        self.init = jax.jit(self.tx.init)
        state = jax.eval_shape(self.tx.init, shapes)
        self.lowered = step.lower(shapes, state, tokens)

    def compile(self):
        self.program = self.lowered.compile()
        memory = self.program.memory_analysis()
        self.record = {
            "name": self.name,
            "held_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
        print(f"  compiled {self.name}", flush=True)
        return self

    def run(self, params, tokens, calls):
        """Milliseconds of a call, the parameters after all of them, and the last norms."""
        state = self.init(params)
        params, state, value, norms = self.program(params, state, tokens)
        for _ in range(CALLS - 1):
            params, state, value, norms = self.program(params, state, tokens)
        jax.block_until_ready(value)
        start = time.perf_counter()
        for _ in range(calls):
            params, state, value, norms = self.program(params, state, tokens)
        jax.block_until_ready((params, state, value))
        return 1e3 * (time.perf_counter() - start) / calls, params, list(map(float, norms))


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--size", choices=model.SIZES, help="default: gpt-1.3b on a GPU, else tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("runs/bench_wrappers.json")
    )
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    size_name = args.size or ("gpt-1.3b" if on_gpu else "tiny")
    size, workload = model.SIZES[size_name], model.Workload(True, 8, checkpoint="blocks")
    sharding = NamedSharding(Mesh(np.asarray([device]), ("data",)), P())
    shapes = model.shapes(size, True)
    plain_loss = model.make_loss(size, workload, "cudnn" if on_gpu else "xla")
    loss = lambda p, tokens: plain_loss(bfloat16(p), tokens)  # noqa: E731
    tokens = jnp.asarray(model.tokens(size, workload, 1).reshape(8, -1))
    made = [Row(name, row, loss, shapes, tokens).compile() for name, row in rows().items()]
    start = check.sample(model.draw(shapes, sharding))
    calls, times, ends = 2 * CALLS, {row.name: [] for row in made}, {}
    with power.PowerLog() if on_gpu else contextlib.nullcontext() as log:
        for i in range(args.rounds + 1):  # the first one checks
            for row in made[:: (-1) ** i]:
                params = model.draw(shapes, sharding)
                ms, params, norms = row.run(params, tokens, CALLS if i == 0 else calls)
                if i == 0:
                    ends[row.name] = check.sample(params)
                    row.record["norms"] = dict(zip(NORMS, norms, strict=False))
                else:
                    times[row.name].append(ms)
                del params
    bound = check.tolerance(size.layers, 1)
    for row in made:
        group = row.name.split("/")[0]
        want, took = ends[f"{group}/optax"], times[row.name]
        distances = [
            np.linalg.norm(ends[row.name][k] - want[k]) / np.linalg.norm(want[k] - start[k])
            for k in want
        ]
        optax_ms = times[f"{group}/optax"]
        row.record |= {
            "ms": statistics.median(took),
            "rounds_ms": took,
            "ratio_to_optax": statistics.median(np.divide(took, optax_ms).tolist()),
            "distance": float(max(distances)),
            "agrees": bool(max(distances) <= bound),
        }
        print(
            f"{row.name:40} {row.record['ms']:8.2f} ms  {row.record['ratio_to_optax']:.3f} of "
            f"optax  temporary {row.record['temporary_bytes'] / 1e9:6.2f} GB  "
            f"off by {row.record['distance']:.4f} of {bound:.4f}  {row.record['norms']}"
        )
    report.write_run(
        args.out,
        args.revision,
        size=size_name,
        rounds=args.rounds,
        bound=bound,
        power=log.summary() if log else None,
        rows=[row.record for row in made],
    )
    return int(not all(row.record["agrees"] for row in made))


if __name__ == "__main__":
    raise SystemExit(main())
