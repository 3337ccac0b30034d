"""``python -m jdistadam info``, ``check``, ``bench``, ``plan`` and ``audit``."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jdistadam import diagnostics
from jdistadam.errors import JDistAdamError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jdistadam", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="versions, devices, which backend runs and why not the others"
    )
    info.add_argument("--json", action="store_true", help="print as JSON")
    commands.add_parser(
        "check", help="one real step on each backend, compared bit for bit with the oracle"
    )
    bench = commands.add_parser(
        "bench", help="speed of one step on this device, against a copy and optax.adamw"
    )
    bench.add_argument("--trees", nargs="+", default=["resnet50"], help="see --list")
    bench.add_argument("--list", action="store_true", help="print the trees and end")
    bench.add_argument("--json", action="store_true", help="print as JSON")
    plan = commands.add_parser(
        "plan", help="bytes that each device would hold and send, from shapes alone"
    )
    plan.add_argument("--devices", type=int, default=8, help="of the mesh; none need exist")
    audit = commands.add_parser(
        "audit", help="compile a step for the devices here, and compare what it sends with the plan"
    )
    for command in (plan, audit):
        _add_optimizer_arguments(command)
    args = parser.parse_args(argv)
    if args.command in ("plan", "audit"):
        try:
            return _plan(args) if args.command == "plan" else _audit(args)
        except JDistAdamError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
    if args.command == "bench":
        return _bench(args.trees, list_trees=args.list, as_json=args.json)
    return _info(as_json=args.json) if args.command == "info" else _check()


def _info(*, as_json: bool) -> int:
    report = diagnostics.info()
    print(json.dumps(report, indent=2) if as_json else diagnostics.format_info(report))
    return 0


def _check() -> int:
    checks = diagnostics.check()
    marks = {True: "[OK]", False: "[FAIL]", None: "[--]"}
    for name, passed, detail in checks:
        print(f"{marks[passed]:<6} {name:<5} {detail}")
    failed = any(check.passed is False for check in checks)
    print("FAILED" if failed else "SUCCESS")
    return int(failed)


def _bench(trees: Sequence[str], *, list_trees: bool, as_json: bool) -> int:
    import jax
    import numpy as np

    from jdistadam import bench

    if list_trees:
        for name, shapes in bench.TREES.items():
            size = sum(int(np.prod(shape)) for shape in shapes.values())
            print(f"{name:<12} {len(shapes):>5} leaves {size:>13,} parameters")
        return 0
    if unknown := set(trees) - set(bench.TREES):
        print(f"unknown tree {sorted(unknown)[0]!r}, expected one of {', '.join(bench.TREES)}")
        return 2
    on_gpu = jax.default_backend() == "gpu"
    copy = bench.copy_bandwidth(1 << (28 if on_gpu else 26), (130, 530) if on_gpu else (1, 3))
    rows = []
    for tree in trees:
        hosts = bench.measure_hosts(tree, ("float32", "optax.adamw"))
        for variant in ("float32", "bf16, float32 main", "bf16, remainder16", "optax.adamw"):
            row = bench.measure(tree, variant, copy)
            rows.append(row._replace(**hosts.get(variant, {})))
    kind = jax.devices()[0].device_kind
    if as_json:
        results = [row._asdict() for row in rows]
        print(json.dumps({"device": kind, "copy_gb_per_second": copy / 1e9, "rows": results}))
    else:
        print(f"{kind}, in-place copy {copy / 1e9:,.0f} GB/s")
        print(bench.format_rows(rows))
    return 0


def _add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Names as in ``distributed_fused_adamw`` and ``MixedPrecisionPolicy``."""
    add = parser.add_argument
    add("--tree", default="gpt2s", help="a tree of `bench --list`, or a JSON file {path: shape}")
    add("--param-dtype", default="bfloat16")
    add("--replicas", type=int, default=1, help="hybrid sharding: size of the replica axis")
    add("--sharding-strategy", default="optim")
    add("--outer-sharding-strategy", default="no_shard")
    add("--accumulate-steps", type=int, default=1)
    for field in _POLICY_FIELDS:
        add(f"--{field.replace('_', '-')}", help="default: that of MixedPrecisionPolicy")


_POLICY_FIELDS = (
    "main_params_dtype",
    "main_grads_dtype",
    "grad_comm_dtype",
    "grad_reduce_dtype",
    "param_comm_dtype",
    "mu_dtype",
    "nu_dtype",
)


def _optimizer(args: argparse.Namespace, num_devices: int) -> tuple[Any, Any]:
    """Returns the optimizer that the arguments describe, and the shapes of the params."""
    import jax

    from jdistadam import bench, config, distributed

    if args.tree in bench.TREES:
        shapes = bench.TREES[args.tree]
    elif pathlib.Path(args.tree).is_file():
        shapes = json.loads(pathlib.Path(args.tree).read_text())
    else:
        raise SystemExit(f"--tree: got {args.tree!r}, expected a file or {', '.join(bench.TREES)}")
    if num_devices % args.replicas:
        raise SystemExit(f"--replicas: {args.replicas} does not divide {num_devices} devices")
    dtype = config.float_dtype("--param-dtype", args.param_dtype)
    params = {path: jax.ShapeDtypeStruct(tuple(s), dtype) for path, s in shapes.items()}
    mesh = jax.make_mesh(
        (args.replicas, num_devices // args.replicas),
        ("replica", "data"),
        devices=jax.devices()[:num_devices],
    )
    given = {name: getattr(args, name) for name in _POLICY_FIELDS}
    policy = config.MixedPrecisionPolicy(**{k: v for k, v in given.items() if v is not None})
    tx = distributed.distributed_fused_adamw(
        1e-3,
        mesh=mesh,
        replica_axis="replica",
        sharding_strategy=args.sharding_strategy,
        outer_sharding_strategy=args.outer_sharding_strategy,
        policy=policy,
        max_grad_norm=1.0,
    )
    return tx, params


def _plan(args: argparse.Namespace) -> int:
    import jax

    from jdistadam.memory_plan import plan

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    tx, params = _optimizer(args, args.devices)
    print(f"{tx.config.policy}\n\n{plan(params, tx, accumulate_steps=args.accumulate_steps)}")
    return 0


def _audit(args: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jdistadam.program_audit import audit
    from jdistadam.train_state import TrainState
    from jdistadam.training import train_step

    tx, params = _optimizer(args, len(jax.devices()))

    def loss_fn(params: Any, batch: Any) -> Any:
        terms = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(params)]
        return sum(terms) * jnp.mean(batch)

    rows = tx.config.parallel.num_devices * args.accumulate_steps
    sharding = NamedSharding(tx.config.mesh, tx.config.parallel.batch_spec)
    batch = jax.ShapeDtypeStruct((rows, 1), jnp.float32, sharding=sharding)
    step = train_step(loss_fn, tx, accumulate_steps=args.accumulate_steps)
    found = audit(step, TrainState.shapes(params, tx), batch)
    print(found)
    return int(not found.passed)


if __name__ == "__main__":
    sys.exit(main())
