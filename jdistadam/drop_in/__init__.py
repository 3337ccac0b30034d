"""``fused_adamw``: one program, any sharding, in place of ``optax.adamw``."""
