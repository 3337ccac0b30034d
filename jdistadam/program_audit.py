"""Whether a compiled training step sends what the plan says, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam import hlo
from jdistadam.communication import planned_collectives
from jdistadam.train_state import TrainState
from jdistadam.training import TrainStep

_Counter = collections.Counter[tuple[str, str, int]]
_MAX_SCALARS = 8  # elements of one all-reduce: losses, norms, weights, flags


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """All collectives of one operation and dtype over so many devices, of one step.

    Attributes:
      op: "reduce-scatter", "all-gather", "all-reduce", "all-to-all" or "collective-permute".
      dtype: What travels.
      devices: How many devices take part in each.
      planned: Elements of the results by the plan.
      optional: How many of these XLA may leave out: gathers of small leaves in the backward pass.
      found: Elements of the results in the compiled program.
      asynchronous: How many of these stand in instructions during which other work can run.
    """

    op: str
    dtype: str
    devices: int
    planned: int
    optional: int
    found: int
    asynchronous: int

    @property
    def passed(self) -> bool:
        """Whether the program sends what is planned."""
        return self.planned - self.optional <= self.found <= self.planned


@dataclasses.dataclass(frozen=True)
class Audit:
    """What ``audit`` found; prints as a table with a verdict.

    Attributes:
      rows: What travels, apart from scalars.
      scalars: All-reduces of a few scalars: the loss, the norm, weights and flags.
      program: The compiled program, as ``jax.jit(f).lower(...).compile()`` returns it.
    """

    rows: tuple[AuditRow, ...]
    scalars: int
    program: Any = dataclasses.field(repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Whether the program sends what is planned, and nothing else."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        """Returns a table with one line a row, and the verdict."""
        lines = [
            f"{'collective':<19} {'dtype':<14} {'devices':>7} {'planned':>13} {'found':>13} "
            f"{'MB':>9} {'async':>6}"
        ]
        for r in self.rows:
            size = r.found * jnp.dtype(r.dtype).itemsize / 1e6
            share = f"{100 * r.asynchronous / r.found:.0f} %" if r.found else "-"
            note = "  MISSING" if r.found < r.planned else "  NOT PLANNED"
            note = "" if r.passed else note
            lines.append(
                f"{r.op:<19} {r.dtype:<14} {r.devices:>7} {r.planned:>13} {r.found:>13} "
                f"{size:>9.2f} {share:>6}{note}"
            )
        verdict = "as planned" if self.passed else "NOT as planned"
        return "\n".join([*lines, f"{verdict}; besides {self.scalars} all-reduces of scalars"])


def audit(step: TrainStep, state: TrainState, batch: Any) -> Audit:
    """Compiles a training step and compares its collectives with the plan.

    Every operation, dtype, number of devices and of elements counts, those of loops as often as
    they run. So a cast that XLA moved across a collective shows, and a gather that it added.

    Args:
      step: What ``train_step`` returned.
      state: A train state, or a tree of ``jax.ShapeDtypeStruct`` with shardings.
      batch: A batch, or a tree of ``jax.ShapeDtypeStruct`` with shardings.

    Returns:
      An ``Audit``: ``print`` it, or look at ``passed`` and ``rows``. On CPU devices XLA widens
      16-bit sums itself, which the audit says.

    Example:
      >>> import jdistadam as jda
      >>> tx = jda.distributed_fused_adamw(1e-2, mesh=jax.make_mesh((1,), ("data",)))
      >>> step = jda.train_step(lambda params, batch: jnp.sum(batch @ params["w"]), tx)
      >>> state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
      >>> audit(step, state, jnp.ones((1, 3))).passed
      True
    """
    planned, optional = _planned(step, state)
    found: _Counter = collections.Counter()
    asynchronous: _Counter = collections.Counter()
    scalars = 0
    program = step.lower(state, batch).compile()
    for c in hlo.collectives_in(program.as_text()):
        small = sum(elements for _, elements in c.arrays) <= _MAX_SCALARS
        if c.op == "all-reduce" and small:
            scalars += 1
            continue
        if c.devices == 1:
            continue  # nothing travels; XLA leaves most of these out, not all
        for dtype, elements in c.arrays:
            key = c.op, hlo.DTYPES.get(dtype, dtype), c.devices
            found[key] += elements * c.times
            asynchronous[key] += elements * c.times * c.is_async
    keys = sorted(planned.keys() | found.keys())
    rows = (
        AuditRow(*key, planned[key], optional[key], found[key], asynchronous[key]) for key in keys
    )
    return Audit(tuple(rows), scalars, program)


def _planned(step: TrainStep, state: Any) -> tuple[_Counter, _Counter]:
    """Elements by operation, dtype and number of devices; and those that XLA may leave out."""
    config = step.tx.config
    planned: _Counter = collections.Counter()
    optional: _Counter = collections.Counter()
    accumulate_steps = step.options.accumulate_steps
    for c in planned_collectives(config, state.params, accumulate_steps=accumulate_steps):
        if c.devices > 1:
            key = c.op, c.dtype.name, c.devices
            planned[key] += c.result_elements * c.times
            optional[key] += c.result_elements * c.times * c.is_optional
    devices = config.mesh.size
    leaves = len(jax.tree.leaves(state.params))
    if step.options.report_nonfinite and devices > 1 and leaves > _MAX_SCALARS:
        planned["all-reduce", "int32", devices] += leaves
    return planned, optional
