"""``chain`` and ``inject_hyperparams`` for optimizers with a fused step."""
