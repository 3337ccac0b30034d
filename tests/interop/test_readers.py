"""The readers of Apex, NeMo and Megatron-FSDP, on layouts that are written out by hand."""

import types

import ml_dtypes
import numpy as np
import pytest

import jdistadam as jda
from jdistadam import interop
from support import their_layouts
from support.bits import assert_same_bits
from support.their_layouts import GROUPS, NAMES, SETTINGS, STEP, adam, rounded

STATE = adam()
PARAMS = {name: leaf[0] for name, leaf in STATE.items()}
NARROW = {name: rounded(x)[0] for name, x in PARAMS.items()}


def nemo(keys, params=NARROW):
    return interop.from_nemo(their_layouts.nemo(STATE, keys), params, NAMES)


def from_file(folder, layout):
    """A layout as it comes back from a file: dictionaries with string keys, JSON, mapped arrays."""
    interop.write_safetensors(folder / "state.safetensors", layout)
    return interop.read_safetensors(folder / "state.safetensors")


def v1(**kwargs):
    ranks = their_layouts.apex_v1(STATE, **kwargs)
    keeps = kwargs.get("keeps", "params")
    return ranks, NARROW if keeps == "remainders" else PARAMS


READERS = {
    "apex": lambda: interop.from_torch(their_layouts.fused_adam(STATE), PARAMS, NAMES),
    "nemo": lambda: nemo(("optimizer", "fp32_from_fp16_params")),
    "nemo, old": lambda: nemo(("optimizer_state_dict", "fp32_from_fp16")),
    "apex v2": lambda: interop.from_apex_distributed(their_layouts.apex_v2(STATE), None, NAMES),
    "apex v1": lambda: interop.from_apex_distributed(*v1(), NAMES),
    "apex v1, remainders": lambda: interop.from_apex_distributed(*v1(keeps="remainders"), NAMES),
    "apex v1, nothing": lambda: interop.from_apex_distributed(*v1(keeps="nothing"), NAMES),
    "apex v1, one process": lambda: interop.from_apex_distributed(
        v1(processes=1, shard_size=64)[0][0], PARAMS, NAMES
    ),
    "megatron": lambda: interop.from_megatron_fsdp(their_layouts.megatron_fsdp(STATE)),
}


def assert_is_state(theirs):
    assert theirs.step == STEP
    assert set(theirs.leaves) == set(NAMES)
    for name, want in STATE.items():
        for got, x in zip(theirs.leaves[name], want, strict=True):
            if x.size:
                assert_same_bits(got, x, name)
            assert got.shape == x.shape
    for group in theirs.groups:
        assert SETTINGS.items() <= group.settings.items()


@pytest.mark.parametrize("reader", READERS)
def test_every_layout_gives_the_same_state(reader):
    theirs = READERS[reader]()
    assert_is_state(theirs)
    groups = [NAMES] if reader == "megatron" else GROUPS
    assert [list(group.names) for group in theirs.groups] == list(map(list, groups))
    assert theirs.arguments() == dict(
        learning_rate=0.02, b1=0.8, b2=0.97, eps=1e-6, weight_decay=0.3
    )


def test_every_layout_comes_back_from_a_file(tmp_path):
    read = lambda layout: from_file(tmp_path, layout)  # noqa: E731
    layouts = their_layouts
    assert_is_state(interop.from_torch(read(layouts.fused_adam(STATE)), PARAMS, NAMES))
    assert_is_state(interop.from_nemo(read(layouts.nemo(STATE)), NARROW, NAMES))
    assert_is_state(interop.from_apex_distributed(read(layouts.apex_v2(STATE)), None, NAMES))
    assert_is_state(interop.from_megatron_fsdp(read(layouts.megatron_fsdp(STATE))))
    ranks = layouts.apex_v1(STATE, keeps="remainders", as_dicts=True)
    gathered = read({"gathered_states": ranks, "params": NARROW})
    assert_is_state(interop.from_apex_distributed(gathered, gathered["params"], NAMES))


def test_from_torch_reads_names_from_groups():
    layout = their_layouts.fused_adam(STATE)
    for group, names in zip(layout["param_groups"], GROUPS, strict=True):
        group["param_names"] = names
    assert_is_state(interop.from_torch(layout, PARAMS))


def test_from_torch_reads_states_keyed_by_name():
    layout = their_layouts.fused_adam(STATE)
    layout["state"] = {NAMES[i]: x for i, x in layout["state"].items()}
    for group, names in zip(layout["param_groups"], GROUPS, strict=True):
        group["params"] = names
    assert_is_state(interop.from_torch(layout, PARAMS))


def test_nemo_main_params_belong_to_those_in_16_bits_that_were_trained():
    params = NARROW | {"conv": PARAMS["conv"], "a.bias": NARROW["a.bias"]}
    layout = their_layouts.nemo(STATE, narrow=["a.weight", "scale", "empty"])
    del layout["optimizer"]["state"][1]  # a.bias, frozen
    theirs = interop.from_nemo(layout, params, NAMES)
    assert theirs.leaves["a.bias"].mu is None
    for name in ("a.weight", "conv", "scale", "empty"):
        assert_same_bits(theirs.leaves[name].param, PARAMS[name], name)


def test_channels_last_shards_are_in_the_order_of_memory():
    turned = {k: tuple(x) for k, x in STATE.items()}
    turned["conv"] = tuple(x.transpose(0, 2, 3, 1).copy() for x in STATE["conv"])
    ranks = their_layouts.apex_v1(turned)
    assert_is_state(interop.from_apex_distributed(ranks, PARAMS, NAMES, channels_last=["conv"]))


@pytest.mark.parametrize("key", ["master_param", "remainder"])
def test_main_params_of_transformer_engine(key):
    layout = their_layouts.fused_adam(STATE)
    for i, name in enumerate(NAMES):
        main = PARAMS[name] if key == "master_param" else rounded(PARAMS[name])[1]
        layout["state"][i]["master_param"] = main
    assert_is_state(interop.from_torch(layout, NARROW, NAMES))


class Tensor:
    """What is asked of a torch tensor."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, f"torch.{x.dtype}"

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.x.astype(np.float32))

    def numpy(self):
        if self.x.dtype == ml_dtypes.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.x


def test_readers_accept_torch_tensors():
    layout = their_layouts.nemo(STATE)
    for entry in layout["optimizer"]["state"].values():
        entry.update({k: Tensor(x) for k, x in entry.items()})
    layout["fp32_from_fp16_params"] = [
        [Tensor(x) for x in group] for group in layout["fp32_from_fp16_params"]
    ]
    for group in layout["optimizer"]["param_groups"]:
        group["lr"], group["step"] = Tensor(np.asarray(0.02)), Tensor(np.asarray([STEP]))
    params = {name: Tensor(x) for name, x in NARROW.items()}
    theirs = interop.from_nemo(layout, params, NAMES)
    assert_is_state(theirs)
    assert [type(group.settings["step"]) for group in theirs.groups] == [int, int]
    narrow = interop.from_torch({"state": {}, "param_groups": [{"params": [0]}]}, params, NAMES[:1])
    assert_same_bits(narrow.leaves[NAMES[0]].param, NARROW[NAMES[0]])


def changed(layout, **changes):
    """An Apex v1 state of which a fragment's fields are others."""
    fragment = layout[0]["state"]["buckets"][0].fragments[0]
    for key, value in changes.items():
        setattr(fragment, key, value)
    return layout


def twice(ranks):
    """Two processes that have the same shards, but for one number."""
    copy = [dict(rank) for rank in their_layouts.apex_v1(STATE)]
    copy[0]["state"]["buckets"][0].exp_avg_shard[0] += 1
    return [*ranks, copy[0]]


def torch_like(**entry):
    return {"state": {0: entry}, "param_groups": [dict(SETTINGS, params=[0])]}


W = {"w": np.ones(2, np.float32)}
M = dict(step=3, exp_avg=W["w"], exp_avg_sq=W["w"])
DTENSOR = types.SimpleNamespace(full_tensor=None)

BAD = {
    "no names": (lambda: interop.from_torch(torch_like(**M), W), "named_parameters"),
    "too few names": (lambda: interop.from_torch(torch_like(**M), W, []), "0 names"),
    "a name twice": (lambda: interop.from_nemo(their_layouts.nemo(STATE), NARROW, ["a"] * 5), "1 different"),
    "other shapes": (lambda: interop.from_torch(torch_like(**M), {"w": np.ones(3)}, ["w"]), r"state of 'w'.*\(3,\)"),
    "an index beyond": (lambda: interop.from_torch(torch_like() | {"state": {7: M}}, W, ["w"]), r"\['state'\]\[7\]"),
    "amsgrad": (lambda: interop.from_torch({"state": {0: M}, "param_groups": [dict(params=[0], amsgrad=True)]}, W, ["w"]), "third moment"),
    "maximize": (lambda: interop.from_torch({"state": {0: M}, "param_groups": [dict(params=[0], maximize=True)]}, W, ["w"]), "negated loss"),
    "another optimizer": (lambda: interop.from_torch(torch_like(momentum_buffer=W["w"]), W, ["w"]), "'momentum_buffer'"),
    "steps that differ": (lambda: interop.from_torch({"state": {0: M | {"step": 3}, 1: M | {"step": 4}}, "param_groups": [dict(params=[0, 1])]}, {"w": W["w"], "v": W["w"]}, ["w", "v"]), r"\{3.0: \"'w'\", 4.0: \"'v'\"\}"),
    "no step": (lambda: interop.from_torch(torch_like(exp_avg=W["w"], exp_avg_sq=W["w"]), W, ["w"]), "state of 'w': has no step count"),
    "no params": (lambda: interop.from_torch({"state": {}, "param_groups": [{}]}, W, ["w"]), "not a list"),
    "a group of others": (lambda: interop.to_torch(interop.NamedState(0, {}, (interop.Group(("w",), SETTINGS),))), "'w': is in a group"),
    "names in groups": (lambda: interop.from_torch({"state": {0: M}, "param_groups": [dict(params=[0], param_names=["w", "v"])]}, W), "got 2 names, 2 different ones, expected one name for each of the 1"),
    "no names in groups": (lambda: interop.from_torch({"state": {0: M}, "param_groups": [dict(params=[0], param_names=None)]}, W), "param_names: not a list"),
    "half a step": (lambda: interop.from_torch(torch_like(**M | dict(step=1.5)), W, ["w"]), "whole number"),
    "too many steps": (lambda: interop.from_torch(torch_like(**M | dict(step=3e9)), W, ["w"]), r"below 2\*\*31"),
    "a shard": (lambda: interop.from_torch(torch_like(exp_avg=DTENSOR, exp_avg_sq=W["w"]), W, ["w"]), "dcp_to_torch_save"),
    "an object": (lambda: interop.from_torch(torch_like(exp_avg="x", exp_avg_sq=W["w"]), W, ["w"]), "exp_avg of 'w'"),
    "nemo's for torch": (lambda: interop.from_torch(their_layouts.nemo(STATE), PARAMS, NAMES), "from_nemo"),
    "torch's for nemo": (lambda: interop.from_nemo(torch_like(**M), W, ["w"]), "from_torch"),
    "nemo without mains": (lambda: interop.from_nemo({"optimizer": torch_like(**M)}, W, ["w"]), "fp32_from_fp16_params"),
    "nemo, wide params": (lambda: interop.from_nemo(their_layouts.nemo(STATE), PARAMS, NAMES), "16 bits"),
    "nemo, a group less": (lambda: interop.from_nemo(their_layouts.nemo(STATE) | {"fp32_from_fp16_params": [[]]}, NARROW, NAMES), "number of groups"),
    "torch's for megatron": (lambda: interop.from_megatron_fsdp(torch_like(**M), W), "from_torch"),
    "megatron, no group": (lambda: interop.from_megatron_fsdp({"state": {"w": M}, "param_to_group_meta": {}}, W), r"\['w'\]: belongs to no group"),
    "megatron, one name": (lambda: interop.from_megatron_fsdp({"state": {}, "param_to_group_meta": {"module.w": {}, "w": {}}}, W), "prefixes"),
    "v1 packed": (lambda: interop.from_apex_distributed({"gathered_states": [np.zeros(3, np.uint8)]}, PARAMS, NAMES), "BytesIO"),
    "v1 without params": (lambda: interop.from_apex_distributed(v1()[0], None, NAMES), r"params\['a.weight'\]"),
    "v1, a process less": (lambda: interop.from_apex_distributed(v1()[0][:-1], PARAMS, NAMES), "states of all processes"),
    "v1, wide params": (lambda: interop.from_apex_distributed(v1(keeps="remainders")[0], PARAMS, NAMES), "in bfloat16"),
    "v1, replicas differ": (lambda: interop.from_apex_distributed(twice(v1()[0]), PARAMS, NAMES), "another process"),
    "v1, beyond": (lambda: interop.from_apex_distributed(changed(v1()[0], shard_param_range=(10, 15)), PARAMS, NAMES), "elements 10 to 15"),
    "v1, none": (lambda: interop.from_apex_distributed([], PARAMS, NAMES), "no process"),
    "v3": (lambda: interop.from_apex_distributed(their_layouts.apex_v2(STATE) | {"format": 3}, None, NAMES), "unknown format"),
    "v2 without step": (lambda: interop.from_apex_distributed(their_layouts.fused_adam(STATE), PARAMS, NAMES), "no step count"),
    "not channels last": (lambda: interop.from_apex_distributed(*v1(), NAMES, channels_last=["a.weight"]), "4 dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_malformed_states_raise(case):
    call, message = BAD[case]
    with pytest.raises(jda.JDistAdamError, match=message):
        call()
