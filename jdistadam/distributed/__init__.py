"""``distributed_fused_adamw``: sharded state and explicit collectives, inside ``jax.shard_map``."""
