"""Times a step of an ensemble on one GPU: under vmap, in a loop over members, and with optax.

    python experiments/bench_vmap.py --out runs/bench_vmap.json

An ensemble of MLPs, each with its own learning rate. It compares `jax.vmap` of the fused step,
which is one kernel call for all members; a `jax.lax.map` and a Python loop in one program over the
same step; and `jax.vmap` of `optax.adamw` with `optax.apply_updates`. Before any timing, the first
three must agree to the last bit, and optax to a few roundings.

Each program takes many steps in a loop, which excludes host time, and donates its arrays. A time is
the median of several runs, divided by the steps; GB/s count the 28 bytes that a step must move per
float32 parameter.
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

HYPER = dict(b1=0.87, b2=0.9973, weight_decay=0.13)
BYTES_A_PARAMETER = 28
# For numbers of order 1, after two steps with updates of the size of the learning rate.
OPTAX_TOLERANCE = 1e-5


def params_of(members, width):
    """Six layers, a kernel and a bias each: 12 leaves, about 1e6 parameters at a width of 420."""
    rng = np.random.default_rng(0)
    shapes = {f"layer{i}": {"kernel": (width, width), "bias": (width,)} for i in range(6)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=(members, *shape)), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def fused_step(rate, grads, state, params):
    return jda.fused_adamw(rate, **HYPER).step(grads, state, params)


def optax_step(rate, grads, state, params):
    updates, state = optax.adamw(rate, **HYPER).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def in_python_loop(step):
    """One call for each member, in one program."""

    def steps(*args):
        members = len(args[0])
        each = [step(*jax.tree.map(lambda x, i=i: x[i], args)) for i in range(members)]
        return jax.tree.map(lambda *x: jnp.stack(x), *each)

    return steps


VARIANTS = {
    "vmap": jax.vmap(fused_step),
    "lax.map": lambda *args: jax.lax.map(lambda x: fused_step(*x), args),
    "Python loop": in_python_loop(fused_step),
    "vmap of optax": jax.vmap(optax_step),
}


def program(step, steps):
    """Many steps in one program, with constant gradients."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, state, rates, grads):
        def body(_, carry):
            return step(rates, grads, carry[1], carry[0])

        return jax.lax.fori_loop(0, steps, body, (params, state))

    return run


def new_arrays(members, width):
    """Returns (params, state, rates, grads); params and state are donated, so made each time."""
    params = params_of(members, width)
    state = jax.vmap(jda.fused_adamw(1e-3).init)(params)
    return params, state, jnp.linspace(1e-4, 1e-3, members), jax.tree.map(jnp.sin, params)


def check(members, width):
    """Raises unless all variants take the same two steps."""
    results = {
        name: jax.device_get(program(step, 2)(*new_arrays(members, width)))
        for name, step in VARIANTS.items()
    }
    want = jax.tree.leaves(results["vmap"])
    for name, result in results.items():
        for got, x in zip(jax.tree.leaves(result), want, strict=True):
            if name == "vmap of optax":
                np.testing.assert_allclose(got, x, rtol=OPTAX_TOLERANCE, atol=OPTAX_TOLERANCE)
            else:
                np.testing.assert_array_equal(got, x, err_msg=name)


def measure(step, members, width, *, steps, repeats):
    """Seconds per step of all members, for each repeat."""
    run = program(step, steps)
    params, state, rates, grads = new_arrays(members, width)
    params, state = jax.block_until_ready(run(params, state, rates, grads))  # compiles
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        params, state = jax.block_until_ready(run(params, state, rates, grads))
        seconds.append((time.perf_counter() - begin) / steps)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--width", type=int, default=420, help="of the six layers of a member")
    parser.add_argument("--steps", type=int, default=50, help="in one program")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_vmap.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for members in args.members:
        check(members, args.width)
        shapes = jax.tree.leaves(jax.eval_shape(lambda n=members: params_of(n, args.width)))
        parameters = sum(x.size for x in shapes)
        for name, step in VARIANTS.items():
            times = measure(step, members, args.width, steps=args.steps, repeats=args.repeats)
            seconds = statistics.median(times)
            rows.append(
                {
                    "members": members,
                    "leaves": len(shapes),
                    "parameters": parameters,
                    "variant": name,
                    "us_a_step": seconds * 1e6,
                    "us_lowest": min(times) * 1e6,
                    "us_highest": max(times) * 1e6,
                    "gb_per_second": BYTES_A_PARAMETER * parameters / seconds / 1e9,
                }
            )
            print(rows[-1], flush=True)
            report.write_run(args.out, args.revision, rows=rows)  # after each: nothing is lost
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
