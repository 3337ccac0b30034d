"""The text of a layout, its digest, and that every entry notices the state of another layout."""

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
from jdistadam.distributed.checks import check_state
from jdistadam.distributed.layout import Leaf, make_layout
from jdistadam.distributed.layout_text import VERSION, differences, digest_of, text_of
from jdistadam.training import admission
from support.bits import assert_same_bits
from support.dtypes import dtypes
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
from support.samples import few, often


def text_for(tx, params):
    return tx.config.layout_text(tx.layout(params))


def test_layout_text_never_changes():
    """Other bytes for the same layout need another version: old states must stay readable."""
    leaves = [
        Leaf("params['b']", (3,), "float32", 0),
        Leaf("params['f']", (2,), jnp.float16, None),
        Leaf("params['w']", (512, 64), "bfloat16", 2, ("model",), cuts=((), (0,))),
    ]
    text = text_of(make_layout(leaves, 4, 1 << 20), (2,), "remainder16")
    digest = digest_of(text)
    assert VERSION == 1 and digest.dtype == np.uint8 and digest.shape == (16,)
    assert digest.tobytes() == hashlib.sha256(text.encode()).digest()[:16]
    assert text == (
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
def test_layout_text_shows_every_difference_of_layouts(name):
    params, make, message = OTHER_LAYOUTS[name]
    other, mine = text_for(make(), params), text_for(make_tx(), make_params())
    assert re.search(message, differences(other, mine)), differences(other, mine)
    assert differences(mine, str(mine)) is None
    assert digest_of(other).tobytes() != digest_of(mine).tobytes()


def test_small_leaves_and_buckets_are_in_the_text():
    """bucket_bytes and groups decide which leaves are packed together."""
    params = {f"w{i}": jnp.zeros(100) for i in range(6)}
    labels = {name: "x" if name == "w0" else "y" for name in params}
    texts = {
        text_for(make_tx(), params),
        text_for(make_tx(bucket_bytes=1000), params),
        text_for(make_tx(param_labels=labels, groups={"x": {}, "y": {}}), params),
    }
    assert len(texts) == 3


def test_layout_text_ignores_hyperparameters_and_meshes():
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
        make_tx(**dtypes(mu_dtype=BF16, grad_comm_dtype=BF16)),
        make_tx(mask=lambda p: jax.tree.map(lambda _: True, p)),
    ]
    assert len({text_for(tx, make_params()) for tx in same}) == 1
    # cut by tensor parallelism: the names of axes do not matter, trailing Nones neither
    cut = []
    for name, spec in (("model", P(None, "model")), ("tp", P(None, "tp", None))):
        mesh = jax.make_mesh((4, 2), ("data", name), devices=devices)
        params = {"w": jnp.zeros((256, 128, 2))}
        cut.append(text_for(make_tx(mesh=mesh, param_specs={"w": spec}), params))
    assert cut[0] == cut[1] and '"cuts":[[],[0]]' in cut[0] and '"shape":[256,64,2]' in cut[0]


def test_layout_text_is_the_same_in_another_process():
    """Python's hash of strings differs between processes; checkpoints move between them."""
    code = (
        "import jax.numpy as jnp\n"
        "from jdistadam.distributed.layout import make_layout\n"
        "from jdistadam.distributed.layout import Leaf\n"
        "from jdistadam.distributed.layout_text import digest_of, text_of\n"
        "leaves = [Leaf(f'params[{c!r}]', (300, 8), jnp.bfloat16, 0) for c in 'zaky']\n"
        "print(digest_of(text_of(make_layout(leaves, 4, 9000), (), 'float32')).tobytes().hex())"
    )
    leaves = [Leaf(f"params[{c!r}]", (300, 8), BF16, 0) for c in "zaky"]
    mine = digest_of(text_of(make_layout(leaves, 4, 9000), (), "float32")).tobytes().hex()
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-P", "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == mine


def without(state, **changes):
    return dataclasses.replace(state, opt_state=state.opt_state._replace(**changes))


def spoilt(state, other):
    """A state by what was done to its digest, and what the error says."""
    digest = state.opt_state.layout_digest
    averaged = jax.tree.map(lambda x, y: (x + y) / 2, state, other)
    return {
        r"missing: .*got None": without(state, layout_digest=None),
        r"averaged, cast or sliced: got float32": averaged,
        r"averaged, cast or sliced: got bfloat16": without(state, layout_digest=digest.astype(BF16)),
        r"averaged, cast or sliced: got uint8, shape \(15,\)": without(state, layout_digest=digest[1:]),
        r"another layout, or its digest was changed by arithmetic: got digest [0-9a-f]{32}, mu of \d+ elements, expected digest": without(state, layout_digest=digest // 2),
        r"leaf \['a'\]: shape \[128, 256\] instead of \[256, 128\]": dataclasses.replace(state, opt_state=other.opt_state),
    }  # fmt: skip


def test_every_entry_notices_another_digest(tmp_path):
    tx = make_tx()
    state = jda.TrainState.create(make_params(), tx)
    other = jda.TrainState.create(other_params(), tx)
    other = dataclasses.replace(other, params=state.params)
    entries = {
        "train_step": lambda s: jda.train_step(loss_fn, tx)(s, BATCH),
        "full_params": lambda s: jda.full_params(s, tx),
        "to_optax_state": lambda s: jda.to_optax_state(s, tx),
        "main_params": lambda s: jda.main_params(s.params, s.opt_state, tx),
        "eval_step": lambda s: jda.eval_step(loss_fn, tx)(s, BATCH),
        "save": lambda s: jda.save(tmp_path, s, tx),
        "check_state": lambda s: tx.check_state(s.opt_state, s.params),
        "reload_main_params": lambda s: jda.reload_main_params(s, tx),
    }
    for message, bad in spoilt(state, other).items():
        for name, entry in entries.items():
            is_other = "instead" in message or "another" in message
            match = "params: do not fit the state" if name == "reload_main_params" and is_other else message  # fmt: skip
            with pytest.raises(jda.LayoutError, match=match):
                entry(bad)
                pytest.fail(name)
    for entry in entries.values():
        entry(jax.tree.map(jnp.copy, state))


def test_a_digest_survives_what_is_done_to_states():
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


def test_a_state_that_a_step_returned_is_not_read_again(monkeypatch):
    """Not by this step, nor by another one: nobody waits for the program that makes its digest."""
    read = []

    def checked(*args, digest=None):
        if digest is None:
            read.append(args)
        return check_state(*args, digest=digest)

    monkeypatch.setattr(admission, "check_state", checked)
    tx = make_tx()
    step, other = (jda.train_step(loss_fn, tx) for _ in range(2))
    state = jda.TrainState.create(make_params(), tx)
    for run in (step, step, other, step, jda.train_step(loss_fn, make_tx())):
        state, _ = run(state, BATCH)
        jda.eval_step(loss_fn, tx)(state, BATCH)
    assert len(read) == 1
    step(jax.tree.map(jnp.copy, state), BATCH)  # other arrays of the same state
    assert len(read) == 2


@few(1)
@pytest.mark.parametrize("how", ["replace", "in place", "dataclasses"])
def test_params_of_other_paths_are_another_layout(how):
    """The same arrays in the same order, of a state that a step returned."""
    tx = make_tx()
    step = jda.train_step(loss_fn, tx)
    state, _ = step(jda.TrainState.create(make_params(), tx), BATCH)
    renamed = {f"x_{name}": x for name, x in state.params.items()}
    if how == "replace":
        with pytest.raises(jda.TreeError, match="new params and no tx"):
            state.replace(params=renamed)
        return
    if how == "in place":
        state.params.clear()
        state.params.update(renamed)
    else:
        state = dataclasses.replace(state, params=renamed)
    for run in (step, jda.eval_step(loss_fn, tx), lambda s, _: jda.full_params(s, tx)):
        with pytest.raises(jda.LayoutError, match=r"leaf \['a'\] is not expected|leaf \['x_a'\]"):
            run(state, BATCH)


CASES = [
    (policy, strategy)
    for policy in POLICIES
    for strategy in ("no_shard", "optim", "optim_grads_params")
    if (policy, strategy) != ("comm", "no_shard")  # contradicts itself
]


@few(1)
@pytest.mark.parametrize(("policy", "strategy"), CASES)
@pytest.mark.parametrize("check_vma", [True, False])
@often(
    lambda policy, strategy, check_vma: (
        (policy, strategy, check_vma)
        in {("bfloat16", "optim", True), ("no main", "no_shard", False)}
    )
)
def test_step_in_a_program_returns_nan_for_another_layout(policy, strategy, check_vma):
    """Where nothing can be raised: a step in a shard_map, with the state of another layout."""
    assert_says_nan(make_tx().config.mesh, policy, strategy, check_vma)


@few(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(learning_rate=0.0, weight_decay=0.0),
        dict(loss_scale=jda.DynamicLossScale(init_scale=8.0), max_grad_norm=0.1),
        dict(b1=0.0, eps=1.0),
    ],
    ids=["rate 0", "loss scale", "no first moment"],
)
@often(lambda policy, kwargs: (policy in ("remainder16", "8 bits")) == ("loss_scale" in kwargs))
def test_another_layout_gives_nan_with_any_hyperparameters(policy, kwargs):
    """Never as a skipped step, which keeps its parameters: a loop that counts skips sees none."""
    strategy = "optim_grads" if policy != "comm" else "optim"
    assert_says_nan(make_tx().config.mesh, policy, strategy, False, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "strategy"), CASES)
def test_step_on_gpus_returns_nan_for_another_layout(policy, strategy):
    """On as many GPUs as there are, up to eight that divide the leaves."""
    devices = jax.devices("gpu")
    n = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    mesh = jax.make_mesh((n,), ("data",), devices=devices[:n])
    assert_says_nan(mesh, policy, strategy, False)


def assert_says_nan(mesh, policy, strategy, check_vma, **kwargs):
    dtype, policy = POLICIES[policy]
    kwargs = dict(loss_scale=2.0) | kwargs
    tx = make_tx(mesh=mesh, sharding_strategy=strategy, policy=policy, **kwargs)
    params = make_params(dtype)
    state = jda.TrainState.create(params, tx)
    other = jda.TrainState.create(other_params(dtype), tx)
    tx = tx.bind(params)
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
    for batch in (BATCH, BATCH * np.inf):  # which would be skipped
        batch = jda.shard_batch(batch, tx)
        good, new = step(state.params, state.opt_state, batch)
        assert not np.isnan(np.asarray(good["a"], np.float32)).any()
        bad, spoilt = step(state.params, other.opt_state, batch)
        for name, x in bad.items():
            assert np.isnan(np.asarray(x, np.float32)).all(), name
        assert np.isnan(spoilt.grad_norm)
        assert int(spoilt.count) == 1 and int(spoilt.scaling.skipped) == 0
        assert_same_bits(spoilt.layout_digest, other.opt_state.layout_digest)
        with pytest.raises(jda.LayoutError, match="another layout"):
            tx.check_state(spoilt, state.params)
    assert int(new.scaling.skipped) == 1 and int(new.count) == 0


def test_traced_train_step_returns_nan_for_another_layout(tmp_path):
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
        spoilt, metrics = run(bad)
        assert np.isnan(metrics["loss"]).all() and np.isnan(metrics["grad_norm"]).all(), name
        assert all(np.isnan(x).all() for x in jax.tree.leaves(spoilt.params)), name
        for entry in (
            lambda s: step(s, batch),
            lambda s: jda.save(tmp_path, s, tx),
            lambda s: jda.full_params(s, tx),
        ):
            with pytest.raises(jda.LayoutError, match=r"leaf \['a'\]: shape"):
                entry(spoilt)
        assert not list(tmp_path.glob("[!.]*")), name


def test_missing_or_averaged_digest_raises_while_tracing():
    """A missing or averaged identity raises where the program is traced."""
    tx = make_tx()
    state = jda.TrainState.create(make_params(), tx)
    step = jax.jit(jda.train_step(loss_fn, tx))
    averaged = jax.tree.map(lambda x: (x + x) / 2, state)
    with pytest.raises(jda.LayoutError, match="averaged, cast or sliced: got float32"):
        step(averaged, BATCH)
    with pytest.raises(jda.LayoutError, match="missing"):
        step(without(state, layout_digest=None), BATCH)
