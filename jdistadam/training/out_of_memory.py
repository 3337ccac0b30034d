"""The error of a step for which a device has too little memory."""

from __future__ import annotations

from typing import Any

from jdistadam.core.trees import Params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.errors import OutOfMemoryError
from jdistadam.training.planned import plan_of, size_text


def check_memory(
    error: Exception, config: DistributedConfig, params: Params, accumulate_steps: int
) -> None:
    """Raises OutOfMemoryError from an error of XLA that says so, with what the plan knows.

    Args:
      error: What a step raised.
      config: The arguments of the optimizer.
      params: The params of the state, or their shapes; they may be deleted.
      accumulate_steps: Number of micro-batches.
    """
    said = str(error).partition("\n")[0]
    if "RESOURCE_EXHAUSTED" not in said or "host_bfc" in str(error):  # of the host: says so itself
        return
    plan = plan_of(config, params, accumulate_steps=accumulate_steps)
    name, size = plan.largest
    in_a_step = plan.step_bytes - plan.held_bytes
    raise OutOfMemoryError(
        f"train_step: a device has too little memory: got {said.rstrip('.')!r:.300}, expected room "
        f"for params and state of {size_text(plan.held_bytes)}, for up to {size_text(in_a_step)} "
        f"in a step, and for {plan.not_counted}{_limit(config)}. "
        f"The largest part is {name}, {size_text(size)}. To lower it: {plan.advice}."
    ) from error


def _limit(config: DistributedConfig) -> str:
    """What JAX may use of a device; "" if it does not say so."""
    mine: Any = config.mesh.local_devices
    stats = mine[0].memory_stats() if mine else None
    limit = (stats or {}).get("bytes_limit")
    return f", in {size_text(limit)} that JAX may use of the device" if limit else ""
