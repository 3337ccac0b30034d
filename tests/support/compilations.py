"""How often XLA compiles."""

import jax

_compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *args, **kwargs: (
        _compilations.append(event) if "backend_compile" in event else None
    )
)


def num_compilations():
    """How many programs XLA has compiled in this process."""
    return len(_compilations)
