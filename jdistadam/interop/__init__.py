"""Optimizer states of other frameworks: import, continued training, export in torch's layout.

A reader converts a dictionary to torch's layout (``readers``), and this to a ``NamedState``: arrays
and hyperparameters by the other framework's names (``torch_layout``, ``named_state``). ``convert``
converts a ``NamedState`` to our states and back; ``to_torch`` writes it. No other framework needs
to be installed.
"""

from jdistadam.interop.convert import from_fused, from_train_state, to_fused, to_train_state
from jdistadam.interop.named_state import Group, NamedLeaf, NamedState, flax_kernels
from jdistadam.interop.readers import from_apex_distributed, from_megatron_fsdp, from_nemo
from jdistadam.interop.safetensors import read_safetensors, write_safetensors
from jdistadam.interop.torch_layout import TorchState, from_torch, to_torch

__all__ = [
    "Group",
    "NamedLeaf",
    "NamedState",
    "TorchState",
    "flax_kernels",
    "from_apex_distributed",
    "from_fused",
    "from_megatron_fsdp",
    "from_nemo",
    "from_torch",
    "from_train_state",
    "read_safetensors",
    "to_fused",
    "to_torch",
    "to_train_state",
    "write_safetensors",
]
