"""Whether a step became slower since another revision: host time and wall time, in turn.

    git archive 81d8c80 | tar -x -C OLD
    pip install --no-deps --target OLD/installed OLD
    python experiments/compare_revisions.py --old OLD/installed --out runs/compare_revisions.json

Each round is a process for each of the two packages, in changing order, on the same devices, random
parameters and gradients. *host*: from the call of a step until it returns, with idle devices.
*busy*: the same while the step before is under way.
*wall*: time per step of a series. *ratio*: new over old, pair by pair; a step on the host's CPU, or
on a GPU at its power limit, varies by some percent between processes, which the extremes show.
"""

import argparse
import inspect
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HOST_CALLS, ROWS, ROW_CALLS = 60, 5, 30


def make_cases(tree, num_devices):
    """Returns functions by name that take one more step without arguments, and do not wait."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import jdistadam as jda
    from jdistadam.tools import bench

    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    params = bench.make_tree(bench.TREES[tree], 0.02, jnp.bfloat16)
    replicated = jax.NamedSharding(mesh, P())

    def copy(tree):
        return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=replicated)(tree)

    def stepper(step, *state):
        held = [state]

        def call():
            held[0] = step(*held[0])
            return held[0]

        return call

    def whole_step(policy):
        tx = jda.distributed(jda.fused_adamw(1e-4), mesh=mesh, max_grad_norm=1.0, policy=policy)
        loss = lambda p, x: sum(jnp.sum(v.astype(jnp.float32)) for v in p.values()) * jnp.mean(x)  # noqa: E731
        step = jda.train_step(loss, tx)
        batch = jda.shard_batch(jnp.ones(num_devices), tx)
        return stepper(lambda state: (step(state, batch)[0],), jda.TrainState.create(params, tx))

    def own_step():
        tx = jda.distributed(jda.fused_adamw(1e-4), mesh=mesh, max_grad_norm=1.0)
        grads = copy(params)
        specs = (P(), tx.state_specs())
        # Revisions before 0a0eaae compared the layout at each step unless they were told not to.
        known = inspect.signature(tx.step).parameters
        options = {"is_verified": True} if "is_verified" in known else {}
        step = jax.jit(
            jax.shard_map(
                lambda g, p, s: tx.step(g, s, p, **options),
                mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=False,
            ),
            donate_argnums=(1, 2),
        )  # fmt: skip
        return stepper(lambda p, s: step(grads, p, s), copy(params), tx.init(params))

    def plain_step():
        tx = jda.fused_adamw(1e-4, main_params_dtype=jnp.float32)
        step = jax.jit(lambda g, p, s: tx.step(g, s, p), donate_argnums=(1, 2))
        grads, mine = copy(params), copy(params)
        return stepper(lambda p, s: step(grads, p, s), mine, jax.jit(tx.init)(mine))

    sums = jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16, grad_reduce_dtype=jnp.float32)
    return {
        "train_step": lambda: whole_step(jda.MixedPrecisionPolicy()),
        "train_step, float32 sums": lambda: whole_step(sums),
        "step in a shard_map": own_step,
        "fused_adamw": plain_step,
    }


def measure(package, tree, num_devices, cases):
    """Microseconds by case: host and wall."""
    sys.path.insert(0, package)
    import jax

    import jdistadam

    assert pathlib.Path(jdistadam.__file__).is_relative_to(pathlib.Path(package).resolve())
    found, made = {}, make_cases(tree, num_devices or len(jax.devices()))
    if unknown := set(cases or ()) - made.keys():
        sys.exit(f"no such cases: {sorted(unknown)}; there are {list(made)}")
    for name in cases or made:
        call = made[name]()
        for _ in range(5):
            jax.block_until_ready(call())
        hosts, busy, walls = [], [], []
        for _ in range(HOST_CALLS):
            start = time.perf_counter()
            result = call()
            hosts.append(time.perf_counter() - start)
            start = time.perf_counter()
            result = call()
            busy.append(time.perf_counter() - start)
            jax.block_until_ready(result)
        for _ in range(ROWS):
            start = time.perf_counter()
            for _ in range(ROW_CALLS):
                result = call()
            jax.block_until_ready(result)
            walls.append((time.perf_counter() - start) / ROW_CALLS)
        found[name] = {
            "host": 1e6 * statistics.median(hosts),
            "busy": 1e6 * statistics.median(busy),
            "wall": 1e6 * statistics.median(walls),
        }
        del call, result
    return found


def run(package, args):
    command = [sys.executable, "-P", __file__, "--measure", package, "--tree", args.tree]
    command += ["--devices", str(args.devices), *(["--cases", *args.cases] if args.cases else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        sys.exit(f"{package}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(rounds):
    """Medians of both, and the ratios of pairs: least, median and greatest."""
    rows = []
    for case in rounds[0]["new"]:
        row = {"case": case}
        for kind in ("host", "busy", "wall"):
            old = [x["old"][case][kind] for x in rounds]
            new = [x["new"][case][kind] for x in rounds]
            ratios = sorted(n / o for n, o in zip(new, old, strict=True))
            row[kind] = {
                "old_us": statistics.median(old),
                "new_us": statistics.median(new),
                "ratio": [ratios[0], statistics.median(ratios), ratios[-1]],
            }
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", help="folder from which the older jdistadam is imported")
    parser.add_argument("--new", help="the newer one; default: the installed one")
    parser.add_argument("--tree", default="gpt2s", help="see jdistadam bench --list")
    parser.add_argument("--cases", nargs="*", help="some of those that it prints; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=0, help="0: all")
    parser.add_argument("--measure", metavar="PACKAGE", help="measure one, and print JSON")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/compare.json"))
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.tree, args.devices, args.cases)))
        return
    import jdistadam

    packages = {
        "old": args.old,
        "new": args.new or str(pathlib.Path(jdistadam.__file__).parents[1]),
    }
    rounds = []
    for i in range(args.rounds):
        order = ("old", "new") if i % 2 else ("new", "old")
        rounds.append({name: run(packages[name], args) for name in order})
    rows = compare(rounds)
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from lm import report

    report.write_run(args.out, args.revision, tree=args.tree, rows=rows, rounds=rounds)
    print(f"{'':<32} {'':<5} {'old us':>10} {'new us':>10}   new / old: least, median, greatest")
    for row in rows:
        for kind in ("host", "busy", "wall"):
            x = row[kind]
            ratios = " ".join(f"{r:.3f}" for r in x["ratio"])
            print(
                f"{row['case']:<32} {kind:<5} {x['old_us']:>10.0f} {x['new_us']:>10.0f}   {ratios}"
            )


if __name__ == "__main__":
    main()
