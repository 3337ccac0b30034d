"""Every example in a docstring runs and shows what it says."""

import doctest
import importlib
import pkgutil

import pytest

import jdistadam

MODULES = [m.name for m in pkgutil.iter_modules(jdistadam.__path__) if not m.name.startswith("_")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"jdistadam.{name}")
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_there_are_examples():
    modules = [importlib.import_module(f"jdistadam.{name}") for name in MODULES]
    attempted = sum(len(test.examples) for m in modules for test in doctest.DocTestFinder().find(m))
    assert attempted >= 15
