"""Compiles, checks and times the rows of one workload, in turn."""

import concurrent.futures
import contextlib
import hashlib
import re
import statistics
import time

import jax
import jax.numpy as jnp
from lm import power, processes, report

from jdistadam.tools import hlo
from step_bench import alone, check, model, trace, variants
from step_bench.rows import ANNOTATED, FLOOR, STRATEGIES
from step_bench.tables import gain

TURN_SECONDS, MOST_STEPS, LEAST_ROUNDS = 0.7, 200, 2
TRIAL_SECONDS, TRIAL_TURNS = 0.5, 4  # for each of the flags that a row tries
FINALISTS, CLOSE = 3, 1.03  # so many flags that are so close to the fastest take part in the rounds


class Group:
    """Rows that do the same work: a floor, and the rows compared with it.

    A row that fails, or does not fit into memory, is left out: its record says why.

    Args:
      rows: Rows of ``rows.select``, the floor first.
      size: The model's.
      mesh: Devices, which need not exist for ``compile``.
      on_gpu: Whether the programs are for GPUs.
      attention: Implementation of ``jax.nn.dot_product_attention``.
      flags: What rows with "best_flags" try; None: ``rows.FLAGS``.
    """

    def __init__(self, rows, size, mesh, on_gpu, attention, flags=None):
        self.rows, self.mesh, self.on_gpu = rows, mesh, on_gpu
        workload = rows[0].workload
        if rows[0].is_alone:
            self.setting, make = alone.Setting(workload, mesh), alone.make
            self.bound = check.tolerance(0, mesh.size)
        else:
            self.setting, make = variants.Setting(size, workload, mesh, attention), variants.make
            self.bound = check.tolerance(size.layers, mesh.size)
        self.variants = {row.name: make(row, self.setting, on_gpu) for row in rows}
        # By the name of a row, then by that of the flags: "" alone for a row that tries none.
        self.tried = {
            row.name: {
                flags: {"options": choice.options if on_gpu else {}}
                for flags, choice in row.choices(flags).items()
            }
            for row in rows
        }
        self.programs = {row.name: {} for row in rows}
        self.states, self.data, self.references = {}, {}, {}
        self.timelines = {}  # of rows with a trace: the last step of every GPU
        self.keeps_states = True
        parameters = sum(x.size for x in jax.tree.leaves(self.setting.shapes))
        self.records = {row.name: {"name": row.name, "parameters": parameters} for row in rows}

    @property
    def tokens(self):
        """Tokens per step; 0 without a model."""
        return 0 if self.rows[0].is_alone else self.setting.rows * self.setting.size.length

    @property
    def floor(self):
        """The name of the floor; None if it failed, or without a model."""
        first = self.rows[0]
        return first.name if first.variant == FLOOR and first.name in self.variants else None

    @contextlib.contextmanager
    def _dropping(self, name):
        """Continues without a row that fails."""
        try:
            yield
        except Exception as error:  # of any library below
            self.drop(name, message(error))

    def drop(self, name, message):
        """Leaves out a row."""
        self.records[name]["failed"] = message
        if tried := _record_of(self.tried[name]):
            self.records[name]["tried"] = tried
        for held in (self.variants, self.programs, self.states):
            held.pop(name, None)
        print(f"  FAILED {name}: {message[:600]}", flush=True)

    def compile(self, jobs):
        """Compiles all rows, the first one alone: it finds the fastest matrix products for all.

        A row is traced once, whatever it tries.
        """
        first, *others = self.variants
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            begun = self._submit(pool, first, self._lower(first))
            lowered = {name: self._lower(name) for name in others}  # while the first is compiled
            concurrent.futures.wait(begun)
            for name in sorted(others, key=lambda name: -len(self.tried[name])):
                self._submit(pool, name, lowered[name])
        for name in [*self.variants]:
            self._drop_equal(name)
            if self.programs[name]:
                self._take(name, next(iter(self.programs[name])))
            else:
                self.drop(name, next(iter(self.tried[name].values()))["failed"])

    def _lower(self, name):
        start = time.perf_counter()
        with self._dropping(name):
            lowered = self.variants[name].lower()
            self.records[name]["trace_seconds"] = time.perf_counter() - start
            return lowered

    def _submit(self, pool, name, lowered):
        """Starts to compile a row with each of the flags that it tries."""
        tried = self.tried[name] if lowered else ()
        return [pool.submit(self._compile, name, flags, lowered) for flags in tried]

    def _compile(self, name, flags, lowered):
        found = self.tried[name][flags]
        start = time.perf_counter()
        try:
            # Without a choice jit itself has the options, and finds this program again.
            program = lowered.compile(found["options"] or None) if flags else lowered.compile()
        except Exception as error:
            found["failed"] = message(error)
            print(f"  FAILED {name} {flags}: {found['failed'][:600]}", flush=True)
            return
        memory = program.memory_analysis()
        found |= {
            "compile_seconds": time.perf_counter() - start,
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
        self.programs[name][flags] = program
        print(
            f"  compiled {f'{name} {flags}':<66} {found['compile_seconds']:6.1f} s, "
            f"held {memory.argument_size_in_bytes / 1e9:6.2f} GB, "
            f"temporary {memory.temp_size_in_bytes / 1e9:6.2f} GB",
            flush=True,
        )

    def _drop_equal(self, name):
        """Leaves out flags that change nothing, so that no program is timed twice."""
        first = {}
        programs = self.programs[name]
        for flags in [x for x in self.tried[name] if x in programs]:  # as listed, not as compiled
            program = programs[flags]
            text = re.sub(r", metadata=\{[^{}]*\}", "", program.as_text())
            same = first.setdefault(hashlib.sha256(text.encode()).hexdigest(), flags)
            if same != flags:
                self.tried[name][flags]["same_as"] = same
                del programs[flags]

    def _take(self, name, flags):
        """Makes one of its programs that of a row."""
        record, program = self.records[name], self.programs[name][flags]
        record |= self.tried[name][flags]
        record["collectives"] = _collectives(program.as_text())
        self.variants[name].program = program
        if tx := getattr(self.variants[name], "tx", None):
            record["communication"] = str(tx.config.transport)
        if tried := _record_of(self.tried[name]):
            record |= {"flags": flags, "tried": tried}

    def drop_too_large(self, limit):
        """Leaves out programs that need more memory than ``limit`` bytes, and rows without any."""
        for name, programs in [*self.programs.items()]:
            for flags in [*programs]:
                found = self.tried[name][flags]
                needed = found["argument_bytes"] + found["temporary_bytes"]
                if needed > limit:
                    found["failed"] = f"out of memory: {needed / 1e9:.1f} of {limit / 1e9:.1f} GB"
                    del programs[flags]
            if not programs:
                self.drop(name, next(iter(self.tried[name].values()))["failed"])

    def fit_together(self, limit):
        """Whether the states of all rows fit into this many bytes, besides what a step needs."""
        records = [self.records[name] for name in self.variants]
        # The float32 values from which a state is made, and a copy of them: whole ones, unless all
        # states are made of shards.
        shards = all("fsdp" in x or "optim_grads_params" in x for x in [*self.variants][1:])
        parts = self.mesh.size if shards else 1
        start = max((8 * x["parameters"] / parts for x in records), default=0)
        most = max((x["temporary_bytes"] for x in records), default=0)
        return sum(x["argument_bytes"] for x in records) + start + most <= limit

    def make_data(self):
        """Places the inputs of steps, once per placement."""
        if self.rows[0].is_alone:
            self.data = dict.fromkeys(self.variants, self.setting.grads())
        else:
            tokens = model.tokens(self.setting.size, self.setting.workload, self.mesh.size)
            self.data = {name: variant.place(tokens) for name, variant in self.variants.items()}

    def make_references(self):
        """Computes the correct parameters, by whether gradients are clipped, for these rows."""
        if self.rows[0].is_alone:
            first, loss_and_grads = next(iter(self.variants)), lambda _, grads: (None, grads)
        elif self.floor:
            first, loss_and_grads = self.floor, self.variants[self.floor].loss_and_grads
        else:
            return  # nothing to compare with
        needed = {"clip" in row.modifiers for row in self.rows if row.variant != FLOOR}
        self.references = {
            clips: check.Reference(self.setting, loss_and_grads, self.data[first], clips)
            for clips in needed
        }

    def _start(self, name):
        """Makes the state of a row, and runs its first step."""
        params = jax.block_until_ready(self.setting.draw())
        start = time.perf_counter()
        self.states[name] = jax.block_until_ready(self.variants[name].start(params))
        self.records[name]["start_seconds"] = time.perf_counter() - start  # the last time
        del params
        self._run(name, 1)

    def _check(self, name):
        """Compares the first steps of a row with its reference, if there is one."""
        row = next(row for row in self.rows if row.name == name)
        reference = self.references.get("clip" in row.modifiers)
        # Without main parameters, bfloat16 ones move by whole units in the last place, at random.
        # Under annotations, "remainder16" starts from bfloat16 values.
        is_rounded = "no_main" in row.modifiers or {"fused", "remainder16"} <= row.modifiers
        if reference is None or row.variant == FLOOR or is_rounded:
            return
        variant, losses = self.variants[name], []
        state = variant.start(self.setting.draw())
        for _ in range(variants.CHECKED_STEPS):
            state, loss = variant.step(state, self.data[name])
            losses.append(loss)
        end = check.sample(variant.main_params(state))
        found = check.compare(reference, end, losses, self.bound)
        self.records[name]["check"] = found
        verdict = "agrees" if found["passed"] else "DIFFERS"
        print(
            f"  {verdict} {name}: {found['worst_leaf']} off by {found['distance']:.4f}, "
            f"loss by {found['losses_apart']:.5f}; bound {found['bound']:.4f}",
            flush=True,
        )

    def turn(self, name, steps):
        """Seconds per step of a row; its state is made if there is none."""
        if name not in self.states:
            self._start(name)
        seconds = self._run(name, steps)
        if not self.keeps_states:
            del self.states[name]
        return seconds

    def _run(self, name, steps):
        processes.meet(name)
        state = self.states.pop(name)  # a step that fails may have used it up
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = self.variants[name].step(state, self.data[name])
        jax.block_until_ready((state, loss))
        seconds = (time.perf_counter() - start) / steps
        self.states[name] = state
        return seconds

    def steps_in(self, seconds, of_one, least=3):
        """How many steps take about so many seconds; equal on all processes."""
        wanted = round(seconds / of_one) if self.on_gpu else 3
        return int(processes.of_first(min(max(least, wanted), MOST_STEPS)))

    def choose(self, name):
        """Times the programs of a row in turn, takes the fastest, and keeps those close to it."""
        programs, times, steps = self.programs[name], {}, None
        if len(programs) > 1:
            for i in range(TRIAL_TURNS):
                for flags in [*programs][:: (-1) ** i]:
                    self.variants[name].program = programs[flags]
                    try:
                        if i == 0:
                            self.turn(name, 1)
                            steps = steps or self.steps_in(TRIAL_SECONDS, self.turn(name, 1), 1)
                        times.setdefault(flags, []).append(1e3 * self.turn(name, steps))
                    except Exception as error:
                        self.tried[name][flags]["failed"] = message(error)
                        del programs[flags]
                        times.pop(flags, None)
            for flags, found in times.items():
                self.tried[name][flags]["ms"] = processes.of_first(statistics.median(found))
            self.states.pop(name, None)
        if not programs:
            raise RuntimeError("all flags failed")
        found = {flags: self.tried[name][flags].get("ms", 0.0) for flags in programs}
        best, *others = sorted(found, key=found.get)
        self._take(name, best)
        last = [x for x in others if found[x] <= CLOSE * found[best]][: FINALISTS - 1]
        for flags in programs.keys() - {best, *last}:
            del programs[flags]

    def measure(self, rounds, traced_steps, limit, is_late=lambda: False):
        """Times the rows in turn, each round in the other order, and fills in their records.

        States are kept between turns if all fit into ``limit`` bytes. Once ``is_late()``, no round
        but the first two begins, and no trace.
        """
        for name in [*self.variants]:
            with self._dropping(name):
                self.choose(name)
        self.keeps_states = self.fit_together(limit)
        if not self.keeps_states:
            print("  too large together: each turn makes its state", flush=True)
        steps, times = {}, {}
        for name in [*self.variants]:
            with self._dropping(name):
                self._check(name)
                steps[name] = self.steps_in(TURN_SECONDS, self.turn(name, 2))
                times[name] = {flags: [] for flags in self.programs[name]}
        logs = self.on_gpu and processes.is_first()
        with power.PowerLog() if logs else contextlib.nullcontext() as log:
            for i in range(rounds + 1):  # the first one warms up
                if i > LEAST_ROUNDS and is_late():
                    print(f"  late: {i - 1} rounds", flush=True)
                    break
                turns = [(name, flags) for name in self.variants for flags in self.programs[name]]
                for name, flags in turns[:: (-1) ** i]:
                    if name not in self.variants:  # another of its programs has failed
                        continue
                    with self._dropping(name):
                        self.variants[name].program = self.programs[name][flags]
                        found = 1e3 * self.turn(name, steps[name])
                        times[name][flags] += [found] if i else []
        times = {name: self._best_of_rounds(name, times[name]) for name in self.variants}
        for name in self.variants:
            self.records[name] |= self._timed(times[name], times.get(self.floor))
            rounds_of_all = processes.of_all(times[name])
            self.records[name]["ms_of_processes"] = list(map(statistics.median, rounds_of_all))
            self.records[name]["power"] = log.summary() if log else None
        traces = self.on_gpu and traced_steps and not is_late()
        for name in [*self.variants] if traces else ():
            with self._dropping(name):
                self.trace(name, traced_steps)

    def _best_of_rounds(self, name, times):
        """Takes the program with the least median of its rounds, and returns these."""
        if len(times) > 1:
            for flags, found in times.items():
                self.tried[name][flags]["rounds_ms"] = found
            medians = {x: processes.of_first(statistics.median(times[x])) for x in times}
            self._take(name, min(medians, key=medians.get))
            return times[self.records[name]["flags"]]
        (found,) = times.values()
        return found

    def _timed(self, times, floors):
        """Ratios within one round: other rounds had other clocks of the GPU."""
        median = statistics.median(times)
        found = {"ms": median, "ms_least": min(times), "ms_most": max(times), "rounds_ms": times}
        if self.tokens:
            found["tokens_per_second"] = self.tokens / median * 1e3
        if floors:
            ratios = [x / floor for x, floor in zip(times, floors, strict=True)]
            above = [x - floor for x, floor in zip(times, floors, strict=True)]
            found["ratio_to_floor"] = statistics.median(ratios)
            found["above_floor_ms"] = statistics.median(above)
        return found

    def gains(self):
        """What each row of ours gains beside each row of annotations: ``tables.gain``."""
        timed = [row for row in self.rows if row.name in self.variants]
        rivals = [row.name for row in timed if row.variant in ANNOTATED]
        return [
            {"row": row.name, "beside": rival} | gain(self.records[rival], self.records[row.name])
            for row in timed
            if row.variant in STRATEGIES
            for rival in rivals
        ]

    def trace(self, name, steps):
        if name not in self.states:
            self._start(name)
        origins = trace.op_names(self.variants[name].program.as_text())
        of_gpus = trace.events_of(trace.record(lambda: self._run(name, steps)), origins)
        if of_gpus:
            first, *others = (trace.phases(events, steps) for events in of_gpus.values())
            self.records[name] |= {"phases": first, "phases_of_other_gpus": others}
            self.records[name]["longest"] = trace.longest(next(iter(of_gpus.values())), steps)
            self.timelines[name] = trace.last_step(of_gpus, steps)
        else:
            print(f"  {name}: the profiler recorded no kernels", flush=True)
        if not self.keeps_states:
            del self.states[name]


def message(error):
    """What a record says of an exception."""
    text = f"{type(error).__name__}: {error}"[:2000]
    return f"out of memory: {text}" if "RESOURCE_EXHAUSTED" in text else text


def _record_of(tried):
    """What a row tried, for its record; empty without a choice."""
    return [{"flags": flags} | found for flags, found in tried.items() if flags]


def _collectives(text):
    """A compiled program's collectives: numbers, how many are async, bytes of results."""
    found = {}
    for c in hlo.collectives_in(text):
        row = found.setdefault(c.op, {"instructions": 0, "asynchronous": 0, "bytes": 0})
        row["instructions"] += 1
        row["asynchronous"] += c.is_async
        sizes = (n * jnp.dtype(hlo.DTYPES[dtype]).itemsize for dtype, n in c.arrays)
        row["bytes"] += c.times * sum(sizes)
    return found


def memory_limit(mesh):
    """Bytes of a device that JAX may use."""
    stats = mesh.local_devices[0].memory_stats() or {}
    return stats.get("bytes_limit", float("inf"))


def peak_bytes(mesh):
    return report.peak_bytes(mesh.local_devices[0])
