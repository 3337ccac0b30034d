"""Ten steps of each strategy, policy and kind of moments; revision 073d8f6 recorded their bits.

The record has the digest of each case's result in optax's form, and checkpoints of some cases. To
record a new case, with a revision that has the right bits:

    PYTHONPATH=tests python -m support.recorded "its name"
"""

import hashlib
import io
import json
import pathlib
import sys
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.dtypes import dtypes
from support.optimizers import distributed_adamw

FOLDER = pathlib.Path(__file__).parent / "recorded"
DIGESTS = FOLDER / "digests.json"
BF16 = ml_dtypes.bfloat16
SHAPES = {"columns": (6, 128), "odd": (515,), "rows": (16, 40), "scalar": ()}
# Powers of these moments' decays are exact, so every machine's `pow` gives the same.
HYPER = dict(b1=0.5, b2=0.75, eps=1e-6, weight_decay=0.13)
RATE = optax.linear_schedule(2**-6, 2**-8, 8)
STEPS = 10
FLAT = dict(shape=(8,), names=("data",))
SQUARE = dict(shape=(2, 4), names=("replica", "data"))
MODEL = dict(shape=(4, 2), names=("data", "model"))
SPECS = {"columns": P(None, "model"), "odd": P(), "rows": P("model"), "scalar": P()}
LABELS = {"columns": "body", "odd": "head", "rows": "body", "scalar": "ice"}
GROUPS = {"body": {}, "head": dict(lr_scale=0.25, weight_decay=0.5), "ice": dict(frozen=True)}
DECAYED = {"columns": True, "odd": True, "rows": False, "scalar": True}
SCALE = jda.DynamicLossScale(init_scale=8.0, growth_interval=2)
SKIPPED = 4
"""This step has a NaN if gradients are checked."""


def distributed(dtype=np.float32, mesh=FLAT, micro=1, **kwargs):
    return dict(dtype=dtype, mesh=mesh, micro=micro, kwargs=kwargs)


def drop_in(dtype=np.float32, sharded=None, **kwargs):
    return dict(dtype=dtype, mesh=None, sharded=sharded, kwargs=kwargs)


HYBRID = dict(mesh=SQUARE, replica_axis="replica")
EIGHT_BITS = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")
REMAINDER = dict(main_params_dtype="remainder16")
PARAMS = dict(sharding_strategy="optim_grads_params")
CASES = {
    "no_shard": distributed(sharding_strategy="no_shard", bucket_bytes=1024),
    "optim": distributed(max_grad_norm=0.5),
    "optim_grads": distributed(BF16, sharding_strategy="optim_grads", micro=3),
    "optim_grads_params": distributed(BF16, **PARAMS, micro=2),
    "hybrid": distributed(**HYBRID, micro=2, bucket_bytes=1024),
    "sharded twice": distributed(BF16, **HYBRID, **PARAMS, outer_sharding_strategy="optim"),
    "two axes": distributed(
        mesh=SQUARE, shard_axis=("replica", "data"), sharding_strategy="optim_grads"
    ),
    "model axis": distributed(BF16, mesh=MODEL, param_specs=SPECS, max_grad_norm=0.5),
    "model axis, params": distributed(mesh=MODEL, param_specs=SPECS, **PARAMS),
    "remainders": distributed(BF16, **dtypes(**REMAINDER), max_grad_norm=0.5),
    "remainders, params": distributed(BF16, **dtypes(**REMAINDER), **PARAMS),
    "no main": distributed(BF16, **dtypes(main_params_dtype=None), micro=2),
    "16 bits": distributed(
        BF16, **dtypes(mu_dtype=jnp.float16, nu_dtype=jnp.bfloat16, rounding="stochastic")
    ),
    "block16": distributed(**dtypes(mu_dtype="block16", nu_dtype="block16")),
    "block8": distributed(BF16, **dtypes(main_params_dtype=None, seed=7, **EIGHT_BITS), **HYBRID),
    "block8, params": distributed(BF16, **dtypes(seed=7, **REMAINDER, **EIGHT_BITS), **PARAMS),
    "grads in bfloat16": distributed(**dtypes(grad_comm_dtype=jnp.bfloat16), **HYBRID),
    "grads pairwise": distributed(
        **dtypes(grad_reduce_dtype=jnp.float32), sharding_strategy="optim_grads", micro=2
    ),
    "params in float8": distributed(BF16, **dtypes(param_comm_dtype=jnp.float8_e4m3fn), **PARAMS),
    "groups": distributed(BF16, param_labels=LABELS, groups=GROUPS, mask=DECAYED),
    "skips": distributed(BF16, **dtypes(**REMAINDER), loss_scale=SCALE, micro=2, max_grad_norm=0.5),
    "nesterov": distributed(nesterov=True, sharding_strategy="optim_grads"),
    "drop-in": drop_in(),
    "drop-in, remainders": drop_in(BF16, **REMAINDER),
    "drop-in, main": drop_in(BF16, main_params_dtype=jnp.float32, mu_dtype=jnp.bfloat16),
    "drop-in, block8": drop_in(BF16, seed=7, **EIGHT_BITS),
    "drop-in, sharded": drop_in(sharded=P("data"), mu_dtype="block16", nu_dtype="block16"),
}
SAVED = (
    "no_shard",
    "optim_grads_params",
    "sharded twice",
    "model axis, params",
    "remainders",
    "no main",
    "16 bits",
    "block16",
    "block8, params",
    "groups",
    "skips",
)
# Checkpoints of removed arguments, by the case that has the same bits.
GONE = {"formats": "optim_grads_params", "params_at_rest": "optim_grads"}


def params_of(dtype):
    rng = np.random.default_rng(0)
    return {k: np.asarray(rng.normal(size=shape)).astype(dtype) for k, shape in SHAPES.items()}


def batch_of(step, case, devices):
    """Different gradients per device and micro-batch; their sums and sums of squares are exact."""
    rng = np.random.default_rng(step)
    batch = {
        k: rng.integers(-16, 17, (devices * case.get("micro", 1), *shape)).astype(np.float32) / 64
        for k, shape in SHAPES.items()
    }
    if step == SKIPPED and "loss_scale" in case["kwargs"]:
        batch["odd"][3] = np.nan
    return batch


def loss_fn(params, batch):
    """Its gradient is the batch; a device has one row at a time."""
    terms = jax.tree.map(lambda p, x: jnp.sum(p.astype(jnp.float32) * x[0]), params, batch)
    return sum(jax.tree.leaves(terms))


def optimizer(name):
    """The optimizer for a case."""
    case = CASES[name]
    kwargs = dict(learning_rate=RATE, **HYPER) | case["kwargs"]
    if case["mesh"] is None:
        return jda.fused_adamw(**kwargs)
    size = int(np.prod(case["mesh"]["shape"]))
    mesh = jax.make_mesh(*case["mesh"].values(), devices=jax.devices("cpu")[:size])
    return distributed_adamw(mesh=mesh, **kwargs)


def trained(name):
    """The result of ten steps: (state, its optimizer); for a drop-in (params, its state)."""
    case, tx = CASES[name], optimizer(name)
    params = params_of(case["dtype"])
    if case["mesh"] is None:
        return trained_drop_in(case, tx, params)
    micro = case["micro"]
    state = jda.TrainState.create(params_of(np.float32), tx, param_dtypes=case["dtype"])
    step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
    rows = 8 // case["mesh"]["shape"][1] if "model" in case["mesh"]["names"] else 8
    for i in range(STEPS):
        state, _ = step(state, batch_of(i, case, rows))
    return state, tx


def trained_drop_in(case, tx, params):
    if case["sharded"] is not None:
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
        params["columns"] = params["columns"].reshape(2, -1)  # whole blocks on each device
        specs = {k: case["sharded"] if k == "columns" else P() for k in params}
        shardings = {k: jax.sharding.NamedSharding(mesh, spec) for k, spec in specs.items()}
        params = jax.device_put(params, shardings)
    params = jax.tree.map(jnp.asarray, params)
    state, step = tx.init(params), jax.jit(tx.step)
    for i in range(STEPS):
        batch = batch_of(i, case, 1)
        grads = {
            k: jax.device_put(jnp.asarray(x[0], params[k].dtype).reshape(params[k].shape), params[k].sharding)
            for k, x in batch.items()
        }  # fmt: skip
        params, state = step(grads, state, params)
    return params, state


def digest(*trees):
    """A digest of the paths, dtypes, shapes and bits of all leaves."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(trees)[0]:
        x = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape} ".encode())
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def digest_of(state, tx):
    """The digest of a distributed optimizer's parameters, main parameters and moments."""
    main, opt_state, _ = jda.to_optax_state(state, tx)
    return digest(jda.full_params(state, tx), main, opt_state)


def found_digest(name):
    """The digest of a case, trained now."""
    result = trained(name)
    return digest(*result) if CASES[name]["mesh"] is None else digest_of(*result)


def checkpoints():
    """The files of checkpoints, and the case with the same bits."""
    return {checkpoint(name): name for name in SAVED} | {checkpoint(x): y for x, y in GONE.items()}


def checkpoint(name):
    """The file of a checkpoint."""
    return FOLDER / f"{name.replace(', ', '_').replace(' ', '_')}.zip"


def record(name):
    """Trains a case and writes its record."""
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    digests[name] = found_digest(name)
    DIGESTS.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    if name not in SAVED:
        return
    with tempfile.TemporaryDirectory() as folder, io.BytesIO() as data:
        jda.save(folder, *trained(name))
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(pathlib.Path(folder).rglob("*")):
                archive.write(file, file.relative_to(folder))
        checkpoint(name).write_bytes(data.getvalue())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for given in sys.argv[1:] or CASES:
        record(given)
