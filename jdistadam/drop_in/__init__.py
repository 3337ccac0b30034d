"""``fused_adamw`` and ``fused_adam``, in place of optax's optimizers, with any sharding."""
