"""Times a GPT's training step on one GPU beside optax's, and what each needs in memory.

    python experiments/bench_one_gpu.py --out experiments/results/bench_one_gpu/h100.json
    python experiments/bench_one_gpu.py --size tiny --rounds 2 --out /tmp/try.json  # CPU

Float32 parameters, a model in bfloat16, unrolled and scanned, 1 and 8 sequences; plain, clipped,
with norms, with wrappers around the optimizer, and with fewer bytes: bfloat16 parameters, main
parameters of several kinds, 8-bit moments ("bytes", beside optax with float32). "inside" casts the
layers' parameters in the scan, whose gradients are then a stack of float32. The rows of a workload
are timed in turn, one state in memory at a time; a ratio is to the "optax" of the same
group in the same round. "step, widened" is the step with an optimization barrier around float32
gradients, which the kernel then reads.

The first program of a workload is compiled alone, so that the others find its tuned products.
"""

import concurrent.futures
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
from step_bench import model
from step_bench.variants import CHECKED_LEARNING_RATE, HYPER, MAX_NORM, bfloat16

import jdistadam as jda

WORKLOADS = ("scanned-8", "unrolled-8", "scanned-1", "unrolled-1")
EIGHT_BITS = {"mu_dtype": "block8", "nu_dtype": "block8", "rounding": "stochastic", "seed": 0}
CALLS = 4  # that are timed, and of one accumulated step
NORMS = ("grad_norm", "param_norm", "update_norm")
COMPILERS = 4


def of_optax(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, ()


def with_norms_of_optax(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    return new, state, tuple(map(optax.global_norm, (grads, new, updates)))


def of_step(tx, grads, state, params):
    return *tx.step(grads, state, params), ()


def with_norms_of_kernel(tx, grads, state, params):
    new, state, norms = tx.step_with_norms(grads, state, params)
    return new, state, tuple(norms[name] for name in NORMS)


def widened(tx, grads, state, params):
    return of_step(tx, jax.lax.optimization_barrier(grads), state, params)


def rows(has_wrappers, is_scanned):
    """Name: (transformation, how to call it, dtype of the parameters that are differentiated)."""
    ours, theirs = (tx(CHECKED_LEARNING_RATE, **HYPER) for tx in (jda.fused_adamw, optax.adamw))
    clip, wide = optax.clip_by_global_norm(MAX_NORM), jnp.float32
    found = {
        "plain/optax": (theirs, of_optax, wide),
        "plain/step": (ours, of_step, wide),
        "plain/step, widened": (ours, widened, wide),
        "clip/optax": (optax.chain(clip, theirs), of_optax, wide),
        "clip/step": (jda.chain(clip, ours), of_step, wide),
        "norms/optax": (theirs, with_norms_of_optax, wide),
        "norms/step_with_norms": (ours, with_norms_of_kernel, wide),
    }
    if is_scanned:
        found |= {"inside/optax": (theirs, of_optax, wide), "inside/step": (ours, of_step, wide)}
    ways = {
        "float32 main": dict(main_params_dtype=jnp.float32),
        "remainders": dict(main_params_dtype="remainder16"),
        "remainders, 8-bit moments": dict(main_params_dtype="remainder16", **EIGHT_BITS),
        "no main, 8-bit moments": EIGHT_BITS,
    }
    found["bytes/optax"] = (theirs, of_optax, wide)
    for name, kept in ways.items():
        tx = jda.fused_adamw(CHECKED_LEARNING_RATE, **HYPER, **kept)
        found[f"bytes/{name}"] = (tx, of_step, jnp.bfloat16)
    if has_wrappers:
        found |= {
            "MultiSteps/optax": (optax.MultiSteps(theirs, CALLS), of_optax, wide),
            "MultiSteps/step": (jda.MultiSteps(ours, CALLS), of_step, wide),
            "apply_if_finite/optax": (optax.apply_if_finite(theirs, 3), of_optax, wide),
            "apply_if_finite/step": (jda.apply_if_finite(ours, 3), of_step, wide),
        }
    return found


def dtype_of(name):
    """The dtype of a row's parameters."""
    is_narrow = name.startswith("bytes/") and name != "bytes/optax"
    return jnp.bfloat16 if is_narrow else jnp.float32


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

    def run(self, params, tokens):
        """Milliseconds of a call, after as many as wrappers accumulate."""
        state = self.init(params)
        for _ in range(CALLS):
            params, state, value, _ = self.program(params, state, tokens)
        jax.block_until_ready(value)
        start = time.perf_counter()
        for _ in range(CALLS):
            params, state, value, _ = self.program(params, state, tokens)
        jax.block_until_ready((params, state, value))
        return 1e3 * (time.perf_counter() - start) / CALLS


def casts_inside(size, workload, attention):
    """The loss of a model that casts a layer's parameters in the scan."""
    loss = model.make_loss(size, workload, attention, gather=bfloat16)

    def of_wide_layers(params, tokens):
        rest = {name: x for name, x in params.items() if name != "layers"}
        return loss(bfloat16(rest) | {"layers": params["layers"]}, tokens)

    return of_wide_layers


def measure(size, workload, sharding, rounds, has_wrappers):
    """Records of all rows of a workload."""
    on_gpu = jax.devices()[0].platform == "gpu"
    shapes = model.shapes(size, workload.is_scanned)
    attention = "cudnn" if on_gpu else "xla"
    plain_loss = model.make_loss(size, workload, attention)

    def casts_first(params, tokens):
        return plain_loss(bfloat16(params), tokens)

    tokens = jnp.asarray(model.tokens(size, workload, 1).reshape(workload.sequences, -1))
    made = []
    for name, row in rows(has_wrappers, workload.is_scanned).items():
        group = name.split("/")[0]
        loss = casts_inside(size, workload, attention) if group == "inside" else casts_first
        stored = jax.tree.map(
            lambda x, name=name: jax.ShapeDtypeStruct(x.shape, dtype_of(name)), shapes
        )
        made.append(Row(name, row, loss, stored, tokens))
    made[0].compile()
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(Row.compile, made[1:]))
    times = {row.name: [] for row in made}
    for i in range(rounds):
        for row in made[:: (-1) ** i]:
            params = model.draw(shapes, sharding)
            if dtype_of(row.name) == jnp.bfloat16:
                params = bfloat16(params)
            times[row.name].append(row.run(params, tokens))
            del params
    for row in made:
        rival = f"{row.name.split('/')[0]}/optax"
        ratios = np.divide(times[row.name], times[rival]).tolist()
        rival_bytes = next(x for x in made if x.name == rival).record["temporary_bytes"]
        row.record |= {
            "ms": statistics.median(times[row.name]),
            "rounds_ms": times[row.name],
            "ratio_to_optax": statistics.median(ratios),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
            "temporary_ratio": row.record["temporary_bytes"] / rival_bytes,
        }
    return [row.record for row in made]


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--size", choices=model.SIZES, help="default: gpt-1.3b on a GPU, else tiny")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of which the first wraps")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_one_gpu.json"))
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    size_name = args.size or ("gpt-1.3b" if on_gpu else "tiny")
    sharding = NamedSharding(Mesh(np.asarray([device]), ("data",)), P())
    found, names = {}, args.workloads.split(",")
    with power.PowerLog() if on_gpu else contextlib.nullcontext() as log:
        for name in names:
            workload = model.Workload.parse(name)
            print(name, flush=True)
            found[name] = measure(
                model.SIZES[size_name],
                workload,
                sharding,
                args.rounds,
                name == names[0],
            )
            for x in found[name]:
                print(
                    f"{name:11} {x['name']:24} {x['ms']:8.2f} ms  {x['ratio_to_optax']:.4f} of "
                    f"optax ({x['least_ratio']:.4f} to {x['most_ratio']:.4f})  temporary "
                    f"{x['temporary_bytes'] / 1e9:6.3f} GB, {x['temporary_ratio']:.3f} of optax"
                )
    report.write_run(
        args.out,
        args.revision,
        size=size_name,
        rounds=args.rounds,
        calls=CALLS,
        power=log.summary() if log else None,
        workloads=found,
    )


if __name__ == "__main__":
    main()
