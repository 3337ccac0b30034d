"""Windows: where shards of buckets are in the flat arrays of a state."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

import jdistadam as jda
from jdistadam.distributed import flat_arrays
from jdistadam.distributed.layout import ALIGNMENT
from support.exact_steps import make_tx
from support.exact_sums import random_params

MIXED = functools.partial(jda.fused_adamw, float32_moments=lambda path: "rows" in path)


@pytest.mark.parametrize("place", ["one device", "hybrid-optim", "flat-optim_grads_params"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("float32", {}),
        ("remainder16", dict(ema_decay=0.9)),
        ("8 bits", dict(ema_decay=0.9, adam=MIXED)),
        ("bfloat16", dict(adam=functools.partial(jda.fused_adamw, mu_dtype="block8"))),
    ],
)
def test_windows_fill_every_array_without_gaps(place, policy, options):
    tx = make_tx(place, policy, **options)
    layout = tx.layout(random_params("float32" if policy == "float32" else jnp.bfloat16))
    types = flat_arrays.types_of_arrays(tx.config, layout)
    ends = collections.Counter()
    for name in flat_arrays.FLAT_ARRAYS:
        for bucket in layout.buckets:
            window = flat_arrays.window_of(tx.config, name, bucket)
            lacks_main = name == "main_params" and not bucket.has_main
            assert (window is None) == (types[name] is None or lacks_main)
            if window is not None:
                assert window.start == ends[window.array] and window.start % ALIGNMENT == 0
                assert 0 <= window.size - bucket.shard_size < ALIGNMENT
                ends[window.array] += window.size
    for name, x in flat_arrays.arrays_of(types).items():
        if x is not None:  # an array is never empty
            first, *_ = jax.tree.leaves(x)
            assert first.size == max(ends[name], ALIGNMENT), name
    fields = flat_arrays.arrays_of(types)
    assert types == {name: flat_arrays.joined_field(fields, name) for name in types}
