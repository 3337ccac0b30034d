"""A covering array of configurations: each compatible pair of values is in one of them.

The rows are in covering.json. After a change of the tables regenerate them, in about a minute:

    PYTHONPATH=tests python -m support.covering
"""

import itertools
import json
import pathlib

import numpy as np

from support.configurations import CONFIG, PLACE, fitted

ROWS = pathlib.Path(__file__).with_suffix(".json")
LEAVES = {"few": {"matrix", "row"}, "all": {"matrix", "block", "odd", "scalar", "empty"}}
TABLE = (
    PLACE
    | CONFIG
    | dict(
        mesh=("1", "8", "replicas last", "two axes", "experts", "model first", "replicas, model"),
        mu=("float32", "bfloat16", "block8", "block16"),
        specs=("rows", "columns"),
        bucket_bytes=(20_000, 32 << 20),
        communication=("auto", "peer"),
        state_memory=("device", "pinned_host", "nu"),
        early_updates=(None, False, True),
        mask=("none", "tree", "size"),
        chain=("none", "schedule", "params"),
        micro=(1, 3),
        clip=(None, 0.25),
        skip=(1, 4),
        move=("none",),
        leaves=tuple(LEAVES),
    )
)


def configuration(row):
    """The configuration of a row: a value for each name, with incompatible ones changed."""
    config, place = ({name: row[name] for name in table} for table in (CONFIG, PLACE))
    if place["strategy"] == "optim_grads_params" and config["chain"] == "params":
        config["chain"] = "none"  # it would see shards of params
    return fitted(0, config, [place, {}], LEAVES[row["leaves"]])


def fitting(row):
    """A row with incompatible values changed."""
    config = configuration(row)
    (place,) = config.places
    given = {
        name: getattr(place if name in PLACE else config, name)
        for name in TABLE
        if name != "leaves"
    }
    return given | dict(leaves=row["leaves"])


GATHERING = dict(strategy="optim_grads_params", reshard=True, gathered_in_model=True)


def pairs(row):
    """The pairs of values in a row; GATHERING counts as one, as no two of its three gather."""
    values = {name: value for name, value in row.items() if value in TABLE[name]}
    if "model" not in row["mesh"] and row["mesh"] != "experts":
        del values["specs"]
    if GATHERING.items() <= row.items():
        values["gathering"] = True
    return set(
        itertools.combinations(sorted(f"{name}={value}" for name, value in values.items()), 2)
    )


def random_row(rng):
    return fitting({name: values[rng.integers(len(values))] for name, values in TABLE.items()})


def possible():
    """The pairs in many random rows."""
    rng = np.random.default_rng(0)
    return set().union(*(pairs(random_row(rng)) for _ in range(2000)))


def improved(row, missing, rng):
    """A row with more of the missing pairs: the best value for each name in turn."""
    best = len(pairs(row) & missing)
    for name in rng.permutation(list(TABLE)):
        for value in TABLE[name]:
            other = fitting(row | {str(name): value})
            count = len(pairs(other) & missing)
            if count > best:
                row, best = other, count
    return row, best


def with_pair(pair, rng):
    """A random row with a pair of values, if the pair stays there."""
    row = {name: values[rng.integers(len(values))] for name, values in TABLE.items()}
    for name, value in (text.split("=") for text in pair):
        if name == "gathering":
            row |= GATHERING
        else:
            row[name] = next(x for x in TABLE[name] if str(x) == value)
    return fitting(row)


def covering(seed):
    """Rows that together contain every possible pair: greedy, with local improvement."""
    rng, missing, rows = np.random.default_rng(seed), possible(), []
    while missing:
        wanted = sorted(missing)
        starts = [with_pair(wanted[rng.integers(len(wanted))], rng) for _ in range(30)]
        row, count = max((improved(x, missing, rng) for x in starts), key=lambda x: x[1])
        if count:  # otherwise the changed row has no missing pair
            rows.append(row)
            missing -= pairs(row)
    return rows


def rows():
    return json.loads(ROWS.read_text())


if __name__ == "__main__":
    best = min((covering(seed) for seed in range(3)), key=len)
    ROWS.write_text("[\n" + ",\n".join(json.dumps(row) for row in best) + "\n]\n")
    print(len(best), "rows")
