"""Trains GPTs of billions of parameters on one GPU: how large may they be, and how fast are they?

    python experiments/largest_model.py --out runs/largest_model.json
    python experiments/largest_model.py --compile-only --rows codes-40     # bytes, for an H200

A row is METHOD-LAYERS. The layers have a width of 4096, 201e6 parameters each, and are
rematerialized. Weights and tokens are random. Each row runs in its own process. A row that fails,
for example because the model does not fit, records its error. "optax_host" moves the state of optax
between the memories by ``jax.device_put`` in the step, as MaxText does with
``optimizer_memory_host_offload``.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from lm import command_line, report
from plan_against_compiler import h200s
from step_bench import model

import jdistadam as jda

CODES = dict(
    main_params_dtype="remainder16", mu_dtype="block8", nu_dtype="block8", rounding="stochastic"
)
METHODS = {  # arguments of fused_adamw and of distributed; optax has none
    "optax": None,
    "optax_host": None,
    "main": (dict(main_params_dtype=jnp.float32), {}),
    "main_early": (dict(main_params_dtype=jnp.float32), dict(early_updates=True)),
    "codes": (CODES, {}),
    "codes_early": (CODES, dict(early_updates=True)),
    "codes_host": (CODES, dict(state_memory="pinned_host")),
}
# The largest that fit on 80 GB, and the next.
ROWS = (
    "optax-26,optax-27,main-23,main-24,codes-43,codes-44,optax_host-20,codes_host-40,codes_host-80"
)
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97"}
TIMEOUT = 400  # seconds of a row
HYPER = dict(learning_rate=1e-4, weight_decay=0.1)
WIDTH, SEQUENCES, LENGTH = 4096, 4, 1024


def size_of(name):
    layers = int(name.partition("-")[2])
    return model.Size(layers, WIDTH, WIDTH // 128, 50304, LENGTH)


class Row:
    """A method and a model on one device."""

    def __init__(self, name, mesh, attention):
        self.method = name.partition("-")[0]
        self.mesh = mesh
        size = size_of(name)
        workload = model.Workload(False, SEQUENCES, checkpoint="blocks")
        self.loss = model.make_loss(size, workload, attention)
        self.shapes = model.shapes(size, False)
        if METHODS[self.method] is None:
            self.tx = optax.adamw(**HYPER)
            self.step = jax.jit(self._optax_step, donate_argnums=0)
        else:
            algorithm, options = METHODS[self.method]
            adamw = jda.fused_adamw(**HYPER, **algorithm)
            policy = jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16)
            self.tx = jda.distributed(
                adamw, mesh=mesh, policy=policy, communication="xla", **options
            )
            self.step = jda.train_step(self.loss, self.tx)

    def _optax_step(self, state, tokens):
        def loss(params):
            return self.loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens)

        value, grads = jax.value_and_grad(loss)(state[0])
        opt_state = self._moved(state[1], jax.memory.Space.Device)
        updates, opt_state = self.tx.update(grads, opt_state, state[0])
        opt_state = self._moved(opt_state, jax.memory.Space.Host)
        return (optax.apply_updates(state[0], updates), opt_state), {"loss": value}

    def _moved(self, opt_state, space):
        """The moments of optax in another memory, for "optax_host"."""
        if self.method != "optax_host":
            return opt_state
        return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, opt_state)

    def param_shapes(self):
        dtype = jnp.float32 if METHODS[self.method] is None else jnp.bfloat16
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), self.shapes)

    def start(self):
        """The state, from random parameters."""
        shapes, keys = self.param_shapes(), iter(range(10**6))

        def draw(x):  # to the host: the state has a copy, and a hole of this size would stay
            return jax.device_get(_drawing(x.shape, x.dtype)(next(keys)))

        params = jax.tree.map(draw, shapes)
        if METHODS[self.method] is None:
            params = jax.device_put(params, jax.devices()[0])
            return params, self._moved(jax.jit(self.tx.init)(params), jax.memory.Space.Host)
        return jda.TrainState.create(params, self.tx)

    def state_shapes(self):
        shapes = self.param_shapes()
        if METHODS[self.method] is None:
            return shapes, jax.eval_shape(self.tx.init, shapes)
        return jda.TrainState.shapes(shapes, self.tx)


@functools.cache  # one program per shape
def _drawing(shape, dtype):
    def draw(seed):
        if len(shape) == 1:  # the scales of norms
            return jnp.ones(shape, dtype)
        return (0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)

    return jax.jit(draw)


def measure(name, steps):
    """Takes steps and returns what a row records."""
    row = Row(name, jax.make_mesh((1,), ("data",)), "cudnn")
    device, begun = jax.devices()[0], time.perf_counter()
    state = jax.block_until_ready(row.start())
    started, seconds, losses = time.perf_counter() - begun, [], []
    print(f"{name}: the state took {started:.0f} s", file=sys.stderr, flush=True)
    rng = np.random.default_rng(0)
    for _ in range(1 + steps):
        tokens = rng.integers(0, 50304, (SEQUENCES, LENGTH + 1), dtype=np.int32)
        begun = time.perf_counter()
        state, metrics = row.step(state, tokens)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begun)
        print(f"{name}: a step took {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    stats = device.memory_stats() or {}
    held = jax.tree.leaves(state)
    on_host = [x for x in held if x.sharding.memory_kind == "pinned_host"]
    typical = statistics.median(seconds[1:])
    return {
        "seconds": typical,
        "rounds": seconds[1:],
        "tokens_per_second": SEQUENCES * LENGTH / typical,
        "losses": losses,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": stats.get("bytes_limit"),
        "host_bytes": sum(x.nbytes for x in on_host),
        "start_seconds": started,
        "first_step_seconds": seconds[0],
    }


def compiled(name):
    """The bytes of a step by the compiler, for an H200 that need not be there."""
    if "host" in name:
        raise SystemExit(f"Error: {name}: devices of the compiler alone have no host memory")
    mesh = Mesh(h200s((1, 1)).devices.reshape(-1), ("data",))
    row = Row(name, mesh, "xla")
    tokens = jax.ShapeDtypeStruct((SEQUENCES, LENGTH + 1), jnp.int32)
    memory = row.step.lower(row.state_shapes(), tokens).compile().memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def in_process(name):
    """A row of this command in a process of its own."""
    command = [sys.executable, *sys.argv, "--row", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT | os.environ, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        last = (error.stderr or b"").decode().strip().splitlines()[-1:]
        return {"failed": f"no result after {TIMEOUT} s; last message: {''.join(last)[:300]}"}
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if "Error" in x or "RESOURCE_EXHAUSTED" in x]
        return {"failed": (lines or done.stderr.splitlines())[-1][:500]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--rows", default=ROWS, help="names, by commas")
    add("--steps", type=int, default=3, help="timed steps")
    add("--compile-only", action="store_true", help="bytes by the compiler, for an H200")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/largest_model.json"))
    add("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        found = compiled(args.row) if args.compile_only else measure(args.row, args.steps)
        print(json.dumps(found))
        return
    found = []
    for name in args.rows.split(","):
        shapes = jax.tree.leaves(model.shapes(size_of(name), False))
        size = {"name": name, "parameters": sum(x.size for x in shapes)}
        found.append(size | in_process(name))
        print(json.dumps(found[-1]), flush=True)
        report.write_run(args.out, args.revision, sequences=SEQUENCES, rows=found)


if __name__ == "__main__":
    main()
