"""Whether two revisions of the package compile to the same programs for eight H200s.

    python experiments/compare_programs.py compile --out /tmp/f855107      # with one revision
    python experiments/compare_programs.py compile --out /tmp/c617cfb      # with the other
    python experiments/compare_programs.py compare /tmp/f855107 /tmp/c617cfb --out result.json

Every sharding strategy with every precision policy, mesh, number of micro-batches and feature, and
the drop-in with every placement of params and moments. Programs are compared as XLA scheduled them,
without names, channel numbers and source locations. If texts differ, it counts the operations and
compares XLA's memory analysis. Needs no GPU: JAX's CUDA plugin compiles for devices described in a
file. Only public names are used, so any two revisions can be compared.
"""

import argparse
import collections
import difflib
import gzip
import hashlib
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import report
from tqdm import tqdm

import jdistadam as jda

WIDTH = 512
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
POLICIES = {
    "float32": {},
    "bf16 sent": dict(grad_comm_dtype="bfloat16"),
    "bf16 sent, f32 sum": dict(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"),
    "bf16 grads": dict(main_grads_dtype="bfloat16"),
    "remainder16": dict(main_params_dtype="remainder16", grad_comm_dtype="bfloat16"),
    "no main": dict(main_params_dtype=None),
    "f8 gathered": dict(param_comm_dtype="float8_e4m3fn", grad_comm_dtype="bfloat16"),
}
MESHES = {"8": "no_shard", "2 x 4": "no_shard", "2 x 4, state over both": "optim"}
FEATURES = {
    "loss scale and clip": dict(max_grad_norm=1.0, loss_scale=jda.DynamicLossScale()),
    "groups": dict(
        param_labels={f"layer{i}": ("frozen", "body", "head")[i] for i in range(3)},
        groups={"frozen": {"frozen": True}, "body": {}, "head": dict(lr_scale=0.1, b1=0.8)},
    ),
    "small buckets": dict(bucket_bytes=600),
    "sums": dict(average_grads=False),
}


def params_of(dtype):
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "scale": (WIDTH,)}
    return {
        f"layer{i}": {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        for i in range(3)
    }


def block(x, layer):
    scaled = x * layer["scale"][None].astype(x.dtype)
    return x + jnp.tanh(scaled @ layer["up"]) @ layer["down"]


def loss_fn(params, x):
    for layer in params.values():
        x = block(x, layer)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def h200s(target, shape, names):
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.read_text(), topology="1x1x8"
    )
    return Mesh(np.asarray(topology.devices).reshape(shape), names)


def placed(mesh, tree, specs):
    def place(spec, subtree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree
        )

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def distributed_adamw(param_labels=None, groups=None, **kwargs):
    adamw = jda.fused_adamw(1e-3, param_labels=param_labels, groups=groups)
    return jda.distributed(adamw, **kwargs)


def train_program(mesh, outer, dtype, policy, *, steps=1, loss=loss_fn, params=None, **kwargs):
    tx = distributed_adamw(
        mesh=mesh,
        replica_axis="replica" if "replica" in mesh.axis_names else None,
        outer_sharding_strategy=outer,
        policy=jda.MixedPrecisionPolicy(**policy),
        **kwargs,
    )
    params = params_of(dtype) if params is None else params
    data = tx.config.parallel.data_axes
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), dtype), P(data))
    step = jda.train_step(lambda p, x: loss(p, x, tx), tx, accumulate_steps=steps)
    state = jda.TrainState.shapes(params, tx)
    return step.lower(state, batch)


def scanned_loss(params, x, tx):
    def body(x, layer):
        return block(x, jda.gather_params(layer, tx)), None

    body = jax.checkpoint(body, policy=jda.remat_policy)
    x, _ = jax.lax.scan(body, x, params["layers"])
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def stacked_params(dtype):
    stack = lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype)  # noqa: E731
    return {"layers": jax.tree.map(stack, params_of(dtype)["layer0"])}


def bound(tx, params):
    """The optimizer for only these params; unchanged for revisions before ``bind``."""
    return tx.bind(params) if hasattr(tx, "bind") else tx


def own_program(mesh, strategy, dtype, policy):
    """A step in the user's own shard_map."""
    tx = distributed_adamw(
        mesh=mesh, sharding_strategy=strategy, policy=jda.MixedPrecisionPolicy(**policy)
    )
    params = params_of(dtype)
    tx = bound(tx, params)
    specs = tx.param_specs(params), tx.state_specs()

    def local_step(params, state, batch):
        varying = jda.local_params(params, tx)
        grads = jax.grad(lambda p: loss_fn(jda.gather_params(p, tx), batch))(varying)
        grads = tx.accumulate(tx.init_grads(params), grads, 2.0)
        norm = tx.grad_norm(grads, state)
        return *tx.step(grads, state, params), norm

    step = jax.shard_map(
        local_step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P())
    )
    state = placed(mesh, jax.eval_shape(tx.init, params), specs[1])
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), dtype), P("data"))
    return jax.jit(step, donate_argnums=(0, 1)).lower(placed(mesh, params, specs[0]), state, batch)


def init_program(mesh, strategy, dtype, policy):
    tx = distributed_adamw(
        mesh=mesh, sharding_strategy=strategy, policy=jda.MixedPrecisionPolicy(**policy)
    )
    params = params_of(dtype)
    tx = bound(tx, params)
    specs = tx.param_specs(params)
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=(specs,), out_specs=tx.state_specs(), check_vma=False
    )
    return jax.jit(init).lower(placed(mesh, params, specs))


def drop_in_program(mesh, dtype, main, mode, param_spec, moment_spec):
    tx = jda.fused_adamw(1e-3, main_params_dtype=main)
    shapes = {
        "w": jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype),
        "v": jax.ShapeDtypeStruct((64, 8), dtype),
    }
    params = placed(mesh, shapes, {"w": param_spec, "v": P()})
    state = jax.eval_shape(tx.init, params)

    def place(path, x):
        spec = moment_spec if x.shape == (WIDTH, WIDTH) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree_util.tree_map_with_path(place, state)
    grads = placed(mesh, shapes, P())
    run = {"step": tx.step, "update": lambda g, s, p: tx.update(g, s, p)}[mode]
    return jax.jit(lambda p, s, g: run(g, s, p), donate_argnums=(0, 1)).lower(params, state, grads)


F32, BF16 = "float32", "bfloat16"
SCANNED_POLICIES = ("bf16 sent", "bf16 sent, f32 sum", "remainder16", "f8 gathered")
OWN_POLICIES = ("bf16 sent", "remainder16")
MAIN_PARAMS = ((F32, None), (BF16, None), (BF16, "float32"), (BF16, "remainder16"))


def programs(target):
    """Yields (name, function that lowers it)."""
    one = h200s(target, (8,), ("data",))
    two = h200s(target, (2, 4), ("replica", "data"))
    by_name = {mesh: one if mesh == "8" else two for mesh in MESHES}
    yield from with_every_policy(by_name)
    yield from with_every_feature(two)
    yield from with_a_tensor_axis(h200s(target, (4, 2), ("data", "model")))
    yield from with_scanned_layers(by_name)
    yield from in_a_shard_map(one)
    yield from drop_ins(one)


def plain_loss(params, x, tx):
    return loss_fn(params, x)


def train(name, mesh, outer, dtype, policy, **kwargs):
    """A whole train_step."""
    kwargs = dict(loss=plain_loss) | kwargs
    return name, lambda: train_program(mesh, outer, dtype, POLICIES[policy], **kwargs)


def with_every_policy(meshes):
    for strategy, policy, (mesh, outer), steps in itertools.product(
        STRATEGIES, POLICIES, MESHES.items(), (1, 4)
    ):
        impossible = (outer == "optim" or policy == "f8 gathered") and strategy == "no_shard"
        if impossible or (policy == "no main" and steps == 4):
            continue
        yield train(
            f"train_step, {strategy}, {policy}, {mesh}, {steps} micro-batches",
            meshes[mesh],
            outer,
            F32 if policy == "no main" else BF16,
            policy,
            sharding_strategy=strategy,
            steps=steps,
        )


def with_every_feature(mesh):
    for strategy, (feature, kwargs) in itertools.product(STRATEGIES, FEATURES.items()):
        for dtype in (F32, BF16):
            yield train(
                f"train_step, {strategy}, {feature}, {dtype}",
                mesh,
                "no_shard",
                dtype,
                "bf16 sent",
                sharding_strategy=strategy,
                steps=2,
                **kwargs,
            )


def with_a_tensor_axis(mesh):
    specs = {
        f"layer{i}": {"up": P(None, "model"), "down": P("model"), "scale": P()} for i in range(3)
    }

    def loss(params, x, tx):
        terms = [jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(params)]
        return sum(terms) * jnp.mean(x.astype(jnp.float32))

    for strategy in STRATEGIES:
        yield train(
            f"train_step, {strategy}, tensor axis",
            mesh,
            "no_shard",
            BF16,
            "bf16 sent, f32 sum",
            sharding_strategy=strategy,
            loss=loss,
            param_specs=specs,
            max_grad_norm=1.0,
        )


def with_scanned_layers(meshes):
    for policy, (mesh, outer), steps in itertools.product(SCANNED_POLICIES, MESHES.items(), (1, 4)):
        yield train(
            f"train_step, scanned layers, {policy}, {mesh}, {steps} micro-batches",
            meshes[mesh],
            outer,
            BF16,
            policy,
            sharding_strategy="optim_grads_params",
            layers=lambda path: "scan" if "layers" in path else None,
            params=stacked_params(BF16),
            loss=scanned_loss,
            steps=steps,
            max_grad_norm=1.0,
        )


def in_a_shard_map(mesh):
    for strategy, policy in itertools.product(STRATEGIES, OWN_POLICIES):
        yield (
            f"shard_map, {strategy}, {policy}",
            lambda s=strategy, p=policy: own_program(mesh, s, BF16, POLICIES[p]),
        )
    for strategy, policy in itertools.product(STRATEGIES, OWN_POLICIES):
        yield (
            f"init, {strategy}, {policy}",
            lambda s=strategy, p=policy: init_program(mesh, s, BF16, POLICIES[p]),
        )


def drop_ins(mesh):
    specs = (P(), P("data"), P(None, "data"))
    for (dtype, main), mode, param_spec, moment_spec in itertools.product(
        MAIN_PARAMS, ("step", "update"), specs, specs
    ):
        yield (
            f"fused_adamw {mode}, {dtype}, main {main}, params {param_spec}, mu nu {moment_spec}",
            lambda a=(dtype, main, mode, param_spec, moment_spec): drop_in_program(mesh, *a),
        )


def canonical(text):
    """A program without names and places: computations and instructions numbered in order."""
    numbers = {}

    def number(match):
        return f"%{numbers.setdefault(match[0], len(numbers))}"

    lines = []
    for line in text.splitlines():
        if re.match(r"(FileNames|FunctionNames|FileLocations|StackFrames|\d+ )", line):
            continue
        line = re.sub(r", metadata=\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "", line)
        line = re.sub(r"^HloModule [\w.\-]+", "HloModule", line)
        line = re.sub(r"channel_id=\d+", "channel_id=", line)
        line = re.sub(r'fingerprint\w*="[^"]*"', "fingerprint", line)
        line = re.sub(
            r"^(ENTRY )?(%?[\w.\-]+) \(.*\) -> ", lambda m: f"{m[1] or ''}{m[2]} -> ", line
        )
        lines.append(re.sub(r"%[A-Za-z_][\w.\-]*", number, line))
    return "\n".join(line for line in lines if line.strip())


def describe(compiled):
    text = compiled.as_text()
    found = re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][a-z\-]*)\(", text)
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("in_bytes")}
    return canonical(text), {
        "sha256": hashlib.sha256(canonical(text).encode()).hexdigest(),
        "operations": dict(sorted(collections.Counter(found).items())),
        "memory": {k: v for k, v in sizes.items() if v and "code" not in k},
    }


def compile_all(args):
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [(n, f) for n, f in programs(args.target) if args.only in n]
    part, parts = map(int, args.part.split("/"))
    wanted = wanted[part::parts]
    for name, lower in tqdm(wanted, mininterval=5):
        path = args.out / (re.sub(r"\W+", "_", name) + ".json.gz")
        if path.exists():
            continue
        try:
            text, entry = describe(lower().compile())
        except Exception as error:  # of the argument checks: part of the comparison
            text, entry = "", {"raises": f"{type(error).__name__}: {error}"}
        path.write_bytes(gzip.compress(json.dumps(entry | {"name": name, "text": text}).encode()))


def load(folder):
    entries = [
        json.loads(gzip.decompress(p.read_bytes())) for p in sorted(folder.glob("*.json.gz"))
    ]
    return {entry["name"]: entry for entry in entries}


def compare(args):
    before, after = load(args.before), load(args.after)
    rows, counts = [], collections.Counter()
    for name in sorted(before.keys() | after.keys()):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            verdict = "only before" if b is None else "only after"
        elif "raises" in a or "raises" in b:
            verdict = (
                "raises the same" if a.get("raises") == b.get("raises") else "raises otherwise"
            )
        elif a["sha256"] == b["sha256"]:
            verdict = "same program"
        elif a["operations"] == b["operations"] and a["memory"] == b["memory"]:
            verdict = "same operations and memory"
        else:
            verdict = "different"
        counts[verdict] += 1
        if verdict not in ("same program", "raises the same"):
            row = {"program": name, "verdict": verdict}
            for key in ("operations", "memory", "raises"):
                x, y = (entry.get(key) if entry else None for entry in (a, b))
                if x != y and isinstance(x, dict) and isinstance(y, dict):
                    row[key] = {
                        k: [x.get(k), y.get(k)] for k in x.keys() | y.keys() if x.get(k) != y.get(k)
                    }
                elif x != y:
                    row[key] = [x, y]
            rows.append(row)
            print(json.dumps(row))
            if args.diff and a and b:
                lines = difflib.unified_diff(
                    a["text"].splitlines(), b["text"].splitlines(), n=0, lineterm=""
                )
                print("\n".join(line[:300] for line in itertools.islice(lines, args.diff)))
    for verdict, count in counts.most_common():
        print(f"{count:>5} {verdict}")
    if args.out:
        folders = {"before": args.before.name, "after": args.after.name}
        report.write_run(args.out, None, **folders, verdicts=dict(counts), others=rows)
    return int(
        any(
            v not in ("same program", "raises the same", "same operations and memory")
            for v in counts
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    compiling = commands.add_parser("compile")
    compiling.add_argument("--out", type=pathlib.Path, required=True)
    compiling.add_argument("--only", default="", help="a part of the names")
    compiling.add_argument("--part", default="0/1", help="0/4: the first of four parts")
    h200 = pathlib.Path(__file__).parent.parent / "tests" / "support" / "h200.txtpb"
    compiling.add_argument(
        "--target", type=pathlib.Path, default=h200, help="description of the GPU"
    )
    compiling.set_defaults(run=compile_all)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    comparing.add_argument("--out", type=pathlib.Path)
    comparing.add_argument("--diff", type=int, default=0, help="lines of each difference to print")
    comparing.set_defaults(run=compare)
    args = parser.parse_args()
    raise SystemExit(args.run(args))


if __name__ == "__main__":
    main()
