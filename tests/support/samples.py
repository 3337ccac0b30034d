"""Which cases of a matrix ``pytest`` runs by default; the rest are slow."""

import collections

import pytest


def often(when):
    """Selects the cases of a test that always run: those for which ``when`` is true, by names.

    tests/conftest.py marks the rest slow. Every value of every parameter should be in a case that
    always runs, or be covered otherwise.
    """
    return pytest.mark.often(when=when)


def few(number):
    """Selects ``number`` of the cases of a test that run on CPUs, spread evenly over the others.

    For cases of which each takes long and that fail together as a rule.
    """
    return pytest.mark.few(number)


def mark_the_rest_slow(items):
    """Marks the cases of tests under ``few`` that are not selected, if they are not slow yet."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not any(
            map(item.get_closest_marker, ("slow", "gpu", "multigpu"))
        ):
            cases[item.nodeid.split("[")[0]].append(item)
    for found in cases.values():
        number = found[0].get_closest_marker("few").args[0]
        step = (len(found) - 1) / max(number - 1, 1)
        chosen = {round(i * step) for i in range(number)}
        for i, item in enumerate(found):
            if i not in chosen:
                item.add_marker("slow")
