"""Derivatives through an update: those of optax's own, and of the kernel's own values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.errors import PolicyError
from jdistadam.tools import hlo
from support.bits import assert_trees_same_bits
from support.samples import few, often
from support.steps import WAYS

# Far from the points where Adam has no derivative; decay of zero, where it has one.
NUMBERS = dict(learning_rate=0.05, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, weight_decay=0.0)
STEPS = 2
METHODS = pytest.mark.parametrize("method", ["step", "update"])


def problem(dtype):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(16, 4)).astype(dtype), rng.normal(size=16).astype(dtype)
    shapes = {"w": (4, 3), "v": (3,), "s": ()}
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}

    def loss(p):
        return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) @ p["v"] * p["s"] - y))

    return loss, params


def numbers_as(dtype):
    return {k: jnp.asarray(v, dtype) for k, v in NUMBERS.items()}


def loss_after_training(make, method, scanned, numbers, params, loss):
    """The outer loss: of params after a few steps on the inner one."""
    tx = make(**numbers)

    def body(carry, _):
        params, state = carry
        grads = jax.grad(loss)(params)
        return WAYS[method](tx, grads, state, params), None

    carry = (params, tx.init(params))
    if scanned:
        carry, _ = jax.lax.scan(body, carry, length=STEPS)
    else:
        for _ in range(STEPS):
            carry, _ = body(carry, None)
    return loss(carry[0])


def ours(method="step", scanned=True, make=jda.fused_adamw):
    loss, params = problem(jnp.float32)
    function = functools.partial(loss_after_training, make, method, scanned, loss=loss)
    return function, numbers_as(jnp.float32), params


@functools.cache
def ours_jitted(method, scanned, transform):
    function, numbers, params = ours(method, scanned)
    return jax.jit(transform(function))(numbers, params)


@functools.cache
def exact(transform):
    """The same derivatives of optax.adamw, in float64."""
    with jax.enable_x64(True):
        loss, params = problem(jnp.float64)
        function = functools.partial(loss_after_training, optax.adamw, "update", False, loss=loss)
        derivative = jax.jit(transform(function))
        return jax.tree.map(np.asarray, derivative(numbers_as(jnp.float64), params))


@functools.cache
def optax_in_float32(transform):
    function, numbers, params = ours("update", make=optax.adamw)
    return jax.jit(transform(function))(numbers, params)


def assert_as_accurate(got, want, optaxs):
    """Within four times the error of optax's own float32, or of one ulp of the largest number.

    Both are the same derivative in float32, of operations in another order: so is their error,
    whose size the chain of steps and the loss make, but not its every digit.
    """
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(want))
    pairs = [jax.tree.leaves(tree) for tree in (got, want, optaxs)]
    errors = [(np.abs(a - b).max(), np.abs(c - b).max()) for a, b, c in zip(*pairs, strict=True)]
    largest = max(c for _, c in errors)
    for mine, _ in errors:
        assert mine <= 4 * max(largest, scale * 2.0**-23), errors


def gradients(function):
    return jax.grad(function, (0, 1))


def directional(function):
    """Forward mode, along one direction in all numbers and params."""

    def derivative(numbers, params):
        tangents = jax.tree.map(jnp.ones_like, (numbers, params))
        return jax.jvp(function, (numbers, params), tangents)[1]

    return derivative


@few(1)
@pytest.mark.parametrize(
    ("jitted", "scanned"), [(True, True), (True, False), (False, False)],
    ids=["jitted scan", "jitted, unrolled", "eager, unrolled"],
)  # fmt: skip
@pytest.mark.parametrize("transform", [gradients, directional])
@METHODS
@often(
    lambda method, transform, jitted, scanned: (
        (method, transform.__name__, jitted, scanned)
        in {
            ("step", "gradients", True, True),
            ("update", "directional", True, False),
        }
    )
)
def test_derivatives_are_those_of_optax(method, transform, jitted, scanned):
    """By every hyperparameter and by the initial params, through the state of all steps."""
    if jitted:
        got = ours_jitted(method, scanned, transform)
    else:
        function, numbers, params = ours(method, scanned)
        got = transform(function)(numbers, params)
    assert_as_accurate(got, exact(transform), optax_in_float32(transform))


@pytest.mark.slow
def test_second_derivatives_are_those_of_optax():
    """Also in a loop, where JAX drops the rules of a custom_jvp."""
    function, numbers, params = ours()
    got = jax.jit(jax.hessian(function))(numbers, params)
    assert_as_accurate(got, exact(jax.hessian), optax_in_float32(jax.hessian))
    twice = jax.grad(lambda lr: jax.grad(rate_alone(function, numbers, params))(lr))
    rate = numbers["learning_rate"]
    curvature = got["learning_rate"]["learning_rate"]
    # in another order of the same sums, some tens of numbers of the size of the result
    np.testing.assert_allclose(twice(rate), curvature, rtol=64 * 2.0**-23)


def rate_alone(function, numbers, params):
    return lambda rate: function(numbers | {"learning_rate": rate}, params)


def test_finite_differences_in_float64():
    """The derivative in float32 against that of optax's float64 values.

    Central differences with steps h have an error of h^2 f'''/6 and of 2^-52 f / h: for h = 1e-5
    both are below 1e-6 of f' here. Float32 adds a few tens of roundings of 2^-24.
    """
    got = ours_jitted("step", True, gradients)[0]["learning_rate"]
    with jax.enable_x64(True):
        loss, start = problem(jnp.float64)
        outer = functools.partial(loss_after_training, optax.adamw, "update", False, loss=loss)
        outer = jax.jit(rate_alone(outer, numbers_as(jnp.float64), start))
        h = 1e-5
        want = (outer(0.05 + h) - outer(0.05 - h)) / (2 * h)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_values_beside_a_derivative_are_the_kernels_own():
    tx = jda.fused_adamw(3e-3, b1=0.87, weight_decay=0.13)
    _, params = problem(jnp.float32)
    params, state = tx.step(params, tx.init(params), params)
    want = tx.step(params, state, params)
    got, _ = jax.jvp(lambda p: tx.step(p, state, p), (params,), (params,))
    assert_trees_same_bits(got, want)
    got, _ = jax.vjp(lambda p: tx.step(p, state, p), params)
    assert_trees_same_bits(got, want)


def test_an_infinite_parameter_without_decay_keeps_its_value():
    """The derivative adds every term; the value still leaves out those of zero."""
    tx = jda.fused_adamw(3e-3, weight_decay=0.0)
    params, grads = {"w": jnp.asarray([jnp.inf, 1.0])}, {"w": jnp.ones(2)}
    state = tx.init(params)
    (got, _), _ = jax.jvp(lambda g: tx.step(g, state, params), (grads,), (grads,))
    assert np.isinf(got["w"][0])


@pytest.mark.slow
def test_derivatives_commute_with_vmap():
    function, numbers, params = ours()
    outer = rate_alone(function, numbers, params)
    rates = jnp.linspace(0.01, 0.1, 5)
    each = jnp.stack([jax.grad(outer)(rate) for rate in rates])
    inside = jax.jit(jax.vmap(jax.grad(outer)))
    outside = jax.jit(jax.grad(lambda rates: jax.vmap(outer)(rates).sum()))
    jacobian = jax.jit(jax.jacfwd(lambda rates: jax.vmap(outer)(rates)))
    # each is a sum over some tens of numbers of its own size, in an order of the compiler's
    tolerance = dict(rtol=64 * 2.0**-23)
    np.testing.assert_allclose(inside(rates), each, **tolerance)
    np.testing.assert_allclose(outside(rates), each, **tolerance)
    np.testing.assert_allclose(jnp.diag(jacobian(rates)), each, **tolerance)
    text = inside.lower(rates).compile().as_text()
    assert text.count('custom_call_target="jdistadam_adam"') == 1  # in the loop, for all members


def test_derivatives_by_state_and_gradients_are_those_of_optax():
    """One step, by each of its operands; counts are integers, whose tangents are float0."""
    tx, like = jda.fused_adamw(**numbers_as(jnp.float32)), optax.adamw(**numbers_as(jnp.float32))
    _, params = problem(jnp.float32)
    grads = jax.tree.map(lambda x: 0.3 * x + 0.1, params)
    _, state = tx.step(grads, tx.init(params), params)
    args = (grads, state, params)

    def total(method, *args):
        results, new_state = method(*args)
        parts = (results, new_state[0].mu, new_state[0].nu)
        return sum(jnp.sum(jnp.sin(3 * x)) for x in jax.tree.leaves(parts))

    def derive(method):
        function = functools.partial(total, method)
        return jax.jit(jax.grad(function, (0, 1, 2), allow_int=True))(*args)

    got, want = derive(tx.update), derive(like.update)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if a.dtype == jnp.float32:  # some roundings of terms of order 1 to 10
            np.testing.assert_allclose(a, b, rtol=32 * 2.0**-23, atol=32 * 2.0**-23)

    @jax.jit
    def both(grads):
        step = lambda grads: tx.step(grads, state, params)[0]  # noqa: E731
        _, linear = jax.linearize(step, grads)
        return linear(grads), jax.jvp(step, (grads,), (grads,))[1]

    for a, b in zip(*map(jax.tree.leaves, both(grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=32 * 2.0**-23, atol=32 * 2.0**-23)


def test_derivatives_pass_through_float32_main_params():
    """The params that the model gets are rounded; their derivative is that of the main ones."""
    _, params = problem(jnp.float32)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tx = jda.fused_adamw(**NUMBERS, main_params_dtype=jnp.float32)
    exact_tx = jda.fused_adamw(**NUMBERS)

    def moved(tx, params, like):
        grads = jax.tree.map(jnp.ones_like, like)
        new, _ = tx.step(grads, tx.init(params), params)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(new))

    got = jax.jit(jax.grad(lambda p: moved(tx, p, half)))(half)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    want = jax.jit(jax.grad(lambda p: moved(exact_tx, p, wide)))(wide)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def test_remainders_have_no_derivative():
    _, params = problem(jnp.float32)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tx = jda.fused_adamw(1e-2, main_params_dtype="remainder16")
    state = tx.init(params)

    def total(grads):
        return jnp.sum(tx.step(grads, state, params)[0]["w"].astype(jnp.float32))

    with pytest.raises(PolicyError, match="main_params_dtype: a step cannot be differentiated"):
        jax.grad(total)(params)
    stopped = jax.grad(lambda p: total(jax.lax.stop_gradient(p)) + jnp.sum(p["v"]))(params)
    np.testing.assert_array_equal(stopped["v"], np.ones(3))


def test_a_derivative_of_sharded_arrays_gathers_nothing():
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((8,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data") if x.ndim else P()))  # noqa: E731
    params = place(jnp.linspace(-1.0, 1.0, 64).reshape(16, 4))
    state = jax.tree.map(place, jda.fused_adamw(1e-2).init(params))

    def total(rate, grads, state, params):
        new, _ = jda.fused_adamw(rate, eps=0.5).step(grads, state, params)
        return jnp.sum(jnp.square(new))

    args = (jnp.float32(0.01), params, state, params)
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*args).compile()
    assert {c.op for c in hlo.collectives_in(compiled.as_text())} <= {"all-reduce"}
    here = jax.device_put(args, devices[0])
    (rate, grads), one = compiled(*args), jax.jit(jax.grad(total, (0, 1)))(*here)
    assert grads.sharding.is_equivalent_to(params.sharding, 2)
    np.testing.assert_allclose(grads, one[1], rtol=32 * 2.0**-23)  # some operations, no sum
    np.testing.assert_allclose(rate, one[0], rtol=64 * 2.0**-23)  # a sum of 64 numbers


def wrapped(whose, wrapper):
    """A wrapper around AdamW without ``eps_root``, whose root has no derivative at zero."""
    library, make = (jda, jda.fused_adamw) if whose == "ours" else (optax, optax.adamw)
    tx = make(0.05, b1=0.8, b2=0.9, weight_decay=0.1)
    if wrapper == "apply_if_finite":
        return library.apply_if_finite(tx, 3)
    return library.MultiSteps(tx, 2, accumulator_dtype=jnp.float64)


def through_calls(tx, method, gradients, start):
    """The derivative of the sum of new params by the first ones, after a call for each gradient."""

    def total(params):
        state = tx.init(params)
        for gradient in gradients:
            grads = {"w": gradient(params["w"])}
            if method == "step":
                params, state = tx.step(grads, state, params)
            else:
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
        return jnp.sum(jnp.square(params["w"]))

    return jax.jit(jax.grad(total))({"w": jnp.asarray(start)})["w"]


START = np.array([1.0, -2.0, 0.5])
square = lambda p: p * p  # noqa: E731
nothing = lambda p: 0 * p  # noqa: E731


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_derivatives_after_a_skipped_step_are_those_of_optax(dtype):
    """A skipped step has second moments of zero, and zero times infinity became NaN."""
    not_finite = lambda p: jnp.full_like(p, jnp.nan)  # noqa: E731
    with jax.enable_x64(True):
        for calls in ([not_finite, square], [square, not_finite, square]):
            want = through_calls(wrapped("optax", "apply_if_finite"), "update", calls, START)
            tx = wrapped("ours", "apply_if_finite")
            got = through_calls(tx, "step", calls, START.astype(dtype))
            assert np.isfinite(want).all()
            # some tens of roundings of numbers of order one
            tolerance = 64 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_derivatives_through_calls_that_only_accumulate(dtype):
    """Against optax.adamw in float64 of the means; optax's MultiSteps has NaN, as we had."""
    with jax.enable_x64(True):

        def by_means(params):
            tx = optax.adamw(0.05, b1=0.8, b2=0.9, weight_decay=0.1)
            state = tx.init(params)
            for _ in range(2):  # the params change between neither of two calls
                mean = (nothing(params) + square(params)) / 2
                updates, state = tx.update(mean, state, params)
                params = optax.apply_updates(params, updates)
            return jnp.sum(jnp.square(params))

        want = jax.grad(by_means)(jnp.asarray(START))
        calls = [nothing, square] * 2
        got = through_calls(wrapped("ours", "MultiSteps"), "step", calls, START.astype(dtype))
        tolerance = 64 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_derivatives_at_a_gradient_of_zero():
    """By params those of optax; by the gradient -rate / eps, where optax has NaN."""
    params, zeros = {"w": jnp.asarray(START, jnp.float32)}, {"w": jnp.zeros(3)}
    results = []
    for tx in (jda.fused_adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)):
        state = tx.init(params)
        total = lambda p, g: jnp.sum(tx.update(g, state, p)[0]["w"])  # noqa: B023, E731
        results.append(jax.grad(total)(params, zeros)["w"])
        by_gradient = jax.grad(total, 1)(params, zeros)["w"]
        if len(results) == 1:  # the bias corrections cancel up to a few roundings of 1e-3
            np.testing.assert_allclose(by_gradient, -1e-2 / 1e-8, rtol=1e-4)
        else:
            assert np.isnan(by_gradient).all()
    np.testing.assert_allclose(*results, rtol=2.0**-22)
