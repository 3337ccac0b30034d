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
from jdistadam.training import checks  # noqa: E402

is_other = index == 1
version = jda.__version__


def run(what):
    """The loss after two steps; only the second process deviates."""
    differs = what if is_other else "nothing"
    wide = 512 if differs == "layout" else 256
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16" if differs == "policy" else None)
    jda.__version__ = "0.0.0" if differs == "versions" else version

    def loss_fn(params, batch):
        if differs == "raises":
            raise ValueError("the data of this process is missing")
        factor = 2.0 if differs == "program" else 1.0
        return factor * jnp.mean((batch @ params["w"]) ** 2)

    mesh = jax.make_mesh((4,), ("data",))
    tx = jda.distributed_fused_adamw(1e-2, mesh=mesh, policy=policy)
    state = jda.TrainState.create({"w": np.ones((64, wide), np.float32)}, tx)
    if differs == "never comes":
        jax.distributed.global_state = None
        print("never comes -> left", flush=True)
        os._exit(0)
    step = jda.train_step(loss_fn, tx)
    for _ in range(2):
        state, metrics = step(state, np.ones((4, 64), np.float32))
    if what in ("extra", "nothing"):
        move_extra(state, tx, epoch=3 if differs == "extra" else 2)
    return float(metrics["loss"])


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
    checks.LIMIT_SECONDS = 2 if what == "never comes" else 60
    try:
        print(f"{what} -> loss {run(what)}", flush=True)
    except jda.errors.AgreementError as error:
        print(f"{what} -> AgreementError: {error}", flush=True)
