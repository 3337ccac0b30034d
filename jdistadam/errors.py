"""The exceptions of jdistadam.

Every message has one form, so that users can act on it without a debugger::

    {where}: {what is wrong}: got {got}, expected {expected}. {one action}

``where`` is the path of a leaf or the name of an argument.

Each class is also a subclass of the exception of Python or JAX that such a mistake usually raises,
so ``except ValueError`` keeps working.
"""

from __future__ import annotations

from jax.errors import JaxRuntimeError


class JDistAdamError(Exception):
    """Base class of all exceptions raised by jdistadam.

    Example:
      >>> print(ShapeError("grads['w']: shape differs from the parameter: "
      ...                  "got (3,), expected (2, 3). Fix the loss."))
      grads['w']: shape differs from the parameter: got (3,), expected (2, 3). Fix the loss.
    """


class TreeError(JDistAdamError, ValueError):
    """Two trees that must match differ in structure."""


class ShapeError(JDistAdamError, ValueError):
    """An array has the wrong shape, even if NumPy would broadcast it."""


class DtypeError(JDistAdamError, TypeError):
    """An array has a dtype that is not supported in its place."""


class HyperparameterError(JDistAdamError, ValueError):
    """A hyperparameter is out of its range."""


class PolicyError(JDistAdamError, ValueError):
    """A precision policy or sharding strategy is unknown, contradictory or not supported."""


class MeshError(JDistAdamError, ValueError):
    """A mesh lacks an axis, or an array is not placed on the mesh as required."""


class LayoutError(JDistAdamError, ValueError):
    """A sharded state belongs to another layout, or to an unknown one."""


class AgreementError(JDistAdamError, RuntimeError):
    """The processes of a run are about to do different things."""


class CheckpointError(JDistAdamError, ValueError):
    """A checkpoint is missing, damaged or of another form, or it could not be written."""


class NonfiniteError(JDistAdamError, FloatingPointError):
    """Gradients or losses stay non-finite: the run would no longer learn."""


class OutOfMemoryError(JDistAdamError, JaxRuntimeError):
    """A device has too little memory for a step; the message says what the plan needs."""


class NativeError(JDistAdamError, ImportError):
    """A compiled module is missing or does not fit the running jaxlib."""
