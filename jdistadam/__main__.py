"""``python -m jdistadam info`` and ``python -m jdistadam check``."""

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
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    sys.exit(main())
