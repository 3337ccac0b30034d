"""Parameters that are gathered inside the loss: their gradients arrive reduced, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.exact_sums import linear_loss
from support.given_gradients import SHAPES, make_tx, random_params
from support.own_loop import jit_over_mesh
from support.placements import PLACEMENTS
from support.samples import few, often

KINDS = [name for name in PLACEMENTS if name.endswith("optim_grads_params")]


@few(1)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("placement", KINDS)
@often(
    lambda placement, check_vma, micro: (
        (placement, check_vma, micro)
        in {("hybrid-optim_grads_params", False, 1), ("tuple-optim_grads_params", True, 2)}
    )
)
def test_gradients_through_the_gather_equal_train_step(placement, check_vma, micro):
    """Whole numbers: every order of the sums is exact, so three steps agree bitwise."""
    mesh, kwargs = PLACEMENTS[placement]
    tx = make_tx(mesh, jda.MixedPrecisionPolicy(), **kwargs)
    state = jda.TrainState.create(random_params(), tx)
    params, opt_state, opt = state.params, state.opt_state, tx.bind(state.params)

    def local_step(params, opt_state, batch):
        def loss(p, batch):
            return linear_loss(jda.gather_params(p, tx), batch)

        def gradients(part):
            return jax.grad(loss)(jda.local_params(params, opt), part)

        if micro == 1:
            return opt.step(gradients(batch), opt_state, params)
        acc = opt.init_grads(params)
        for i in range(micro):
            part = jax.tree.map(lambda x, i=i: x.reshape(micro, -1, *x.shape[1:])[i], batch)
            acc = tx.accumulate(acc, gradients(part))
        return opt.step(acc, opt_state, params)

    own = jit_over_mesh(local_step, tx, params, check_vma)
    step = jda.train_step(linear_loss, tx, accumulate_steps=micro)
    rng = np.random.default_rng(8)
    for _ in range(3):
        batch = {k: rng.integers(-9, 10, (16, *s)).astype(np.float32) for k, s in SHAPES.items()}
        params, opt_state = own(params, opt_state, jda.shard_batch(batch, tx))
        state, _ = step(state, batch)
    assert_trees_same_bits(params, state.params, placement)
    assert_trees_same_bits(
        (opt_state.mu, opt_state.nu), (state.opt_state.mu, state.opt_state.nu), ""
    )


def test_shards_that_are_not_marked_raise():
    mesh, kwargs = PLACEMENTS["flat-optim_grads_params"]
    params = {"w": jnp.ones((64, 512))}
    opt = make_tx(mesh, **kwargs).bind(params)
    gather = jax.shard_map(
        lambda p: jda.gather_params(p, opt),
        mesh=opt.config.mesh,
        in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec("data"),
    )
    with pytest.raises(
        jda.MeshError, match=r"params\['w'\]: not marked as a shard: got an array of shape \(8, 512"
    ):
        gather(jda.shard_batch(params, opt))


def test_whole_params_where_shards_belong_raise():
    mesh, kwargs = PLACEMENTS["flat-optim_grads_params"]
    tx = make_tx(mesh, **kwargs)
    params = random_params()
    opt_state = tx.init(params)
    step = jax.shard_map(
        tx.bind(params).step,
        mesh=tx.config.mesh,
        in_specs=(jax.sharding.PartitionSpec(), tx.state_specs(), jax.sharding.PartitionSpec()),
        out_specs=(jax.sharding.PartitionSpec(), tx.state_specs()),
        check_vma=False,
    )
    with pytest.raises(
        jda.MeshError, match=r"params\['columns'\]: not placed as sharding_strategy"
    ):
        step(params, opt_state, params)


def test_a_block_keeps_what_takes_long_to_compute_and_booleans():
    """No result of elementwise operations, and no part of a parameter that was converted."""

    def block(w, x, key):
        h = x.astype(jnp.float32)
        h *= jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-5)
        gate, up = jnp.split(w["up"].astype(x.dtype), 2, axis=1)
        h = (h * w["scale"][None, None]).astype(x.dtype)
        h = jax.nn.gelu(h @ gate) * (h @ up)
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)
        return x + h @ w["down"].astype(x.dtype)

    w = {"scale": jnp.ones(16), "up": jnp.ones((16, 64)), "down": jnp.ones((32, 16))}
    args = w, jnp.ones((4, 8, 16), jnp.bfloat16), jax.random.key(0)
    _, pullback = jax.vjp(jax.checkpoint(block, policy=jda.remat_policy), *args)
    kept = sorted(x.aval.str_short() for x in jax.tree.leaves(pullback))
    products, mean, mask = ["bfloat16[4,8,32]"] * 2, ["float32[4,8]"], ["bool[4,8,32]"]
    arguments = [x.aval.str_short() for x in jax.tree.leaves(args[:2])]
    assert kept == sorted(arguments + products + mean + mask)
