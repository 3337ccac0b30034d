"""The arguments of the command ``jdistadam``: parsing, checks and help."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jdistadam
from jdistadam.core import memory
from jdistadam.core.arguments import FLOATS
from jdistadam.core.codecs import BLOCK_CODECS
from jdistadam.core.precision import FLOAT8, MixedPrecisionPolicy
from jdistadam.core.storage import ROUNDINGS
from jdistadam.distributed.mesh_axes import OUTER_SHARDING_STRATEGIES, SHARDING_STRATEGIES
from jdistadam.tools import bench

_LARGEST = 1 << 20  # largest count: more than any machine has, and still planned at once
_BLOCKS = tuple(known.name for known in BLOCK_CODECS)

# Fields of MixedPrecisionPolicy: allowed values, and what each is the dtype of.
_POLICY: dict[str, tuple[tuple[str, ...], str]] = {
    "main_params_dtype": (
        ("float32", "remainder16", "none"),
        "main parameters, which the optimizer updates; none: it updates the model's",
    ),
    "main_grads_dtype": (FLOATS, "gradients in storage"),
    "grad_comm_dtype": (("none", *FLOATS), "communicated gradients; none: main-grads-dtype"),
    "grad_reduce_dtype": (
        ("none", "float32"),
        "sums over devices; none: grad-comm-dtype, summed by the collective library",
    ),
    "param_comm_dtype": (
        ("none", *FLOATS, *FLOAT8),
        "communicated parameters; none: param-dtype",
    ),
}
_MOMENTS = {
    "mu_dtype": ((*FLOATS, *_BLOCKS), "first moments"),
    "nu_dtype": (("float32", "bfloat16", *_BLOCKS), "second moments"),
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not those of switches, which would be read as their effect."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.nargs == 0 else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, and shows defaults in its help."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=_Help, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        text = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {text}; see {self.prog} --help\n")


class Tree(NamedTuple):
    """Parameters by path, and their source: a name or a file."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        """Returns the name and sizes."""
        leaves = f"{len(self.shapes)} {'leaf' if len(self.shapes) == 1 else 'leaves'}"
        return f"{self.name}, {leaves}, {sum(map(math.prod, self.shapes.values())):,} parameters"


def make_parser() -> Parser:
    """Returns the parser; its results have the name of the ``command`` and its ``parser``."""
    parser = Parser(prog="jdistadam", description="Fused and sharded Adam for JAX.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {jdistadam.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> Parser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(parser=added)
        return added

    info = command(
        "info", "print versions, devices, speeds of links, which kernels run, and why others do not"
    )
    _add_json(info)
    command("check", "take a step on each backend and compare it bit for bit with the reference")
    bench = command("bench", "time a step on this device against a copy and optax.adamw")
    _add_bench_arguments(bench)
    plan = command("plan", "compute from shapes the bytes that each device would hold and send")
    plan.add_argument(
        "--devices", type=_count, metavar="N", default=8, help="number; they need not exist"
    )
    _add_optimizer_arguments(plan)
    plan.add_argument(
        "--model-devices",
        type=_count,
        metavar="N",
        default=1,
        help="number of devices over which the model is partitioned: each leaf of two or more "
        "dimensions along its last one, if N divides it",
    )
    plan.add_argument(
        "--state-memory",
        choices=("device", memory.HOST),
        default="device",
        help="where main parameters and moments are between steps",
    )
    _add_json(plan)
    audit = command(
        "audit", "compile a step for the present devices, and compare what it sends with the plan"
    )
    _add_optimizer_arguments(audit)
    audit.set_defaults(model_devices=1, state_memory="device")
    audit.add_argument("--order", action="store_true", help="print what the step does, in order")
    _add_json(audit)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments; an unknown one ends the program with the usage of its command."""
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def policy(args: argparse.Namespace) -> MixedPrecisionPolicy:
    """Returns the policy that the arguments describe."""
    given: dict[str, Any] = {name: getattr(args, name) for name in _POLICY}
    return MixedPrecisionPolicy(**{k: None if v == "none" else v for k, v in given.items()})


def layers(args: argparse.Namespace) -> Callable[[str], str | None] | None:
    """Returns the argument ``layers``: "scan" for leaves in ``scans``; None for no ``--layers``."""
    selected = {f"params[{path!r}]" for scan in scans(args) for path in scan}
    return None if args.layers is None else lambda path: "scan" if path in selected else None


def scans(args: argparse.Namespace) -> list[list[str]]:
    """Returns the paths of the leaves of each scan that ``--layers`` selects.

    Leaves of one scan have the same path up to the end of its part with the text, so those of
    "encoder/layers" and "decoder/layers" may have different numbers of layers. Exits if leaves of
    one scan have different first dimensions, or none.
    """
    found: dict[str, list[str]] = {}
    for path in args.tree.shapes if args.layers is not None else ():
        if start := re.match(rf".*?{re.escape(args.layers)}[^/.]*", path, re.DOTALL):
            found.setdefault(start[0], []).append(path)
    for place, paths in found.items():
        sizes = dict.fromkeys(args.tree.shapes[path][:1] for path in paths)
        if len(sizes) > 1 or () in sizes:
            got = ", ".join(str(size[0]) if size else "none" for size in sizes)
            args.parser.error(
                f"argument --layers: leaves in {place} are not stacked: got first dimensions "
                f"{got}, expected one, the number of layers of a scan"
            )
    return list(found.values())


def with_flags(args: argparse.Namespace, message: str) -> str:
    """Returns a message about Python arguments in terms of the command's."""
    flags = {name: f"--{name.replace('_', '-')}" for name in vars(args)}
    flags["replica_axis"] = "--replicas"
    # Names that are also words are replaced only if their context shows that they are names.
    names, value = "|".join(flags), r"=(?:jnp\.)?(['\"]?)([\w.]+)\2"
    pattern = rf"(?<![-\w])(?:MixedPrecisionPolicy\.)?({names})(?!\w)(?:{value})?"

    def flag(found: re.Match[str]) -> str:
        name, _, given = found.groups()
        if given is not None:
            return f"{flags[name]} {'none' if given == 'None' else given}"
        before = message[: found.start()]
        is_name = (
            "_" in name or name in ("b1", "b2") or not before or before.endswith(("eave ", "Pass "))
        )
        return flags[name] if is_name else found[0]

    return re.sub(pattern, flag, message)


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _add_bench_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--trees",
        nargs="+",
        default=argparse.SUPPRESS,  # it depends on the device
        choices=bench.TREES,
        metavar="TREE",
        help="trees to update: %(choices)s (default: resnet50, on a CPU flat4M)",
    )
    parser.add_argument("--list", action="store_true", help="print the trees and exit")
    _add_json(parser)


def _add_optimizer_arguments(parser: Parser) -> None:
    """Adds arguments named as in ``fused_adamw``, ``distributed`` and ``MixedPrecisionPolicy``."""
    add = parser.add_argument
    names = ", ".join(bench.TREES)
    add("--tree", type=_tree, default="gpt2s", help=f"{names}, or a JSON file {{path: shape}}")
    _add_dtype(parser, "param_dtype", FLOATS, "bfloat16", "parameters")
    add(
        "--replicas",
        type=_count,
        metavar="N",
        default=1,
        help="number of replicas into which the devices are divided; 1: no replica axis",
    )
    add(
        "--sharding-strategy",
        choices=SHARDING_STRATEGIES,
        default="optim",
        help="what is sharded over the devices of a replica",
    )
    add(
        "--outer-sharding-strategy",
        choices=OUTER_SHARDING_STRATEGIES,
        default="no_shard",
        help="what is sharded over the replicas too",
    )
    add(
        "--no-reshard-after-forward",
        dest="reshard_after_forward",
        action="store_false",
        help="gather parameters and reduce gradients only once per step",
    )
    add(
        "--accumulate-steps",
        type=_count,
        metavar="N",
        default=1,
        help="number of micro-batches per step",
    )
    use = "a text in the paths of the leaves whose first dimension is the layer of a scan"
    add("--layers", metavar="TEXT", help=use)
    add(
        "--communication",
        choices=("auto", "xla", "peer"),
        default="auto",
        help="peer: between GPUs that can access each other's memory; auto: peer on present GPUs "
        "if the other options allow it, otherwise xla",
    )
    defaults = MixedPrecisionPolicy(main_params_dtype="float32")
    for name, (choices, use) in (_POLICY | _MOMENTS).items():
        _add_dtype(parser, name, choices, str(getattr(defaults, name, "float32")).lower(), use)
    for name, default, moment in (("--b1", 0.9, "first"), ("--b2", 0.999, "second")):
        use = f"decay rate of the {moment} moment; not every dtype supports every rate"
        add(name, type=float, default=default, help=use)
    parser.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        default=ROUNDINGS[0],
        help="rounding of moments, and of 16-bit params without main parameters",
    )


def _add_dtype(parser: Parser, name: str, choices: tuple[str, ...], default: str, use: str) -> None:
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        choices=choices,
        default=default,
        metavar="DTYPE",
        help=f"dtype of {use}; one of %(choices)s",
    )


def _count(text: str) -> int:
    """Returns a number of devices, replicas or micro-batches."""
    if text.isdecimal() and len(text) < 20 and 1 <= int(text) <= _LARGEST:
        return int(text)
    expected = f"a whole number from 1 to {_LARGEST}"
    raise argparse.ArgumentTypeError(f"got {reprlib.repr(text)}, expected {expected}")


def _tree(text: str) -> Tree:
    """Returns a tree of the bench, or one from a JSON file."""
    if text in bench.TREES:
        return Tree(text, bench.TREES[text])
    try:
        content = pathlib.Path(text).read_text(encoding="utf-8")
        shapes = json.loads(content, object_pairs_hook=_without_repetition)
    except OSError as error:
        names = ", ".join(bench.TREES)
        raise argparse.ArgumentTypeError(
            f"cannot read {text!r} ({error.strerror}), expected a JSON file or one of {names}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    _check(text, isinstance(shapes, dict) and shapes, shapes, 'an object like {"w": [1024, 64]}')
    for path, shape in shapes.items():
        expected = "a list of whole numbers, with fewer than 2**63 elements"
        if isinstance(shape, dict):
            leaf = _flat_path(path, shape)
            expected = f"one level, with the paths of leaves: {{{leaf}: [1024, 64]}}"
        _check(f"{text}: shape of {path!r}", _is_shape(shape), shape, expected)
    return Tree(text, {path: tuple(shape) for path, shape in shapes.items()})


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file; raises ValueError for a key twice, of which one would be lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _flat_path(path: str, tree: Any) -> str:
    """The path of the first leaf of a nested JSON tree."""
    while isinstance(tree, dict) and tree:
        key, tree = next(iter(tree.items()))
        path = f"{path}/{key}"
    return json.dumps(path)


def _is_shape(value: Any) -> bool:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        return False
    return math.prod(max(n, 1) for n in value) < 1 << 63


def _check(where: str, is_valid: Any, got: Any, expected: str) -> None:
    if not is_valid:
        raise argparse.ArgumentTypeError(f"{where}: got {reprlib.repr(got)}, expected {expected}")
