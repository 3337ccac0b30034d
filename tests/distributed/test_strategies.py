"""Every sharding strategy on every mesh: the same bits, the memory it promises, the dtypes named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.exact_sums import linear_loss
from support.given_gradients import SHAPES, make_tx, own_step, random_params
from support.placements import FIRST, FLAT, PLACEMENTS, SECOND, SQUARE
from support.reduced import reduced
from support.samples import few, often


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
@often(lambda placement, check_vma: placement == "twice-optim_grads" and check_vma)
def test_accumulate_gives_the_same_bits_under_every_strategy(placement, check_vma):
    """Three micro-batches of small whole numbers: every order of their sums is exact."""
    mesh, kwargs = PLACEMENTS[placement]
    rng = np.random.default_rng(2)
    grads = {k: rng.integers(-9, 10, (8, 3, *s)).astype(np.float32) for k, s in SHAPES.items()}

    def after(tx, grads, micro, **how):
        state = jda.TrainState.create(random_params(), tx)
        step = own_step(tx, state.params, micro=micro, **how)
        params, opt_state = state.params, state.opt_state
        grads = jda.shard_batch(grads, tx)
        for _ in range(3):
            params, opt_state = step(grads, opt_state, params)
        return jda.full_params(jda.TrainState(params, opt_state), tx)

    policy = jda.MixedPrecisionPolicy()  # the native sum
    got = after(make_tx(mesh, policy, **kwargs), grads, 3, check_vma=check_vma)
    # One device, one micro-batch: the mean over 24 is the same float32 number times the sum.
    alone = make_tx(dict(shape=(1,), names=("data",)), policy, average_grads=False)
    scale = np.float32(1 / 24)
    want = after(alone, {k: x.sum((0, 1), keepdims=True) * scale for k, x in grads.items()}, 1)
    assert_trees_same_bits(got, want, placement)


@few(3)
@pytest.mark.parametrize(
    ("comm", "summed", "bound"),
    [("bfloat16", "float32", 1.7e-3), ("float32", "float32", 1e-7), ("float32", None, 1e-7)],
)
@pytest.mark.parametrize("mesh", [FLAT, SQUARE], ids=["flat", "square"])
def test_error_of_the_mean_is_bounded(mesh, comm, summed, bound):
    """Relative L2 error of the mean of N(0, 1) over 8 devices, against float64."""
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=comm, grad_reduce_dtype=summed)
    tx = make_tx(mesh, policy, shard_axis=mesh["names"])
    x = np.random.default_rng(4).normal(size=(8, 1 << 16)).astype(np.float32)
    got, _ = reduced(tx, jnp.zeros(1 << 16), x)
    exact = x.astype(np.float64).sum(0)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) <= bound


@few(4)
@pytest.mark.parametrize("placement", PLACEMENTS)
@often(lambda placement: placement in FIRST + SECOND)
def test_devices_hold_the_shares_of_the_strategy(placement):
    mesh, kwargs = PLACEMENTS[placement]
    tx = make_tx(mesh, **kwargs)
    state = jda.TrainState.create(random_params(), tx)
    kind, strategy = placement.split("-")
    shards = {"flat": 8, "hybrid": 4, "twice": 8, "tuple": 8}[kind]
    total = sum(x.size for x in jax.tree.leaves(state.params))
    part = total if strategy == "no_shard" else total / shards
    for flat in (state.opt_state.mu, state.opt_state.nu):
        size = flat.addressable_shards[0].data.size
        assert part <= size <= part + 128 * len(SHAPES)
        assert {s.data.size for s in flat.addressable_shards} == {size}
    held = {k: x.addressable_shards[0].data.size for k, x in state.params.items()}
    inner = 4 if kind in ("hybrid", "twice") else 8
    for name, x in state.params.items():
        is_sharded = strategy == "optim_grads_params" and name in ("rows", "columns")
        assert held[name] == x.size // (inner if is_sharded else 1), name
    main = state.opt_state.main_params
    if strategy == "no_shard":
        assert main is None  # float32 parameters are placed as the state is
    elif strategy == "optim_grads_params" and kind != "twice":
        assert main.addressable_shards[0].data.size < part / 2  # only of the packed ones
    else:
        assert (
            main.addressable_shards[0].data.size
            == state.opt_state.mu.addressable_shards[0].data.size
        )


def test_a_state_of_another_mesh_raises():
    """Eight pieces of equal size: sizes say nothing, and JAX would move them without a word."""
    kwargs = dict(replica_axis="replica", outer_sharding_strategy="optim")
    twice = make_tx(SQUARE, **kwargs)
    turned = make_tx(dict(shape=(4, 2), names=("replica", "data")), **kwargs)
    flat = make_tx(FLAT)
    params = random_params()
    layouts = [tx.config.layout(params) for tx in (twice, turned, flat)]
    assert {layout.flat_size for layout in layouts} == {layouts[0].flat_size}
    states = [jda.TrainState.create(params, tx) for tx in (twice, turned, flat)]
    batch = {k: np.zeros((8, *s), np.float32) for k, s in SHAPES.items()}
    for tx in (twice, turned, flat):
        step = jda.train_step(linear_loss, tx)
        accepted = 0
        for state in states:
            same = state.opt_state.mu.sharding.is_equivalent_to(
                tx.init(params).mu.sharding, state.opt_state.mu.ndim
            )
            if same:
                accepted += 1
                step.lower(state, batch)  # to run is for other tests
            else:
                with pytest.raises(
                    jda.MeshError, match=r"opt_state\.mu: sharded over another mesh"
                ):
                    step(state, batch)
        assert accepted < len(states)
