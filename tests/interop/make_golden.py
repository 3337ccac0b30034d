"""Makes golden.safetensors: a model that torch trains with torch.optim.AdamW.

Run it where torch and safetensors are installed, from this folder:

    python make_golden.py

The file in the repository was made by torch 2.15.0 (CPU). It has the parameters and the state after
STEPS steps, with the output of the model for an input in float64, then the gradients and the
results of each of STEPS more, and the last parameters in bfloat16 as torch rounds them.
"""

import copy
import json

import torch
from safetensors.torch import save_file

STEPS = 4


class Model(torch.nn.Module):
    """An embedding, a convolution and a linear layer, with normalisation between them."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.conv = torch.nn.Conv2d(3, 4, (3, 2))
        self.norm = torch.nn.LayerNorm(4)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, tokens):
        x = self.embed(tokens).permute(0, 3, 1, 2)
        x = torch.relu(self.conv(x)).mean(dim=(2, 3))
        return self.out(self.norm(x))


def parameters_of(model):
    return {f"params/{name}": x.detach().clone() for name, x in model.named_parameters()}


def state_of(optimizer):
    entries = optimizer.state_dict()["state"].items()
    return {f"optimizer/state/{i}/{k}": x.clone() for i, entry in entries for k, x in entry.items()}


def main():
    torch.manual_seed(3)
    model = Model()
    decayed = {name: x for name, x in model.named_parameters() if x.ndim > 1}
    others = {name: x for name, x in model.named_parameters() if x.ndim == 1}
    shared = dict(lr=0.02, betas=(0.8, 0.97), eps=1e-6)
    groups = [
        dict(params=list(others.values()), weight_decay=0.0, **shared),
        dict(params=list(decayed.values()), weight_decay=0.3, **shared),
    ]
    optimizer = torch.optim.AdamW(groups)
    tensors = {}

    def step():
        tokens, wanted = torch.randint(5, (6, 4, 4)), torch.randn(6, 2)
        optimizer.zero_grad()
        (model(tokens) - wanted).square().sum().backward()
        optimizer.step()

    for _ in range(STEPS):
        step()
    tokens = torch.randint(5, (2, 5, 4))
    tensors |= parameters_of(model) | state_of(optimizer)
    tensors |= {"tokens": tokens, "logits": copy.deepcopy(model).double()(tokens).detach()}
    for i in range(STEPS):
        step()
        tensors |= {f"later/{i}/grads/{k}": x.grad.clone() for k, x in model.named_parameters()}
        tensors |= {f"later/{i}/{k}": x for k, x in parameters_of(model).items()}
        tensors |= {f"later/{i}/{k}": x for k, x in state_of(optimizer).items()}
    metadata = {
        "names": [*others, *decayed],
        "optimizer/param_groups": optimizer.state_dict()["param_groups"],
        "torch": torch.__version__,
    }
    tensors |= {f"rounded/{name}": x.detach().bfloat16() for name, x in model.named_parameters()}
    metadata = {key: json.dumps(value) for key, value in metadata.items()}
    save_file({k: x.contiguous() for k, x in tensors.items()}, "golden.safetensors", metadata)


main()
