"""Times one optimizer step on one device against jitted optax.adamw and against a copy.

    python experiments/bench_kernel.py --out experiments/results/bench_kernel.json

Time per step is the slope between two lengths of a loop inside one jitted program, so that the
start of a call does not count. Floor: the bytes that a step must move (28 a parameter in float32:
read gradient, parameter, mu, nu; write the last three) over the bandwidth of an in-place copy,
measured in the same run.
"""

import argparse
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lm import report

import jdistadam as jda

HYPER = dict(learning_rate=1e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.1)
LOOPS = (10, 40)  # steps in one program


def gpt2(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """The leaves of GPT-2, attention kernels two-dimensional."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (50304, width), "wpe": (1024, width)}
    for i in range(layers):
        dense = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
        for name, shape in (dense | {"down": (4 * width, width)}).items():
            shapes[f"h{i}.{name}.w"], shapes[f"h{i}.{name}.b"] = shape, shape[1:]
        for name in ("ln1.s", "ln1.b", "ln2.s", "ln2.b"):
            shapes[f"h{i}.{name}"] = (width,)
    return shapes


TREES = {
    "one leaf of 2^28": {"w": (1 << 28,)},
    "GPT-2 small": gpt2(768, 12),
    "tiny": {"w": (1000, 100), "b": (100,)},
}


def median_seconds(f, args, repeats: int = 5):
    """Median wall time of ``args = f(*args)`` after one call to warm up."""
    args = jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        args = jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth(size: int) -> float:
    """Bytes a second of reading and writing one float32 array in place."""

    def scaled(steps):
        return jax.jit(
            lambda x: (jax.lax.fori_loop(0, steps, lambda _, a: a * 1.0001, x),), donate_argnums=0
        )

    times = [median_seconds(scaled(n), (jnp.ones(size),)) for n in LOOPS]
    return 8 * size * (LOOPS[1] - LOOPS[0]) / (times[1] - times[0])


def ours():
    tx = jda.fused_adamw(**HYPER)
    return tx.init, tx.step


def theirs():
    tx = optax.adamw(**HYPER)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def make_tree(shapes, scale, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: (jax.random.normal(k, shape) * scale).astype(dtype) for k, (name, shape) in pairs}


def seconds_per_step(init, step, shapes, grad_dtype):
    """Returns (seconds per step, seconds to compile)."""
    grads = make_tree(shapes, 0.01, grad_dtype)
    times = []
    for steps in LOOPS:

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def run(params, state, grads, steps=steps):
            def body(_, carry):
                fresh = jax.lax.optimization_barrier(grads)  # nothing is hoisted out of the loop
                return step(fresh, carry[1], carry[0])

            return (*jax.lax.fori_loop(0, steps, body, (params, state)), grads)

        params = make_tree(shapes, 0.1)
        args = (params, init(params), grads)
        start = time.perf_counter()
        compiled = run.lower(*args).compile()
        compile_seconds = time.perf_counter() - start
        times.append(median_seconds(compiled, args))
    return (times[1] - times[0]) / (LOOPS[1] - LOOPS[0]), compile_seconds


def check(shapes, grad_dtype):
    """Correct first: one step of both, parameters equal to a few units in the last place."""
    params, grads = make_tree(shapes, 0.1), make_tree(shapes, 0.01, grad_dtype)
    results = [jax.jit(step)(grads, init(params), params)[0] for init, step in (ours(), theirs())]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        if grad_dtype == jnp.float32:  # optax computes 16-bit gradients in 16 bits
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        assert np.isfinite(np.asarray(a)).all()


def compare(tree, grad_dtype, ceiling):
    """Returns one row for each optimizer, and prints them."""
    shapes = TREES[tree]
    check(shapes, grad_dtype)
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    nbytes = size * (24 + jnp.dtype(grad_dtype).itemsize)
    rows = []
    for name, (init, step) in (("jdistadam", ours()), ("optax", theirs())):
        seconds, compile_seconds = seconds_per_step(init, step, shapes, grad_dtype)
        row = dict(
            tree=tree,
            leaves=len(shapes),
            parameters=size,
            gradients=jnp.dtype(grad_dtype).name,
            optimizer=name,
            microseconds=seconds * 1e6,
            gb_per_second=nbytes / seconds / 1e9,
            share_of_copy=nbytes / seconds / ceiling,
            compile_seconds=compile_seconds,
        )
        rows.append(row)
        print(
            f"{tree:<18} {row['gradients']:<9} {name:<10} {row['microseconds']:>8.0f} us "
            f"{row['gb_per_second']:>6.0f} GB/s {100 * row['share_of_copy']:>6.1f} % of copy, "
            f"compile {compile_seconds:.1f} s",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trees", nargs="+", choices=TREES, default=["one leaf of 2^28", "GPT-2 small"]
    )
    parser.add_argument("--copy-elements", type=int, default=1 << 30)
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_kernel.json"))
    args = parser.parse_args()
    ceiling = copy_bandwidth(args.copy_elements)
    print(f"in-place copy: {ceiling / 1e9:.0f} GB/s")
    cases = [(tree, dtype) for tree in args.trees for dtype in (jnp.float32, jnp.bfloat16)]
    rows = [row for tree, dtype in cases for row in compare(tree, dtype, ceiling)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_run(args.out, args.revision, copy_gb_per_second=ceiling / 1e9, rows=rows)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
