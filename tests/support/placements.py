"""Every strategy on every mesh of eight devices."""

import jax
import numpy as np

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FLAT = dict(shape=(8,), names=("data",))
SQUARE = dict(shape=(2, 4), names=("replica", "data"))
# Every mesh of eight devices, with the arguments that name its axes.
PLACEMENTS = {
    **{f"flat-{s}": (FLAT, dict(sharding_strategy=s)) for s in STRATEGIES},
    **{
        f"hybrid-{s}": (SQUARE, dict(sharding_strategy=s, replica_axis="replica"))
        for s in STRATEGIES
    },
    **{
        f"twice-{s}": (
            SQUARE,
            dict(sharding_strategy=s, replica_axis="replica", outer_sharding_strategy="optim"),
        )
        for s in STRATEGIES[1:]
    },
    **{
        f"tuple-{s}": (SQUARE, dict(sharding_strategy=s, shard_axis=("replica", "data")))
        for s in STRATEGIES
    },
}


def make_mesh(shape, names, platform="cpu"):
    size = int(np.prod(shape))
    return jax.make_mesh(shape, names, devices=jax.devices(platform)[:size])


# Twice each kind of mesh once, and each strategy once.
FIRST = ("flat-no_shard", "hybrid-optim", "twice-optim_grads", "tuple-optim_grads_params")
SECOND = ("flat-optim", "hybrid-optim_grads", "twice-optim_grads_params", "tuple-no_shard")
