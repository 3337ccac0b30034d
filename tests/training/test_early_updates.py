"""Kernel calls of a state in host memory run as soon as their gradients are known."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jdistadam as jda
from jdistadam.distributed import calls, host_memory
from jdistadam.training import reordered, step_program
from jdistadam.training.early_updates import with_early_updates
from support.bits import assert_trees_same_bits
from support.samples import few, often

LAYERS, WIDTH = 8, 32


def plain(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def rematerialized(params, x):
    for name in sorted(params):
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(params[name], x)
    return jnp.mean(jnp.square(x))


LOSSES = {"plain": plain, "jit": jax.jit(plain), "remat": rematerialized}


HOST = dict(state_memory="pinned_host")
DEVICE = dict(early_updates=True)


def made(monkeypatch, loss, devices=1, micro=1, memory=HOST, **options):
    """A step whose windows are layers, its first state and batches."""
    monkeypatch.setattr(calls, "WINDOW", WIDTH**2 // devices)
    monkeypatch.setattr(host_memory, "WINDOWS_BYTES", 1)
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices("cpu")[:devices])
    tx = jda.distributed(
        jda.fused_adamw(1e-2, weight_decay=0.1),
        mesh=mesh,
        bucket_bytes=1,
        **memory,
        **options,
    )
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for i in range(LAYERS)}
    state = jda.TrainState.create(params, tx)
    batches = rng.normal(size=(10, 4 * devices * micro, WIDTH)).astype(np.float32)
    return jda.train_step(loss, tx, accumulate_steps=micro), state, batches


def order_of(jaxpr):
    """Products and kernel calls as letters, where a program evaluates them."""
    found = ""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "ffi_call":
            found += "K" * (eqn.params["target_name"] == "jdistadam_adam")
        elif name == "dot_general":
            found += "G"
        else:
            inner = "".join(map(order_of, core.jaxprs_in_params(eqn.params)))
            found += "G" if name in ("scan", "remat2") and "G" in inner else inner
    return found


@few(1)
@pytest.mark.parametrize("memory", [HOST, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
@often(lambda loss, devices, micro, memory: devices * micro == (6 if memory is HOST else 1))
def test_updates_run_between_products(loss, devices, micro, memory, monkeypatch):
    step, state, batches = made(monkeypatch, LOSSES[loss], devices, micro, memory)
    found = order_of(jax.make_jaxpr(step)(state, batches[0]).jaxpr)
    before, after = found[: found.rindex("G")], found[found.rindex("G") :]
    assert after.count("K") == 1 and before.count("K") == LAYERS - 1, found
    early = [state]
    for batch in batches:
        early.append(step(early[-1], batch)[0])
    monkeypatch.setattr(step_program, "with_early_updates", lambda function, *, lag, seen: function)
    step, late, _ = made(monkeypatch, LOSSES[loss], devices, micro, memory)
    assert order_of(jax.make_jaxpr(step)(late, batches[0]).jaxpr).endswith(
        "GK" + "K" * (LAYERS - 1)
    )
    for batch in batches:
        late, _ = step(late, batch)
    assert_trees_same_bits(early[-1], late)


def needs_of(jaxpr):
    """For each variable all variables before it."""
    needs = {}
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        before = set(inputs).union(*(needs.get(v, ()) for v in inputs))
        needs |= dict.fromkeys(eqn.outvars, before)
    return needs


def operations_of(step, *args):
    """The jaxpr that has the products, and for each of its variables all before it."""
    jaxpr = jax.make_jaxpr(step)(*args).jaxpr
    while "dot_general" not in {eqn.primitive.name for eqn in jaxpr.eqns}:
        inner = (x for eqn in jaxpr.eqns for x in core.jaxprs_in_params(eqn.params))
        jaxpr = max(inner, key=lambda x: len(x.eqns))
    return jaxpr, needs_of(jaxpr)


@pytest.mark.parametrize(("devices", "lag"), [(1, 1), (2, step_program._LAG)])
def test_products_wait_for_updates_of_an_earlier_layer(devices, lag, monkeypatch):
    """Copies between the memories and other kernels do not count."""
    step, state, batches = made(monkeypatch, plain, devices)
    jaxpr, needs = operations_of(step, state, batches[0])
    calls, norms, most = [], [], 0
    for eqn in jaxpr.eqns:
        if order_of(jaxpr.replace(eqns=[eqn])) == "K":
            calls.append(eqn.outvars[0])
        elif eqn.params.get("target_name") == "jdistadam_norm_tiles":
            norms.append(eqn.outvars[0])
        elif eqn.primitive.name == "dot_general":
            before = needs[eqn.outvars[0]]
            assert sum(v in before for v in calls) == max(0, len(calls) - lag)
            assert sum(v in before for v in norms) == max(0, len(calls) + 1 - lag)
            most = max(most, len(calls))
    assert most == LAYERS - 1


def copies_and_products(jaxpr):
    """The first results of copies to the device, and of products."""
    copies, products = [], []
    for eqn in jaxpr.eqns:
        if eqn.params.get("target_name") == "jdistadam_host_copy":
            copies += eqn.outvars[:1] * (eqn.outvars[0].aval.size < LAYERS * WIDTH**2)
        elif eqn.primitive.name == "dot_general":
            products.append(eqn.outvars[0])
    return copies, products


@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0)])
def test_copies_to_the_device_wait_for_a_gradient(options, monkeypatch):
    """If the forward pass waited for their start, XLA could copy a window that is arriving."""
    step, state, batches = made(monkeypatch, plain, memory=HOST, **options)
    jaxpr, needs = operations_of(step, state, batches[0])
    copies, products = copies_and_products(jaxpr)
    assert len(copies) == LAYERS
    assert all(set(products[LAYERS:]) & needs[x] for x in copies)


@pytest.mark.parametrize("options", [dict(max_grad_norm=1.0), dict(loss_scale=8.0)])
def test_updates_that_need_the_norm_come_last(options, monkeypatch):
    step, state, batches = made(monkeypatch, plain, **options)
    assert order_of(jax.make_jaxpr(step)(state, batches[0]).jaxpr).endswith("G" + "K" * LAYERS)


VIEWS = {
    "itself": list,
    "barrier": jax.lax.optimization_barrier,
    "transposed": lambda matrices: [-x.T for x in matrices],
}


@few(4)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("lag", [0, 2, math.inf])
def test_products_wait_for_new_matrices_and_those_for_old_ones(lag, view, monkeypatch):
    """atan2 takes the place of kernel calls: each makes a new matrix from a gradient."""
    monkeypatch.setattr(reordered, "UPDATES", {"atan2"})

    def step(matrices, x):
        found, last, coefficients = {}, 0.0, x
        for i, matrix in enumerate(VIEWS[view](matrices)):
            x, found[i] = x @ matrix, x
        new = []
        for i, matrix in enumerate(matrices):
            last = jax.lax.atan2(coefficients, found[i] + last)
            new.append(last + matrix)
        return new, x

    # Products of whole numbers are exact, however XLA adds them.
    matrices = np.random.default_rng(0).integers(-1, 2, (6, 8, 8)).astype(np.float32)
    args = list(matrices), jnp.ones((8, 8))
    early = with_early_updates(step, lag=lag)
    assert_trees_same_bits(jax.jit(early)(*args), jax.jit(step)(*args))
    jaxpr = jax.make_jaxpr(early)(*args).jaxpr
    needs, products, new = needs_of(jaxpr), [], []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            products.append(eqn.outvars[0])
        elif eqn.primitive.name == "atan2":
            new.append(eqn.outvars[0])
    for i, call in enumerate(new):
        assert products[i] in needs[call]  # the last use of the old matrix
    for i, product in enumerate(products):
        waits_for = [k for k, call in enumerate(new) if call in needs[product]]
        assert waits_for == list(range(max(0, i - lag) if lag < 6 else 0))


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_rematerialized_operations_stay_behind_a_barrier(prevent_cse):
    def step(w, x):
        layer = jax.checkpoint(lambda x: jnp.sin(x @ w) @ w, prevent_cse=prevent_cse)
        return jax.value_and_grad(lambda x: jnp.sum(layer(layer(x))))(x)

    args = jnp.ones((4, 4)) / 3, jnp.ones((4, 4))
    early = with_early_updates(step, lag=math.inf)
    assert_trees_same_bits(jax.jit(early)(*args), jax.jit(step)(*args))
    text = jax.jit(early).lower(*args).as_text()
    assert text.count("optimization_barrier") == 2 * prevent_cse
    assert text.count("dot_general") == jax.jit(step).lower(*args).as_text().count("dot_general")


@pytest.mark.parametrize("wrapper", [jax.jit, jax.checkpoint])
def test_operations_of_nested_functions_keep_their_names(wrapper):
    """A profile tells the model's operations from the optimizer's by them."""

    def step(w, x):
        with jax.named_scope("model"):
            layer = wrapper(lambda w, x: jnp.sin(x @ w) @ w)
            return jax.value_and_grad(lambda w: jnp.sum(layer(w, layer(w, x))))(w)

    early = with_early_updates(step, lag=math.inf)
    text = jax.jit(early).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile().as_text()
    names = re.findall(r'op_name="([^"]*dot_general)"', text)
    assert names and all("model" in name for name in names), names


def test_functions_without_products_give_the_same_results():
    def function(x, y):
        _, kept = jnp.modf(x)
        return {"kept": kept, "one": 1.0, "y": y}

    x = jnp.linspace(0.0, 3.0, 7)
    assert_trees_same_bits(with_early_updates(function, lag=0)(x, x), function(x, x))
