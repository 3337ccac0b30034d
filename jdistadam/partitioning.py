"""The kernel under plain ``jax.jit`` over several devices.

XLA gathers every operand of a foreign call that it knows nothing about. Here it is told that the
step is elementwise, so that each device updates the shard it holds: no collective, no copy. Inside
``jax.shard_map``, or on one device, this is the kernel itself.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import collectives, kernel
from jdistadam.kernel import Operands, Results, Scalars, Spec


def adam(spec: Spec, scalars: Scalars, operands: Operands) -> Results:
    """Like kernel.adam, for leaves sharded in any way.

    Gradients and moments are brought to the sharding of their params. ``spec.flat`` must be empty:
    a flat array has no dimension that belongs to a leaf.
    """
    if not operands.grads:
        return kernel.adam(spec, scalars, operands)
    scalars, operands = collectives.vary_together((scalars, operands))
    ranks = tuple(x.ndim for x in operands.params)
    return _partitioned(spec, ranks)(scalars, operands)


@functools.lru_cache(maxsize=256)
def _partitioned(spec: Spec, ranks: tuple[int, ...]) -> Any:
    @custom_partitioning
    def adam_step(scalars: Scalars, operands: Operands) -> Results:
        return kernel.adam(spec, scalars, operands)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Results) -> Any:
        _, operands = arg_shapes
        shardings = tuple(x.sharding for x in operands.params)
        replicated = NamedSharding(mesh, P())
        arg_shardings = (
            jax.tree.map(lambda _: replicated, arg_shapes[0]),
            Operands(*(shardings if arrays else () for arrays in operands)),
        )
        results = Results(*(shardings if arrays else () for arrays in result_shape))

        def lower_fn(scalars: Scalars, operands: Operands) -> Results:
            return kernel.adam(spec, scalars, operands)

        return mesh, lower_fn, results, arg_shardings

    adam_step.def_partition(partition=partition, sharding_rule=_sharding_rule(spec, ranks))
    return adam_step


def _sharding_rule(spec: Spec, ranks: tuple[int, ...]) -> SdyShardingRule:
    """All arrays of a leaf share one factor for each dimension; the scalars are replicated."""
    leaves: Any = tuple(tuple(f"l{i}d{d}" for d in range(rank)) for i, rank in enumerate(ranks))
    scalars: Any = (("r", "c"), (), ())
    num_inputs = 4 + (spec.mode == "step_split")
    num_outputs = 2 + (spec.mode != "update") + (spec.mode != "step")
    return SdyShardingRule(
        operand_mappings=scalars + leaves * num_inputs,
        result_mappings=leaves * num_outputs,
        need_replication_factors=("r", "c"),
    )
