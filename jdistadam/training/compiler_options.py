"""The XLA options with which a training step is compiled for GPUs.

[Note: pipelined loops] If a scan gathers one layer at a time, an iteration of the loop needs its
parameters at its start, and has its gradients at its end: neither collective overlaps anything. So
XLA is asked to gather the next layer, and to reduce the last one, in the neighbouring iterations
(``pipeline_all_gather``; reductions are pipelined by default), to unroll the loop by two, so that
values carried between iterations are never copied, and to start collectives as soon as their
operands are there. On two H200s this took 1.09 times the forward and backward pass instead of 1.13,
for one more layer of parameters in memory. ``jax.checkpoint`` hides the gathers of the backward
pass behind a barrier unless it has ``prevent_cse=False``, which is enough in a scan.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdistadam.distributed.config import DistributedConfig
from jdistadam.training.layer_sums import sums_in_loops

# XLA's own limit of 30 MiB counts shards: it merges most models into one collective that starts
# when the last gradient is ready. This is large enough for bandwidth and leaves work to overlap.
MERGED_BYTES = 256 << 20
_MERGED = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": MERGED_BYTES,
    "xla_gpu_all_gather_combine_threshold_bytes": MERGED_BYTES,
}
# Merged, parameters at rest would all be gathered before the forward pass starts. Separately, each
# gather starts a few operations before its first use: see [Note: parameters at rest].
_GATHERS_APART = {"xla_gpu_all_gather_combine_threshold_bytes": 1}
# For a model that gathers block by block: merged, several blocks would be gathered at once, and
# their gradients kept until the last of them is known.
_BLOCKS_APART = dict.fromkeys(_MERGED, 1)
# Gradients that are sent ahead to peers (distributed/schedule.py) leave all multiprocessors to the
# backward pass.
_BY_COPY_ENGINES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
_PIPELINED = {
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_enable_pipelined_all_gather": True,  # its name in jaxlib 0.10
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
# [Note: sums of layers] Separate sums each start as soon as the gradient is there. A merged one
# would come at the end of the iteration; XLA moves it into the next and waits for it there at once.
_SUMMED_IN_LOOPS = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF",
    "xla_gpu_enable_pipelined_reduce_scatter": False,  # its name in jaxlib 0.10
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def options_for(config: DistributedConfig, accumulate_steps: int) -> dict[str, Any]:
    """Options for the training step of an optimizer; empty if its devices are not GPUs."""
    if not is_on_gpu(config):
        return {}
    wanted, parallel = dict[str, Any](), config.parallel
    if config.communication.is_peer:
        wanted |= _BY_COPY_ENGINES
    if parallel.gathers_layers and config.stacked:
        wanted |= _PIPELINED
    if sums_in_loops(config):
        wanted |= _SUMMED_IN_LOOPS
    # A loop over micro-batches starts after all parameters have arrived.
    gathers_once = parallel.shards_params and not parallel.reshard_after_forward
    apart = dict[str, Any]()
    if gathers_once and accumulate_steps == 1:
        apart = _GATHERS_APART
    elif parallel.gathers_layers and config.gathered_in_model:
        apart = _BLOCKS_APART
    merged, mesh = _MERGED | apart, config.mesh
    return merged | {name: x for name, x in wanted.items() if _is_known(name, x, mesh)}


def is_on_gpu(config: DistributedConfig) -> bool:
    """Whether the devices of the mesh are GPUs."""
    platform: str = config.mesh.devices.flat[0].platform
    return platform in ("gpu", "cuda")


@functools.cache
def _is_known(name: str, value: Any, mesh: Mesh) -> bool:
    """Whether this XLA has the option and the value: both change, and only compiling tells."""
    # For the whole mesh: a process cannot compile only for another one's device.
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):  # nothing else in this program causes it
            raise
        return False
    return True
