"""How XLA compiles programs for the CPUs of tests: quickly, as each runs a few times.

Not where XLA_FLAGS names an optimization level, as .ci/long does.
"""

import importlib.metadata

_VERSION = tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))

_OPTIONS = {  # by name: in tests, and for users
    "xla_backend_optimization_level": (0, 3),
    "xla_llvm_disable_expensive_passes": (True, False),
}
if _VERSION < (0, 11):
    # Halves the time; later ones have no such option. Some programs with several all-to-alls in a
    # loop end the process so, every time ("rendezvous ... id < num_threads"): those are compiled as
    # for users.
    _OPTIONS["xla_cpu_use_fusion_emitters"] = (False, True)

AS_FOR_USERS = {name: value for name, (_, value) in _OPTIONS.items()}
"""Options for a program that is to be compiled as users have it."""


def flags():
    """What to add to XLA_FLAGS."""
    return " ".join(f"--{name}={value}".lower() for name, (value, _) in _OPTIONS.items())
