"""Where the repository is, and its tests: for reading its files and starting its programs."""

import os
import pathlib

TESTS = pathlib.Path(__file__).parent.parent
ROOT = TESTS.parent


def environment(**variables):
    """That of this process, in which a program that is started finds ``support``."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(TESTS), *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": path} | variables
