"""Records under results, as the tables and plots of the pages read them."""

import json
import pathlib
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


def results_of(record: str) -> Any:
    """Returns the results in a record, by its name, such as "bench_step/h200/default"."""
    return json.loads((RESULTS / f"{record}.json").read_text())["results"]
