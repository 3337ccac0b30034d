"""Clock and power of the GPUs, which determine their speed."""

import os
import subprocess
import tempfile

FIELDS = ("clocks.sm", "power.draw", "clocks_event_reasons.sw_power_cap")


def _query(*options):
    return [
        "nvidia-smi",
        f"--query-gpu={','.join(FIELDS)}",
        "--format=csv,noheader,nounits",
        *options,
    ]


def snapshot():
    """Clock in MHz, power in watts and whether power is capped, for every GPU; None without any."""
    try:
        done = subprocess.run(_query(), capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return None
    return [dict(zip(FIELDS, line.split(", "), strict=False)) for line in done.stdout.splitlines()]


class PowerLog:
    """Clock and power of the first GPU that CUDA shows, twenty times per second."""

    def __enter__(self):
        self._file = tempfile.TemporaryFile("w+")
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        self._process = subprocess.Popen(_query("-i", first, "-lms", "50"), stdout=self._file)
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()

    def summary(self):
        """A summary of samples above half the highest power; None if there are none."""
        self._file.seek(0)
        lines = [line.strip().split(", ") for line in self._file if line.count(",") == 2]
        known = [line for line in lines if "[N/A]" not in line]
        samples = [(float(clock), float(watts), cap == "Active") for clock, watts, cap in known]
        if not samples:
            return None
        most = max(watts for _, watts, _ in samples)
        busy = [x for x in samples if x[1] >= most / 2]
        return {
            "watts_highest": most,
            "mhz_lowest": min(clock for clock, _, _ in busy),
            "mhz_highest": max(clock for clock, _, _ in busy),
            "share_at_power_limit": sum(cap for *_, cap in busy) / len(busy),
        }
