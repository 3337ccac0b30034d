"""Keys of agreements; what processes compare is in distributed/test_processes.py."""

import collections
import itertools

import jax
import pytest

from jdistadam import compat
from jdistadam.training import agreement


class Client:
    """A store of the coordination service, where the first process has found no difference."""

    def __init__(self):
        self.keys = []

    def key_value_set(self, key, value, allow_overwrite=False):
        self.keys.append(key)

    def blocking_key_value_get(self, key, milliseconds):
        return '""'

    def key_value_delete(self, key):
        raise AssertionError("only the first process deletes")


@pytest.mark.parametrize("others_before", [0, 2])
def test_agreements_of_others_do_not_move_the_keys(monkeypatch, others_before):
    """Processes 0 and 1 may agree before 0 and 2 do, of which 2 knows nothing."""
    client = Client()
    monkeypatch.setattr(compat, "coordination_client", lambda: client)
    counts = collections.defaultdict(itertools.count)
    monkeypatch.setattr(agreement, "_NUMBERS", counts)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    agreement.check_agreement("save", {}, (0, 2))
    (alone,) = client.keys
    counts.clear()
    for _ in range(others_before):
        agreement.check_agreement("save", {}, (0, 1))
    agreement.check_agreement("save", {}, (0, 2))
    assert client.keys[-1] == alone
    agreement.check_agreement("save", {}, (0, 2))
    assert client.keys[-1] != alone  # the next one of the same processes
