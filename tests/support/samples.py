"""Which cases of a matrix run in ``pytest`` alone; the rest are slow."""

import pytest


def often(when):
    """Of the cases of a test, those run always of whose parameters ``when`` is true, by their names.

    The rest are marked slow, which tests/conftest.py does. Every value of every parameter should be
    in some case that runs always, or something else should stand for it.
    """
    return pytest.mark.often(when=when)
