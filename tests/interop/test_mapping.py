"""Names, shapes and hyperparameters of both sides: what does not fit raises, and says where."""

import re
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from jdistadam import interop
from support.bits import assert_same_bits, assert_trees_same_bits
from support.optimizers import distributed_adamw
from support.paths import ROOT

BF16 = jnp.bfloat16
SETTINGS = dict(lr=0.02, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3)
OURS = dict(learning_rate=0.02, b1=0.8, b2=0.97, eps=1e-6, weight_decay=0.3)
SHAPES = {"a.weight": (2, 3), "a.bias": (2,)}
LIKE = {
    "a": {
        "bias": jax.ShapeDtypeStruct((2,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32),
    }
}
RENAME = {"a.weight": "a/kernel", "a.bias": "a/bias"}
TO_OURS = dict(rename=RENAME, transpose=interop.flax_kernels)


def named(shapes=SHAPES, settings=SETTINGS, step=3, dtype=np.float32, drop=()):
    rng = np.random.default_rng(2)
    leaves = {
        name: interop.NamedLeaf(*(np.asarray(rng.uniform(1, 2, shape), dtype) for _ in range(3)))
        for name, shape in shapes.items()
    }
    for name, key in drop:
        leaves[name] = leaves[name]._replace(**{k: None for k in key.split()})
    return interop.NamedState(step, leaves, (interop.Group(tuple(shapes), settings),))


def fused(**changes):
    return jda.fused_adamw(**OURS | changes)


def distributed(function=distributed_adamw, **changes):
    return function(**OURS | dict(mesh=jax.make_mesh((1,), ("data",))) | changes)


def into(theirs, tx=None, like=LIKE, **changes):
    tx = fused() if tx is None else tx
    is_distributed = isinstance(tx, jda.DistributedTransformation)
    convert = interop.to_train_state if is_distributed else interop.to_fused
    return convert(theirs, tx, like, **TO_OURS | changes)


BF16_LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, BF16), LIKE)
BETWEEN = named()  # values that bfloat16 does not have
MORE = SHAPES | {"b": (4,)}
WRONG = {
    "missing": (lambda: into(named({"a.bias": (2,)})), r"params\['a'\]\['kernel'\]: missing.*'a/kernel'"),
    "unexpected": (lambda: into(named(MORE), rename=RENAME | {"b": "b/bias"}), r"params: b/bias: unexpected.*got 'b'"),
    "not renamed": (lambda: into(named(MORE)), r"rename\['b'\]: missing"),
    "no rename": (lambda: into(named(), rename=None), "params: a/weight: unexpected"),
    "two to one": (lambda: into(named(MORE), rename=RENAME | {"b": "a/bias"}), r"\['bias'\]: two parameters lead here: got 'b' and 'a.bias'"),
    "two of one path": (lambda: into(named(), like=LIKE | {"a/bias": LIKE["a"]["bias"]}), r"params\['a/bias'\]: two leaves have the same path here.* 'a/bias' for it and params\['a'\]\['bias'\]"),
    "two of one path, to torch": (lambda: interop.from_fused(params := {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}, fused().init(params), fused(), ["a.b"]), "two leaves have the same path here"),
    "wrong shape": (lambda: into(named(SHAPES | {"a.bias": (3,)})), r"params\['a'\]\['bias'\]: shape.*\(3,\) of 'a.bias'.*expected \(2,\)"),
    "not transposed": (lambda: into(named(), transpose=None), r"\['kernel'\]: shape.*\(2, 3\) of 'a.weight'.*expected \(3, 2\).*flax_kernels"),
    "another rank": (lambda: into(named(SHAPES | {"a.weight": (6,)})), r"\(6,\) of 'a.weight'"),
    "bad axes": (lambda: into(named(), transpose={"a/kernel": (0, 0)}), r"\['kernel'\]: cannot be transposed"),
    "bad path": (lambda: into(named(), transpose={"a/weight": (1, 0)}), r"transpose\['a/weight'\]"),
    "float64": (lambda: into(named(dtype=np.float64)), r"\['bias'\]: dtype.*float64 for parameter of 'a.bias'"),
    "no parameter": (lambda: into(named(drop=[("a.bias", "param")])), r"\['bias'\]: missing.*no parameter 'a.bias'"),
    "no moments": (lambda: into(named(drop=[("a.bias", "mu nu")])), r"\['bias'\]: has no moments"),
    "no moments, distributed": (lambda: into(named(drop=[("a.bias", "mu nu")]), distributed()), r"\['bias'\]: has no moments"),
    "rounded": (lambda: into(BETWEEN, like=BF16_LIKE), r"\['bias'\]: would be rounded"),
    "rounded, distributed": (lambda: into(BETWEEN, distributed(policy=jda.MixedPrecisionPolicy(main_params_dtype=None)), BF16_LIKE), r"\['bias'\]: would be rounded"),
    "fused for a train state": (lambda: interop.to_train_state(named(), fused(), LIKE, **TO_OURS), "not a distributed optimizer"),
    "distributed for fused": (lambda: interop.to_fused(named(), distributed(), LIKE, **TO_OURS), "to_train_state"),
    "optax": (lambda: interop.to_fused(named(), optax.adamw(1e-3), LIKE, **TO_OURS), "to_train_state"),
    "a dictionary": (lambda: into({"state": {}}), "not a NamedState"),
    "a dictionary, distributed": (lambda: into({"state": {}}, distributed()), "not a NamedState"),
    "a dictionary, to torch": (lambda: interop.to_torch({"state": {}}), "not a NamedState"),
    "like a number": (lambda: into(named(), like={"a": {"bias": 1.0, "kernel": 1.0}}), r"like\['a'\]\['bias'\]"),
    "differences": (lambda: into(named(), differences="ignore"), '"raise" or "warn"'),
    "groups": (lambda: interop.NamedState(0, {}, (interop.Group(("a",), {"lr": 1.0}), interop.Group(("b",), {"lr": 2.0}))).arguments(), "different hyperparameters"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_mismatched_states_raise(case):
    call, message = WRONG[case]
    with pytest.raises(jda.JDistAdamError, match=message):
        call()


def test_frozen_leaves_need_no_moments_and_get_none_back():
    labels = {"a": {"kernel": "trained", "bias": "frozen"}}
    groups = {"trained": {}, "frozen": dict(frozen=True)}
    tx = distributed(param_labels=labels, groups=groups)
    theirs = named(drop=[("a.bias", "mu nu")])
    state = into(theirs, tx)
    back = interop.from_train_state(state, tx, list(SHAPES), **TO_OURS)
    assert back.groups[0].names == ("a.weight",) and len(back.groups) == 1
    assert back.leaves["a.bias"].mu is None
    for name, leaf in theirs.leaves.items():
        for x, y in zip(leaf, back.leaves[name], strict=True):
            assert x is y is None or assert_same_bits(x, y) is None
    # torch's optimizer has no frozen parameters: the error says how to add them.
    exported = interop.to_torch(back)
    read = interop.from_torch(exported.optimizer, exported.params, exported.names)
    advice = r"theirs\.leaves\[name\] = jda\.interop\.NamedLeaf\(param\)\."
    with pytest.raises(jda.TreeError, match=rf"^params\['a'\]\['bias'\]: missing: .*{advice}"):
        into(read, tx)
    read.leaves["a.bias"] = interop.NamedLeaf(exported.params["a.bias"])
    again = into(read, tx)
    assert_trees_same_bits(jda.full_params(again, tx), jda.full_params(state, tx))
    assert_trees_same_bits(jda.to_optax_state(again, tx)[1], jda.to_optax_state(state, tx)[1])


def test_names_that_rename_maps_to_none_are_left_out():
    params, _ = into(named(MORE), rename=lambda name: RENAME.get(name))
    assert_trees_same_bits(params, into(named())[0])


def test_copies_share_no_memory_with_theirs():
    theirs = named({"w": (3,)})
    params, opt_state = interop.to_fused(theirs, fused(), {"w": jnp.zeros(3)})
    before = jax.tree.map(np.copy, (params, opt_state))
    for x in theirs.leaves["w"]:
        x += 1
    assert_trees_same_bits((params, opt_state), before)


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
DIFFERENT = {
    "lr": (dict(learning_rate=0.03), "learning_rate"),
    "schedule": (dict(learning_rate=SCHEDULE), "learning_rate"),
    "b1": (dict(b1=0.9), "b1"),
    "b2": (dict(b2=0.999), "b2"),
    "eps": (dict(eps=1e-8), "eps"),
    "eps_root": (dict(eps_root=1e-8), "eps_root"),
    "weight_decay": (dict(weight_decay=0.1), "weight_decay"),
    "mask": (dict(mask={"a": {"kernel": True, "bias": False}}), r"weight_decay for params\['a'\]\['bias'\]"),
    "nesterov": (dict(nesterov=True), "nesterov"),
    "bias_correction": (dict(bias_correction=False), "bias_correction"),
}  # fmt: skip


@pytest.mark.parametrize(
    "make, case",
    [(fused, case) for case in DIFFERENT]
    + [(distributed, case) for case in DIFFERENT if case != "bias_correction"],  # has no such
)
def test_other_hyperparameters_raise(make, case):
    changes, message = DIFFERENT[case]
    with pytest.raises(jda.HyperparameterError, match=f"{message}.*'a.(bias|weight)'"):
        into(named(), make(**changes))


def test_differences_warn_lists_every_hyperparameter():
    with pytest.warns(UserWarning) as caught:
        into(named(), fused(b1=0.9, eps=1e-8), differences="warn")
    told = [str(w.message).partition(" for")[0] for w in caught]
    assert sorted(told) == ["tx, b1", "tx, eps"]


def test_equivalent_hyperparameters_compare_equal():
    """A schedule of the step count, and arrays, and decay in the gradient."""
    settings = SETTINGS | dict(lr=float(SCHEDULE(3)))
    into(named(settings=settings), fused(learning_rate=SCHEDULE, b1=jnp.float32(0.8)))
    into(named(settings=settings), distributed(learning_rate=SCHEDULE))
    coupled = SETTINGS | dict(decoupled_weight_decay=False)
    arguments = named(settings=coupled).arguments()
    assert arguments["l2"] == 0.3 and "weight_decay" not in arguments
    theirs = named(settings=coupled)
    into(theirs, jda.fused_adam(**arguments))
    with pytest.raises(jda.HyperparameterError, match="weight_decay"):
        into(theirs, fused())
    into(named(settings={}), fused(b1=0.1))  # which says nothing


def test_groups_are_compared_leaf_by_leaf_and_come_back():
    labels = {"a": {"kernel": "x", "bias": "y"}}
    groups = {"x": {}, "y": dict(lr_scale=0.5, weight_decay=0.0, b1=0.7)}
    tx = distributed(param_labels=labels, groups=groups)
    theirs = named()
    other = SETTINGS | dict(lr=0.01, weight_decay=0.0, betas=(0.7, 0.97))
    parts = (interop.Group(("a.weight",), SETTINGS), interop.Group(("a.bias",), other))
    state = into(interop.NamedState(3, theirs.leaves, parts), tx)
    back = interop.from_train_state(state, tx, list(SHAPES), **TO_OURS)
    assert [group.names for group in back.groups] == [("a.weight",), ("a.bias",)]
    for got, want in zip(back.groups, parts, strict=True):
        assert want.settings.items() <= got.settings.items()
    with pytest.raises(jda.HyperparameterError, match=r"'a.bias'"):
        into(theirs, tx)


def test_states_that_torch_lacks_begin_anew_and_warn():
    tx = jda.chain(optax.trace(0.9), fused())
    with pytest.warns(UserWarning) as caught:
        _, opt_state = into(named(), tx)
    messages = [str(w.message) for w in caught]
    assert any(m.startswith("opt_state[0].trace['a']['bias']: begins anew") for m in messages)
    assert any("cannot be seen" in m and "'b1': 0.8" in m for m in messages)
    assert all(not x.any() for x in jax.tree.leaves(opt_state[0]))


def test_every_count_in_a_state_is_the_step():
    with pytest.warns(UserWarning, match="cannot be seen"):
        tx = jda.inject_hyperparams(jda.fused_adamw)(**OURS | {"learning_rate": SCHEDULE})
        _, opt_state = into(named(), tx)
    assert int(opt_state.count) == 3
    assert int(opt_state.inner_state[0].count) == 3
    counts = {k: int(x.count) for k, x in opt_state.hyperparams_states.items()}
    assert counts == {"learning_rate": 3}
    _, opt_state = into(named(settings={}), fused(learning_rate=SCHEDULE))
    assert [int(x.count) for x in (opt_state[0], opt_state[-1])] == [3, 3]


def test_distributed_chain_state_survives_import_and_export():
    tx = jda.chain(optax.scale_by_schedule(lambda count: 1.0 + 0 * count), distributed())
    state = into(named(), tx)
    assert int(state.step) == int(state.opt_state[0].count) == 3
    back = interop.from_train_state(state, tx, list(SHAPES), **TO_OURS)
    for name, leaf in named().leaves.items():
        for x, y in zip(leaf, back.leaves[name], strict=True):
            assert_same_bits(x, y, name)


def test_injected_hyperparameters_are_not_guessed_on_the_way_out():
    tx = distributed(jda.inject_hyperparams(distributed_adamw))
    state = into(named(), tx)
    back = interop.from_train_state(state, tx, list(SHAPES), **TO_OURS)
    with pytest.raises(jda.HyperparameterError, match="lr: missing"):
        interop.to_torch(back)
    exported = interop.to_torch(back, **SETTINGS)
    assert SETTINGS.items() <= exported.optimizer["param_groups"][0].items()


@pytest.mark.parametrize("changes", [dict(eps_root=1e-8), dict(nesterov=True)])
def test_export_of_options_that_torch_lacks_raises(changes):
    tx = fused(**changes)
    params = {"w": jnp.ones(2)}
    with pytest.raises(jda.HyperparameterError, match=next(iter(changes))):
        interop.from_fused(params, tx.init(params), tx, ["w"])


def test_export_of_l2_sets_coupled_weight_decay():
    tx, params = jda.fused_adam(0.02, l2=0.3), {"w": jnp.ones(2)}
    theirs = interop.from_fused(params, tx.init(params), tx, ["w"])
    group = interop.to_torch(theirs).optimizer["param_groups"][0]
    assert (group["weight_decay"], group["decoupled_weight_decay"]) == (0.3, False)
    again = interop.to_torch(theirs, lr=0.5, foreach=True).optimizer["param_groups"][0]
    assert again == group | {"lr": 0.5, "foreach": True}


def test_export_without_bias_correction_raises():
    tx, params = fused(bias_correction=False), {"w": jnp.ones(2)}
    theirs = interop.from_fused(params, tx.init(params), tx, ["w"])
    with pytest.raises(jda.HyperparameterError, match="bias_correction"):
        interop.to_torch(theirs)


DAMAGED = {
    "empty": b"",
    "short": b"\x10",
    "long header": (10**6).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"{x",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_files_of_another_format_raise(case, tmp_path):
    (tmp_path / "x").write_bytes(DAMAGED[case])
    with pytest.raises(jda.TreeError, match="not a file of the safetensors format"):
        interop.read_safetensors(tmp_path / "x")


def test_damaged_files_raise(tmp_path):
    interop.write_safetensors(tmp_path / "x", {"w": np.arange(4, dtype=np.float32)})
    data = (tmp_path / "x").read_bytes()
    for changed in (data[:-1], data.replace(b'"shape":[4]', b'"shape":[5]')):
        (tmp_path / "x").write_bytes(changed)
        with pytest.raises(jda.TreeError, match=r"x: not a file .* or damaged: got Error while"):
            interop.read_safetensors(tmp_path / "x")
    (tmp_path / "x").write_bytes(data.replace(b'"F32"', b'"F99"'))
    with pytest.raises(jda.TreeError, match="F99"):
        interop.read_safetensors(tmp_path / "x")
    header = b'{"w":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(jda.DtypeError, match="x: w: dtype is not supported: got F8_E8M0"):
        interop.read_safetensors(tmp_path / "x")


def test_missing_or_old_safetensors_raises(tmp_path, monkeypatch):
    def check(message):
        for call in (interop.read_safetensors, lambda path: interop.write_safetensors(path, {})):
            with pytest.raises(jda.CheckpointError, match=message) as caught:
                call(tmp_path / "x")
            assert 'pip install "jdistadam[interop]"' in str(caught.value)
            (needed,) = re.findall(r", expected (.*?)\. ", str(caught.value))
            assert extras["optional-dependencies"]["interop"] == [needed.replace(" ", "")]

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    monkeypatch.setattr("safetensors.safe_open", None)
    check("safetensors: needed for files .* got ImportError: 0.* is too old")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    check("safetensors: needed for files .* got ModuleNotFoundError")


def test_every_dtype_comes_back_with_its_bits(tmp_path):
    dtypes = [BF16, jnp.float8_e4m3fn, jnp.float8_e5m2, *"?efdbhiqBHIQ"]
    tree = {str(i): np.arange(6).astype(dtype).reshape(2, 3) for i, dtype in enumerate(dtypes)}
    tree |= {f"{i}.T": x.T for i, x in tree.items()}  # in another order in memory
    interop.write_safetensors(tmp_path / "x", tree)
    read = interop.read_safetensors(tmp_path / "x")
    assert not any(x.flags.owndata or x.flags.writeable for x in read.values())  # mapped
    assert_trees_same_bits(read, tree)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"a/b": np.ones(1)}, "cannot be a part of a path"),
        ({"": np.ones(1)}, "cannot be a part of a path"),
        ({"a": np.ones(1, np.complex64)}, "complex64"),
        ({"a": object()}, "cannot be written"),
    ],
)
def test_writing_unsupported_trees_raises(tree, message, tmp_path):
    with pytest.raises(jda.JDistAdamError, match=message):
        interop.write_safetensors(tmp_path / "x", tree)


@pytest.mark.parametrize("length", range(1, 9))
def test_tensors_are_aligned(length, tmp_path):
    interop.write_safetensors(tmp_path / "x", {"w" * length: np.ones(1)})
    assert int.from_bytes((tmp_path / "x").read_bytes()[:8], "little") % 8 == 0


def test_empty_and_scalar_arrays_are_kept(tmp_path):
    tree = {"a": np.zeros((0, 2), BF16), "b": np.float32(3), "c": {}, "d": []}
    interop.write_safetensors(tmp_path / "x", tree)
    read = interop.read_safetensors(tmp_path / "x")
    assert read["a"].shape == (0, 2) and read["a"].dtype == BF16
    assert_same_bits(read["b"], tree["b"])
    assert (read["c"], read["d"]) == ({}, [])


@pytest.mark.parametrize(("mu", "nu"), [("block8", "block8"), ("block16", "block8")])
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_quantized_moments_survive_export_and_import(is_stochastic, mu, nu):
    """They leave as float32, exactly, and come back as the same codes; small ones are floats."""
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in {"w": (33, 128), "b": (7,)}.items()
    }
    tx = jda.fused_adamw(
        1e-2, b1=0.8, b2=0.88, mu_dtype=mu, nu_dtype=nu,
        rounding="stochastic" if is_stochastic else "nearest",
    )  # fmt: skip
    state = tx.init(params)
    for _ in range(3):
        grads = {k: jnp.asarray(rng.normal(size=x.shape), x.dtype) for k, x in params.items()}
        params, state = tx.step(grads, state, params)
    theirs = interop.from_fused(params, state, tx, ["w", "b"])
    adam = jda.decoded(state)[0]
    for name, leaf in theirs.leaves.items():
        assert_same_bits(leaf.mu, adam.mu[name])
        assert_same_bits(leaf.nu, adam.nu[name])
    back = interop.to_fused(theirs, tx, params)
    assert_trees_same_bits(back, (params, state))
