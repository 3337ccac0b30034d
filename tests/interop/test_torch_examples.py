"""What docs/interop.md runs where torch is: it runs here as it stands, if torch is installed."""

import itertools
import re

import jax
import numpy as np
import pytest

import jdistadam as jda
from jdistadam import interop
from support.bits import assert_same_bits
from support.paths import ROOT

torch = pytest.importorskip("torch", reason="needs torch")

EXPORT, *_, LOAD = re.findall(r"```py\n(.*?)```", (ROOT / "docs/interop.md").read_text(), re.S)
GROUPS = {
    "one": [["c", "a", "b"]],
    "two, the last first": [["c"], ["a", "b"]],
    "three, mixed": [["b"], ["c"], ["a"]],
}


class Tied(torch.nn.Module):
    """Three layers of equal shapes, and one of them under a second name; with a buffer."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            setattr(self, name, torch.nn.Linear(4, 4, bias=False))
        self.z = torch.nn.Linear(4, 4, bias=False)
        self.z.weight = self.a.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        return self.z(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


def trained(groups):
    torch.manual_seed(5)
    model = Tied()
    weights = [[getattr(model, name).weight for name in names] for names in groups]
    optimizer = torch.optim.AdamW([dict(params=x) for x in weights], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def moments(model, optimizer):
    """Those of each layer, found by its parameter."""
    state = {name: optimizer.state[getattr(model, name).weight] for name in "abc"}
    return {
        (name, key): entry[key].numpy()
        for (name, entry), key in itertools.product(state.items(), ("exp_avg", "exp_avg_sq"))
    }


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_moments_keep_their_parameters_there_and_back(tmp_path, monkeypatch, groups):
    """Groups in another order than the model's, of parameters of one shape, and a tied weight."""
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained(groups)
    exec(EXPORT, dict(model=model, optimizer=optimizer))
    file = interop.read_safetensors("state.safetensors")
    theirs = interop.from_torch(file["optimizer"], file["params"], file["names"])
    want = moments(model, optimizer)
    for name in "abc":
        leaf = theirs.leaves[f"{name}.weight"]
        assert_same_bits(leaf.mu, want[name, "exp_avg"])
        assert_same_bits(leaf.nu, want[name, "exp_avg_sq"])

    like = {name: {"weight": jax.ShapeDtypeStruct((4, 4), np.float32)} for name in "abc"}
    tx = jda.fused_adamw(0.01, weight_decay=0.1)
    params, state = interop.to_fused(theirs, tx, like)
    exported = interop.from_fused(params, state, tx, file["names"], groups=theirs.groups)
    interop.write_safetensors("back.safetensors", interop.to_torch(exported)._asdict())
    again = Tied()
    loaded = dict(model=again)
    exec(LOAD, loaded)
    for key, x in moments(again, loaded["optimizer"]).items():
        assert_same_bits(x, want[key], str(key))
    for (name, x), y in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert_same_bits(x.numpy(), y.numpy(), name)
