"""Which tests need GPUs that jax does not see."""

import functools

import jax

NEEDED = {"gpu": (1, "an NVIDIA GPU"), "multigpu": (2, "two NVIDIA GPUs")}


@functools.cache
def count_gpus():
    """How many GPUs jax sees: none if it was installed for CPUs, whatever the machine has."""
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


def why_skipped(markers):
    """Why a test with these markers cannot run here; "" if it can. Other markers need no count."""
    for needed, what in (NEEDED[marker] for marker in markers if marker in NEEDED):
        if count_gpus() < needed:
            return f"needs {what}; jax sees {count_gpus() or 'none'}"
    return ""
