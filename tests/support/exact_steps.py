"""Training steps with exact gradient sums, so every mesh and strategy has the same results."""

import jax
import numpy as np

import jdistadam as jda
from support.exact_sums import HYPER, decays, exact_batch, linear_loss, random_params
from support.placements import FIRST, PLACEMENTS, make_mesh
from support.skipped_step import POLICIES as OTHERS

POLICIES = OTHERS | {"sums": dict(grad_reduce_dtype="float32")}
ONE = dict(shape=(1,), names=("data",))
# One device, and each strategy on another kind of mesh.
PLACES = {"one device": (ONE, {}), **{name: PLACEMENTS[name] for name in FIRST}}
LABELS = {"rows": "own", "columns": "", "prime": "", "small": "ice", "scalar": "own", "empty": ""}
GROUPS = {"": {}, "own": dict(lr_scale=0.5), "ice": dict(frozen=True)}


def make_tx(place, policy="float32", adam=jda.fused_adamw, **kwargs):
    """Gradients are summed, so they do not depend on the number of devices."""
    mesh, of_place = (PLACEMENTS | PLACES)[place]
    moments = ("mu_dtype", "nu_dtype", "rounding", "param_labels", "groups")
    of_adam = {k: kwargs.pop(k) for k in moments if k in kwargs}
    given = dict(POLICIES[policy])
    of_adam |= {k: given.pop(k) for k in moments if k in given}
    adam = adam(**HYPER, mask=decays, **of_adam)
    return jda.distributed(
        adam,
        **dict(
            mesh=make_mesh(**mesh),
            policy=jda.MixedPrecisionPolicy(**given),
            average_grads=False,
            loss_scale=1.0,
        )
        | of_place
        | kwargs,
    )


def first_state(tx, policy="float32"):
    dtype = "float32" if policy in ("float32", "sums") else "bfloat16"
    return jda.TrainState.create(random_params(), tx, param_dtypes=dtype)


def batches(count=10, factors=(), seed=1):
    """Integers, times a power of two or NaN in the steps that ``factors`` names."""
    rng, factors = np.random.default_rng(seed), dict(factors)
    for i in range(count):
        yield {k: x * np.float32(factors.get(i, 1)) for k, x in exact_batch(rng).items()}


def run(tx, state, given, micro=1):
    """Takes a step with each batch; yields state and metrics after each, on the host."""
    step = jda.train_step(linear_loss, tx, accumulate_steps=micro)
    for batch in given:
        state, metrics = step(state, batch)
        yield state, jax.tree.map(np.asarray, metrics)


def everything(state, tx):
    """The whole state on the host, independent of the mesh, without the norm (any order of sum)."""
    *rest, extra = jda.to_optax_state(state, tx)
    return *rest, extra._replace(grad_norm=np.float32(0))
