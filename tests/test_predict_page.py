"""The page of predict: its example runs, its tables are those recorded, and those are today's."""

import json
import re
import sys

import jax
import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import scaling_check
from lm import markdown

DOCS = (ROOT / "experiments" / "predict" / "README.md").read_text()


@pytest.fixture(scope="module")
def recorded():
    return json.loads(scaling_check.RECORDED.read_text())["results"]


def test_example_prints_a_row_for_each_number_of_devices(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", DOCS, re.S)
    exec(compile(example, "README.md", "exec"), {})
    titles, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert titles[0] == "devices" and [int(row[0]) for row in rows] == [1 << i for i in range(11)]


def test_tables_equal_the_records(recorded):
    assert markdown.fill(DOCS, scaling_check.tables_of(recorded), "README.md") == DOCS


def test_predictions_equal_the_records(recorded):
    """If this fails after a change that was meant, run experiments/scaling_check.py again."""
    name = "bench_step/h200_x2/default"
    found = json.loads(json.dumps([*scaling_check.check_steps(name)]))
    assert found == [row for row in recorded["steps"] if row["run"] == name]
    with jax.numpy_rank_promotion("allow"):  # which the model of train_lm relies on
        found = json.loads(json.dumps([*scaling_check.check_trained(scaling_check.SCANNED)]))
    assert found == recorded["trained"][-2:]
