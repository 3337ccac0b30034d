"""Checkpoints: saves training states to files and restores them on any mesh.

Both ways use the names of ``parts.py`` and, for Adam, the units of ``adam.py``: a parameter, or a
bucket of a distributed state, which is cut into leaves and put together again::

    save     checkpointer -> contents   state -> leaves -> groups: entries, and what makes arrays
                          -> storage    a few groups at a time: arrays -> checksum -> orbax; header
    restore  restore -> storage         header -> entries
                     -> restored        template and entries are compared -> reads, none made yet
                     -> storage         a few reads at a time: orbax -> checksum -> arrays
                     -> adam            arrays -> state
"""
