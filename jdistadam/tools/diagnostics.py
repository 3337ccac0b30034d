"""What is installed, which kernels run and why, and whether they compute the right bits."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_PACKAGES = (
    "jdistadam",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "numpy",
    "ml_dtypes",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)


def info() -> dict[str, Any]:
    """Returns versions, devices and backends as JSON-ready values. Never raises.

    If a value cannot be found, its place has the reason.
    """
    return {
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _try(_devices),
        "driver": _try(_driver),
        "backends": _try(_backends),
        "code": _try(_code),
        "runs": _try(_what_runs),
        "peers": _try(_peers),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _try(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # a broken installation needs a report too
        return (
            f"unknown: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def _devices() -> list[str]:
    import jax

    return [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]


def _driver() -> str:
    import jax

    return jax.devices()[0].client.platform_version.splitlines()[0]


def _backends() -> dict[str, dict[str, Any]]:
    from jdistadam.kernels import native

    found = {name: native.status(name) for name in native.PLATFORMS}
    return {name: {"available": s.available, "detail": s.detail} for name, s in found.items()}


def _code() -> dict[str, str]:
    """For each kind of GPU here the code of the CUDA module that it runs."""
    import jax

    from jdistadam.kernels import native

    status = native.status("cuda")
    gpus = [d for d in jax.devices() if d.platform == "gpu" and status.available]
    return {
        d.device_kind: native.code_that_runs(status.detail, d.compute_capability)
        or f"no code for compute capability {d.compute_capability}. Reinstall with CUDAARCHS=native"
        for d in gpus
    }


def _what_runs() -> str:
    from jdistadam.kernels import native

    default = native.default_platform()
    status = native.status(default)
    if without := [kind for kind, code in _code().items() if code.startswith("no ")]:
        return f"no kernel on {', '.join(without)}: see code"
    if status.available:
        return f"compiled {default} kernels"
    return f"jax.numpy fallback on {default}: {status.detail}"


def _peers() -> dict[str, Any]:
    """Which GPUs of this process reach each other's memory, or why peer memory is unavailable."""
    import jax

    from jdistadam.distributed.transport import local_number, why_gpus_are_apart
    from jdistadam.kernels import native

    gpus = [d for d in jax.local_devices() if d.platform == "gpu"]
    if len(gpus) < 2:
        return {"reached": {}, "why_not": f"{len(gpus)} GPUs in this process"}
    if not native.status("cuda").available:
        return {"reached": {}, "why_not": "no CUDA kernels"}
    reaches, numbers = native.reachable_peers(), [local_number(d) for d in gpus]
    reached = {str(a): [b for b in numbers if b != a and reaches(a, b)] for a in numbers}
    speeds = {f"{a} to {b}": native.link_speed(int(a), b) for a in reached for b in reached[a]}
    return {"reached": reached, "why_not": why_gpus_are_apart(gpus), "gb_per_s": speeds}


def _format_peers(peers: Any) -> list[str]:
    """The matrix of peers: a row per GPU, x if it reaches the memory of the column's GPU."""
    if not isinstance(peers, dict):
        return [f"peers     {peers}"]
    numbers = [int(a) for a in peers["reached"]]
    lines = [
        f"link      GPU {pair}: " + (f"{speed:.0f} GB/s" if speed else "not measured")
        for pair, speed in peers.get("gb_per_s", {}).items()
    ]
    if numbers:
        lines.append(f"peers     {'    '.join(str(b) for b in numbers)}")
    for a in numbers:
        marks = ["-" if a == b else "x" if b in peers["reached"][str(a)] else "." for b in numbers]
        lines.append(f"  GPU {a:<3} {'    '.join(marks)}")
    usable = f"not used: {peers['why_not']}" if peers["why_not"] else "usable between all GPUs here"
    return [*lines, f"peers     memory {usable}"]


def format_info(report: dict[str, Any]) -> str:
    """Formats ``info()`` for people: [OK] usable, [--] not."""
    lines = [f"{key:<9} {report[key]}" for key in ("python", "machine", "driver")]
    lines.append(
        "packages  "
        + ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    )
    devices = report["devices"]
    lines.append("devices   " + (", ".join(devices) if isinstance(devices, list) else str(devices)))
    if isinstance(report["backends"], dict):
        for name, status in report["backends"].items():
            lines.append(f"[{'OK' if status['available'] else '--'}] {name:<5} {status['detail']}")
    else:
        lines.append(f"backends  {report['backends']}")
    if isinstance(report["code"], dict):
        lines += [f"code      {kind}: {code}" for kind, code in report["code"].items()]
    else:
        lines.append(f"code      {report['code']}")
    lines.append(f"runs      {report['runs']}")
    lines += _format_peers(report["peers"])
    return "\n".join(lines)


class Check(NamedTuple):
    """The result of one check: True passed, False failed, None not possible here."""

    name: str
    passed: bool | None
    detail: str


def check() -> list[Check]:
    """Takes a real step on every backend and compares its bits with the reference."""
    from jdistadam.kernels import native

    checks = []
    for name in native.PLATFORMS:
        status = native.status(name)
        if not status.available:
            # An installation without the CPU kernels is broken; CUDA kernels are optional.
            checks.append(Check(name, False if name == "cpu" else None, status.detail))
            continue
        try:
            checks.append(_check_backend(name))
        except Exception as error:
            checks.append(Check(name, False, f"{type(error).__name__}: {error}"))
    return checks


def _check_backend(name: str) -> Check:
    import jax

    from jdistadam.kernels import native

    try:
        device = jax.devices(native.name_in_jax(name))[0]
    except RuntimeError as error:
        return Check(name, None, f"JAX has no such device: {str(error).splitlines()[0]}")
    compared = 0
    for dtype in ("float32", "bfloat16", "float16"):
        for mode in ("step", "step_and_cast", "update"):
            wrong, size = _count_wrong_bits(device, mode, dtype)
            compared += size
            if wrong:
                return Check(
                    name, False, f"{wrong} of {size} values differ in bits ({mode}, {dtype})"
                )
    return Check(
        name, True, f"{compared} values equal the reference bit for bit on {device.device_kind}"
    )


def _count_wrong_bits(device: Any, mode: str, dtype: str) -> tuple[int, int]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jdistadam.kernels.adam import adam
    from jdistadam.kernels.operands import Operands, Scalars, Spec
    from jdistadam.kernels.reference_step import adam_reference

    rng = np.random.default_rng(0)
    low = jnp.dtype(dtype)
    shapes = ((), (3,), (17, 61), (4099,))
    dtypes = (low, low if mode == "step" else np.dtype(np.float32), low, np.dtype(np.float32))
    operands = Operands(
        *(tuple(np.abs(rng.normal(size=s)).astype(t) for s in shapes) for t in dtypes)
    )
    row = np.asarray(
        [3e-3, 0.87, 0.13, 0.9973, 0.0027, 1e-7, 0.0, 0.13, 0.2431, 0.3415, 0.0053, 0.021],
        np.float32,
    )
    spec = Spec(mode, (0,) * len(shapes), out_dtype=None if mode == "step" else low)
    scalars = Scalars(row[None], np.float32(0.37), np.bool_(False))
    with jax.default_device(device):
        results = jax.jit(adam, static_argnums=0)(spec, scalars, operands)
    wrong = size = 0
    expected = adam_reference(spec, scalars, operands, xp=np)
    for got, want in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        size += got.size
        pair = (np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (got, want))
        wrong += int(np.not_equal(*pair).reshape(got.size, -1).any(1).sum())
    return wrong, size
