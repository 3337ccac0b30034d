"""The norms of a step, by name; and how near to the exact ones float32 sums are."""

import numpy as np

from support.configurations import group_of_norms

KINDS = ("grad", "param", "update")
# A square is rounded, and passes through at most 7 sums of a run, 100 of a lane (single elements of a
# bucket), 10 of lanes, 4 of leaves and 8 of devices. Of a root that is the half, with its own
# rounding and those of the factors for mean, loss scale and clip.
BOUND = ((1 + 7 + 100 + 10 + 4 + 8) / 2 + 4) * 2.0**-24


def groups_of(config, paths):
    """The leaves of each group by name, from the paths of trained leaves by number."""
    groups = {}
    for i, path in sorted(paths.items()):
        name = {"total": None, "leaves": path, "groups": group_of_norms(path)}[config.norms]
        groups.setdefault(name, []).append(i)
    return groups


def named(names, roots):
    """Metrics, from rows of the three norms: of everything, then of each group."""
    total, *rows = roots
    found = dict(param_norm=total[1], update_norm=total[2])
    for name, row in zip(names, rows, strict=True):
        if name is not None:
            found |= {f"{kind}_norm/{name}": x for kind, x in zip(KINDS, row, strict=True)}
    return found


def assert_near(got, want, what):
    """Within the rounding of sums in float32, in any order; NaN and infinite as expected."""
    got, want = np.float64(got), np.float64(want)
    is_near = got == want or abs(got - want) <= BOUND * want or (np.isnan(got) and np.isnan(want))
    assert is_near, f"{what}: got {got!r}, expected {want!r}"
