"""Prints for which GPUs CMake compiles: ``python architectures.py NVCC``; CUDAARCHS overrides it.

A build takes minutes for all GPUs, so it is for those of this machine, if it has any: machine code,
and PTX of the newest, which newer GPUs compile at the first use. Without a GPU, as in most
containers, it is for every GPU from 7.5 on: machine code for those of data centers, and PTX for
the others. Wheels have machine code for all of them (.ci/wheels).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable

_OLDEST = 75


def architectures(capabilities: Iterable[str], codes: Iterable[str]) -> tuple[str, str]:
    """Returns the value of CMAKE_CUDA_ARCHITECTURES, and in words which GPUs these are.

    Args:
      capabilities: Compute capabilities of the machine's GPUs, such as "9.0".
      codes: The machine code that nvcc knows, such as "sm_90".

    Example:
      >>> architectures(["9.0", "8.0", "9.0"], ["sm_80", "sm_90"])
      ('80-real;90', 'the GPUs of this machine')
      >>> architectures([], ["sm_80", "sm_90"])[0]
      '75-virtual;80-real;90-real;90-virtual'
    """
    known, numbers = set(codes), sorted({int(x.replace(".", "")) for x in capabilities})
    if numbers and numbers[0] >= _OLDEST and {f"sm_{x}" for x in numbers} <= known:
        *older, newest = numbers
        return ";".join([*(f"{x}-real" for x in older), str(newest)]), "the GPUs of this machine"
    newest_ones = "100-real;120-virtual" if "sm_120" in known else "90-virtual"
    why = "nvcc knows no code for a GPU of this machine" if numbers else "this machine has no GPU"
    return f"75-virtual;80-real;90-real;{newest_ones}", f"all GPUs: {why}"


def _output(*command: str) -> str:
    """What a command prints; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def main(nvcc: str) -> None:
    """Prints both, in two lines."""
    found = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    capabilities = re.findall(r"^\d+\.\d$", found, re.M)
    codes = re.findall(r"\bsm_\d+\b", _output(nvcc, "--list-gpu-code"))
    print("\n".join(architectures(capabilities, codes)))


if __name__ == "__main__":
    main(sys.argv[1])
