"""Tokens per second of Flax's lm1b example: with optax.adamw as it stands, and with this package.

    git clone https://github.com/google/flax /tmp/flax
    python experiments/bench_lm1b.py --code /tmp/flax/examples/lm1b --out runs/lm1b.json

It runs the example's own model, train state, shardings and jitted train step, with the example's
configuration and random tokens. "fused" has the changes of docs/coming_from.md: another
optimizer, and ``jda.flax.TrainState``. "fused, sharded" also cuts the state with
``jda.state_shardings``. TensorFlow, input pipelines and loggers are replaced by placeholders. All
ways start with the same parameters and tokens, and are timed in turn; the losses of the first ten
steps are recorded.
"""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import pathlib
import statistics
import sys
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from lm import command_line, power, report

PLACEHOLDERS = ("tensorflow", "tensorflow_datasets", "clu", "ml_collections", "absl")
PLACEHOLDERS += ("input_pipeline", "tokenizer")
WAYS = ("optax", "fused", "fused, sharded")
VOCABULARY = 30_000
SHARDED_STATE = """
    import jdistadam
    _shapes = jax.eval_shape(nn.unbox, abstract_state)
    _own = jax.tree.map(
        lambda x, s: x.update(sharding=s), _shapes.params, state_mesh_annotations.params)
    state_mesh_annotations = state_mesh_annotations.replace(
        opt_state=jdistadam.state_shardings(_shapes.opt_state, _own, mesh))
"""


class Config(dict):
    """Attributes are items."""

    def __getattr__(self, name):
        return self[name]

    __setattr__ = dict.__setitem__


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules whose attributes are mocks."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PLACEHOLDERS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name, __path__=[], __spec__=spec)
        module.ConfigDict = Config
        return module

    def exec_module(self, module):
        pass


def changed(name, text, way):
    """The text of one of the example's modules, with the changes of a way."""
    changes = []
    if name == "train" and way != "optax":
        changes.append(
            ("optimizer = optax.adamw(", "optimizer = __import__('jdistadam').fused_adamw(")
        )
    if name == "utils" and way != "optax":
        changes.append(
            ("from flax.training import train_state", "from jdistadam import flax as train_state")
        )
    if name == "utils" and way == "fused, sharded":
        end = "state_logical_annotations, mesh, config.logical_axis_rules\n    )\n"
        changes.append((end, end + SHARDED_STATE))
    for old, new in changes:
        if text.count(old) != 1:
            raise SystemExit(f"{name}.py: {old!r} occurs {text.count(old)} times, expected 1")
        text = text.replace(old, new)
    return text


def modules(code, way):
    """The example's modules by name."""
    found = {}
    for name in ("models", "temperature_sampler", "utils", "train"):
        module = found[name] = types.ModuleType(name)
        module.__file__ = str(code / f"{name}.py")
        text = changed(name, (code / f"{name}.py").read_text(), way)
        with mock.patch.dict(sys.modules, found):
            exec(compile(text, module.__file__, "exec"), vars(module))
    return found


MADE = {"train_config", "eval_config", "devices_array", "mesh", "rng", "m", "learning_rate_fn"}
MADE |= {"optimizer", "state", "jit_train_step", "data_sharding"}


class Way:
    """A state and a jitted step, from the statements of ``train_and_evaluate`` that make them."""

    def __init__(self, code, way, config):
        self.name, train = way, modules(code, way)["train"]
        body = ast.parse(changed("train", (code / "train.py").read_text(), way)).body
        named = (node for node in body if getattr(node, "name", "") == "train_and_evaluate")
        names = dict(vars(train), config=config, vocab_size=VOCABULARY, workdir="")
        body = [node for node in next(named).body if self._targets(node) & MADE]
        exec(compile(ast.Module(body=body, type_ignores=[]), way, "exec"), names)
        self.state, step = names["state"], names["jit_train_step"]
        static = (names["train_config"], names["learning_rate_fn"], 0.0, names["rng"])
        self._step = lambda batch: step(self.state, {"inputs": batch}, *static)
        self.losses = []

    def _targets(self, node):
        targets = node.targets if isinstance(node, ast.Assign) else []
        return {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}

    def run(self, batches):
        """Seconds of a step."""
        start = time.perf_counter()
        for batch in batches:
            self.state, metrics = self._step(batch)
            if len(self.losses) < 10:
                self.losses.append(float(metrics["loss"]) / float(metrics["denominator"]))
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / len(batches)

    def state_bytes(self):
        """Of the optimizer's state, on the first device."""
        leaves = [x for x in jax.tree.leaves(self.state.opt_state) if isinstance(x, jax.Array)]
        return sum(x.addressable_shards[0].data.nbytes for x in leaves)


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--code", type=pathlib.Path, required=True, help="flax/examples/lm1b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for CPU")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/lm1b.json"))
    args = parser.parse_args()
    sys.meta_path.insert(0, Placeholders())
    config = types.ModuleType("default")
    exec((args.code / "configs" / "default.py").read_text(), vars(config))
    config = config.get_config()
    n = len(jax.devices())
    config.update(dcn_data_parallelism=1, ici_data_parallelism=n, ici_fsdp_parallelism=-1)
    if args.tiny:
        config.update(num_layers=2, qkv_dim=64, emb_dim=64, mlp_dim=128, max_target_length=32)
    ways = [Way(args.code, way, config) for way in WAYS]
    rng = np.random.default_rng(0)
    shape = (n * config.per_device_batch_size, config.max_target_length)
    batches = [jnp.asarray(rng.integers(1, VOCABULARY, shape, np.int32)) for _ in range(4)]
    batches *= -(-args.steps // len(batches))
    for way in ways:
        way.run(batches[:12])
    rounds = {way.name: [] for way in ways}
    on_gpu = jax.devices()[0].platform == "gpu"
    with power.PowerLog() if on_gpu else contextlib.nullcontext() as log:
        for i in range(args.rounds):
            for way in ways[:: (-1) ** i]:
                rounds[way.name].append(way.run(batches[: args.steps]))
    rows = []
    for way in ways:
        seconds = statistics.median(rounds[way.name])
        ratios = np.divide(rounds["optax"], rounds[way.name]).tolist()
        rows.append(
            {
                "name": way.name,
                "tokens_per_second": shape[0] * shape[1] / seconds,
                "ms": 1e3 * seconds,
                "rounds_ms": [1e3 * x for x in rounds[way.name]],
                "speed_of_optax": statistics.median(ratios),
                "state_bytes": way.state_bytes(),
                "losses": way.losses,
            }
        )
        print(
            f"{way.name:16} {rows[-1]['tokens_per_second']:10,.0f} tokens/s  "
            f"{rows[-1]['speed_of_optax']:.3f} of optax's  state "
            f"{rows[-1]['state_bytes'] / 1e9:.2f} GB  loss {way.losses[-1]:.6f}"
        )
    parameters = sum(x.size for x in jax.tree.leaves(ways[0].state.params))
    report.write_run(
        args.out,
        args.revision,
        devices=n,
        parameters=parameters,
        batch=shape,
        power=log.summary() if log else None,
        rows=rows,
    )


if __name__ == "__main__":
    main()
