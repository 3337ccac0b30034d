"""Phases of a step on a GPU, from a trace of the profiler.

Every moment of a step belongs to one phase. If several run at once, the first of PHASES has it: the
model before the optimizer's own work before collectives. So the time of a collective is its
*exposed* part, during which nothing else ran; the rest of its time is *overlapped*. The phases and
"idle" add up to the step.
"""

import glob
import re
import tempfile

import jax

PHASES = (
    "model", "update", "sum", "norm", "other", "copies",
    "reduce-scatter", "all-gather", "all-reduce", "all-to-all", "peer copies",
)  # fmt: skip
_NCCL = {"ReduceScatter": "reduce-scatter", "AllGather": "all-gather", "AllReduce": "all-reduce"}
_OURS = {
    "AdamKernel": "update",
    "PartsKernel": "update",  # and sums before it
    "TileKernel": "norm",
    "FinalKernel": "norm",
    "SumKernel": "sum",
}
_COPY = re.compile(r"(?:mem(?:cpy|set).*|(?:\w+_)?copy(?:_fusion)?(?:_\d+)*)", re.I)
_MODEL = re.compile(r"gemm|nvjet|cutlass|cudnn|sdpa|flash|fmha|xmma", re.I)


def op_names(hlo):
    """The origin in the user's program of each instruction of a compiled one."""
    pattern = r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"'
    return {_plain(name): origin for name, origin in re.findall(pattern, hlo, re.M)}


def _plain(name):
    return re.sub(r"[.\-]", "_", name)


def phase_of(kernel, instruction, origins):
    """The phase of a kernel or copy, from its name and the instruction that started it."""
    if "nccl" in kernel.lower():
        found = [phase for word, phase in _NCCL.items() if word in kernel]
        return found[0] if found else "all-to-all"  # sends and receives
    if "MemcpyP2P" in kernel:
        return "peer copies"
    if _COPY.fullmatch(kernel):  # those between the model's own operations, too
        return "copies"
    for word, phase in _OURS.items():
        if word in kernel:
            return phase
    if _MODEL.search(kernel):
        return "model"
    origin = origins.get(_plain(instruction)) or origins.get(_plain(kernel), "")
    for scope, phase in (("optimizer", "update"), ("clip", "norm"), ("model", "model")):
        if re.search(rf"\b{scope}\b", origin):
            return phase
    return "other"


def record(run):
    """The profile of a function's run."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return jax.profiler.ProfileData.from_file(path)


def events_of(profile, origins):
    """By GPU of this process, (start, end, phase, name) in ms of one clock; empty without a GPU."""
    of_gpus = {}
    for plane in profile.planes:
        if not (gpu := re.fullmatch(r"/device:GPU:(\d+)", plane.name)):
            continue
        found = []
        for line in (line for line in plane.lines if "Stream" in line.name):
            for event in line.events:
                instruction = next((str(v) for k, v in event.stats if k == "hlo_op"), "")
                phase = phase_of(event.name, instruction, origins)
                end = event.start_ns + event.duration_ns
                found.append((event.start_ns / 1e6, end / 1e6, phase, event.name))
        of_gpus[int(gpu[1])] = sorted(found)
    return {gpu: of_gpus[gpu] for gpu in sorted(of_gpus) if of_gpus[gpu]}


def phases(events, steps):
    """For each phase per step: exposed and overlapped ms, and how many kernels; and "idle"."""
    edges = []
    for i, (start, end, *_) in enumerate(events):
        edges += [(start, 1, i), (end, 0, i)]
    running = dict.fromkeys(PHASES, 0)
    busy, exposed = dict.fromkeys(PHASES, 0.0), dict.fromkeys((*PHASES, "idle"), 0.0)
    before = None
    for moment, is_start, i in sorted(edges):
        if before is not None and moment > before:
            active = [phase for phase in PHASES if running[phase]]
            for phase in active:
                busy[phase] += moment - before
            exposed[active[0] if active else "idle"] += moment - before
        before = moment
        running[events[i][2]] += 1 if is_start else -1
    counts = {phase: sum(e[2] == phase for e in events) for phase in PHASES}
    found = {
        phase: {
            "exposed_ms": exposed[phase] / steps,
            "overlapped_ms": (busy[phase] - exposed[phase]) / steps,
            "kernels": counts[phase] / steps,
        }
        for phase in PHASES
        if counts[phase]
    }
    return found | {
        "idle": {"exposed_ms": exposed["idle"] / steps, "overlapped_ms": 0.0, "kernels": 0}
    }


def last_step(of_gpus, steps):
    """The events of the last of so many equal steps, from 0 ms on."""
    begin = min(events[0][0] for events in of_gpus.values())
    end = max(event[1] for events in of_gpus.values() for event in events)
    first = end - (end - begin) / steps
    return {
        gpu: [(start - first, stop - first, *rest) for start, stop, *rest in events if stop > first]
        for gpu, events in of_gpus.items()
    }


def longest(events, steps, count=30):
    """The kernels that took most time: (phase, name, times, ms) per step."""
    total = {}
    for start, end, phase, name in events:
        times, ms = total.get((phase, name[:80]), (0, 0.0))
        total[phase, name[:80]] = times + 1, ms + end - start
    rows = [(*key, n / steps, ms / steps) for key, (n, ms) in total.items()]
    return sorted(rows, key=lambda row: -row[-1])[:count]
