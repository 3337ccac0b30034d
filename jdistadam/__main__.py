"""``python -m jdistadam info``, ``check`` and ``bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from jdistadam import diagnostics


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
    args = parser.parse_args(argv)
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
    loops = (10, 40) if on_gpu else (1, 3)
    copy = bench.copy_bandwidth(1 << (28 if on_gpu else 26), loops)
    rows = [
        bench.measure(tree, variant, copy, loops)
        for tree in trees
        for variant in ("float32", "bf16, float32 main", "bf16, remainder16", "optax.adamw")
    ]
    kind = jax.devices()[0].device_kind
    if as_json:
        results = [row._asdict() for row in rows]
        print(json.dumps({"device": kind, "copy_gb_per_second": copy / 1e9, "rows": results}))
    else:
        print(f"{kind}, in-place copy {copy / 1e9:,.0f} GB/s")
        print(bench.format_rows(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
