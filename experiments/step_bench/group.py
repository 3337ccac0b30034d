"""Compiles, checks and times the rows of one workload, in turn."""

import concurrent.futures
import contextlib
import statistics
import time

import jax
import jax.numpy as jnp
from lm import power, processes, report

from jdistadam.tools import hlo
from step_bench import alone, check, model, trace, variants

TURN_SECONDS, MOST_STEPS = 0.7, 200


class Group:
    """Rows that do the same work: a floor, and the rows compared with it.

    Args:
      rows: Rows of ``rows.select``, the floor first.
      size: The model's.
      mesh: Devices, which need not exist for ``compile``.
      on_gpu: Whether the programs are for GPUs.
      attention: Implementation of ``jax.nn.dot_product_attention``.
    """

    def __init__(self, rows, size, mesh, on_gpu, attention):
        self.rows, self.mesh, self.on_gpu = rows, mesh, on_gpu
        workload = rows[0].workload
        if rows[0].is_alone:
            self.setting, make = alone.Setting(workload, mesh), alone.make
            self.bound = check.tolerance(0, mesh.size)
        else:
            self.setting, make = variants.Setting(size, workload, mesh, attention), variants.make
            self.bound = check.tolerance(size.layers, mesh.size)
        self.variants = {row.name: make(row, self.setting, on_gpu) for row in rows}
        self.records = {
            row.name: {
                "name": row.name,
                "options": row.options if on_gpu else {},
                "parameters": sum(x.size for x in jax.tree.leaves(self.setting.shapes)),
            }
            for row in rows
        }

    @property
    def tokens(self):
        """Tokens per step; 0 without a model."""
        return 0 if self.rows[0].is_alone else self.setting.rows * self.setting.size.length

    def compile(self, jobs):
        """Compiles all rows, the first one alone: it finds the fastest matrix products for all."""
        names = list(self.variants)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            self._compile(names[0])
            for _ in pool.map(self._compile_or_drop, names[1:]):
                pass

    def _compile_or_drop(self, name):
        with self._dropping(name):
            self._compile(name)

    @contextlib.contextmanager
    def _dropping(self, name):
        """Continues without a row that fails: it says why, and the others keep their results."""
        try:
            yield
        except Exception as error:  # of any library below
            if name == self.rows[0].name:
                raise  # nothing to compare with
            message = f"{type(error).__name__}: {error}"
            self.records[name]["failed"] = message[:2000]
            del self.variants[name]
            print(f"  FAILED {name}: {message[:600]}", flush=True)

    def _compile(self, name):
        start = time.perf_counter()
        lowered = self.variants[name].lower()
        traced = time.perf_counter()
        program = self.variants[name].program = lowered.compile()
        memory = program.memory_analysis()
        self.records[name] |= {
            "trace_seconds": traced - start,
            "compile_seconds": time.perf_counter() - traced,
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "collectives": _collectives(program.as_text()),
        }
        if tx := getattr(self.variants[name], "tx", None):
            self.records[name]["communication"] = str(tx.config.communication)
        print(
            f"  compiled {name:<46} {self.records[name]['compile_seconds']:6.1f} s, "
            f"held {memory.argument_size_in_bytes / 1e9:6.2f} GB, "
            f"temporary {memory.temp_size_in_bytes / 1e9:6.2f} GB",
            flush=True,
        )

    def batches(self, limit):
        """Rows that fit into memory together, each batch with the floor; ``limit``: bytes."""
        held = {name: self.records[name]["argument_bytes"] for name in self.variants}
        most = max(self.records[name]["temporary_bytes"] for name in self.variants)
        # The float32 values from which a state is made, and a copy of them: whole ones, unless all
        # states are made of shards.
        shards = all("fsdp" in x or "optim_grads_params" in x for x in [*self.variants][1:])
        parameters = next(iter(self.records.values()))["parameters"]
        fixed = most + 8 * parameters / (self.mesh.size if shards else 1)
        first, *others = self.variants
        always, others = ([], [first, *others]) if self.rows[0].is_alone else ([first], others)
        batches = [[*always]]
        for name in others:
            taken = fixed + sum(held[x] for x in batches[-1])
            if batches[-1] != always and taken + held[name] > limit:
                batches.append([*always])
            batches[-1].append(name)
        return batches

    def data(self):
        """The inputs of steps by name, placed once per placement."""
        if self.rows[0].is_alone:
            return dict.fromkeys(self.variants, self.setting.grads())
        tokens = model.tokens(self.setting.size, self.setting.workload, self.mesh.size)
        return {name: variant.place(tokens) for name, variant in self.variants.items()}

    def references(self, data):
        """The correct parameters, by whether gradients are clipped, for the rows there are."""
        first = next(iter(self.variants))
        if self.rows[0].is_alone:
            loss_and_grads = lambda params, grads: (None, grads)  # noqa: E731
        else:
            loss_and_grads = self.variants[first].loss_and_grads
        needed = {"clip" in row.modifiers for row in self.rows if row.variant != "floor"}
        return {
            clips: check.Reference(self.setting, loss_and_grads, data[first], clips)
            for clips in needed
        }

    def start(self, name, data, references):
        """State of a row after the checked steps, or its first one if there is no reference."""
        variant, record = self.variants[name], self.records[name]
        params = self.setting.draw()
        state = variant.start(params)
        del params
        row = next(row for row in self.rows if row.name == name)
        reference = references.get("clip" in row.modifiers)
        # Without main parameters, bfloat16 ones move by whole units in the last place, at random.
        if reference is None or row.variant == "floor" or "no_main" in row.modifiers:
            return state
        losses = []
        for _ in range(variants.CHECKED_STEPS):
            state, loss = variant.step(state, data[name])
            losses.append(loss)
        end = check.sample(variant.main_params(state))
        record["check"] = found = check.compare(reference, end, losses, self.bound)
        verdict = "agrees" if found["passed"] else "DIFFERS"
        print(
            f"  {verdict} {name}: {found['worst_leaf']} off by {found['distance']:.4f}, "
            f"loss by {found['losses_apart']:.5f}; bound {found['bound']:.4f}",
            flush=True,
        )
        return state

    def measure(self, names, data, references, rounds, traced_steps):
        """Times these rows in turn, each round in the other order, and fills in their records."""
        states = {}
        for name in names:
            with self._dropping(name):
                state = self.start(name, data, references)
                states[name], _ = self._turn(name, state, data, 1)
        names = list(states)
        steps, times = {}, {name: [] for name in names}
        for name in names:
            states[name], seconds = self._turn(name, states[name], data, 2)
            wanted = round(TURN_SECONDS / seconds) if self.on_gpu else 3
            steps[name] = int(processes.of_first(min(max(3, wanted), MOST_STEPS)))
        logs = self.on_gpu and processes.is_first()
        with power.PowerLog() if logs else contextlib.nullcontext() as log:
            for i in range(rounds):
                for name in names[:: (-1) ** i]:
                    states[name], seconds = self._turn(name, states[name], data, steps[name])
                    times[name].append(1e3 * seconds)
        for name in names:
            self.records[name] |= self._timed(times[name], times[names[0]])
            rounds_of_all = processes.of_all(times[name])
            self.records[name]["ms_of_processes"] = list(map(statistics.median, rounds_of_all))
            self.records[name]["power"] = log.summary() if log else None
        for name in names if self.on_gpu and traced_steps else ():
            states[name] = self._trace(name, states[name], data, traced_steps)

    def _turn(self, name, state, data, steps):
        processes.meet(name)
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = self.variants[name].step(state, data[name])
        jax.block_until_ready((state, loss))
        return state, (time.perf_counter() - start) / steps

    def _timed(self, times, floors):
        """Ratios within one round: other rounds had other clocks of the GPU."""
        median = statistics.median(times)
        found = {"ms": median, "ms_least": min(times), "ms_most": max(times), "rounds_ms": times}
        if self.tokens:
            ratios = [x / floor for x, floor in zip(times, floors, strict=True)]
            above = [x - floor for x, floor in zip(times, floors, strict=True)]
            found |= {
                "ratio_to_floor": statistics.median(ratios),
                "above_floor_ms": statistics.median(above),
                "tokens_per_second": self.tokens / median * 1e3,
            }
        return found

    def _trace(self, name, state, data, steps):
        held = [state]

        def run():
            held[0], _ = self._turn(name, held[0], data, steps)

        origins = trace.op_names(self.variants[name].program.as_text())
        events = trace.events_of(trace.record(run), origins)
        if events:
            self.records[name]["phases"] = trace.phases(events, steps)
            self.records[name]["longest"] = trace.longest(events, steps)
        else:
            print(f"  {name}: the profiler recorded no kernels", flush=True)
        return held[0]


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
