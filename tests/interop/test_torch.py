"""A model that torch trained goes on here, and back; golden.safetensors is torch's own."""

import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from jdistadam import interop
from support.bits import assert_same_bits, assert_trees_same_bits
from support.exact_sums import decays
from support.optimizers import distributed_adamw
from support.samples import few, often

GOLDEN = pathlib.Path(__file__).parent / "golden.safetensors"
BF16 = jnp.bfloat16
RENAME = {
    "embed.weight": "params/Embed_0/embedding",
    "conv.weight": "params/Conv_0/kernel",
    "conv.bias": "params/Conv_0/bias",
    "norm.weight": "params/LayerNorm_0/scale",
    "norm.bias": "params/LayerNorm_0/bias",
    "out.weight": "params/Dense_0/kernel",
    "out.bias": "params/Dense_0/bias",
}
LIKE = {
    "params": {
        "Embed_0": {"embedding": jax.ShapeDtypeStruct((5, 3), jnp.float32)},
        "Conv_0": {
            "kernel": jax.ShapeDtypeStruct((3, 2, 3, 4), jnp.float32),
            "bias": jax.ShapeDtypeStruct((4,), jnp.float32),
        },
        "LayerNorm_0": {k: jax.ShapeDtypeStruct((4,), jnp.float32) for k in ("scale", "bias")},
        "Dense_0": {
            "kernel": jax.ShapeDtypeStruct((4, 2), jnp.float32),
            "bias": jax.ShapeDtypeStruct((2,), jnp.float32),
        },
    }
}
TO_OURS = dict(rename=RENAME, transpose=interop.flax_kernels)
HYPER = dict(b1=0.8, b2=0.97, eps=1e-6, weight_decay=0.3)


class Model(nn.Module):
    """The model of make_golden.py."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(5, 3)(tokens)
        x = nn.relu(nn.Conv(4, (3, 2), padding="VALID")(x)).mean(axis=(1, 2))
        return nn.Dense(2)(nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x))


@pytest.fixture(scope="module")
def golden():
    return interop.read_safetensors(GOLDEN)


def read(golden, params=None):
    params = golden["params"] if params is None else params
    return interop.from_torch(golden["optimizer"], params, golden["names"])


def fused(learning_rate=0.02, **kwargs):
    return jda.fused_adamw(learning_rate, **HYPER, mask=decays, **kwargs)


def distributed(learning_rate=0.02, n=8, **kwargs):
    mesh = jax.make_mesh((n,), ("data",))
    hyper = HYPER | dict(mask=decays)
    return distributed_adamw(learning_rate, **(hyper | dict(mesh=mesh) | kwargs))


def in_ours(named):
    """Arrays by torch's names as a tree of ours, by what each layer is known to need."""
    axes = {"conv.weight": (2, 3, 1, 0), "out.weight": (1, 0)}
    tree = {"params": {}}
    for name, x in named.items():
        _, layer, leaf = RENAME[name].split("/")
        tree["params"].setdefault(layer, {})[leaf] = np.transpose(x, axes.get(name, range(x.ndim)))
    return tree


def moments(entries, names, key):
    return {name: entries[str(i)][key] for i, name in enumerate(names)}


def assert_is_golden(golden, params, adam):
    assert int(adam.count) == 4
    assert_trees_same_bits(params, in_ours(golden["params"]))
    entries, names = golden["optimizer"]["state"], golden["names"]
    assert_trees_same_bits(adam.mu, in_ours(moments(entries, names, "exp_avg")))
    assert_trees_same_bits(adam.nu, in_ours(moments(entries, names, "exp_avg_sq")))


def test_imported_arrays_equal_those_of_torch(golden):
    params, opt_state = interop.to_fused(read(golden), fused(), LIKE, **TO_OURS)
    assert_is_golden(golden, params, opt_state[0])


@few(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_imported_sharded_arrays_equal_those_of_torch(golden, strategy):
    tx = distributed(sharding_strategy=strategy)
    state = interop.to_train_state(read(golden), tx, LIKE, **TO_OURS)
    main_params, opt_state, _ = jda.to_optax_state(state, tx)
    assert_is_golden(golden, main_params, opt_state[0])
    assert int(state.step) == 4


def test_the_model_computes_what_torchs_does(golden):
    """In float64, in which both err by some hundred roundings of 1e-16, at most 1e3 times enlarged
    by the normalisation; a wrong layout errs by about one."""
    params, _ = interop.to_fused(read(golden), fused(), LIKE, **TO_OURS)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        logits = Model().apply(wide, jnp.asarray(golden["tokens"]))
    assert logits.dtype == np.float64 and np.abs(golden["logits"]).max() > 0.1
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-10)


class Bound:
    """How far two float32 Adams that began in the same state and get the same gradients may be
    apart: u = 2^-24 for every rounding, of both, to first order (and 1 % for the rest).

    mu: torch interpolates, m + (1 - b1) (g - m), which is four roundings of at most |m| + |g|; ours
    adds two products, three of them and one of a coefficient: 8 u (|m| + |g|) together.
    nu: all terms are positive, so that five relative errors each (coefficient, products, sum) are
    10 u nu.
    Coefficients: 1 - b^t is exact in torch, and a float32 power here, whose exponent enlarges the
    rounding of b t times, with 8 u for the power itself; divided by 1 - b^t where that is small.
    Update: 16 u for the roundings of square root, sum, quotients and the two learning rates; half
    of the relative error of nu; that of mu divided like mu itself.
    Parameters: 6 u |p| for decay, which torch applies as a factor, and the sums.
    """

    def __init__(self):
        self.mu = self.nu = self.params = 0.0

    def after(self, old, new, grad, t, decay):
        u, b1, b2 = 2.0**-24, HYPER["b1"], HYPER["b2"]
        c1, c2 = ((1 - b**t, (t + 8) * u * b**t / (1 - b**t) + 2 * u) for b in (b1, b2))
        self.mu = b1 * self.mu + 8 * u * (np.abs(old["mu"]) + np.abs(grad))
        self.nu = b2 * self.nu + 10 * u * new["nu"]
        den = np.sqrt(new["nu"] / c2[0]) + HYPER["eps"]
        of_nu = self.nu / np.where(new["nu"] > 0, new["nu"], 1)
        errors = np.abs(new["mu"]) * (c1[1] + 0.5 * (of_nu + c2[1]) + 16 * u)
        self.params = (
            self.params
            + 0.02 * (self.mu + errors) / (c1[0] * den)
            + 6 * u * np.maximum(np.abs(old["params"]), np.abs(new["params"]))
        )
        return {k: 1.01 * x for k, x in vars(self).items()}


def arrays_of(golden, where):
    entries, names = where["optimizer"]["state"], golden["names"]
    found = {"mu": "exp_avg", "nu": "exp_avg_sq"}
    found = {ours: in_ours(moments(entries, names, key)) for ours, key in found.items()}
    return found | {"params": in_ours(where["params"])}


def assert_stays_with_torch(golden, continued):
    """Compares every step of ``continued(gradients)``, which yields params, mu and nu."""
    later = [golden["later"][str(i)] for i in range(4)]
    old, bounds = arrays_of(golden, golden), None
    start = old
    for i, (theirs, ours) in enumerate(
        zip(later, continued([in_ours(x["grads"]) for x in later]), strict=True)
    ):
        new, grads = arrays_of(golden, theirs), in_ours(theirs["grads"])
        bounds = bounds or jax.tree.map(lambda _: Bound(), grads)

        def check(bound, grad, *leaves, t=5 + i):
            keys = ("mu", "nu", "params")
            *pairs, ours = (dict(zip(keys, leaves[k : k + 3], strict=True)) for k in (0, 3, 6))
            wide = [{k: np.asarray(x, np.float64) for k, x in pair.items()} for pair in pairs]
            limits = bound.after(*wide, np.asarray(grad, np.float64), t, grad.ndim > 1)
            for key, limit in limits.items():
                apart = np.abs(np.asarray(ours[key], np.float64) - wide[1][key])
                assert (apart <= limit).all(), (key, t, (apart / limit).max())

        trees = [x[k] for x in (old, new, ours) for k in ("mu", "nu", "params")]
        jax.tree.map(check, bounds, grads, *trees, is_leaf=lambda x: isinstance(x, Bound))
        old = new
    for name, limit in (("params", 1e-4), ("mu", 1e-4)):  # the bounds say something
        moved = [
            np.abs(a - b).max()
            for a, b in zip(jax.tree.leaves(old[name]), jax.tree.leaves(start[name]), strict=True)
        ]
        largest = [np.max(getattr(x, name)) for x in jax.tree.leaves(bounds)]
        assert max(largest) < limit * max(moved)


def test_fused_adamw_goes_on_as_torch_does(golden):
    tx = fused()
    params, opt_state = interop.to_fused(read(golden), tx, LIKE, **TO_OURS)

    def continued(gradients, params=params, opt_state=opt_state):
        for grads in gradients:
            params, opt_state = jax.jit(tx.step)(grads, opt_state, params)
            yield {"params": params, "mu": opt_state[0].mu, "nu": opt_state[0].nu}

    assert_stays_with_torch(golden, continued)


@pytest.mark.slow
def test_a_train_state_goes_on_as_torch_does(golden):
    tx = distributed(n=2, sharding_strategy="optim_grads")
    state = interop.to_train_state(read(golden), tx, LIKE, **TO_OURS)
    step = jda.train_step(inner_product, tx)

    def continued(gradients, state=state):
        for grads in gradients:
            # Twice the same, on two devices, whose mean is the gradient itself.
            batch = jax.tree.map(lambda x: np.stack([x, x]), grads)
            state, _ = step(state, batch)
            main_params, opt_state, _ = jda.to_optax_state(state, tx)
            yield {"params": main_params, "mu": opt_state[0].mu, "nu": opt_state[0].nu}

    assert_stays_with_torch(golden, continued)


def inner_product(params, grads):
    """A loss whose gradient is given."""
    products = jax.tree.map(lambda p, g: jnp.sum(p * g[0]), params, grads)
    return sum(jax.tree.leaves(products))


def assert_same_torch_state(got, golden):
    assert got.names == golden["names"]
    for name, x in golden["params"].items():
        assert_same_bits(got.params[name], x, name)
    want = golden["optimizer"]
    assert {str(i) for i in got.optimizer["state"]} == set(want["state"])
    for i, entry in got.optimizer["state"].items():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
        for key, x in entry.items():
            assert_same_bits(x, want["state"][str(i)][key], f"{i}, {key}")
    groups = [x | {"betas": list(x["betas"])} for x in got.optimizer["param_groups"]]
    assert groups == want["param_groups"]


INTO = {
    "fused": lambda: fused(),
    "remainder16": lambda: fused(main_params_dtype="remainder16"),
    "chain": lambda: jda.chain(optax.clip_by_global_norm(1.0), fused(main_params_dtype=np.float32)),
    "inject": lambda: jda.inject_hyperparams(jda.fused_adamw)(0.02, **HYPER, mask=decays),
}


@few(1)
@pytest.mark.parametrize("into", INTO)
def test_into_fused_adamw_and_back_is_the_same_file(golden, into, tmp_path):
    tx, theirs = INTO[into](), read(golden)
    has_main = into in ("remainder16", "chain")
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, BF16 if has_main else x.dtype), LIKE
    )
    if into in ("chain", "inject"):
        with pytest.warns(UserWarning, match="cannot be seen"):
            params, opt_state = interop.to_fused(theirs, tx, like, **TO_OURS)
    else:
        params, opt_state = interop.to_fused(theirs, tx, like, **TO_OURS)
    assert jax.tree.structure(opt_state) == jax.tree.structure(tx.init(params))
    groups = theirs.groups if into in ("chain", "inject") else None
    back = interop.from_fused(params, opt_state, tx, golden["names"], **TO_OURS, groups=groups)
    exported = interop.to_torch(back)
    assert_same_torch_state(exported, golden)
    interop.write_safetensors(tmp_path / "x", exported._asdict())
    assert_same_torch_state(from_file(tmp_path / "x"), golden)


def from_file(path):
    read = interop.read_safetensors(path)
    return interop.to_torch(interop.from_torch(read["optimizer"], read["params"], read["names"]))


DISTRIBUTED = {
    "optim": dict(),
    "clip": dict(max_grad_norm=1.0, loss_scale=jda.DynamicLossScale()),
    "remainder16": dict(policy=jda.MixedPrecisionPolicy(main_params_dtype="remainder16")),
    "optim_grads_params": dict(sharding_strategy="optim_grads_params", n=3),
}


@few(1)
@pytest.mark.parametrize("into", DISTRIBUTED)
@often(lambda into: into != "optim")
def test_into_a_train_state_and_back_is_the_same_file(golden, into):
    tx = distributed(**DISTRIBUTED[into])
    dtype = BF16 if into in ("remainder16", "clip") else jnp.float32
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), LIKE)
    state = interop.to_train_state(read(golden), tx, like, **TO_OURS)
    back = interop.from_train_state(state, tx, golden["names"], **TO_OURS)
    assert_same_torch_state(interop.to_torch(back), golden)


def test_bfloat16_is_read_as_torch_rounds(golden):
    last = golden["later"]["3"]["params"]
    assert set(golden["rounded"]) == set(last)
    for name, x in golden["rounded"].items():
        assert_same_bits(x, last[name].astype(BF16), name)


def test_written_files_equal_those_of_safetensors(golden, tmp_path):
    """The same tensors at the same places, aligned; the order of the metadata is arbitrary."""
    interop.write_safetensors(tmp_path / "x", golden)
    parts = []
    for path in (GOLDEN, tmp_path / "x"):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        assert end % 8 == 0
        header = json.loads(data[8:end])
        del header["__metadata__"]
        parts.append((list(header.items()), data[end:]))
    assert parts[0] == parts[1]
    assert_trees_same_bits(arrays(interop.read_safetensors(tmp_path / "x")), arrays(golden))


def arrays(tree):
    return {k: x for k, x in tree.items() if k in ("params", "rounded", "later")}
