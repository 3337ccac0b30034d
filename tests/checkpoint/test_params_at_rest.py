"""States whose parameters rest as shards: their small leaves are packed shard by shard."""

import jax
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import often

pytestmark = pytest.mark.slow

SHAPES = {"w": (256, 128), "v": (128, 40), "b": (48,), "odd": (7, 3)}
FORMS = {
    "shard of 8": dict(n=8, params_at_rest="shard"),
    "full of 4": dict(n=4),
    "shard of 2": dict(n=2, params_at_rest="shard", sharding_strategy="optim_grads"),
    "layers of 8": dict(n=8, sharding_strategy="optim_grads_params"),
}


def params_of():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def loss_fn(params, x):
    small = sum((params[name] ** 2).sum() for name in ("b", "odd")) * x[0, 0]
    return ((jax.numpy.tanh(x @ params["w"]) @ params["v"]) ** 2).mean().astype("float32") + small


def make_tx(cpu_mesh, n, **kwargs):
    return jda.distributed_fused_adamw(1e-2, mesh=cpu_mesh(n), weight_decay=0.1, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
@often(
    lambda source, target, dtype: (source, target, dtype) == ("shard of 8", "full of 4", "bfloat16")
)
def test_they_move_between_all_forms(tmp_path, cpu_mesh, source, target, dtype):
    one, two = (make_tx(cpu_mesh, **FORMS[form]) for form in (source, target))
    state = jda.TrainState.create(params_of(), one, param_dtypes=dtype)
    step = jda.train_step(loss_fn, one)
    for i in range(3):
        batch = np.random.default_rng(i).normal(size=(8, 256)).astype(np.float32)
        state, _ = step(state, batch)
    jda.save(tmp_path, state, one)
    shapes = jax.eval_shape(params_of)
    found = jda.restore(tmp_path, jda.TrainState.shapes(shapes, two, param_dtypes=dtype), two)
    assert_trees_same_bits(jda.to_optax_state(found, two)[:2], jda.to_optax_state(state, one)[:2])
    assert_trees_same_bits(jda.full_params(found, two), jda.full_params(state, one))
    assert int(jda.train_step(loss_fn, two)(found, batch)[0].step) == 4
