"""``distributed``: sharded state and explicit collectives, inside ``jax.shard_map``."""
