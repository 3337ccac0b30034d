"""What a distributed state is outside of a step: saved, exported, restored, converted, reloaded.

Each case is a state after a step of one combination of strategy, kind of main parameters, kind of
moments, average, guards and chain, on one of several meshes. Its digests are those of everything that
leaves the state or comes back. Revision d14c5ef recorded them, before these ways shared one description
of the state. To record them, with a revision that has the right bits:

    PYTHONPATH=tests python -m support.kept_states

With numbers of a process, of all processes and of a port, it prints the digests of ``SHARED`` as
found by several processes: they must be the same.
"""

import hashlib
import itertools
import json
import os
import pathlib
import sys
import tempfile

TOTAL = 8  # devices
if __name__ == "__main__":
    from support import fast_compilation

    COUNT = int(sys.argv[2]) if len(sys.argv) > 1 else 1
    devices = f"--xla_force_host_platform_device_count={TOTAL // COUNT}"
    os.environ["XLA_FLAGS"] = f"{devices} {fast_compilation.flags()}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jdistadam as jda  # noqa: E402
from jdistadam.checkpoint.contents import contents_of  # noqa: E402
from jdistadam.core.trees import words_of  # noqa: E402

RECORD = pathlib.Path(__file__).parent / "recorded" / "states.json"
BF16 = ml_dtypes.bfloat16
SHAPES = {  # two that are cut, one of them along its second dimension, and three that are packed
    "columns": (6, 4096),
    "empty": (0, 4),
    "ice": (16, 16),
    "odd": (515,),
    "rows": (32, 512),
    "scalar": (),
}
SPECS = {"columns": P(None, "model"), "rows": P("model"), "odd": P(), "scalar": P()}
SPECS |= {"empty": P(), "ice": P()}
HYPER = dict(b1=0.5, b2=0.75, eps=1e-6, weight_decay=0.125)
MESHES = {
    "1": ((1,), ("data",)),
    "4": ((4,), ("data",)),
    "8": ((8,), ("data",)),
    "model": ((4, 2), ("data", "model")),
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MAINS = {"float32": jnp.float32, "remainder16": "remainder16", "none": None}
MOMENTS = {
    "floats": dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.float32),
    "block8": dict(mu_dtype="block8", nu_dtype="block8"),
    "block16": dict(mu_dtype="block16", nu_dtype="block16"),
}
AVERAGES = {"no average": None, "average": 0.75}
GUARDS = {
    "no guards": {},
    "guards": dict(
        loss_scale=jda.DynamicLossScale(init_scale=8.0, growth_interval=2),
        norm_guard=jda.NormGuard(max_norm=1e6),
    ),
}
CHAINS = ("alone", "chain")
PRODUCT = list(itertools.product(STRATEGIES, MAINS, MOMENTS, AVERAGES, GUARDS, CHAINS))[::3]
CASES = {
    f"{', '.join(case)}, {mesh}": (*case, mesh)
    for case, mesh in zip(PRODUCT, itertools.cycle(("4", "8", "model", "1", "8")), strict=False)
}
"""96 cases: every pair of two values, and 770 of 782 triples."""
OFTEN = tuple(CASES)[5:6]
SHARED = tuple(name for name in CASES if name.endswith(", 8"))[::13]
"""Cases that several processes repeat."""


def optimizer(case):
    strategy, main, moments, average, guards, chain, mesh = case
    shape, names = MESHES[mesh]
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    adam = jda.fused_adamw(
        optax.linear_schedule(2**-6, 2**-8, 8),
        **HYPER,
        **MOMENTS[moments],
        main_params_dtype=MAINS[main],
        param_labels={k: "ice" if k == "ice" else "body" for k in SHAPES},
        groups={"body": {}, "ice": dict(frozen=True)},
    )
    tx = jda.distributed(
        adam,
        mesh=jax.make_mesh(shape, names, devices=devices),
        sharding_strategy=strategy,
        bucket_bytes=4096,
        ema_decay=AVERAGES[average],
        param_specs=SPECS if "model" in names else None,
        **GUARDS[guards],
    )
    return tx if chain == "alone" else jda.chain(optax.scale_by_schedule(lambda n: 1 + n / 8), tx)


def loss_fn(params, batch):
    """Its gradients are exact: they are sums of the batch."""
    terms = [jnp.sum(p.astype(jnp.float32)) * jnp.sum(batch) for p in jax.tree.leaves(params)]
    return sum(terms)


def params_of(dtype):
    rng = np.random.default_rng(0)
    return {k: np.asarray(rng.normal(size=shape)).astype(dtype) for k, shape in SHAPES.items()}


def trained(case):
    """The state after a step."""
    tx = optimizer(case)
    dtypes = {k: np.float32 if k == "odd" and case[1] != "remainder16" else BF16 for k in SHAPES}
    state = jda.TrainState.create(
        params_of(np.float32),
        tx,
        param_dtypes=dtypes,
        model_state={"seen": np.zeros(2, np.float32)},
        rng=jax.random.key(3),
    )

    def loss(params, batch, *, model_state, rng):
        del rng
        return loss_fn(params, batch), {"seen": model_state["seen"] + 1}

    rows = TOTAL // jax.process_count() if case[-1] == "8" else 8
    first = rows * jax.process_index()
    batch = np.arange(first, first + rows, dtype=np.float32) / 64
    state, _ = jda.train_step(loss, tx)(state, batch)
    return state, tx, dtypes


def digest(*trees):
    """A digest of the paths, dtypes, shapes and bits of all leaves."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(trees)[0]:
        x = np.asarray(whole(words_of(leaf)))
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape} ".encode())
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()[:16]


def whole(x):
    """An array that this process holds whole."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        everywhere = jax.sharding.NamedSharding(x.sharding.mesh, P())
        return jax.jit(lambda x: x, out_shardings=everywhere)(x)
    return x


def digests_of(case, folder):
    """Digests of all that is made of a state, by what it is; ``folder``: of a new checkpoint."""
    state, tx, dtypes = trained(case)
    found = {"state": digest(state)}
    contents = contents_of(state, tx, None)
    entries = [entry for group in contents.groups for entry in group.entries]
    names = [f"{x.name} {x.dtype} {x.shape} {x.keys} {x.is_count} {x.sent}" for x in entries]
    about = json.dumps(contents.about, sort_keys=True, default=str)
    found["header"] = hashlib.sha256("\n".join([about, *names]).encode()).hexdigest()[:16]
    found["file"] = digest([x for group in contents.groups for x in group.make()])
    exported = jda.to_optax_state(state, tx)
    found["exported"] = digest(exported)
    found["main"] = digest(jda.main_params(state.params, state.opt_state, tx))
    found["params"] = digest(jda.full_params(state, tx))
    if tx.config.ema_decay is not None:
        found["average"] = digest(jda.ema_params(state, tx))
    found["back"] = digest(
        jda.from_optax_state(*exported[:2], tx, exported[2], param_dtypes=dtypes)
    )
    found["reloaded"] = digest(jda.reload_main_params(state, tx))
    jda.save(folder, state, tx)
    like = {k: jax.ShapeDtypeStruct(shape, dtypes[k]) for k, shape in SHAPES.items()}
    template = jda.TrainState.shapes(like, tx)
    found["restored"] = digest(jda.restore(folder, template, tx))
    lines = [
        f"{jax.tree_util.keystr(k)} {x}" for k, x in jax.tree_util.tree_leaves_with_path(template)
    ]
    found["shapes"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return found


def found_digests(name):
    with tempfile.TemporaryDirectory() as folder:
        return digests_of(CASES[name], folder)


def in_one_of_several(index, count, port, folder):
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    for i, name in enumerate(SHARED):
        found = digests_of(CASES[name], pathlib.Path(folder) / str(i))
        print(json.dumps([name, found]), flush=True)


def main():
    if len(sys.argv) > 1:
        in_one_of_several(*map(int, sys.argv[1:4]), sys.argv[4])
        return
    found = {name: found_digests(name) for name in CASES}
    RECORD.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
