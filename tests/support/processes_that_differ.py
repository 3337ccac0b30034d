"""One of two processes that take steps together; in each case the second may deviate.

Usage: processes_that_differ.py INDEX PORT FOLDER WHAT [WHAT ...]
"""

import os
import sys

index, port, folder, whats = int(sys.argv[1]), *sys.argv[2:4], sys.argv[4:]
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

# A process left alone waits at exit for the other one, but not for the default time.
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, shutdown_timeout_seconds=2)

import jdistadam as jda  # noqa: E402
from jdistadam.core import waits  # noqa: E402

is_other = index == 1
version = jda.__version__


def run(what):
    """The loss after two steps; only the second process deviates."""
    differs = what if is_other else "nothing"
    if what.startswith("save "):
        return save(what, differs)
    wide = 512 if differs == "layout" else 256
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16" if differs == "policy" else None)
    jda.__version__ = "0.0.0" if differs == "versions" else version

    def loss_fn(params, batch):
        if differs == "raises":
            raise ValueError("the data of this process is missing")
        factor = 2.0 if differs == "program" else 1.0
        return factor * jnp.mean((batch @ params["w"]) ** 2)

    mesh = jax.make_mesh((4,), ("data",))
    rate = 0.5 if differs == "learning rate" else 1e-2
    most = 1.0 if differs == "max_grad_norm" else None
    tx = jda.distributed(jda.fused_adamw(rate), mesh=mesh, policy=policy, max_grad_norm=most)
    params = {"w": np.ones((64, wide), np.float32), "b": np.zeros(4, np.float32)}
    params["b"] += differs == "params"
    more = {"model_state": {"n": np.zeros(2)}} if what == "model state" else {}
    if differs == "model state":
        more["model_state"]["n"][1] = 1
    if what == "another rng" or differs == "rng":
        more["rng"] = jax.random.key(index)
    state = jda.TrainState.create(params, tx, **more)
    if differs == "never comes":
        jax.distributed.global_state = None
        print("never comes -> left", flush=True)
        os._exit(0)
    micro, rows = (2 if differs == "accumulate_steps" else 1), (8 if differs == "rows" else 4)
    step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
    dtype = np.int32 if differs == "batch" else np.float32
    for _ in range(2):
        state, metrics = step(state, np.ones((rows, 3 if differs == "lengths" else 2, 64), dtype))
    if what == "evaluation":
        evaluate = jda.eval_step(loss_fn, tx)
        for _ in range(3 + is_other):
            evaluate(state, np.ones((4, 2, 64), np.float32))
        _, metrics = step(state, np.ones((4, 2, 64), np.float32))
    if what in ("extra", "nothing"):
        move_extra(state, tx, epoch=3 if differs == "extra" else 2)
    return float(metrics["loss"])


def save(what, differs):
    """Saves, or what the second process does in its place; then both take steps."""
    tx = jda.distributed(jda.fused_adamw(1e-2), mesh=jax.make_mesh((4,), ("data",)))
    state = jda.TrainState.create({"w": np.ones((64, 8), np.float32)}, tx)
    place, number = f"{folder}/{what}", 5 if differs == "save step" else 4
    values = {"epoch": 2, "key": jax.random.key(3)}
    extra = {
        "save without extra": None,
        "save refused extra": values | {"x": object()},
        "save another key": values | {"key": jax.random.key(4)},
    }.get(differs, values)
    if differs == "save other call":
        loss = lambda p, b: jnp.mean(b @ p["w"])  # noqa: E731
        return float(jda.eval_step(loss, tx)(state, np.ones((4, 64), np.float32))[0])
    try:
        jda.save(place, state, tx, step=number, extra=extra)
    except jda.TreeError as error:
        print(f"{what} refused -> {error}", flush=True)
        return run("as before")
    except jda.errors.AgreementError as error:
        print(f"{what} refused -> {error}", flush=True)
        if what == "save refused extra":
            return run("as before")
        raise
    got = jda.restore_extra(place)
    assert got["epoch"] == 2
    assert np.array_equal(*map(jax.random.key_data, (got["key"], values["key"])))
    return float(jda.checkpoint_steps(place)[-1])


def move_extra(state, tx, epoch):
    """In addition to a state: common values, own arrays of equal values, and a global array."""
    everywhere = jax.jit(lambda x: x)(state.params["w"])
    extra = {"epoch": epoch, "order": np.arange(3), "seen": jnp.int32(7), "w": everywhere}
    jda.save(folder, state, tx, extra=extra)
    got = jda.restore_extra(folder, extra)
    assert got["w"].sharding == everywhere.sharding
    local = [
        {k: np.asarray(x.addressable_data(0)) if k == "w" else x for k, x in tree.items()}
        for tree in (got, extra)
    ]
    assert jax.tree.all(jax.tree.map(np.array_equal, *local))
    assert isinstance(got["order"], np.ndarray) and isinstance(got["seen"], jax.Array)
    assert np.array_equal(jda.restore_params(folder)["w"], local[1]["w"])
    without = jda.restore_extra(folder)
    assert np.array_equal(without["w"], local[1]["w"]) and without["w"].is_fully_addressable


for what in whats:
    jda.set_wait_limit(2 if what == "never comes" else 60)
    waits.LATER = 0.05 if what == "evaluation" else 6
    try:
        print(f"{what} -> loss {run(what)}", flush=True)
    except jda.errors.AgreementError as error:
        print(f"{what} -> AgreementError: {error}", flush=True)
        if what == "evaluation":
            os._exit(1)
