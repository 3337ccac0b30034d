"""Adam and AdamW for JAX: fused, sharded and precise about dtypes.

Fused: one compiled kernel updates every leaf in place, on CPU and CUDA with the same bits.
Sharded: optimizer state is spread over a mesh, with explicit reduce-scatter and all-gather.
Precise: what is stored and what travels each has its own dtype, kept in the compiled program.

Start with ``fused_adamw`` in place of ``optax.adamw``; for several devices, see
``distributed_fused_adamw`` and ``train_step``.
"""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

from jdistadam.accumulation import AccumulatedGrads
from jdistadam.batches import shard_batch
from jdistadam.checkpoint import from_optax_state, main_params, to_optax_state
from jdistadam.combine import chain, inject_hyperparams
from jdistadam.config import MixedPrecisionPolicy
from jdistadam.distributed import distributed_fused_adam, distributed_fused_adamw
from jdistadam.distributed_state import DistributedState, scale_loss
from jdistadam.distributed_transformation import DistributedTransformation
from jdistadam.errors import (
    DtypeError,
    HyperparameterError,
    JDistAdamError,
    LayoutError,
    MeshError,
    NativeError,
    PolicyError,
    ShapeError,
    TreeError,
)
from jdistadam.gather import gather_params, remat_policy
from jdistadam.loss_scale import DynamicLossScale, LossScaleState
from jdistadam.main_state import MainParamsState
from jdistadam.memory_plan import Plan, plan
from jdistadam.nonfinite import count_nonfinite, nonfinite_paths
from jdistadam.optimizer import fused_adam, fused_adamw
from jdistadam.program_audit import Audit, audit
from jdistadam.train_state import TrainState, full_params, reload_main_params
from jdistadam.training import local_params, train_step
from jdistadam.transformation import FusedTransformation

try:
    __version__ = _version("jdistadam")
except _NotInstalled:  # imported from a source tree
    __version__ = "unknown"

__all__ = [
    "AccumulatedGrads",
    "Audit",
    "DistributedState",
    "DistributedTransformation",
    "DtypeError",
    "DynamicLossScale",
    "FusedTransformation",
    "HyperparameterError",
    "JDistAdamError",
    "LayoutError",
    "LossScaleState",
    "MainParamsState",
    "MeshError",
    "MixedPrecisionPolicy",
    "NativeError",
    "Plan",
    "PolicyError",
    "ShapeError",
    "TrainState",
    "TreeError",
    "audit",
    "chain",
    "count_nonfinite",
    "distributed_fused_adam",
    "distributed_fused_adamw",
    "from_optax_state",
    "full_params",
    "fused_adam",
    "fused_adamw",
    "gather_params",
    "inject_hyperparams",
    "local_params",
    "main_params",
    "nonfinite_paths",
    "plan",
    "reload_main_params",
    "remat_policy",
    "scale_loss",
    "shard_batch",
    "to_optax_state",
    "train_step",
]
