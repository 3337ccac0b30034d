"""A pytest plugin: optax's own tests, with jdistadam's optimizers in place of optax's."""

import inspect
import re

import jax
import optax
import pytest
from optax._src import alias, transform

import jdistadam as jda

OURS = {"adam": jda.fused_adam, "adamw": jda.fused_adamw, "scale_by_adam": jda.scale_by_adam}
MODULES = {"adam": alias, "adamw": alias, "scale_by_adam": transform}
calls = dict.fromkeys(OURS, 0)


def replacement(name):
    """Our optimizer with optax's name and arguments; counts its calls."""
    theirs = getattr(optax, name)
    inside = []  # ours calls optax's own for the layout of the state

    def make(*args, **kwargs):
        if inside:
            return theirs(*args, **kwargs)
        inside.append(name)
        try:
            calls[name] += 1
            return OURS[name](*args, **kwargs)
        finally:
            inside.pop()

    make.__name__ = name
    make.__signature__ = inspect.signature(theirs)
    return make


for name in OURS:
    made = replacement(name)
    setattr(MODULES[name], name, made)
    setattr(optax, name, made)


def pytest_addoption(parser):
    parser.addoption(
        "--one-of-each", action="store_true", help="one case of each parametrized test"
    )


def pytest_collection_modifyitems(config, items):
    """Keeps the tests that make Adam or AdamW, or have one of them as a parameter."""
    makes = re.compile(r"\b(alias|optax|transform)\.(adam|adamw|scale_by_adam)\b")
    parameter = re.compile(r"\b(adam|adamw)\b")
    named = re.compile(r"_(adam|adamw)$")  # from absl's named_parameters
    kept, others = [], []
    for item in items:
        parameters = getattr(item.function, "__x_params_repr__", "")
        is_about = parameter.search(parameters) or named.search(item.name)
        is_kept = is_about or makes.search(inspect.getsource(item.function))
        (kept if is_kept else others).append(item)
    if config.getoption("--one-of-each"):
        chosen = one_of_each(kept)
        others += [item for item in kept if item not in chosen]
        kept = chosen
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def one_of_each(items):
    """The first case of one test, the last of the next: both optimizers are included."""
    tests = {}
    for item in items:
        tests.setdefault(re.sub(r"\d+$", "", item.nodeid), []).append(item)
    return [cases[-(i % 2)] for i, cases in enumerate(tests.values())]


@pytest.fixture(autouse=True)
def version_that_compares_as_text(request, monkeypatch):
    """Keeps optax's sharding tests from being skipped: they compare JAX versions as text."""
    if "sharding_test" in request.node.nodeid:
        monkeypatch.setattr(jax, "__version__", "9")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"made by jdistadam: {calls}")
