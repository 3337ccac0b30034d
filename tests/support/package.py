"""Which package tests import: the source tree usually has no compiled module."""

import importlib.util
import os
import pathlib
import sys

import pytest

from support.paths import ROOT


def has_kernels():
    """Whether ``import jdistadam`` would find a package with its compiled module; imports none."""
    package = importlib.util.find_spec("jdistadam")
    folders = package and package.submodule_search_locations
    return bool(folders) and any(x.find_spec("jdistadam._cpu", folders) for x in sys.meta_path)


def without_root(folders):
    return [x for x in folders if pathlib.Path(x).resolve() != ROOT]  # "" is the current directory


def choose_package():
    """Makes this process and its children import a package that has its compiled module.

    ``python -m pytest`` puts the source tree before an installed package, ``pytest`` leaves it out.
    """
    for path in (sys.path[:], without_root(sys.path), [str(ROOT), *sys.path]):
        sys.path[:] = path
        if has_kernels():
            break
    else:
        raise pytest.UsageError(
            f"{sys.executable} finds no compiled module of jdistadam: run "
            f'`pip install ".[test]"` in {ROOT}'
        )
    inherited = without_root(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    root = [str(ROOT)] if len(without_root(sys.path)) < len(sys.path) else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*root, *inherited])
