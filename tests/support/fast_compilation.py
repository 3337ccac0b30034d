"""How XLA compiles programs for CPUs in tests: quickly, because each runs only a few times.

No effect if XLA_FLAGS has an optimization level, as in .ci/long.
"""

import importlib.metadata

_VERSION = tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))

_OPTIONS = {  # by name: in tests, and for users
    "xla_backend_optimization_level": (0, 3),
    "xla_llvm_disable_expensive_passes": (True, False),
}
if _VERSION < (0, 11):
    # Halves the time; later versions have no such option. With it some programs with several
    # all-to-alls in a loop always crash the process ("rendezvous ... id < num_threads"): those are
    # compiled as for users.
    _OPTIONS["xla_cpu_use_fusion_emitters"] = (False, True)

AS_FOR_USERS = {name: value for name, (_, value) in _OPTIONS.items()}
"""Options for a program that is compiled as for users."""


def flags():
    """Additions to XLA_FLAGS."""
    return " ".join(f"--{name}={value}".lower() for name, (value, _) in _OPTIONS.items())
