"""Names for the trees that optimizers take and return, as they stand in signatures."""

from __future__ import annotations

from typing import Any, TypeAlias

Params: TypeAlias = Any
"""A tree of arrays: what the model computes with."""

Grads: TypeAlias = Any
"""A tree of arrays with the structure and the shapes of the params."""

OptState: TypeAlias = Any
"""What ``init`` of an optimizer returned, or a later ``update`` or ``step``."""
