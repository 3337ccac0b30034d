"""One of two processes that may copy among each other, by test_peers_that_meet.py.

Usage: peers_that_meet.py cpu|gpu INDEX PORT WHAT
"""

import contextlib
import os
import pathlib
import socket
import sys
import time

platform, index, port, what = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
is_other = index == 1
of_each = 2 if platform == "cpu" else 1
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={of_each}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

mine = None if platform == "cpu" else [index]
jax.distributed.initialize(
    f"127.0.0.1:{port}", 2, index, local_device_ids=mine, shutdown_timeout_seconds=5
)

import jdistadam as jda  # noqa: E402
from jdistadam.kernels import copies, processes  # noqa: E402

processes.GRACE_SECONDS = 1
if what == "comes late":
    jax.devices(platform)  # which waits for the other process
    jda.set_wait_limit(30 if is_other else 1)
    time.sleep(4 * is_other)
if what in ("cannot compile", "cannot copy") and is_other:
    compiled_trial = copies.compiled_trial

    def planted(*args):
        compiled_trial(*args)  # XLA for GPUs may compile it in all of its processes together
        if what == "cannot compile":
            raise RuntimeError("a planted reason")
        return lambda: ("a planted reason", 0.0)

    copies.compiled_trial = planted


def optimizer(communication):
    return jda.distributed(
        jda.fused_adamw(1e-2, weight_decay=0.1),
        mesh=jax.sharding.Mesh(jax.devices(platform)[: 2 * of_each], ("data",)),
        policy=jda.MixedPrecisionPolicy(grad_reduce_dtype="float32"),
        communication=communication,
    )


def chosen():
    """As by default on GPUs. On CPUs copies must be asked for, as where other tests use the links."""
    is_default = platform == "gpu" and not what.startswith("leaves")
    while True:
        try:
            return optimizer("auto" if is_default else "peer")
        except jda.PolicyError as error:
            print("refused:", error, flush=True)
            return optimizer("xla")
        except jda.errors.AgreementError as error:
            print("missing:", error, flush=True)


def left():
    """How many sockets of copies this process has, and threads in their name."""
    sockets = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as found:
                ends = found.getsockname(), found.getpeername()
                sockets += any(str(end).startswith("b'\\x00jdistadam-") for end in ends)
        except OSError:  # another kind of file
            continue
    threads = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            threads += pathlib.Path(f"/proc/self/task/{task}/comm").read_text() == "jda peers\n"
    return sockets, threads


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["w"] - 1))


tx = chosen()
print("over", tx.config.transport, flush=True)
state = jda.TrainState.create({"w": np.ones((64, 8), np.float32)}, tx)
step = jda.train_step(loss_fn, tx)
batch = np.ones((4, 64), np.float32)
for _ in range(2):
    state, metrics = jax.block_until_ready(step(state, batch))
print("loss", float(metrics["loss"]), flush=True)
print("sockets and threads", *left(), flush=True)
if what.startswith("leaves"):
    if what == "leaves":
        jax.distributed.shutdown()
    if is_other:
        os._exit(0)
    time.sleep(4)  # longer than others live after a death whose copies they wait for
    print("still there", flush=True)
    begin = time.monotonic()
    try:
        jax.block_until_ready(step(state, batch))
    except jax.errors.JaxRuntimeError as error:
        print(f"after {time.monotonic() - begin:.0f} s: {error}", flush=True)
    os._exit(7)
time.sleep(2)
print("end", flush=True)
