"""Which cases of a matrix run in ``pytest`` alone; the rest are slow."""

import pytest


def often(when):
    """Of the cases of a test, those run always of whose parameters ``when`` is true, by their names.

    The rest are marked slow, which tests/conftest.py does. ``when`` leaves every value of every
    parameter in some case that runs always, or says what else stands for it.
    """
    return pytest.mark.often(when=when)


def alternate(*places):
    """Whether the sum of places in their lists is even: of two short lists this is every pair once.

    Each place is a pair of a value and the list that it stands in.
    """
    return sum([str(x) for x in values].index(str(value)) for value, values in places) % 2 == 0
