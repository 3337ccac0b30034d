"""Checks that a compiled training step runs exactly the planned collectives."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.distributed.checks import check_options
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.norms import sent_elements
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import find_state
from jdistadam.errors import TreeError
from jdistadam.tools import hlo
from jdistadam.training.step_program import as_sent
from jdistadam.training.train_state import TrainState, check_train_state
from jdistadam.training.train_step import TrainStep

_Counter = collections.Counter[tuple[str, str, int]]
_MAX_SCALARS = 8  # elements of an array of an all-reduce: losses, norms, weights, flags

# Dtypes that XLA's CPU backend neither computes with nor sends, and their substitutes, for every
# operation. float16 stays as it is.
_WIDENED_ON_CPU = {"bfloat16": "float32", "float8_e5m2": "float16", "float8_e4m3fn": "float16"}


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """All collectives of a step with one operation, dtype and number of devices.

    Attributes:
      op: "reduce-scatter", "all-gather", "all-reduce" or "all-to-all"; over peer memory "copied
        all-gather" or "copied all-to-all". A model may have others.
      dtype: The dtype that is sent.
      devices: The number of devices that take part in each.
      planned: Elements of the results by the plan.
      optional: How many planned elements may be left out: by XLA, gathers in the backward pass, of
        blocks and of small leaves of a scan; and floats of the model state that the loss keeps.
      found: Elements of the results in the compiled program.
      asynchronous: How many found elements are in instructions that other work can overlap.
      widened: Whether the row fails only because XLA's CPU backend widened the dtype. Nothing is
        found in the planned dtype, and as many additional elements in the wider one.
      of_model: Whether the collectives run along tensor axes only, where XLA partitions the model.
        The plan does not cover them.
    """

    op: str
    dtype: str
    devices: int
    planned: int
    optional: int
    found: int
    asynchronous: int
    widened: bool = False
    of_model: bool = False

    @property
    def passed(self) -> bool:
        """Whether the program sends the planned elements."""
        return self.of_model or self.planned - self.optional <= self.found <= self.planned

    @property
    def found_bytes(self) -> int:
        """Bytes of the found elements."""
        return self.found * jnp.dtype(self.dtype).itemsize

    @property
    def note(self) -> str:
        """The failure in a word; "" if it passed."""
        if self.of_model:
            return "the model's"
        if self.passed:
            return ""
        if self.widened:
            return "WIDENED"
        return "MISSING" if self.found < self.planned else "NOT PLANNED"


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of ``audit``; prints as a table with a verdict.

    Attributes:
      rows: All collectives except those of scalars.
      scalars: All-reduces with a few scalars: the loss, the norm, weights and flags.
      num_devices: Size of the mesh.
      program: The compiled program, as ``jax.jit(f).lower(...).compile()`` returns it.
    """

    rows: tuple[AuditRow, ...]
    scalars: int
    num_devices: int
    program: Any = dataclasses.field(repr=False, compare=False)
    make_order: Callable[[], str] = dataclasses.field(default=str, repr=False, compare=False)

    @functools.cached_property
    def order(self) -> str:
        """What the step does, in order: ``step.order(state, batch)``. It traces the step again."""
        return self.make_order()

    @property
    def passed(self) -> bool:
        """Whether the program sends exactly the planned elements, in the planned dtypes."""
        return all(row.passed for row in self.rows)

    @property
    def only_widened(self) -> bool:
        """Whether it fails only because XLA's CPU backend widened dtypes.

        Only a program for GPUs then shows whether the planned dtypes are sent.
        """
        return not self.passed and all(row.passed or row.widened for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Converts the audit to types that ``json.dumps`` takes.

        Returns:
          Its rows and the verdict by name.
        """
        added = "found_bytes", "passed", "note"
        return {
            "rows": [vars(r) | {name: getattr(r, name) for name in added} for r in self.rows],
            "scalars": self.scalars,
            "num_devices": self.num_devices,
            "passed": self.passed,
            "only_widened": self.only_widened,
        }

    def __str__(self) -> str:
        """Returns a table with one line per row, and the verdict."""
        if self.num_devices == 1 and not self.rows:
            return "one device: nothing is sent, so there is nothing to check"
        lines = [
            f"{'collective':<19} {'dtype':<14} {'devices':>7} {'elements planned':>16} "
            f"{'found':>13} {'found MB':>9} {'async':>6}"
        ]
        for r in self.rows:
            share = f"{100 * r.asynchronous / r.found:.0f} %" if r.found else "-"
            line = (
                f"{r.op:<19} {r.dtype:<14} {r.devices:>7} {r.planned:>16} {r.found:>13} "
                f"{r.found_bytes / 1e6:>9.2f} {share:>6}  {r.note}"
            )
            lines.append(line.rstrip())
        verdict = "as planned" if self.passed else "NOT as planned"
        if self.only_widened:
            verdict = "as planned in operations and elements, NOT CHECKED in dtypes"
            lines.append(self._about_widening())
        return "\n".join([*lines, f"{verdict}; besides {self.scalars} all-reduces of scalars"])

    def _about_widening(self) -> str:
        dtypes = {row.dtype for row in self.rows if row.widened and row.dtype in _WIDENED_ON_CPU}
        widened = " and ".join(f"{dtype} to {_WIDENED_ON_CPU[dtype]}" for dtype in sorted(dtypes))
        return f"XLA's CPU backend widens {widened}; only an audit for GPUs can check that"


def audit(step: TrainStep, state: TrainState, batch: Any) -> Audit:
    """Compiles a training step and compares its collectives with the plan.

    Compares the operation, dtype, number of devices and number of elements of each collective; one
    in a loop counts once per iteration. This detects casts that XLA moved across a collective, and
    gathers that it added.

    Args:
      step: The result of ``train_step``.
      state: A train state, or a tree of ``jax.ShapeDtypeStruct`` with shardings.
      batch: A batch, or a tree of ``jax.ShapeDtypeStruct``, with shardings or without.

    Returns:
      An ``Audit``: ``print`` it, or read ``passed`` and ``rows``. XLA's CPU backend widens bfloat16
      and float8: such a program does not pass, and if nothing else differs ``only_widened`` is
      True.

    Example:
      >>> import jax, jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-2), mesh=jax.make_mesh((1,), ("data",)))
      >>> step = jda.train_step(lambda params, batch: jnp.sum(batch @ params["w"]), tx)
      >>> state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
      >>> audit(step, state, jnp.ones((1, 3))).passed
      True
    """
    if not isinstance(step, TrainStep):
        raise TreeError(
            f"step: not a training step of this package: got {type(step).__name__}, "
            "expected what train_step returned. Call audit(train_step(loss_fn, tx), state, batch)."
        )
    check_train_state(state)
    check_options(step.tx.config, find_state(state.opt_state))
    config, mesh = step.tx.config, step.tx.config.mesh
    schedule = config.schedule_of(state.params, accumulate_steps=step.options.accumulate_steps)
    planned, optional = _planned(step, schedule)
    of_model_state = _of_model_state(state.model_state, config)
    planned += of_model_state
    optional += {k: x for k, x in of_model_state.items() if jnp.issubdtype(k[1], jnp.inexact)}
    program = step.lower(state, batch).compile()
    text = program.as_text()
    ours, models, scalars = _found(text, config, schedule.layout)
    rows = [
        AuditRow(*key, planned[key], optional[key], ours.elements[key], ours.asynchronous[key])
        for key in sorted(planned.keys() | ours.elements.keys())
    ]
    if mesh.devices.flat[0].platform == "cpu":
        rows = _mark_widened(rows)
    rows += [
        AuditRow(*key, 0, 0, elements, models.asynchronous[key], of_model=True)
        for key, elements in sorted(models.elements.items())
    ]
    order = functools.partial(step.order, *jax.tree.map(_shape_of, (state, batch)))
    return Audit(tuple(rows), scalars, mesh.size, program, order)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, so that nothing keeps the array."""
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=getattr(x, "sharding", None))


class _Elements(NamedTuple):
    """Elements of the results of collectives, and those in asynchronous instructions."""

    elements: _Counter
    asynchronous: _Counter


def _found(
    text: str, config: DistributedConfig, layout: Layout
) -> tuple[_Elements, _Elements, int]:
    """Elements that a program sends, those of the model itself, and all-reduces of scalars."""
    ours, models = (_Elements(collections.Counter(), collections.Counter()) for _ in range(2))
    scalars, named = 0, (axis for leaf in layout.leaves for axis in leaf.tensor_axes)
    splitting = frozenset(config.parallel.splitting(named))
    for c in hlo.collectives_in(text):
        arrays = c.arrays
        if c.op == "all-reduce":  # scalars may be combined with gradients
            arrays = tuple(a for a in arrays if a[1] > _MAX_SCALARS)
            scalars += len(arrays) < len(c.arrays)
        if c.devices == 1:
            continue  # nothing is sent; XLA leaves out most of these, not all
        found = models if _is_of_model(c, config, splitting) else ours
        for dtype, elements in arrays:
            key = c.op, hlo.DTYPES.get(dtype, dtype), c.devices
            found.elements[key] += elements * c.times
            found.asynchronous[key] += elements * c.times * c.is_async
    return ours, models, scalars


def _is_of_model(
    c: hlo.CompiledCollective, config: DistributedConfig, splitting: frozenset[str]
) -> bool:
    """Whether all devices of each of its groups have the same data, or parts of one parameter.

    Along axes of data that split parameters, a step communicates, too: names tell.
    """
    mesh = config.mesh
    if not config.has_model_axes and (c.is_ours or not splitting):
        return False
    data = [
        i
        for i, name in enumerate(mesh.axis_names)
        if name in config.parallel.data_axes and name not in splitting
    ]
    places = [np.unravel_index(group, mesh.devices.shape) for group in c.groups]
    return bool(places) and all(np.ptp(place[i]) == 0 for place in places for i in data)


def _mark_widened(rows: list[AuditRow]) -> list[AuditRow]:
    """Marks rows of programs for CPU devices that differ only in dtype."""
    groups: dict[tuple[str, str, int], list[AuditRow]] = {}
    for row in rows:
        key = row.op, _WIDENED_ON_CPU.get(row.dtype, row.dtype), row.devices
        groups.setdefault(key, []).append(row)
    marked: list[AuditRow] = []
    for group in groups.values():
        widened = _is_widening(group)
        marked += [dataclasses.replace(r, widened=widened and not r.passed) for r in group]
    return sorted(marked, key=lambda r: (r.op, r.dtype, r.devices))


def _is_widening(group: list[AuditRow]) -> bool:
    """Whether everything planned is found in the wide dtype, and nothing else."""
    planned = sum(row.planned for row in group)
    optional = sum(row.optional for row in group)
    found = sum(row.found for row in group)
    nothing_left = not any(row.found for row in group if row.dtype in _WIDENED_ON_CPU)
    return nothing_left and planned - optional <= found <= planned


def _planned(step: TrainStep, schedule: Schedule) -> tuple[_Counter, _Counter]:
    """Elements by operation, dtype and number of devices; and those that XLA may leave out."""
    config = step.tx.config
    planned: _Counter = collections.Counter()
    optional: _Counter = collections.Counter()
    for c in schedule.collectives:
        is_scalar = c.op == "all-reduce" and c.result_elements <= _MAX_SCALARS
        if c.devices > 1 and not is_scalar:
            key = hlo.COPIED * bool(c.groups) + c.op, c.dtype.name, c.devices
            planned[key] += c.result_elements * c.times
            optional[key] += c.result_elements * c.times * c.is_optional
    parallel, layout = config.parallel, schedule.layout
    of_norms, state_axes = sent_elements(config, layout), parallel.state_axes
    together = parallel.size(state_axes + parallel.tensor_axes)
    is_of_model = config.has_model_axes and not state_axes
    if of_norms > _MAX_SCALARS and together > 1 and not is_of_model:
        planned["all-reduce", "float32", together] += of_norms
    devices = parallel.num_devices if config.has_model_axes else config.mesh.size
    leaves = len(layout.leaves)
    if step.options.report_nonfinite and devices > 1 and leaves > _MAX_SCALARS:
        planned["all-reduce", "int32", devices] += leaves
    return planned, optional


def _of_model_state(model_state: Any, config: DistributedConfig) -> _Counter:
    """Elements that devices send to average the model state, such as batch statistics.

    Floats that the loss returns as it got them are not sent.
    """
    planned: _Counter = collections.Counter()
    devices = config.parallel.num_devices
    sent = jax.tree.leaves(jax.eval_shape(functools.partial(jax.tree.map, as_sent), model_state))
    for x in sent if devices > 1 else ():
        if x.size > _MAX_SCALARS:
            planned["all-reduce", x.dtype.name, devices] += x.size
    return planned
