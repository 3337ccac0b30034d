"""The command ``jdistadam``: ``info``, ``check``, ``bench``, ``plan`` and ``audit``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jdistadam.errors import JDistAdamError
from jdistadam.tools import command_line, diagnostics

# A shell's exit codes for a program that is interrupted, and one whose output is no longer read.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code; 2 for unusable arguments, 1 for a failure."""
    try:
        try:
            args = command_line.parse(argv)
            return _run(args)
        finally:
            print(end="", flush=True)  # what cannot be written is caught here
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # Python flushes once more at exit, which must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _BROKEN_PIPE
        print(f"jdistadam: error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    try:
        return _COMMANDS[args.command](args)
    except JDistAdamError as error:  # the arguments ask for the impossible
        _refuse(args, f"{type(error).__name__}: {command_line.with_flags(args, str(error))}")


def _info(args: argparse.Namespace) -> int:
    report = diagnostics.info()
    print(json.dumps(report, indent=2) if args.json else diagnostics.format_info(report))
    return 0


def _check(args: argparse.Namespace) -> int:
    checks = diagnostics.check()
    marks = {True: "[OK]", False: "[FAIL]", None: "[--]"}
    for name, passed, detail in checks:
        print(f"{marks[passed]:<6} {name:<5} {detail}")
    failed = any(check.passed is False for check in checks)
    if not failed and not any(check.passed for check in checks):
        print("FAILED: nothing was checked")
        return 1
    print("FAILED" if failed else "SUCCESS")
    return int(failed)


def _bench(args: argparse.Namespace) -> int:
    from jdistadam.tools import bench

    if args.list:
        sizes = {k: (len(x), sum(map(math.prod, x.values()))) for k, x in bench.TREES.items()}
        lines = [f"{k:<12} {n:>5} leaves {size:>13,} parameters" for k, (n, size) in sizes.items()]
        listed = {k: {"leaves": n, "parameters": size} for k, (n, size) in sizes.items()}
        print(json.dumps(listed, indent=2) if args.json else "\n".join(lines))
        return 0
    device = _devices(args)[0]
    on_gpu = device.platform == "gpu"
    copy = bench.copy_bandwidth(1 << (28 if on_gpu else 26), (130, 530) if on_gpu else (1, 3))
    rows = []
    for tree in getattr(args, "trees", ["resnet50" if on_gpu else "flat4M"]):
        hosts = bench.measure_hosts(tree, ("float32", "optax.adamw"))
        for variant in ("float32", "bf16, float32 main", "bf16, remainder16", "optax.adamw"):
            row = bench.measure(tree, variant, copy)._replace(**hosts.get(variant, {}))
            rows.append(row if on_gpu else row._replace(wall_share_of_copy=None))
    kind = device.device_kind
    if args.json:
        results = [row._asdict() for row in rows]
        print(json.dumps({"device": kind, "copy_gb_per_second": copy / 1e9, "rows": results}))
    else:
        print(f"{kind}, in-place copy {copy / 1e9:,.0f} GB/s")
        print(bench.format_rows(rows))
    return 0


def _plan(args: argparse.Namespace) -> int:
    import numpy as np
    from jax.sharding import Mesh

    from jdistadam.tools.plan import plan

    # Numbers stand for the devices: nothing is placed on them, and JAX starts no backend.
    shape, axes = _mesh_shape(args, args.devices)
    tx, params = _optimizer(args, Mesh(np.arange(args.devices).reshape(shape), axes))
    planned = plan(params, tx, accumulate_steps=args.accumulate_steps)
    why = command_line.with_flags(args, planned.communication.why_not_peer)
    planned = dataclasses.replace(
        planned,
        settings=tuple(command_line.with_flags(args, x) for x in planned.settings),
        communication=planned.communication._replace(why_not_peer=why),
    )
    if args.json:
        print(json.dumps(planned.as_dict(), indent=2))
        return 0
    dtypes = f"{tx.config.policy}\n{tx.config.algorithm}"
    print(f"{_heading(args, args.devices)}\n\n{dtypes}\n\n{planned}")
    return 0


def _audit(args: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jdistadam.tools.audit import audit
    from jdistadam.training.train_state import TrainState
    from jdistadam.training.train_step import train_step

    devices = _devices(args)
    shape, axes = _mesh_shape(args, len(devices))
    tx, params = _optimizer(args, jax.make_mesh(shape, axes, devices=devices))

    rows = tx.config.parallel.num_devices * args.accumulate_steps
    sharding = NamedSharding(tx.config.mesh, tx.config.parallel.batch_spec)
    batch = jax.ShapeDtypeStruct((rows, 1), jnp.float32, sharding=sharding)
    loss_fn = _loss_of(tx, command_line.scans(args))
    step = train_step(loss_fn, tx, accumulate_steps=args.accumulate_steps)
    found = audit(step, TrainState.shapes(params, tx), batch)
    failed = not (found.passed or found.only_widened)
    if args.json:
        order = {"order": found.order} if args.order else {}
        print(json.dumps(found.as_dict() | order, indent=2))
        return int(failed)
    print(f"{_heading(args, len(devices))}\n\n{found}")
    if args.order:
        print(f"\n{found.order or 'XLA orders the step: nothing is copied over peer memory.'}")
    return int(failed)


def _loss_of(tx: Any, scans: list[list[str]]) -> Any:
    """A loss of all params that gathers layer after layer of those that are scanned."""
    import jax
    import jax.numpy as jnp

    from jdistadam.distributed.gather_params import gather_params

    def of_leaves(params: Any, factor: Any) -> Any:
        terms = [jnp.sum(jnp.sin(factor * x)) for x in jax.tree.leaves(params)]
        return sum(terms, jnp.float32(0))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_layer(factor: Any, layer: Any) -> tuple[Any, Any]:
        return factor, of_leaves(gather_params(layer, tx), factor)

    def loss_fn(params: Any, batch: Any) -> Any:
        factor, loss, others = jnp.mean(batch), jnp.float32(0), dict(params)
        for paths in scans:
            layers = {path: others.pop(path) for path in paths}
            loss += jnp.sum(jax.lax.scan(of_layer, factor, layers)[1])
        return loss + of_leaves(others, factor)

    return loss_fn


_COMMANDS = {"info": _info, "check": _check, "bench": _bench, "plan": _plan, "audit": _audit}


def _refuse(args: argparse.Namespace, message: str) -> NoReturn:
    """Exits with a one-line message."""
    parser: command_line.Parser = args.parser
    parser.error(message)


def _devices(args: argparse.Namespace) -> list[Any]:
    """Returns the devices of this process, or exits if JAX cannot start its backend."""
    import jax

    try:
        return jax.devices()
    except Exception as error:  # JAX passes on any exception of the backend
        _refuse(args, f"JAX finds no device: {type(error).__name__} {error}".rstrip())


def _mesh_shape(
    args: argparse.Namespace, num_devices: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns shape and axes of the mesh: one axis, unless there are replicas or a model axis."""
    sizes = {"replica": args.replicas, "data": num_devices, "model": args.model_devices}
    for flag, axis in (("--model-devices", "model"), ("--replicas", "replica")):
        if sizes["data"] % sizes[axis]:
            text = f"{sizes[axis]} does not divide {sizes['data']} devices"
            _refuse(args, f"argument {flag}: {text}")
        sizes["data"] //= sizes[axis]
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis == "data")
    return tuple(sizes[axis] for axis in axes), axes


def _optimizer(args: argparse.Namespace, mesh: Any) -> tuple[Any, Any]:
    """Returns the optimizer described by the arguments, and the shapes of the params."""
    import jax
    from jax.sharding import PartitionSpec as P

    from jdistadam.distributed.optimizer import distributed
    from jdistadam.drop_in.optimizer import fused_adamw

    def spec(shape: tuple[int, ...]) -> P:
        is_cut = len(shape) > 1 and shape[-1] % args.model_devices == 0
        return P(*[None] * (len(shape) - 1), "model") if is_cut else P()

    has_model_axis = "model" in mesh.axis_names
    moments = {name: getattr(args, name) for name in ("mu_dtype", "nu_dtype", "rounding")}
    tx = distributed(
        fused_adamw(1e-3, b1=args.b1, b2=args.b2, **moments),
        mesh=mesh,
        replica_axis="replica" if "replica" in mesh.axis_names else None,
        communication=args.communication,
        state_memory=args.state_memory,
        param_specs={k: spec(v) for k, v in args.tree.shapes.items()} if has_model_axis else None,
        sharding_strategy=args.sharding_strategy,
        outer_sharding_strategy=args.outer_sharding_strategy,
        reshard_after_forward=args.reshard_after_forward,
        policy=command_line.policy(args),
        max_grad_norm=1.0,
        layers=command_line.layers(args),
    )
    leaves = args.tree.shapes.items()
    return tx, {path: jax.ShapeDtypeStruct(shape, args.param_dtype) for path, shape in leaves}


def _heading(args: argparse.Namespace, num_devices: int) -> str:
    """Returns the arguments as a description, in lines like those of a policy."""
    size = num_devices // args.replicas
    division = f", as {args.replicas} replicas of {size}" if args.replicas > 1 else ""
    division += f", {args.model_devices} along the model" if args.model_devices > 1 else ""
    kept = "" if args.reshard_after_forward else ", not resharded"
    strategy = f"{args.sharding_strategy}, outer {args.outer_sharding_strategy}{kept}"
    lines = {
        "tree": args.tree,
        "param_dtype": args.param_dtype,
        "devices": f"{num_devices}{division}",
        "sharding_strategy": strategy,
        "accumulate_steps": args.accumulate_steps,
    }
    if scans := command_line.scans(args):
        numbers = dict.fromkeys(args.tree.shapes[first][0] for first, *_ in scans)
        lines["layers"] = ", ".join(map(str, numbers))
    if args.state_memory != "device":
        lines["state_memory"] = args.state_memory
    return "\n".join(f"{name:<18}  {value}" for name, value in lines.items())


if __name__ == "__main__":
    sys.exit(main())
