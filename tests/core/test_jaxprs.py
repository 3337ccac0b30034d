"""What the package knows of JAX's traced programs, tried with the JAX that is here."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.extend.core import primitives as of_jax

import jdistadam as jda
from jdistadam.core import jaxprs
from support.paths import ROOT


def test_this_jax_traces_what_is_known():
    assert jaxprs.unknown() == {}


@pytest.mark.parametrize(
    "context",
    [
        lambda mesh: jax.set_mesh(mesh),
        lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        lambda mesh: jax.disable_jit(),
        lambda mesh: jax.enable_x64(True),
        lambda mesh: jax.debug_nans(True),
    ],
    ids=["set_mesh", "abstract mesh", "disable_jit", "x64", "debug_nans"],
)
def test_no_context_looks_like_another_jax(context):
    """Of the caller: a mesh of its own, or another way to run."""
    jaxprs.warn_of_unknown.cache_clear()
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    with context(mesh):
        jaxprs.warn_of_unknown()
        jax.eval_shape(lambda x: (jaxprs.unknown(), x)[1], jax.ShapeDtypeStruct((), jnp.float32))
    jaxprs.warn_of_unknown.cache_clear()


def primitives():
    """All primitives in the trials, by name."""
    found = {}

    def collect(jaxpr):
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] = eqn.primitive
            for inner in core.jaxprs_in_params(eqn.params):
                collect(inner)

    remat = jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x))))
    own = jax.custom_vjp(lambda x: x @ x)
    own.defvjp(lambda x: (x @ x, x), lambda x, y: (x @ y,))
    loop = lambda x: jax.lax.scan(lambda c, x: (c + x, x), x[0], x)  # noqa: E731
    image = lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME")  # noqa: E731
    both = [remat, own, loop, image, jax.jit(lambda x: x @ x), jax.lax.optimization_barrier]
    for function in both:
        collect(jax.make_jaxpr(function)(jnp.ones((2, 2))).jaxpr)
    return found


COSTS = {
    "jit": "jax.jit",
    "remat2": "jax.checkpoint",
    "custom_vjp_call": "jax.custom_vjp",
    "scan": "jax.lax.scan",
    "optimization_barrier": "jax.lax.optimization_barrier",
    "dot_general": "products",
    "conv_general_dilated": "products",
}


@pytest.mark.parametrize("name", COSTS)
def test_an_operation_with_another_name_is_missed(monkeypatch, name):
    """With another name in JAX, everything is traced as before, and nothing else is lost."""
    monkeypatch.setattr(primitives()[name], "name", "renamed")
    found = jaxprs.unknown()
    assert COSTS[name] in found and "overlap" in found[COSTS[name]]


@pytest.mark.parametrize(
    ("known", "other", "missing"),
    [
        ("_SUMS", ("added",), "sums over axes"),
        ("_PASSED_ON", frozenset(), "psum"),
        ("GATHERS", frozenset(), "all_gather"),
        ("_OF_AXES", "AnotherEffect", "effects"),
    ],
)
def test_what_is_known_by_another_name_is_missed(monkeypatch, known, other, missing):
    """Names of sums, of operations that pass a value on, of gathers and of effects."""
    monkeypatch.setattr(jaxprs, known, other)
    assert missing in jaxprs.unknown()


def test_the_first_trace_of_a_step_warns_once(monkeypatch):
    """It names the JAX and what is lost; the step is right."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    tx = jda.distributed(jda.fused_adamw(1e-2), mesh=mesh)
    step = jda.train_step(lambda params, x: jnp.sum(params["w"] * x[0]), tx)
    state, other = (jda.TrainState.create({"w": jnp.ones(3)}, tx) for _ in range(2))
    monkeypatch.setattr(jaxprs, "_BARRIER", "another")
    jaxprs.warn_of_unknown.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match="does not know: jax.lax.optimization_barrier"
        ) as found:
            state, _ = step(state, np.ones((1, 3), np.float32))
        text = str(found[0].message)
        assert jax.__version__ in text and "may not overlap" in text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jda.eval_step(lambda params, x: jnp.sum(params["w"] * x[0]), tx)(
                state, np.ones((1, 3), np.float32)
            )
    finally:
        jaxprs.warn_of_unknown.cache_clear()
    monkeypatch.undo()
    other, _ = jda.train_step(lambda p, x: jnp.sum(p["w"] * x[0]), tx)(
        other, np.ones((1, 3), np.float32)
    )
    assert np.array_equal(state.params["w"], other.params["w"])


def test_one_file_knows_names_and_parameters_of_operations():
    """In training/, where steps are evaluated in another order."""
    for path in (ROOT / "jdistadam" / "training").glob("*.py"):
        text = path.read_text()
        for word in (".primitive", "eqn.params", "jax.extend", "jax.interpreters", "eval_jaxpr"):
            assert word not in text, (path.name, word)


def test_cheap_operations_have_names_that_jax_knows():
    known = {getattr(of_jax, x).name for x in dir(of_jax) if x.endswith("_p")}
    newer = {"log2", "one_minus_square", "polynomial"}  # than jax 0.10.2
    assert jaxprs.ELEMENTWISE - known <= newer
