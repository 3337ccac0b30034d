"""Handwritten layouts of states that need GPUs to be made.

Each function writes the same Adam in one layout, as documented in jdistadam/interop. No Apex, NeMo
or Megatron-LM wrote these files.
"""

import types

import ml_dtypes
import numpy as np

SETTINGS = dict(lr=0.02, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3)
STEP = 6
SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "conv": (2, 3, 2, 2), "scale": (), "empty": (0, 2)}
NAMES = list(SHAPES)
GROUPS = (NAMES[:2], NAMES[2:])


def adam():
    """Parameters and moments by name: (param, mu, nu), float32."""
    rng = np.random.default_rng(8)

    def normal(shape):
        return np.asarray(rng.standard_normal(shape), np.float32)

    return {k: (normal(s), normal(s), np.square(normal(s))) for k, s in SHAPES.items()}


def param_groups(**more):
    indices = [[NAMES.index(name) for name in group] for group in GROUPS]
    return [dict(SETTINGS, params=found, **more) for found in indices]


def moments(leaf, **more):
    return dict(exp_avg=leaf[1], exp_avg_sq=leaf[2], **more)


def fused_adam(state):
    entries = {i: moments(state[name]) for i, name in enumerate(NAMES)}
    return {"state": entries, "param_groups": param_groups(step=STEP, bias_correction=True)}


def nemo(state, keys=("optimizer", "fp32_from_fp16_params"), narrow=NAMES):
    mains = [[state[name][0] for name in group if name in narrow] for group in GROUPS]
    return {keys[0]: fused_adam(state), keys[1]: mains}


def apex_v2(state):
    entries = {i: moments(state[k], param=state[k][0]) for i, k in enumerate(NAMES)}
    groups = param_groups(bias_correction=True)
    return {"state": {"step": STEP} | entries, "param_groups": groups, "format": 2}


def megatron_fsdp(state):
    meta = dict(SETTINGS, step=STEP, bias_correction=True, lr_mult=1.0)
    optimizer = {
        "state": {f"module.module.{name}": moments(state[name]) for name in NAMES},
        "param_to_group_meta": {f"module.module.{name}": dict(meta) for name in NAMES},
    }
    return {"optimizer": optimizer, "model": {f"module.{k}": x[0] for k, x in state.items()}}


def rounded(x):
    """The nearest bfloat16 of a float32, ties away from zero, and the rest of its bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    high = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16)
    return high.view(ml_dtypes.bfloat16), bits.astype(np.uint16).view(np.int16)


def apex_v1(state, processes=3, shard_size=5, alignment=4, keeps="params", as_dicts=False):
    """The states of all processes: parameters cut into buckets, and these into shards.

    Args:
      state: The result of ``adam``.
      processes: Their number.
      shard_size: Elements of a shard.
      alignment: Fragments begin at multiples of it.
      keeps: "params", "remainders" or "nothing" in addition to the moments.
      as_dicts: Whether buckets and fragments are dictionaries, as in a file.
    """
    make = dict if as_dicts else types.SimpleNamespace
    size, places = processes * shard_size, []  # (name, bucket, start in it, in parameter, length)
    bucket, filled = 0, 0
    for name in NAMES:
        done = 0
        while done < state[name][0].size:
            start = -(-filled // alignment) * alignment
            length = min(state[name][0].size - done, size - start)
            if length <= 0:
                bucket, filled = bucket + 1, 0
                continue
            places.append((name, bucket, start, done, length))
            filled, done = start + length, done + length
    flat = {k: [x.reshape(-1) for x in leaf] for k, leaf in state.items()}
    return [
        _process(rank, places, flat, shard_size, keeps, make, bucket + 1)
        for rank in range(processes)
    ]


def _process(rank, places, flat, shard_size, keeps, make, num_buckets):
    buckets = []
    for b in range(num_buckets):
        kinds = {"exp_avg_shard": 1, "exp_avg_sq_shard": 2}
        shards = {kind: np.zeros(shard_size, np.float32) for kind in kinds}
        if keeps == "params":
            kinds["params_shard"] = 0
            shards["params_shard"] = np.zeros(shard_size, np.float32)
        shards.setdefault("params_shard", None)
        shards["param_remainders_shard"] = (
            np.zeros(shard_size, np.int16) if keeps == "remainders" else None
        )
        fragments = []
        for name, _, start, done, length in (x for x in places if x[1] == b):
            low, high = (
                min(max(x - shard_size * rank, 0), shard_size) for x in (start, start + length)
            )
            inside = low < high
            first = low + shard_size * rank - start + done
            if inside:
                part = slice(first, first + high - low)
                for kind, i in kinds.items():
                    shards[kind][low:high] = flat[name][i][part]
                if keeps == "remainders":
                    shards["param_remainders_shard"][low:high] = rounded(flat[name][0])[1][part]
            group = next(i for i, names in enumerate(GROUPS) if name in names)
            fragments.append(
                make(
                    param_group_id=group,
                    param_id=GROUPS[group].index(name),
                    bucket_id=b,
                    in_local_shard=inside,
                    shard_range=(low, high) if inside else None,
                    shard_param_range=(first, first + high - low) if inside else None,
                )
            )
        buckets.append(make(fragments=fragments, **shards))
    entries = {i: {"fragments": []} for i in range(len(NAMES))}
    groups = param_groups(bias_correction=True)
    return {"state": {"step": STEP, "buckets": buckets} | entries, "param_groups": groups}
