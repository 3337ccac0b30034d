"""Names of the trees that optimizers take and return, for signatures."""

from __future__ import annotations

from typing import Any, TypeAlias

Params: TypeAlias = Any
"""A tree of arrays: the parameters of the model."""

Grads: TypeAlias = Any
"""A tree of arrays with the structure and the shapes of the params."""

OptState: TypeAlias = Any
"""The result of an optimizer's ``init``, ``update`` or ``step``."""
