"""Every example in a docstring runs and shows what it says."""

import doctest
import importlib
import pkgutil

import pytest

import jdistadam

MODULES = [
    m.name
    for m in pkgutil.walk_packages(jdistadam.__path__, "jdistadam.")
    if not m.name.rpartition(".")[2].startswith("_")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    assert "jdistadam.core.trees" in MODULES  # also in folders
    modules = [importlib.import_module(name) for name in MODULES]
    attempted = sum(len(test.examples) for m in modules for test in doctest.DocTestFinder().find(m))
    assert attempted >= 15
