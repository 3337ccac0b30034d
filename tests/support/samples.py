"""Which cases of a matrix ``pytest`` runs by default; the rest are slow."""

import pytest


def often(when):
    """Selects the cases of a test that always run: those for which ``when`` is true, by names.

    tests/conftest.py marks the rest slow. Every value of every parameter should be in a case that
    always runs, or be covered otherwise.
    """
    return pytest.mark.often(when=when)
