"""Kernel calls of some buckets each: the gather of one call runs beside the next call."""

import re

import jax.numpy as jnp
import pytest

from jdistadam.distributed import calls, schedule
from support.bits import assert_trees_same_bits
from support.exact_steps import GROUPS, LABELS, batches, first_state, make_tx, run
from support.h200 import compile_step
from support.samples import few, often

CASES = {
    "ZeRO-1": ("flat-optim", "8 bits", dict(norms="leaves")),
    "ZeRO-2": ("flat-optim_grads", "comm", dict(ema_decay=0.9, max_grad_norm=1.0)),
    "replicas": ("hybrid-optim", "bfloat16", dict(param_labels=LABELS, groups=GROUPS, norms="total")),
    "replicas, ZeRO-3": ("twice-optim_grads_params", "remainder16", {}),
}  # fmt: skip


@few(1)
@pytest.mark.parametrize("case", CASES)
@often(lambda case: case in ("ZeRO-1", "replicas"))
def test_bits_do_not_depend_on_the_number_of_calls(case, monkeypatch):
    place, policy, options = CASES[case]
    found, groups = [], []
    merged = calls._merged

    def noted(*args):
        groups.append(merged(*args))
        return groups[-1]

    monkeypatch.setattr(calls, "_merged", noted)
    for limit in (schedule.MERGED_BYTES, 1):
        monkeypatch.setattr(calls, "MERGED_BYTES", limit)
        tx = make_tx(place, policy, bucket_bytes=1 << 10, **options)
        state = first_state(tx, policy)
        found.append(list(run(tx, state, batches(), micro=3))[-1])
        assert max(map(len, groups)) == 1 or limit == 1
    assert max(map(len, groups)) >= 3
    assert_trees_same_bits(*found)


@few(1)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_gathers_run_beside_updates_on_h200s(h200s, clip, monkeypatch):
    """And nothing is copied for that."""
    limit = 1 << 21  # bytes of one matrix
    monkeypatch.setattr(calls, "MERGED_BYTES", limit)
    options = {"xla_gpu_all_gather_combine_threshold_bytes": limit}
    _, _, compiled = compile_step(
        h200s(2), jnp.bfloat16, jnp.bfloat16, max_grad_norm=clip, options=options
    )
    text = compiled.as_text()
    assert not re.search(r"\[[\d,]+\]\S* copy(?:-start)?\(", text)
    pattern = r'(all-gather-start|all-gather-done)\(|target="jdistadam_(adam)"'
    entry = text[text.index("\nENTRY") :]
    events = [a or b for a, b in re.findall(pattern, entry)]
    order = "".join(
        {"all-gather-start": "[", "all-gather-done": "]", "adam": "K"}[x] for x in events
    )
    assert order.count("K") == 7 and order.count("[K]") == 5, order


@few(1)
@pytest.mark.parametrize(
    ("place", "count"), [("one device", 1), ("flat-no_shard", 1), ("flat-optim", 5)]
)
def test_calls_without_gathers_are_not_split(place, count, monkeypatch):
    monkeypatch.setattr(calls, "MERGED_BYTES", 1)
    tx = make_tx(place, "bfloat16", bucket_bytes=1 << 10)
    params = tx.config.tensor_local(first_state(tx, "bfloat16").params)
    found = tx.config.schedule(params)
    groups = calls._merged(found, range(len(found.buckets)), False)
    assert len(groups) == count
