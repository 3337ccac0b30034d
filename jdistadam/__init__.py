"""Adam and AdamW for JAX: fused, sharded and precise about dtypes.

Fused: one compiled kernel updates every leaf in place, on CPU and CUDA with the same bits.
Sharded: optimizer state is spread over a mesh, with explicit reduce-scatter and all-gather.
Precise: storage, communication and sums use the dtypes that you choose for each.

Start with ``fused_adamw`` in place of ``optax.adamw``; for several devices, see ``distributed`` and
``train_step``.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

from jdistadam import interop
from jdistadam.checkpoint.checkpointer import Checkpointer, save
from jdistadam.checkpoint.restore import checkpoint_steps, restore, restore_extra, restore_params
from jdistadam.compose.chain import chain
from jdistadam.compose.inject_hyperparams import inject_hyperparams
from jdistadam.compose.selections import masked, named_chain, partition
from jdistadam.compose.wrappers import MultiSteps, apply_if_finite
from jdistadam.core.codecs import BlockCodes
from jdistadam.core.guards import DynamicLossScale, LossScaleState, NormGuard, NormGuardState
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.core.waits import set_wait_limit
from jdistadam.distributed.accumulate import AccumulatedGrads
from jdistadam.distributed.gather_params import (
    gather_params,
    local_params,
    remat_policy,
    stored_params,
)
from jdistadam.distributed.optimizer import distributed
from jdistadam.distributed.shard import Shard
from jdistadam.distributed.state import DistributedState, scale_loss
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.low_precision import RoundingState, decoded
from jdistadam.drop_in.optimizer import fused_adam, fused_adamw
from jdistadam.drop_in.parts import add_decayed_weights, scale_by_adam, scale_by_learning_rate
from jdistadam.drop_in.placement import state_shardings
from jdistadam.drop_in.state import MainParamsState
from jdistadam.drop_in.transformation import FusedTransformation, jit_step
from jdistadam.errors import (
    AgreementError,
    CheckpointError,
    DtypeError,
    HyperparameterError,
    JDistAdamError,
    LayoutError,
    MeshError,
    NativeError,
    NonfiniteError,
    OutOfMemoryError,
    PolicyError,
    ShapeError,
    TreeError,
)
from jdistadam.kernels.native import export_checks
from jdistadam.tools.audit import Audit, audit
from jdistadam.tools.plan import plan
from jdistadam.training.eval_step import EvalStep, ema_params, eval_step, full_params
from jdistadam.training.extra_state import ExtraState
from jdistadam.training.loss import SkipLimit, count_nonfinite, nonfinite_paths
from jdistadam.training.optax_state import from_optax_state, main_params, to_optax_state
from jdistadam.training.placement import shard_batch
from jdistadam.training.planned import Plan
from jdistadam.training.train_state import TrainState, reload_main_params
from jdistadam.training.train_step import TrainStep, train_step

try:
    __version__ = _version("jdistadam")
except _NotInstalled:  # imported from a source tree
    __version__ = "unknown"


def __getattr__(name: str) -> object:
    """Imports ``jda.flax`` when it is first used: Flax is optional."""
    if name != "flax":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module("jdistadam.flax")


__all__ = [  # noqa: RUF022 - by task
    # One program, any sharding: in place of optax.adamw and optax.adam.
    "fused_adam",
    "fused_adamw",
    "jit_step",
    "state_shardings",
    "FusedTransformation",
    "MainParamsState",
    "BlockCodes",
    "RoundingState",
    "decoded",
    # Several devices: sharded state, explicit collectives.
    "distributed",
    "DistributedTransformation",
    "DistributedState",
    "MixedPrecisionPolicy",
    "DynamicLossScale",
    "LossScaleState",
    "NormGuard",
    "NormGuardState",
    # A whole training step.
    "train_step",
    "TrainStep",
    "eval_step",
    "EvalStep",
    "TrainState",
    "shard_batch",
    "full_params",
    "ema_params",
    "reload_main_params",
    "count_nonfinite",
    "nonfinite_paths",
    "SkipLimit",
    "set_wait_limit",
    # The pieces of a training step, inside jax.shard_map.
    "local_params",
    "gather_params",
    "Shard",
    "stored_params",
    "remat_policy",
    "scale_loss",
    "AccumulatedGrads",
    # Composition with optax's own transformations.
    "scale_by_adam",
    "add_decayed_weights",
    "scale_by_learning_rate",
    "chain",
    "named_chain",
    "masked",
    "partition",
    "inject_hyperparams",
    "MultiSteps",
    "apply_if_finite",
    # Programs of jax.export.
    "export_checks",
    # Checkpoints.
    "save",
    "restore",
    "restore_extra",
    "restore_params",
    "Checkpointer",
    "checkpoint_steps",
    # To and from optax.
    "main_params",
    "to_optax_state",
    "from_optax_state",
    "ExtraState",
    # To and from torch, Apex, Megatron-FSDP and NeMo.
    "interop",
    # What a step stores and sends, before and after compilation.
    "plan",
    "Plan",
    "audit",
    "Audit",
    # Exceptions.
    "JDistAdamError",
    "AgreementError",
    "CheckpointError",
    "DtypeError",
    "HyperparameterError",
    "LayoutError",
    "MeshError",
    "NativeError",
    "NonfiniteError",
    "OutOfMemoryError",
    "PolicyError",
    "ShapeError",
    "TreeError",
]
