"""The identity of a layout: what it says, and that every entry notices the state of another one."""

import copy
import dataclasses
import hashlib
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed.bucketing import make_layout
from jdistadam.distributed.layout import Leaf
from jdistadam.distributed.layout_identity import VERSION, differences, identity_of
from jdistadam.training import state_check
from support.bits import assert_same_bits, assert_trees_same_bits
from support.lookalike import (
    BATCH,
    BF16,
    POLICIES,
    TALL,
    WIDE,
    loss_fn,
    make_params,
    make_tx,
    other_params,
)
from support.samples import often


def text_of(tx, params):
    return tx.config.identity(tx.layout(params)).tobytes().decode()


def test_the_text_is_written_once_and_for_all():
    """Other bytes for the same layout need another version: old states must stay readable."""
    leaves = [
        Leaf("params['b']", (3,), "float32", 0),
        Leaf("params['f']", (2,), jnp.float16, None),
        Leaf("params['w']", (512, 64), "bfloat16", 2, ("model",), cuts=((), (0,))),
    ]
    identity = identity_of(make_layout(leaves, 4, 1 << 20), (2,), "remainder16")
    assert VERSION == 1 and identity.dtype == np.uint8 and identity.size == 4096
    assert identity.tobytes().decode().rstrip() == (
        '{"jdistadam_layout":1,"flat_size":8320,"main_size":8320,"num_shards":4,"tensor_parts":[2]\n'
        ',"leaves":[\n'
        """{"dtype":"float32","path":"['b']","shape":[3]},\n"""
        """{"dtype":"float16","frozen":true,"path":"['f']","shape":[2]},\n"""
        """{"cuts":[[],[0]],"dtype":"bfloat16","path":"['w']","shape":[512,64]}]\n"""
        ',"buckets":[\n'
        '{"dim":0,"leaves":[2],"main":"remainder16","offset":0,"padding":0,"shard_shape":[128,64]},\n'
        '{"dim":null,"leaves":[0],"main":"remainder16","offset":8192,"padding":1,"shard_shape":[1]}]\n'
        "}"
    )  # fmt: skip


LABELS = {"a": "x", "b": "y", "bias": "y"}
OTHER_LAYOUTS = {
    "number of shards": (make_params(), lambda: make_tx(4), "num_shards 4 instead of 8"),
    "one device": (make_params(), lambda: make_tx(1), "num_shards 1 instead of 8"),
    "a leaf's path": ({"z": make_params()}, make_tx, r"leaf \['z'\]\['a'\] is not expected"),
    "a leaf's dtype": (make_params(BF16), make_tx, r"leaf \['a'\]: dtype bfloat16 instead of float32"),
    "shapes": (make_params(a=TALL, b=WIDE), make_tx, r"leaf \['a'\]: shape \[128, 256\] instead of \[256, 128\]"),
    "main parameters": (make_params(), lambda: make_tx(policy=jda.MixedPrecisionPolicy(main_params_dtype=None)),
                        r"bucket of \['a'\]: main none instead of float32"),
    "frozen leaves": (make_params(), lambda: make_tx(param_labels=LABELS, groups={"x": {"frozen": True}, "y": {}}),
                      r"leaf \['a'\]: frozen True instead of none"),
    "strategy": (make_params(), lambda: make_tx(sharding_strategy="optim_grads_params"),
                 r"bucket of \['a'\]: main none instead of float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_what_the_text_depends_on(name):
    params, make, message = OTHER_LAYOUTS[name]
    other, mine = (
        tx.config.identity(tx.layout(p)) for tx, p in ((make(), params), (make_tx(), make_params()))
    )
    assert re.search(message, differences(other, mine)), differences(other, mine)
    assert differences(mine, mine.copy()) is None


def test_small_leaves_and_buckets_are_in_the_text():
    """bucket_bytes and groups decide which leaves are packed together."""
    params = {f"w{i}": jnp.zeros(100) for i in range(6)}
    labels = {name: "x" if name == "w0" else "y" for name in params}
    texts = {
        text_of(make_tx(), params),
        text_of(make_tx(bucket_bytes=1000), params),
        text_of(make_tx(param_labels=labels, groups={"x": {}, "y": {}}), params),
    }
    assert len(texts) == 3


def test_what_the_text_does_not_depend_on():
    """Hyperparameters, names, strategies and meshes of the same layout: states can be exchanged."""
    devices = jax.devices("cpu")
    square = jax.make_mesh((2, 4), ("x", "y"), devices=devices)
    with_idle_axis = jax.make_mesh((8, 1), ("data", "model"), devices=devices)
    same = [
        make_tx(),
        make_tx(learning_rate=1.0, b1=0.5, weight_decay=0.0, max_grad_norm=1.0, loss_scale=2.0),
        make_tx(sharding_strategy="optim_grads"),
        make_tx(mesh=square, shard_axis=("x", "y")),
        make_tx(mesh=square, shard_axis="y", replica_axis="x", outer_sharding_strategy="optim"),
        make_tx(mesh=jax.make_mesh((8,), ("other",), devices=devices), shard_axis="other"),
        make_tx(mesh=with_idle_axis, param_specs=lambda p: jax.tree.map(lambda _: P("model"), p)),
        make_tx(bucket_bytes=1 << 20),
        make_tx(policy=jda.MixedPrecisionPolicy(mu_dtype=BF16, grad_comm_dtype=BF16)),
        make_tx(mask=lambda p: jax.tree.map(lambda _: True, p)),
    ]
    assert len({text_of(tx, make_params()) for tx in same}) == 1
    # cut by tensor parallelism: the names of axes do not matter, trailing Nones neither
    cut = []
    for name, spec in (("model", P(None, "model")), ("tp", P(None, "tp", None))):
        mesh = jax.make_mesh((4, 2), ("data", name), devices=devices)
        params = {"w": jnp.zeros((256, 128, 2))}
        cut.append(text_of(make_tx(mesh=mesh, param_specs={"w": spec}), params))
    assert cut[0] == cut[1] and '"cuts":[[],[0]]' in cut[0] and '"shape":[256,64,2]' in cut[0]


def test_the_text_does_not_depend_on_the_process():
    """Python's hash of strings differs between processes; checkpoints move between them."""
    code = (
        "import hashlib, jax.numpy as jnp\n"
        "from jdistadam.distributed.bucketing import make_layout\n"
        "from jdistadam.distributed.layout import Leaf\n"
        "from jdistadam.distributed.layout_identity import identity_of\n"
        "leaves = [Leaf(f'params[{c!r}]', (300, 8), jnp.bfloat16, 0) for c in 'zaky']\n"
        "print(hashlib.sha256(identity_of(make_layout(leaves, 4, 9000), (), 'float32')).hexdigest())"
    )
    leaves = [Leaf(f"params[{c!r}]", (300, 8), BF16, 0) for c in "zaky"]
    mine = hashlib.sha256(identity_of(make_layout(leaves, 4, 9000), (), "float32")).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-P", "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == mine


def without(state, **changes):
    return dataclasses.replace(state, opt_state=state.opt_state._replace(**changes))


def spoilt(state, other):
    """A state by what was done to its identity, and what the error says."""
    identity = state.opt_state.layout_identity
    averaged = jax.tree.map(lambda x, y: (x + y) / 2, state, other)
    return {
        r"missing: .*got None": without(state, layout_identity=None),
        r"averaged or cast: got float32": averaged,
        r"averaged or cast: got bfloat16": without(state, layout_identity=identity.astype(BF16)),
        r"a text that was cut off or changed: .* instead of": without(state, layout_identity=identity // 2),
        r"a text that was cut off": without(state, layout_identity=np.asarray(identity) * (np.arange(identity.size) < 200)),
        r"leaf \['a'\]: shape \[128, 256\] instead of \[256, 128\]": dataclasses.replace(state, opt_state=other.opt_state),
    }  # fmt: skip


def test_every_entry_notices_another_identity():
    tx = make_tx()
    state = jda.TrainState.create(make_params(), tx)
    other = jda.TrainState.create(other_params(), tx)
    other = dataclasses.replace(other, params=state.params)
    entries = {
        "train_step": lambda s: jda.train_step(loss_fn, tx)(s, BATCH),
        "full_params": lambda s: jda.full_params(s, tx),
        "to_optax_state": lambda s: jda.to_optax_state(s, tx),
        "main_params": lambda s: jda.main_params(s.params, s.opt_state, tx),
        "check_state": lambda s: tx.check_state(s.opt_state, s.params),
        "reload_main_params": lambda s: jda.reload_main_params(s, tx),
    }
    for message, bad in spoilt(state, other).items():
        for name, entry in entries.items():
            if name == "reload_main_params" and "instead" in message:
                message = "params: do not fit the state: got .* instead of"
            with pytest.raises(jda.LayoutError, match=message):
                entry(bad)
                pytest.fail(name)
    for entry in entries.values():
        entry(jax.tree.map(jnp.copy, state))


def test_identity_survives_what_is_done_to_states():
    tx = make_tx()
    step = jda.train_step(loss_fn, tx)
    state, _ = step(jda.TrainState.create(make_params(), tx), BATCH)
    for copied in (
        pickle.loads(pickle.dumps(state)),
        pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state))),
        jax.tree.map(jnp.copy, state),
        copy.deepcopy(state),
        jax.tree.unflatten(jax.tree.structure(state), jax.device_get(jax.tree.leaves(state))),
    ):
        new, metrics = step(copied, BATCH)
        again, wanted = step(jax.tree.map(jnp.copy, state), BATCH)
        assert_same_bits(metrics["loss"], wanted["loss"])
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(again), strict=True):
            assert_same_bits(x, y)


def test_a_state_that_the_step_returned_is_not_read_again(monkeypatch):
    """The check of values is for other states; the program of a call has no operand for it."""
    seen = []
    check = state_check.check_layout
    monkeypatch.setattr(state_check, "check_layout", lambda *args: (seen.append(1), check(*args)))
    tx = make_tx()
    step = jda.train_step(loss_fn, tx)
    state = jda.TrainState.create(make_params(), tx)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert len(seen) == 1
    state, _ = step(jax.tree.map(jnp.copy, state), BATCH)  # other arrays of the same state
    assert len(seen) == 2
    verified = step.lower(state, BATCH, is_verified=True).as_text()
    assert "ui8" not in verified and "ui8" in step.lower(state, BATCH).as_text()


CASES = [
    (policy, strategy)
    for policy in POLICIES
    for strategy in ("no_shard", "optim", "optim_grads_params")
    if (policy, strategy) != ("comm", "no_shard")  # contradicts itself
]


@pytest.mark.parametrize(("policy", "strategy"), CASES)
@pytest.mark.parametrize("check_vma", [True, False])
@often(
    lambda policy, strategy, check_vma: (
        (policy, strategy, check_vma)
        in {("bfloat16", "optim", True), ("no main", "no_shard", False)}
    )
)
def test_a_program_keeps_everything_and_says_nan(policy, strategy, check_vma):
    """Where nothing can be raised: a step in a shard_map, with the state of another layout."""
    assert_keeps_everything(make_tx().config.mesh, policy, strategy, check_vma)


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "strategy"), CASES)
def test_a_program_on_gpus_keeps_everything_and_says_nan(policy, strategy):
    """On as many GPUs as there are, up to eight that divide the leaves."""
    devices = jax.devices("gpu")
    n = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    assert_keeps_everything(
        jax.make_mesh((n,), ("data",), devices=devices[:n]), policy, strategy, False
    )


def assert_keeps_everything(mesh, policy, strategy, check_vma):
    dtype, policy = POLICIES[policy]
    tx = make_tx(mesh=mesh, sharding_strategy=strategy, policy=policy, loss_scale=2.0)
    params = make_params(dtype)
    state = jda.TrainState.create(params, tx)
    other = jda.TrainState.create(other_params(dtype), tx)
    specs = tx.param_specs(params)

    def local_step(params, opt_state, x):
        local = jda.local_params(params, tx)
        grads = jax.grad(lambda p: loss_fn(jda.gather_params(p, tx), x))(local)
        return tx.step(grads, opt_state, params)

    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=tx.config.mesh,
            in_specs=(specs, tx.state_specs(), P("data")),
            out_specs=(specs, tx.state_specs()),
            check_vma=check_vma,
        )
    )
    batch = jda.shard_batch(BATCH, tx)
    new_params, new = step(state.params, state.opt_state, batch)
    assert int(new.count) == 1 and np.isfinite(new.grad_norm)
    assert np.any(np.asarray(new_params["a"]) != np.asarray(state.params["a"]))
    kept_params, kept = step(state.params, other.opt_state, batch)
    assert np.isnan(kept.grad_norm)
    for name, x in state.params.items():
        assert_same_bits(kept_params[name], x, name)
    for name in ("count", "main_params", "mu", "nu", "layout_identity"):
        assert_trees_same_bits(getattr(kept, name), getattr(other.opt_state, name))


def test_a_traced_step_keeps_everything_and_says_nan():
    """jit, scan and a program that was compiled ahead of time, chained and with a model state."""
    tx = jda.chain(optax.scale_by_schedule(lambda count: 1.0 / (1 + count)), make_tx())
    loss = lambda p, x, model_state: (loss_fn(p, x), model_state + 1)  # noqa: E731
    step = jda.train_step(loss, tx)
    state = jda.TrainState.create(make_params(), tx, model_state=jnp.zeros(()))
    other = jda.TrainState.create(other_params(), tx, model_state=jnp.zeros(()))
    bad = dataclasses.replace(other, params=jax.tree.map(jnp.copy, state.params))
    batch = jda.shard_batch(BATCH, tx)
    compiled = step.lower(state, batch).compile()
    ways = {
        "jit": lambda s: jax.jit(step)(s, batch),
        "scan": lambda s: jax.lax.scan(step, s, batch[None]),
        "compiled": lambda s: compiled(jax.tree.map(jnp.copy, s), batch),
    }
    for name, run in ways.items():
        new, metrics = run(state)
        assert np.isfinite(metrics["loss"]).all() and float(new.model_state) == 1, name
        kept, metrics = run(bad)
        assert np.isnan(metrics["loss"]).all() and np.isnan(metrics["grad_norm"]).all(), name
        kept_rest, bad_rest = (
            (s.params, s.model_state, s.opt_state[0], s.opt_state[1][:4]) for s in (kept, bad)
        )
        for x, y in zip(jax.tree.leaves(kept_rest), jax.tree.leaves(bad_rest), strict=True):
            assert_same_bits(x, y, name)


def test_inside_a_program_types_are_checked():
    """A missing or averaged identity raises where the program is traced."""
    tx = make_tx()
    state = jda.TrainState.create(make_params(), tx)
    step = jax.jit(jda.train_step(loss_fn, tx))
    averaged = jax.tree.map(lambda x: (x + x) / 2, state)
    with pytest.raises(jda.LayoutError, match="averaged or cast: got float32"):
        step(averaged, BATCH)
    with pytest.raises(jda.LayoutError, match="missing"):
        step(without(state, layout_identity=None), BATCH)
