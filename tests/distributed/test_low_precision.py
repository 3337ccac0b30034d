"""Moments of 8 bits and stochastic rounding over a mesh: the bits of one device, however it is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import often

SHAPES = {
    "rows": (256, 96),
    "inner": (3, 2048, 4),  # cut along its second dimension
    "columns": (5, 7200),  # packed: on 8 devices no dimension divides into whole blocks
    "middle": (4100,),  # coded, in a packed bucket, its last block not full
    "prime": (20_011,),
    "small": (7, 3),
    "row": (1024,),  # not coded; divides
    "scalar": (),
}
HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.93, eps=1e-7, eps_root=1e-12, weight_decay=0.13)
CODED = dict(mu_dtype="block8", nu_dtype="block8", main_params_dtype=None)
KINDS = {
    "8 bits": CODED,
    "8 bits at random": CODED | dict(rounding="stochastic", seed=77),
    "remainders": CODED | dict(main_params_dtype="remainder16", rounding="stochastic", seed=2**40),
    "main": CODED | dict(main_params_dtype=jnp.float32),
    "bfloat16 at random": dict(
        main_params_dtype=None,
        mu_dtype=jnp.bfloat16,
        nu_dtype=jnp.bfloat16,
        rounding="stochastic",
    ),
    "nu alone, not rows": CODED
    | dict(mu_dtype=jnp.bfloat16, float32_moments=lambda path: "rows" in path),
}
STEPS = 10
EXAMPLES = 16


def decays(params):
    return jax.tree.map(lambda x: len(x.shape) > 1, params)


def random_params(dtype):
    rng = np.random.default_rng(0)
    make = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)  # noqa: E731
    return {name: make(shape) for name, shape in SHAPES.items()}


def batches(steps=STEPS):
    """Signs for each example: every sum over them is exact, in every order."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        scale = {name: 2.0 ** rng.integers(-20, 3) for name in SHAPES}
        yield {
            name: (np.sign(rng.integers(-64, 65, (EXAMPLES, *s))) * scale[name]).astype(np.float32)
            for name, s in SHAPES.items()
        }


def loss(params, batch):
    terms = jax.tree.map(lambda p, x: jnp.sum(p.astype(jnp.float32) * jnp.sum(x, 0)), params, batch)
    return sum(jax.tree.leaves(terms))


@functools.cache
def of_one_device(kind, dtype, steps=STEPS):
    """The same by ``fused_adamw``, which has no buckets: params, exact params, moments as floats."""
    given = dict(KINDS[kind])
    tx = jda.fused_adamw(**HYPER, mask=decays, **given)
    params = random_params(dtype)
    state = tx.init(params)
    step = jax.jit(tx.step)
    for batch in batches(steps):
        grads = jax.tree.map(lambda x, p: jnp.asarray(x.sum(0)).astype(p.dtype), batch, params)
        params, state = step(grads, state, params)
    adam = find_adam(jda.decoded(state))
    return params, jda.main_params(params, state), adam.mu, adam.nu


def find_adam(state):
    is_adam = lambda x: hasattr(x, "mu") and hasattr(x, "nu")  # noqa: E731
    return next(x for x in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(x))


def make_tx(shape, kind, *, explicit=False, **kwargs):
    names = ("replica", "data", "model")[2 - len(shape) :][: len(shape)] if len(shape) < 3 else ()
    names = {1: ("data",), 2: ("replica", "data")}[len(shape)]
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices("cpu")[: np.prod(shape)]
    mesh = jax.make_mesh(shape, names, (axis_type,) * len(shape), devices=devices)
    if len(shape) == 2:
        kwargs["replica_axis"] = "replica"
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32, **KINDS[kind])
    return jda.distributed_fused_adamw(mesh=mesh, policy=policy, mask=decays, **HYPER, **kwargs)


def trained(tx, dtype, *, steps=STEPS, accumulate_steps=1, state=None, skip=0):
    if state is None:
        state = jda.TrainState.create(random_params(dtype), tx)
    n = tx.config.parallel.num_devices * accumulate_steps
    step = jda.train_step(
        lambda p, b: loss(p, b) * n, tx, accumulate_steps=accumulate_steps
    )  # the mean over devices is the sum over examples
    for batch in list(batches(skip + steps))[skip:]:
        state, _ = step(state, batch)
    return state


def assert_as_one_device(tx, state, kind, dtype, steps=STEPS):
    params, main, mu, nu = of_one_device(kind, dtype, steps)
    got_main, got_state, _ = jda.to_optax_state(state, tx)
    assert_trees_same_bits(jda.full_params(state, tx), params)
    assert_trees_same_bits(got_main, jax.tree.map(lambda x: x.astype(jnp.float32), main))
    adam = find_adam(got_state)
    as_float = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)  # noqa: E731
    assert_trees_same_bits(as_float(adam.mu), as_float(mu))
    assert_trees_same_bits(as_float(adam.nu), as_float(nu))


CUTS = {
    "1": dict(shape=(1,)),
    "2": dict(shape=(2,), bucket_bytes=1),
    "8": dict(shape=(8,), bucket_bytes=30_000),
    "8, explicit": dict(shape=(8,), explicit=True),
    "DDP": dict(shape=(4,), sharding_strategy="no_shard"),
    "ZeRO-2": dict(shape=(4,), sharding_strategy="optim_grads", accumulate_steps=2),
    "ZeRO-3": dict(shape=(8,), sharding_strategy="optim_grads_params", accumulate_steps=2),
    "hybrid": dict(shape=(2, 4)),
    "hybrid, twice": dict(shape=(2, 4), outer_sharding_strategy="optim"),
    "at rest": dict(shape=(8,), params_at_rest="shard"),
    "at rest, twice": dict(
        shape=(2, 4), params_at_rest="shard", outer_sharding_strategy="optim", accumulate_steps=2
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
@often(
    lambda kind, cut: (
        (kind, cut)
        in {
            ("8 bits", "8"),
            ("8 bits at random", "8, explicit"),
            ("8 bits at random", "at rest, twice"),
            ("remainders", "ZeRO-3"),
            ("main", "hybrid, twice"),
            ("bfloat16 at random", "2"),
            ("nu alone, not rows", "ZeRO-2"),
        }
    )
)
def test_the_bits_of_one_device(kind, cut):
    dtype = jnp.bfloat16
    given = dict(CUTS[cut])
    accumulate_steps = given.pop("accumulate_steps", 1)
    tx = make_tx(kind=kind, **given)
    state = trained(tx, dtype, accumulate_steps=accumulate_steps)
    assert_as_one_device(tx, state, kind, dtype)
