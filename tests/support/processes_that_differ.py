"""One of two processes that take a step; the second may do something else.

Usage: processes_that_differ.py INDEX PORT WHAT
"""

import os
import sys

index, port, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

# Who is left alone waits at exit for the other: not for as long as by default.
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, shutdown_timeout_seconds=5)

import jdistadam as jda  # noqa: E402
from jdistadam.training import agreement  # noqa: E402

agreement.LIMIT_SECONDS = 5
is_other = index == 1
kwargs, wide, factor = {}, 256, 1.0
if is_other and what == "policy":
    kwargs["policy"] = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16")
if is_other and what == "layout":
    wide = 512
if is_other and what == "program":
    factor = 2.0
if is_other and what == "versions":
    agreement.metadata.version = lambda _: "0.0.0"


def loss_fn(params, batch):
    if is_other and what == "raises":
        raise ValueError("the data of this process is missing")
    return factor * jnp.mean((batch @ params["w"]) ** 2)


mesh = jax.make_mesh((4,), ("data",))
tx = jda.distributed_fused_adamw(1e-2, mesh=mesh, **kwargs)
state = jda.TrainState.create({"w": np.ones((64, wide), np.float32)}, tx)
if is_other and what == "never comes":
    jax.distributed.global_state = None
    print("left")
    os._exit(0)
step = jda.train_step(loss_fn, tx)
for _ in range(2):
    state, metrics = step(state, np.ones((4, 64), np.float32))
print("loss", float(metrics["loss"]))
