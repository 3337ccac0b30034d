"""One of two processes that take steps together; in each case the second may do something else.

Usage: processes_that_differ.py INDEX PORT WHAT [WHAT ...]
"""

import os
import sys

index, port, whats = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

# Who is left alone waits at exit for the other: not for as long as by default.
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, shutdown_timeout_seconds=2)

import jdistadam as jda  # noqa: E402
from jdistadam.training import checks  # noqa: E402

is_other = index == 1
version = jda.__version__


def run(what):
    """The loss after two steps; of what differs, only the second process does it."""
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
    return float(metrics["loss"])


for what in whats:
    checks.LIMIT_SECONDS = 2 if what == "never comes" else 60
    try:
        print(f"{what} -> loss {run(what)}", flush=True)
    except jda.errors.AgreementError as error:
        print(f"{what} -> AgreementError: {error}", flush=True)
