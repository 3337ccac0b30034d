"""Coded moments and stochastic rounding in ``fused_adamw``: same bits on every path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.core.codecs import BLOCK_CODECS, BlockCodes
from support.bits import assert_trees_same_bits
from support.samples import few, often

BOTH = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=2**33 + 7)
OPTIONS = {
    "params of 16 bits": BOTH,
    "remainders": BOTH | dict(main_params_dtype="remainder16"),
    "float32 main params": BOTH | dict(main_params_dtype=jnp.float32),
    "bfloat16 moments": dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, rounding="stochastic"),
    "to nearest": dict(b1=0.81, b2=0.88, mu_dtype="block8", nu_dtype="block8"),
    "nu alone": dict(nu_dtype="block8", rounding="stochastic"),
    "16 and 8 bits": BOTH | dict(mu_dtype="block16", main_params_dtype="remainder16"),
}
SIXTEEN = BOTH | dict(mu_dtype="block16", nu_dtype="block16")
HYPER = dict(learning_rate=3e-3, b1=0.87, eps=1e-7, weight_decay=0.13)
each_option = pytest.mark.parametrize("option", OPTIONS)


def normal(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape).astype(np.float32).astype(dtype))


def make_params(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (70, 130), "bias": (130,), "embedding": (33, 3, 64)}
    return {name: normal(rng, shape, dtype) for name, shape in shapes.items()}


def grads_at(step, params):
    rng = np.random.default_rng(1 + step)
    return jax.tree.map(lambda x: normal(rng, x.shape, x.dtype), params)


def run(tx, params, steps, step=None):
    state = tx.init(params)
    step = step or jax.jit(tx.step)
    for i in range(steps):
        params, state = step(grads_at(i, params), state, params)
    return params, state


@pytest.mark.slow
@each_option
@often(lambda option: option in ("16 and 8 bits", "to nearest"))
def test_eager_jit_scan_and_a_restart_give_the_same_bits(option):
    options = OPTIONS[option]
    tx = jda.fused_adamw(**HYPER | options)
    params = make_params()
    want = run(tx, params, 6)
    assert_trees_same_bits(run(tx, params, 6, step=tx.step), want)

    def body(carry, grads):
        return tx.step(grads, carry[1], carry[0]), None

    stacked = jax.tree.map(lambda *x: np.stack(x), *[grads_at(i, params) for i in range(6)])
    scanned = jax.jit(lambda p, s: jax.lax.scan(body, (p, s), stacked)[0])(params, tx.init(params))
    assert_trees_same_bits(scanned, want)
    half = run(tx, params, steps=4)
    later = jda.fused_adamw(**HYPER | options | ({"seed": 99} if "seed" in options else {}))
    state, params = half[1], half[0]
    for i in range(4, 6):  # the key is in the state
        params, state = later.step(grads_at(i, params), state, params)
    assert_trees_same_bits((params, state), want)


def test_seeds_leaves_and_counts_differ():
    params = {name: jnp.zeros((64, 128)) for name in "ab"}
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.3), params)
    options = dict(mu_dtype=jnp.bfloat16, nu_dtype="block8", rounding="stochastic")
    one, two = (jda.fused_adamw(**HYPER | options | dict(seed=s)) for s in (1, 2))
    a, b = (jda.decoded(tx.step(grads, tx.init(params), params)[1])[0] for tx in (one, two))
    differ = lambda x, y: 0.05 < np.mean(np.asarray(x != y, float)) < 0.95  # noqa: E731
    assert differ(a.nu["a"], b.nu["a"]) and differ(a.mu["a"], b.mu["a"])
    assert differ(a.nu["a"], a.nu["b"])
    _, state = one.step(grads, one.init(params), params)
    again = state.inner[0]._replace(
        mu=one.init(params).inner[0].mu, nu=one.init(params).inner[0].nu
    )
    _, later = one.step(grads, state._replace(inner=(again, *state.inner[1:])), params)
    assert differ(jda.decoded(later)[0].nu["a"], a.nu["a"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@each_option
@often(
    lambda option, kind: (
        option == ("16 and 8 bits" if kind == AxisType.Auto else "float32 main params")
    )
)
def test_replicated_steps_have_the_bits_of_one_device(option, kind):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER | OPTIONS[option])
    want = run(tx, make_params(), steps=3)
    placed = jax.device_put(make_params(), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        got = run(tx, placed, steps=3)
    assert_trees_same_bits(got, want)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(got))


def sharded_params(mesh, spec):
    """Leaves that four devices can cut at blocks along their first dimension, and a small one."""
    params, rng = {"a": (64, 3, 40), "b": (128, 132), "small": (33,)}, np.random.default_rng(4)
    made = {k: normal(rng, s, jnp.bfloat16) for k, s in params.items()}
    specs = {"a": spec, "b": spec, "small": P()}
    return made, {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in made.items()}


@few(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(("y", "x"))], ids=str)
@each_option
@often(
    lambda option, spec, kind: (
        (option, spec, kind)
        in {
            ("remainders", P("x"), AxisType.Auto),
            ("bfloat16 moments", P(("y", "x")), AxisType.Explicit),
        }
    )
)
def test_sharded_along_the_first_dimension(option, spec, kind):
    """Each device has its part of parameters and state; the bits are those of one device."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER | OPTIONS[option])
    with jax.set_mesh(mesh):
        whole, placed = sharded_params(mesh, spec)
        state = tx.init(placed)
        step = jax.jit(tx.step)
        want = run(jda.fused_adamw(**HYPER | OPTIONS[option]), whole, steps=4)
        params, sharded = placed, []
        for i in range(4):
            grads = jax.device_put(grads_at(i, whole), jax.tree.map(lambda x: x.sharding, placed))
            params, state = step(grads, state, params)
            sharded.append(jax.tree.map(lambda x: x.sharding, (params, state)))
    assert_trees_same_bits((params, state), want)
    for x in jax.tree.leaves((params, state)):
        parts = 2 if spec == P("x") else 4
        is_whole = x.size <= 33 or x.dtype == jnp.int32
        assert x.sharding.shard_shape(x.shape)[:1] == (
            x.shape[:1] if is_whole else (x.shape[0] // parts,)
        )
    assert sharded[0] == sharded[3] and step._cache_size() <= 2  # of a count that was on one device


@pytest.mark.slow
def test_params_replicated_and_moments_sharded():
    """Each device updates its part, and the new parameters are gathered: ZeRO-1 by annotations."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER | BOTH)
    whole, placed = sharded_params(mesh, P("data"))
    state = tx.init(placed)
    params = jax.device_put(whole, NamedSharding(mesh, P()))
    want = run(tx, whole, steps=2)
    for i in range(2):
        params, state = jax.jit(tx.step)(grads_at(i, whole), state, params)
    assert_trees_same_bits((params, state), want)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    assert state.inner[0].mu["b"].codes.sharding.shard_shape((128, 132)) == (32, 132)


@few(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((64, 128), P(None, "data"), "on leaves that are sharded along a dimension other than the first"),
        ((68, 70), P("data"), "on leaves whose parts are not blocks of 128 elements"),
    ],
    ids=str,
)  # fmt: skip
def test_shardings_that_cut_blocks_raise(shape, spec, message, kind):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER | BOTH)
    assert_raises_in_init(
        tx, mesh, jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec)), message
    )


ROUNDED = {  # what is rounded stochastically, beside what
    "params": (dict(), jnp.bfloat16),
    "mu": (dict(mu_dtype=jnp.bfloat16), jnp.float32),
    "nu": (dict(nu_dtype=jnp.bfloat16, main_params_dtype="remainder16"), jnp.bfloat16),
}


@few(1)
@pytest.mark.parametrize("stored", ROUNDED)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@often(lambda stored, kind: (stored == "mu") == (kind == AxisType.Explicit))
def test_stochastic_rounding_of_leaves_cut_along_others_raises(stored, kind):
    given, dtype = ROUNDED[stored]
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER, rounding="stochastic", **given)
    w = jax.device_put(jnp.ones((3, 8), dtype), NamedSharding(mesh, P(None, "data")))
    assert_raises_in_init(tx, mesh, w, "along a dimension other than the first")


def test_stochastic_rounding_looks_at_no_other_leaf():
    """One in float32 may be cut anywhere, as may one without elements."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER, rounding="stochastic")
    columns = NamedSharding(mesh, P(None, "data"))
    params = {
        "cut": jax.device_put(jnp.ones((3, 8)), columns),
        "empty": jax.device_put(jnp.ones((0, 8), jnp.bfloat16), columns),
        "half": jax.device_put(jnp.ones((8, 3), jnp.bfloat16), NamedSharding(mesh, P("data"))),
    }
    new, _ = jax.jit(tx.step)(params, tx.init(params), params)
    assert new["cut"].sharding.is_equivalent_to(columns, 2)
    assert (new["cut"] < 1).all() and (new["half"] < 1).any() and new["empty"].shape == (0, 8)


def assert_raises_in_init(tx, mesh, w, message):
    params = {"w": w}
    with jax.set_mesh(mesh):
        with pytest.raises(jda.PolicyError, match=rf"params\['w'\]: .*{message}"):
            tx.init(params)
        state = jax.jit(tx.init)(params)  # which on Auto axes cannot know
        with pytest.raises(Exception, match=message):
            jax.jit(tx.step)(params, state, params)


def test_vmap_and_derivatives_raise():
    tx = jda.fused_adamw(**HYPER | BOTH)
    params = {"w": jnp.ones((2, 64, 128))}
    with pytest.raises(jda.PolicyError, match=r"is not supported under jax\.vmap"):
        jax.vmap(lambda p: tx.step(p, tx.init(p), p)[0])(params)
    params = {"w": jnp.ones((64, 128))}
    state = tx.init(params)
    with pytest.raises(jda.PolicyError, match="is not supported where it is differentiated"):
        jax.grad(lambda p: tx.step(params, state, p)[0]["w"].sum())(params)


def test_only_large_selected_leaves_are_quantized():
    params = make_params(jnp.float32) | {"small": jnp.ones((63, 65)), "count": jnp.ones(5000, int)}
    tx = jda.fused_adamw(**HYPER | BOTH | dict(float32_moments=lambda path: "embed" in path))
    mu = tx.init(params).inner[0].mu
    assert {k for k, x in mu.items() if isinstance(x, BlockCodes)} == {"kernel"}
    assert mu["kernel"].scales.shape == (-(-70 * 130 // 128),)
    new, state = jax.jit(tx.step)(grads_at(0, params), tx.init(params), params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    plain = jda.fused_adamw(**HYPER)
    want = plain.step(grads_at(0, params), plain.init(params), params)
    for name in ("embedding", "bias", "small", "count"):
        assert_trees_same_bits(new[name], want[0][name])
        assert_trees_same_bits(state.inner[0].nu[name], want[1][0].nu[name])


@few(1)
@pytest.mark.parametrize(
    "option", [name for name, given in OPTIONS.items() if "main_params_dtype" not in given]
)
def test_the_first_update_is_exact(option):
    """What is rounded is what is stored, not what the update is computed from."""
    options, params = OPTIONS[option], make_params(jnp.float32)
    rates = {k: options[k] for k in ("b1", "b2") if k in options}
    tx, plain = (jda.fused_adamw(**HYPER | x) for x in (options, rates))
    got, _ = jax.jit(tx.update)(grads_at(0, params), tx.init(params), params)
    want, _ = jax.jit(plain.update)(grads_at(0, params), plain.init(params), params)
    assert_trees_same_bits(got, want)


@pytest.mark.parametrize(("kind", "bound"), [(BOTH, 0.1), (SIXTEEN, 1e-3)], ids=["8", "16"])
@often(lambda bound: bound == 0.1)
def test_close_to_float32_state(kind, bound):
    """100 steps: the parameters' distance, relative to how far they went, as measured, doubled."""
    params = make_params(jnp.float32)
    moved = lambda x, y: np.sqrt(sum(np.sum((np.asarray(x[k]) - y[k]) ** 2) for k in x))  # noqa: E731
    hyper = HYPER | dict(b2=0.99)
    want, _ = run(jda.fused_adamw(**hyper), params, 100)
    got, _ = run(jda.fused_adamw(**hyper | kind), params, 100)
    assert moved(got, want) < bound * moved(want, params)


def relative_errors(form, mu_octaves, nu_octaves):
    """Of a step without a gradient, from moments rounded to nearest, and its updates from float32.

    Over so many octaves the logarithms of the moments are uniform.
    """
    rng, n = np.random.default_rng(6), 1 << 15
    mu = np.float32(np.exp2(rng.uniform(-mu_octaves, 0, n)) * rng.choice([-1, 1], n))
    nu = np.float32(np.exp2(rng.uniform(-nu_octaves, 0, n)))
    hyper = dict(learning_rate=1.0, b1=0.85, b2=0.88, eps=0.0, weight_decay=0.0)
    plain = jda.fused_adamw(**hyper)
    coded = jda.fused_adamw(**hyper, mu_dtype=form.name, nu_dtype=form.name)
    encoded = [form.encode(*x, None, np) for x in (("mu", mu), ("nu", nu))]
    params, found = {"w": jnp.zeros(n)}, []
    for tx, (m, v) in ((plain, (mu, nu)), (coded, encoded)):
        state = tx.init(params)
        adam = state[0]._replace(count=jnp.asarray(10), mu={"w": m}, nu={"w": v})
        updates, _ = tx.update({"w": jnp.zeros(n)}, (adam, *state[1:]), params)
        found.append(np.asarray(updates["w"], np.float64))
    want, got = found
    return got / want - 1, want


@pytest.mark.parametrize("form", BLOCK_CODECS, ids=lambda form: form.name)
def test_the_error_of_an_update_from_coded_moments(form):
    """2.2e-4 of updates from float32 moments in 16 bits, 0.028 in 8; of one element 1.5 h at most.

    h = 2^-(M + 1), half a unit of a mantissa of M bits. Relative to a number x in [1, 2) what
    rounding adds has the variance h^2 / 3 / x^2. Updates are as mu / sqrt(nu). Weighed by their
    squares mu adds h^2 / 3 / E[x^2]; nu, of whose error the root has half, h^2 / 12 * E[x^-3] /
    E[x^-1]. With log x uniform E[x^k] is (2^k - 1) / (k log 2): the root of the sum is 0.450 h. Of
    32,768 elements within few octaves the mean of squares is known to some percent.
    """
    half = 2.0 ** -(form.mantissa + 1)
    error, weight = relative_errors(form, 2, 4)
    mean = np.sqrt(np.sum((error * weight) ** 2) / np.sum(weight**2))
    assert mean == pytest.approx(0.450 * half, rel=0.03)
    # Over all octaves of codes but two, 2^29 of nu in 8 bits and 2^61 in 16.
    spans = [form.code(name).highest_exponent - 2 for name in ("mu", "nu")]
    error, _ = relative_errors(form, *spans)
    assert np.abs(error).max() < (1 + half) / np.sqrt(1 - half) - 1 + 2**-20  # of float32


def test_updates_of_rounded_params_raise():
    tx = jda.fused_adamw(**HYPER | BOTH)
    params = make_params()
    with pytest.raises(jda.PolicyError, match=r"params\['bias'\]: an update cannot round"):
        tx.update(params, tx.init(params), params)
    main = jda.fused_adamw(**HYPER | BOTH | dict(main_params_dtype=jnp.float32))
    updates, _ = main.update(params, main.init(params), params)
    stepped, _ = main.step(params, main.init(params), params)
    assert_trees_same_bits(optax.apply_updates(params, updates), stepped)


@pytest.mark.parametrize(("mu_dtype", "b1"), [(jnp.float16, 0.9), (jnp.bfloat16, 0.995)], ids=str)
def test_first_moments_of_16_bits_that_stop_decaying_warn(mu_dtype, b1):
    """They are optax's, and are accepted. At random they decay."""
    message = f"^mu_dtype: a first moment in {jnp.dtype(mu_dtype)}"
    with pytest.warns(UserWarning, match=message) as caught:
        jda.fused_adamw(1e-3, b1=b1, mu_dtype=mu_dtype)
    assert caught[0].filename == __file__
    jda.fused_adamw(1e-3, b1=b1, mu_dtype=mu_dtype, rounding="stochastic")
    jda.fused_adamw(1e-3, b1=0.99, mu_dtype=jnp.bfloat16)


EIGHT = dict(mu_dtype="block8", nu_dtype="block8")
BAD = [
    (
        dict(nu_dtype="block8"),
        "nu_dtype: a second moment in 8 bits, rounded to nearest.* b2 <= 0.894",
    ),
    (
        dict(nu_dtype="block16", b2=0.9995),
        "a second moment in 16 bits, rounded to nearest.* b2 <= 0.999",
    ),
    (
        dict(EIGHT, b1=0.9, b2=0.894),
        "mu_dtype: a first moment in 8 bits, rounded to nearest.* b1 <= 0.894",
    ),
    (dict(EIGHT, b1=0.87, b2=0.894), r"mu_dtype: .*may outlast .* 1.1912 b1\^2 < b2"),
    (
        dict(EIGHT, b1=np.ones(()), b2=0.894),
        r'mu_dtype: .*its value is not known.*static_args=\("b1", "b2"\)',
    ),
    (
        dict(mu_dtype="block16", rounding="stochastic"),
        'nu_dtype=None and .* expected nu_dtype "block8" or',
    ),
    (
        dict(EIGHT, nu_dtype="block16", rounding="stochastic"),
        'expected nu_dtype "block8": otherwise steps',
    ),
    (dict(mu_dtype="block32"), 'mu_dtype: not a dtype.* float16, "block8", "block16"'),
    (dict(nu_dtype="Block8"), 'nu_dtype: not a dtype.* "block8", "block16"'),
    (dict(rounding="up"), "rounding: unknown: got 'up', expected 'nearest' or"),
    (dict(seed=-1), "seed: not a seed"),
    (dict(seed=2**64), "seed: not a seed"),
    (dict(seed=True), "seed: not a seed"),
    (dict(seed=5), 'seed: has no effect: got 5 with rounding="nearest"'),
    (
        dict(b2=np.ones(()), nu_dtype="block16"),
        r'its value is not known.*static_args=\("b1", "b2"\)',
    ),
    (dict(float32_moments=lambda path: True), "float32_moments: has no effect"),
    (dict(mu_dtype="block8", float32_moments="w"), "float32_moments: not a function"),
    (dict(nu_dtype=jnp.float16, rounding="stochastic"), "float16 loses .* got float16, expected"),
    (dict(nu_dtype=jnp.bfloat16), "nu_dtype: a second moment in 16 bits"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=range(len(BAD)))
def test_bad_options_raise(options, message):
    with pytest.raises(jda.PolicyError, match=message):
        jda.fused_adamw(**HYPER | options)


@pytest.mark.parametrize("part", ["embbed", "bias"])
def test_a_predicate_that_selects_no_leaf(part):
    """As a misspelt path, or one of leaves that are never coded; the message names one."""
    tx = jda.fused_adamw(**HYPER | BOTH | dict(float32_moments=lambda path: part in path))
    with pytest.raises(jda.TreeError, match=r"selects no leaf of 4096 elements or more: .*\['emb"):
        tx.init(make_params())


def test_random_rounding_that_rounds_nothing_raises():
    for options in ({}, dict(main_params_dtype=jnp.float32)):
        tx = jda.fused_adamw(1e-3, rounding="stochastic", **options)
        with pytest.raises(jda.PolicyError, match=r"rounding: has no effect: .* for float32,"):
            tx.init(make_params(jnp.float32))
    for options in ({}, dict(mu_dtype=jnp.bfloat16), dict(nu_dtype=jnp.bfloat16)):
        tx = jda.fused_adamw(1e-3, rounding="stochastic", **options)
        tx.init(make_params(jnp.float32 if options else jnp.bfloat16))


def test_gradients_of_64_bits_raise():
    """They would be left to optax, which neither codes nor rounds stochastically."""
    with jax.enable_x64(True):
        params = make_params()
        grads = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        for options in (BOTH, dict(rounding="stochastic")):
            tx = jda.fused_adamw(**HYPER | options)
            with pytest.raises(jda.DtypeError, match=r"params\['.*gradients of float64"):
                tx.step(grads, tx.init(params), params)


def test_codes_that_were_cast_raise():
    tx = jda.fused_adamw(**HYPER | BOTH)
    state = jax.tree.map(lambda x: x.astype(jnp.float32), tx.init(make_params()))
    with pytest.raises(jda.DtypeError, match="codes: not codes of a moment: got float32"):
        jda.decoded(state)


def test_states_of_another_optimizer_raise():
    params = make_params()
    plain, random, coded, other = (
        jda.fused_adamw(**HYPER | x)
        for x in (
            {},
            dict(rounding="stochastic"),
            dict(b1=0.7, b2=0.88, mu_dtype="block16", nu_dtype="block8"),
            dict(b1=0.7, b2=0.88, mu_dtype="block16", nu_dtype="block16"),
        )
    )
    states = [tx.init(params) for tx in (plain, random, coded, other)]
    for tx, state, error, message in (
        (plain, states[1], jda.TreeError, "opt_state: does not fit rounding: got RoundingState"),
        (random, states[0], jda.TreeError, "opt_state: does not fit rounding: got tuple"),
        (plain, states[2], jda.DtypeError, r"opt_state\[0\].mu\['embedding'\]: is not stored as"),
        (coded, states[0], jda.DtypeError, r"opt_state\[0\].mu\['embedding'\]: is not stored as"),
        (coded, states[3], jda.DtypeError, r"nu\['embedding'\]: .*'uint16'.*expected .*uint8"),
        (other, states[2], jda.DtypeError, r"nu\['embedding'\]: .*'uint8'.*expected .*uint16"),
    ):
        with pytest.raises(error, match=message):
            tx.step(params, state, params)
    adam = states[2][0]
    cut = adam.nu["kernel"]._replace(scales=adam.nu["kernel"].scales[1:])
    bad = (adam._replace(nu=adam.nu | {"kernel": cut}), *states[2][1:])
    with pytest.raises(jda.DtypeError, match=r"nu\['kernel'\]: does not fit its parameter"):
        coded.step(params, bad, params)


@pytest.mark.slow
def test_optax_wrappers_do_not_change_the_rounding():
    """Masked, chained, skipped: what stands around does not change what is rounded."""
    params = make_params(jnp.float32)
    tx = jda.fused_adamw(**HYPER | BOTH)
    want = tx.update(params, tx.init(params), params)
    chained = optax.chain(optax.clip_by_global_norm(1e9), tx)
    got = chained.update(params, chained.init(params), params)
    assert_trees_same_bits(got[0], want[0])
    safe = optax.apply_if_finite(tx, 3)
    state = safe.init(params)
    _updates, after = safe.update(jax.tree.map(lambda x: x * jnp.nan, params), state, params)
    assert_trees_same_bits(after.inner_state, state.inner_state)
    assert_trees_same_bits(safe.update(params, after, params)[0], want[0])
    masked = optax.masked(tx, {"kernel": True, "bias": False, "embedding": True})
    got, _ = masked.update(params, masked.init(params), params)
    assert_trees_same_bits(got["bias"], params["bias"])
    injected = jda.inject_hyperparams(jda.fused_adamw)(**HYPER | BOTH)
    got, _ = injected.update(params, injected.init(params), params)
    numbers = {k: jnp.float32(x) for k, x in (HYPER | dict(b2=0.999, eps_root=0)).items()}
    given = jda.fused_adamw(**numbers | BOTH)
    assert_trees_same_bits(got, given.update(params, given.init(params), params)[0])


def test_decoded_is_what_optax_continues_from():
    params = make_params(jnp.float32)
    tx = jda.fused_adamw(**HYPER | BOTH)
    _, state = run(tx, params, 5)
    like = optax.adamw(**HYPER)
    decoded = jda.decoded(state)
    assert jax.tree.structure(decoded) == jax.tree.structure(like.init(params))
    like.update(params, decoded, params)
    functools.partial(jda.decoded)(decoded)  # what has nothing in 8 bits stays as it is
    assert_trees_same_bits(jda.decoded(decoded), decoded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@often(lambda kind: kind == AxisType.Explicit)
def test_decoded_sharded_leaves_equal_those_of_one_device(kind):
    """Called at once and in a program, which knows shardings on Explicit axes alone."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER | SIXTEEN)
    with jax.set_mesh(mesh):
        whole, placed = sharded_params(mesh, P(("y", "x")))
        grads = jax.device_put(grads_at(0, whole), jax.tree.map(lambda x: x.sharding, placed))
        _, state = jax.jit(tx.step)(grads, tx.init(placed), placed)
        got = jda.decoded(state), jax.jit(jda.decoded)(state)
    one = jda.fused_adamw(**HYPER | SIXTEEN)
    want = jda.decoded(one.step(grads_at(0, whole), one.init(whole), whole)[1])
    for found in got:
        assert_trees_same_bits(found, want)
        assert not found[0].mu["a"].sharding.is_fully_replicated


CODED = dict(b1=0.7, b2=0.88, mu_dtype="block16", nu_dtype="block8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@often(lambda kind: kind == AxisType.Auto)
def test_codes_become_floats_on_a_mesh(tmp_path, kind):
    """Saved on one device; restored where leaves are unsharded, and cut in blocks and elsewhere."""
    params = make_params(jnp.float32)
    tx, plain = jda.fused_adamw(1e-3, **CODED), jda.fused_adamw(1e-3, b1=0.7, b2=0.88)
    state = tx.step(grads_at(0, params), tx.init(params), params)[1]
    jda.save(tmp_path, {"params": params, "opt_state": state})
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices("cpu")[:4])
    specs = {"kernel": P(), "bias": P(), "embedding": P(None, None, "data")}
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
    template = {"params": placed, "opt_state": plain.init(placed)}
    got = jda.restore(tmp_path, template)["opt_state"]
    assert_trees_same_bits(got, jda.decoded(state))
    assert got[0].mu["embedding"].sharding == placed["embedding"].sharding


def test_moments_of_16_bits_become_codes(tmp_path):
    params = {"kernel": make_params()["kernel"]}
    half = jda.fused_adamw(1e-3, b1=0.7, b2=0.88, mu_dtype=jnp.bfloat16)
    state = half.step(grads_at(0, params), half.init(params), params)[1]
    jda.save(tmp_path, {"params": params, "opt_state": state})
    tx = jda.fused_adamw(1e-3, **CODED)
    got = jda.restore(tmp_path, {"params": params, "opt_state": tx.init(params)})["opt_state"]
    assert got[0].mu["kernel"].codes.dtype == jnp.uint16
    assert_trees_same_bits(
        jda.decoded(got)[0].mu["kernel"], state[0].mu["kernel"].astype(jnp.float32)
    )
