"""One of two processes whose devices copy arrays of different sizes, by test_peer_processes.py.

Usage: peers_that_differ.py INDEX PORT
"""

import os
import sys
import time

index, port = map(int, sys.argv[1:3])
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax  # noqa: E402
import numpy as np  # noqa: E402

jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, shutdown_timeout_seconds=5)

from jdistadam.core import waits  # noqa: E402
from jdistadam.kernels import copies, processes  # noqa: E402

if why := processes.join("cpu").why_not:
    print(why, flush=True)
    os._exit(0)
mesh = jax.make_mesh((4,), ("data",))
groups = (tuple(processes.OF_PROCESSES + device.id for device in mesh.devices.flat),)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def run(size):
    def local(x):
        return copies.gather(x, dim=0, groups=groups, to="varying")

    whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows.spec, out_specs=rows.spec))
    shards = np.arange(4 * size, dtype=np.float32).reshape(4, size)
    x = jax.make_array_from_callback((4 * size,), rows, lambda i: shards.reshape(-1)[i])
    return jax.block_until_ready(whole(x))


found = run(8)
assert all((np.asarray(x.data) == np.arange(32)).all() for x in found.addressable_shards)
waits.set_wait_limit(5)
begin = time.monotonic()
try:
    run(8 if index == 0 else 16)
except jax.errors.JaxRuntimeError as error:
    print(f"after {time.monotonic() - begin:.0f} s: {error}", flush=True)
os._exit(0)
