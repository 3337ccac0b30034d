"""Numbers in the records of whole steps follow from their rounds.

Those of README and of the pages follow from the records: experiments/update_readme.py --check.
"""

import json
import statistics

import pytest

from support.paths import ROOT

RECORDS = ROOT / "experiments" / "results" / "bench_step"


def results_of(path):
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize(
    "path", sorted(RECORDS.glob("*/*.json")), ids=lambda x: f"{x.parent.name}/{x.stem}"
)
def test_numbers_follow_from_rounds(path):
    found, tokens = results_of(path), {}
    rows = [row for row in found["rows"] if "ms" in row]
    assert rows
    for row in rows:
        times = row["rounds_ms"]
        assert row["ms"] == statistics.median(times)
        assert (row["ms_least"], row["ms_most"]) == (min(times), max(times))
        if "tokens_per_second" in row:  # of a step: the same for all rows of a workload
            of_step = row["tokens_per_second"] * row["ms"]
            assert of_step == pytest.approx(tokens.setdefault(row["name"].split("/")[0], of_step))
        if share := row.get("model_flops_utilization"):
            flops, most = found["flops"], found["devices"] * found["flops"]["peak_per_second"]
            assert share == pytest.approx(row["tokens_per_second"] * flops["per_token"] / most)
        if tried := [x for x in row.get("tried", ()) if "ms" in x]:
            best = min(tried, key=lambda x: x["ms"])  # of a short trial
            if last := [x for x in tried if "rounds_ms" in x]:  # those that took part in all rounds
                assert best in last
                best = min(last, key=lambda x: statistics.median(x["rounds_ms"]))
                assert row["rounds_ms"] == best["rounds_ms"]
            assert row["flags"] == best["flags"]


def test_gains_follow_from_rounds():
    for found in map(results_of, RECORDS.glob("*/*.json")):
        rows = {row["name"]: row for row in found["rows"]}
        for gain in found.get("gains", ()):
            pair = (rows[gain[key]]["rounds_ms"] for key in ("beside", "row"))
            percent = [100 * (rival / ours - 1) for rival, ours in zip(*pair, strict=True)]
            expected = (statistics.median(percent), min(percent), max(percent))
            names = ("percent", "percent_least", "percent_most")
            assert [gain[name] for name in names] == pytest.approx(expected)
