"""What copies between GPUs cost beside matrix products, and why.

    python experiments/copies_beside_products.py --out runs/copies_beside_products.json

Each GPU multiplies bfloat16 matrices of random numbers, or of zeros. Meanwhile copy engines send
nothing, zeros, or random numbers: to the other GPUs, or within its own memory. Zeros take the same
bandwidth and time as random numbers, but less power: only products of random numbers are limited by
the power of the GPU. Copies go all the time, or in bursts. Rates are GB/s that each GPU sends while
products run; clocks and watts are means over the GPUs, sampled by nvidia-smi. Needs torch.
"""

import argparse
import pathlib
import statistics
import subprocess
import threading
import time

import torch
from lm import report

SIZE, CHUNK = 8192, 64 << 20
NOTHING = ("nothing", 0, 0.0)
WHOLE = [(what, 768 << 20, 0.0) for what in ("zeros", "random", "random, own memory")]
BURSTS = [
    ("random", burst << 20, (burst << 20) / rate)
    for rate in (20e9, 80e9)
    for burst in (192, 768, 3072)
]
SECONDS = 0.7  # of products in each measurement
KINDS = {"random": WHOLE + BURSTS, "zeros": WHOLE}  # of products: what is sent meanwhile


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


class Gpu:
    """A GPU's matrices, what it sends, and the streams of both."""

    def __init__(self, index, count):
        self.index, self.device = index, torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self.products, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
            draw = lambda n: torch.randn(n, n, device=self.device, dtype=torch.bfloat16)  # noqa: E731
            self.factors = {"random": draw(SIZE), "zeros": 0 * draw(SIZE)}
            self.out = torch.empty_like(self.factors["zeros"])
            bits = torch.randint(-(2**31), 2**31 - 1, (CHUNK // 4,), device=self.device)
            self.random = bits.to(torch.int32)
            self.zeros = torch.zeros_like(self.random)
            self.targets = [torch.empty_like(self.random) for _ in range(count)]

    def multiply(self, factors, times):
        x = self.factors[factors]
        for _ in range(times):
            torch.matmul(x, x, out=self.out)


def power_and_clocks(stop, found):
    query = "--query-gpu=power.draw.instant,clocks.sm"
    while not stop.is_set():
        text = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True
        ).stdout
        found.append([[float(x) for x in line.split(",")] for line in text.splitlines()])


def send(gpus, what, burst, seconds, until):
    """Sends bursts of copies, one every so many seconds, until products have ended."""
    others = {gpu: [gpu] if "own" in what else [x for x in gpus if x is not gpu] for gpu in gpus}
    chunks = max(1, round(burst / (CHUNK * len(others[gpus[0]]))))
    sent, before, begin = 0, [], time.perf_counter()
    while not all(event.query() for event in until):
        if what == "nothing":
            time.sleep(1e-3)
            continue
        events = []
        for gpu in gpus:
            source = gpu.zeros if what == "zeros" else gpu.random
            with torch.cuda.stream(gpu.copies):
                for other in others[gpu] * chunks:
                    other.targets[gpu.index].copy_(source, non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record()
        sent += CHUNK * chunks * len(others[gpu])
        for event in before:
            event.synchronize()
        before, begin = events, begin + seconds
        time.sleep(max(0, begin - time.perf_counter()))
    return sent


def measure(gpus, factors, what, burst, seconds, times):
    """Milliseconds of the slowest GPU's products, GB/s, watts and MHz."""
    begins, ends = [], []
    for gpu in gpus:
        torch.cuda.synchronize(gpu.device)
    for gpu in gpus:
        with torch.cuda.stream(gpu.products):
            begins.append(torch.cuda.Event(enable_timing=True))
            ends.append(torch.cuda.Event(enable_timing=True))
            begins[-1].record()
            gpu.multiply(factors, times)
            ends[-1].record()
    stop, found = threading.Event(), []
    thread = threading.Thread(target=power_and_clocks, args=(stop, found))
    thread.start()
    sent = send(gpus, what, burst, seconds, ends)
    stop.set()
    thread.join()
    ms = max(a.elapsed_time(b) for a, b in zip(begins, ends, strict=True))
    samples = [gpu for sample in found[1:-1] for gpu in sample[: len(gpus)]]
    watts, mhz = (statistics.fmean(x[i] for x in samples) if samples else 0.0 for i in (0, 1))
    return {"ms": ms, "gb_per_s": sent / ms / 1e6, "watts": watts, "mhz": mhz}


def main():
    args = arguments()
    gpus = [Gpu(i, torch.cuda.device_count()) for i in range(torch.cuda.device_count())]
    rows = []
    for factors, kinds in KINDS.items():
        measure(gpus, factors, *NOTHING, 100)
        times = int(SECONDS * 1e3 / (measure(gpus, factors, *NOTHING, 100)["ms"] / 100))
        found = {kind: [] for kind in [NOTHING, *kinds]}
        for _ in range(args.rounds):
            for kind, each in found.items():
                each.append(measure(gpus, factors, *kind, times))
        for (what, burst, seconds), each in found.items():
            row = {key: statistics.median(x[key] for x in each) for key in each[0]}
            alone = statistics.median(x["ms"] for x in found[NOTHING])
            row |= {"products": factors, "copies": what, "burst_bytes": burst}
            row |= {"burst_every_seconds": seconds, "relative_time": row["ms"] / alone}
            rows.append(row)
            print(
                f"{factors:6} {what:18} {burst / 1e6:5.0f} MB every {1e3 * seconds:5.1f} ms: "
                f"{row['relative_time']:.3f} {row['gb_per_s']:4.0f} GB/s {row['watts']:4.0f} W "
                f"{row['mhz']:5.0f} MHz",
                flush=True,
            )
    if args.out:
        report.write_run(args.out, args.revision, rows=rows)


if __name__ == "__main__":
    main()
