"""The folders of the repository and its tests, for reading files and starting programs."""

import os
import pathlib

TESTS = pathlib.Path(__file__).parent.parent
ROOT = TESTS.parent


def environment(**variables):
    """This process's environment, with ``support`` on the path for child processes."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(TESTS), *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": path} | variables
