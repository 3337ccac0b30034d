"""Loads the compiled modules and registers their FFI handlers once, or says why it cannot.

Nothing here runs at import: ``status(platform)`` loads the module of a platform on its first call.

[Note: types of results]
The caller gives a foreign call the types of its results. They come from ``jax.typeof`` of an
operand, which has the mesh and the varying axes. A plain ``jax.ShapeDtypeStruct`` would claim that
a result is equal on all devices.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jaxlib
from jax import export, lax
from jax.sharding import PartitionSpec as P

from jdistadam.core import waits
from jdistadam.errors import NativeError

PLATFORMS = ("cpu", "cuda")
_MODULES = {"cpu": "jdistadam._cpu", "cuda": "jdistadam._cuda"}
_XLA_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
_LOADED = list[Any]()  # compiled modules
Arrays = TypeVar("Arrays")  # a tree


class Status(NamedTuple):
    """Whether the compiled kernels of a platform are usable, and why not."""

    available: bool
    detail: str  # build information, or the reason


@functools.cache
def status(platform: str) -> Status:
    """Loads and registers the compiled module of ``platform``, "cpu" or "cuda"."""
    if platform not in PLATFORMS:
        return Status(False, f"jdistadam has no compiled kernels for platform {platform!r}")
    try:
        module = module_of(platform)
        check_ffi_api_version(module.ffi_api_version, runtime_ffi_api_version())
    except ImportError as error:
        return Status(False, _explain(platform, error))
    for name, handler in module.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform=_XLA_PLATFORMS[platform])
    waits.follow(module.set_wait_limit)
    atexit.register(_stop_copies, module)
    _LOADED.append(module)
    return Status(True, module.build_info)


def module_of(platform: str) -> Any:
    """Returns the compiled module of a platform, or raises ImportError.

    Its handlers are registered if ``status`` says that it is available.
    """
    return importlib.import_module(_MODULES[platform])


def call(program: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled program that may copy between devices.

    If it fails, no copy that it has started writes memory any more when the error leaves.
    """
    try:
        return program(*args)
    except jax.errors.JaxRuntimeError:
        for module in _LOADED:
            module.abandon_copies()
        raise


def _stop_copies(module: Any) -> None:
    """Ends the threads of copies between devices while JAX and CUDA are there."""
    try:
        jax.effects_barrier()  # callbacks of programs under way
    finally:
        module.stop_copies()


def export_checks() -> tuple[export.DisabledSafetyCheck, ...]:
    """Returns ``disabled_checks`` of ``jax.export.export`` for our steps.

    It also registers the kernels, so call it in every process that runs an exported program.
    Without it, jax says "Cannot serialize code with custom calls" for an export, and
    "No FFI handler registered for jdistadam" for a program that runs.

    A step of ``fused_adamw`` over several devices cannot be exported, because XLA would have to
    call Python to partition it. A step of a distributed optimizer can.

    Returns:
      A check to disable for each kernel of the platforms with compiled modules.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.fused_adamw(1e-2)
      >>> params = {"w": jnp.ones(3)}
      >>> args = (params, tx.init(params), params)  # gradients, state, parameters
      >>> exporting = jax.export.export(jax.jit(tx.step), disabled_checks=jda.export_checks())
      >>> params, opt_state = exporting(*args).call(*args)
      >>> round(float(params["w"][0]), 6)
      0.989999
    """
    modules = [module_of(platform) for platform in PLATFORMS if status(platform).available]
    targets = {name for module in modules for name in module.handlers()}
    return tuple(export.DisabledSafetyCheck.custom_call(name) for name in sorted(targets))


def _explain(platform: str, error: ImportError) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return str(error)
    package = pathlib.Path(__file__).parent.parent
    is_installed = importlib.util.find_spec(_MODULES["cpu"]) is not None  # editable, too
    if not is_installed and (package.parent / "pyproject.toml").exists():
        return (
            f"{_MODULES[platform]} is not built: jdistadam was imported from its source tree "
            f"{package}. Install it with `pip install .` and run from another folder."
        )
    if platform == "cuda":
        return (
            "jdistadam was installed without a CUDA compiler. Reinstall with nvcc on the PATH, "
            "or with CUDACXX or CUDA_HOME set."
        )
    return f"{_MODULES[platform]} is not built. Reinstall jdistadam with a C++17 compiler present."


def runtime_ffi_api_version() -> tuple[int, int]:
    """Returns the XLA FFI version of the running jaxlib, read from its headers."""
    header = pathlib.Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise NativeError(
            f"jaxlib: its FFI version cannot be read: got {error}, "
            "expected the header that it ships. Reinstall jaxlib."
        ) from None
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def check_ffi_api_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises NativeError if a module's FFI headers are newer than the running jaxlib.

    If such a module were registered, JAX's backend would fail to start.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise NativeError(
            f"compiled module: XLA FFI version does not fit jaxlib {jaxlib.__version__}: "
            f"got {built[0]}.{built[1]}, expected at most {runtime[0]}.{runtime[1]}. "
            "Reinstall with `pip install .` (which builds against old headers), or upgrade jaxlib."
        )


def reachable_peers() -> Callable[[int, int], bool]:
    """Returns a function of two local GPU numbers: whether one can access the other's memory."""
    return module_of("cuda").can_reach


@functools.cache
def link_speed(one: int, other: int) -> float:
    """Returns the GB/s of a copy from one local GPU to another, which its first call measures.

    It is 0 if it cannot be measured, as where there is no memory for 64 MiB, and negative if the
    copy brings other values.
    """
    speed: float = module_of("cuda").link_speed(one, other)
    return speed


def code_that_runs(build_info: str, capability: str) -> str | None:
    """Returns the code of the CUDA module that a GPU of this compute capability runs, or None.

    A GPU runs the newest machine code for its own major number and at most its minor number.
    Otherwise it runs PTX for at most its capability, which the driver compiles.

    Example:
      >>> code_that_runs("nvcc 13.0.88, sm_80 sm_90 compute_90", "8.9")
      'sm_80'
      >>> code_that_runs("nvcc 13.0.88, sm_80 sm_90 compute_90", "12.0")
      'compute_90'
    """
    major, minor = (int(x) for x in capability.split("."))
    codes = []
    for kind, number in re.findall(r"\b(sm|compute)_(\d+)\b", build_info):
        its_major, its_minor = int(number[:-1]), int(number[-1])
        is_machine_code = kind == "sm"
        if (its_major, its_minor) <= (major, minor) and (its_major == major or not is_machine_code):
            codes.append((is_machine_code, int(number), f"{kind}_{number}"))
    return max(codes)[-1] if codes else None


def platform_of(name: str) -> str:
    """Returns JAX's name of a platform, such as "gpu", as in this module: "cpu" or "cuda"."""
    return {"gpu": "cuda"}.get(name, name)


def name_in_jax(platform: str) -> str:
    """Returns a platform, "cpu" or "cuda", as JAX names it: the inverse of ``platform_of``."""
    return {"cuda": "gpu"}.get(platform, platform)


def default_platform() -> str:
    """Returns the platform that JAX uses by default."""
    return platform_of(jax.default_backend())


@functools.cache
def warn_if_unavailable(platform: str) -> None:
    """Warns, once per platform, that the jax.numpy fallback will run there."""
    if not (known := status(platform)).available:
        warnings.warn(
            f"jdistadam runs its jax.numpy fallback on {platform}: {known.detail} The fallback is "
            "slower and not bitwise equal to the compiled kernels.",
            stacklevel=4,
        )


def _has_cpus_alone() -> bool:
    """Whether CPUs are JAX's only devices, by default or otherwise."""
    try:
        return default_platform() == "cpu" and not jax.devices("gpu")
    except RuntimeError:  # there is no such backend
        return True


def choose(compiled: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``compiled`` on platforms with the compiled module, otherwise ``fallback``."""
    available = [platform for platform in PLATFORMS if status(platform).available]
    if len(available) == len(PLATFORMS) or (available == ["cpu"] and _has_cpus_alone()):
        return compiled  # tracing the fallback would be wasted
    warn_if_unavailable(default_platform())
    branches = {platform: compiled for platform in available}
    return lambda *operands: lax.platform_dependent(*operands, default=fallback, **branches)


def unfused(arrays: Arrays) -> Arrays:
    """Keeps XLA for GPUs from fusing slices with a call that takes or returns these arrays.

    A call in place would otherwise read from a slice of a loop's input or write to a slice of its
    output, and an operand and its result would have different addresses.
    """
    return lax.optimization_barrier(arrays)


def type_like(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the type of an array that varies as ``x`` does: [Note: types of results]."""
    kind = jax.typeof(x)
    sharding = kind.sharding.update(spec=P(*(None,) * len(shape)))
    return kind.update(shape=shape, dtype=jax.numpy.dtype(dtype), sharding=sharding)
