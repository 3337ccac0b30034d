"""The time of one optimizer step on one device, compared with a copy and with optax.

All times are per step. *Wall* is measured with two jitted programs that run different numbers of
steps in a loop: the median difference of their times, divided by the difference of the numbers. The
start of a call therefore does not count. *Host* is how long one jitted call of one step blocks the
caller, and *compile* is the time to trace and compile. The floor is the number of bytes that a step
must move, divided by the bandwidth of an in-place copy in the same run. On a CPU, where a copy may
use fewer cores than a step, the command prints no share of it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.core.trees import Grads, Params
from jdistadam.distributed.optimizer import distributed
from jdistadam.drop_in.optimizer import fused_adamw

Shapes = dict[str, tuple[int, ...]]
HYPER: Any = dict(learning_rate=1e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.1)


def gpt2(width: int, layers: int) -> Shapes:
    """The leaves of GPT-2 with two-dimensional attention kernels."""
    shapes: Shapes = {"wte": (50304, width), "wpe": (1024, width)}
    for i in range(layers):
        dense = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
        for name, shape in (dense | {"down": (4 * width, width)}).items():
            shapes[f"h{i}.{name}.w"], shapes[f"h{i}.{name}.b"] = shape, shape[1:]
        for name in ("ln1.s", "ln1.b", "ln2.s", "ln2.b"):
            shapes[f"h{i}.{name}"] = (width,)
    return shapes


def resnet50() -> Shapes:
    """The leaves of ResNet-50 with four-dimensional convolution kernels."""
    shapes: Shapes = {}

    def conv(size: int, inputs: int, outputs: int) -> None:
        i = len(shapes)
        shapes[f"{i}.kernel"] = (size, size, inputs, outputs)
        shapes[f"{i}.scale"] = shapes[f"{i}.bias"] = (outputs,)

    conv(7, 3, 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            conv(1, inputs, width)
            conv(3, width, width)
            conv(1, width, 4 * width)
            if block == 0:
                conv(1, inputs, 4 * width)
            inputs = 4 * width
    return shapes | {"head.kernel": (2048, 1000), "head.bias": (1000,)}


def llama(width: int, layers: int, hidden: int, vocabulary: int) -> Shapes:
    """The leaves of a Llama-like model with tied embeddings."""
    shapes: Shapes = {"embed": (vocabulary, width), "norm": (width,)}
    for i in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"h{i}.{name}"] = (width, width)
        for name in ("gate", "up"):
            shapes[f"h{i}.{name}"] = (width, hidden)
        shapes |= {f"h{i}.down": (hidden, width), f"h{i}.ln1": (width,), f"h{i}.ln2": (width,)}
    return shapes


TREES: dict[str, Shapes] = {
    "flat1B": {"w": (1 << 30,)},
    "gpt2xl": gpt2(1600, 48),
    "llama1B": llama(2048, 22, 5632, 32000),
    "gpt2s": gpt2(768, 12),
    "resnet50": resnet50(),
    "many1000x4k": {f"l{i}": (4096,) for i in range(1000)},
    "flat4M": {"w": (1 << 22,)},
}
"""Shapes of the trees by name."""


class Variant(NamedTuple):
    """A way to step, and the bytes per parameter that it must move."""

    make: Callable[[], tuple[Any, Any]]  # -> (init, step(grads, state, params))
    param_dtype: Any
    grad_dtype: Any
    bytes_per_parameter: float


def _ours(**kwargs: Any) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        tx = fused_adamw(**HYPER, **kwargs)
        return tx.init, tx.step

    return make


def _optax() -> tuple[Any, Any]:
    tx = optax.adamw(**HYPER)

    def step(grads: Grads, state: Any, params: Params) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def _flat() -> tuple[Any, Any]:
    """The distributed optimizer on a mesh of one device: moments in two flat arrays."""
    (device,) = jnp.zeros(()).devices()  # JAX's default device
    mesh = jax.make_mesh((1,), ("data",), devices=[device])
    tx = distributed(fused_adamw(**HYPER), mesh=mesh, max_grad_norm=1.0)
    spec = jax.sharding.PartitionSpec()
    specs = tx.state_specs()
    step = jax.shard_map(
        tx.step, mesh=mesh, in_specs=(spec, specs, spec), out_specs=(spec, specs), check_vma=False
    )
    return tx.init, step


_BF16: Any = jnp.bfloat16
_8_BITS: Any = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")
_16_BITS: Any = dict(mu_dtype="block16", nu_dtype="block16", rounding="stochastic")
_SCALES = 2 * 2 * 4 / 128  # bytes per parameter of the scales of both moments, read and written

VARIANTS: dict[str, Variant] = {
    "float32": Variant(_ours(), jnp.float32, jnp.float32, 28),
    "bf16 grads": Variant(_ours(), jnp.float32, _BF16, 26),
    "bf16, float32 main": Variant(_ours(main_params_dtype=jnp.float32), _BF16, _BF16, 28),
    "bf16, remainder16": Variant(_ours(main_params_dtype="remainder16"), _BF16, _BF16, 26),
    "bf16, stochastic, bf16 moments": Variant(
        _ours(mu_dtype=_BF16, nu_dtype=_BF16, rounding="stochastic"), _BF16, _BF16, 14
    ),
    "bf16, remainder16, 8-bit moments": Variant(
        _ours(main_params_dtype="remainder16", **_8_BITS), _BF16, _BF16, 14 + _SCALES
    ),
    "bf16, stochastic, 8-bit moments": Variant(_ours(**_8_BITS), _BF16, _BF16, 10 + _SCALES),
    "bf16, remainder16, 16-bit moments": Variant(
        _ours(main_params_dtype="remainder16", **_16_BITS), _BF16, _BF16, 18 + _SCALES
    ),
    "bf16, stochastic, 16-bit moments": Variant(_ours(**_16_BITS), _BF16, _BF16, 14 + _SCALES),
    # one more read of the gradients, for the norm
    "float32, flat, clipped": Variant(_flat, jnp.float32, jnp.float32, 32),
    "optax.adamw": Variant(_optax, jnp.float32, jnp.float32, 28),
}
"""Ways to step by name; all are jitted and donated."""


Loops = tuple[int, int]
Program = Callable[..., Any]


def slope(make: Callable[[int], Program], loops: Loops, args: Any) -> tuple[float, Any]:
    """Seconds per step of ``args = make(steps)(*args)``, and the last args.

    Both programs run on the same arrays, because their addresses change the time.
    """
    programs = [make(steps) for steps in loops]
    for program in programs:
        args = jax.block_until_ready(program(*args))
    differences = []
    for _ in range(5):
        times = []
        for program in programs:
            start = time.perf_counter()
            args = jax.block_until_ready(program(*args))
            times.append(time.perf_counter() - start)
        differences.append((times[1] - times[0]) / (loops[1] - loops[0]))
    return statistics.median(differences), args


def loops_for(seconds: float) -> Loops:
    """Numbers of steps of the two programs whose difference takes a fifth of a second.

    The start of a call takes milliseconds for many leaves, with some variation.
    """
    steps = min(max(3, round(0.2 / seconds)), 20_000)
    return steps // 3, steps // 3 + steps


def copy_bandwidth(elements: int, loops: Loops = (30, 130)) -> float:
    """Bytes per second of reading and writing one float32 array in place."""

    def scale(_: Any, x: Any) -> Any:
        return jax.lax.optimization_barrier(x * 1.0001)  # two iterations are two passes

    def scaled(steps: int) -> Any:
        return jax.jit(lambda x: (jax.lax.fori_loop(0, steps, scale, x),), donate_argnums=0)

    seconds, _ = slope(scaled, loops, (jnp.ones(elements),))
    return 8 * elements / seconds


def make_tree(shapes: Shapes, scale: float, dtype: Any) -> Any:
    """Normal numbers times ``scale``."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(shapes))  # compiles fast
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: _normal(key, shape, scale, dtype) for key, (name, shape) in pairs}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))  # one program a shape, not a tree
def _normal(key: Any, shape: tuple[int, ...], scale: float, dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape) * scale).astype(dtype)


def looped(step: Any, steps: int) -> Any:
    """A jitted program of ``steps`` steps: (params, state, grads) -> the same."""

    # all is donated: copies of gradients would have another address in every other program
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def run(params: Params, state: Any, grads: Grads) -> Any:
        def body(_: Any, carry: Any) -> Any:
            fresh = jax.lax.optimization_barrier(grads)  # nothing is hoisted out of the loop
            return step(fresh, carry[1], carry[0])

        return (*jax.lax.fori_loop(0, steps, body, (params, state)), grads)

    return run


def one_step(step: Any) -> Any:
    """A jitted program of one step: (params, state, grads) -> (params, state)."""
    return jax.jit(lambda params, state, grads: step(grads, state, params), donate_argnums=(0, 1))


class Measured(NamedTuple):
    """One row of results; the last fields are filled by callers that can measure them."""

    tree: str
    leaves: int
    parameters: int
    variant: str
    wall_microseconds: float
    wall_share_of_copy: float | None
    device_microseconds: float | None = None
    device_share_of_copy: float | None = None
    host_microseconds: float | None = None
    compile_seconds: float | None = None


def fresh_arrays(tree: str, variant: str, grads: Grads = None) -> Any:
    """Params, state and gradients: the given ones, or new ones."""
    shapes, settings = TREES[tree], VARIANTS[variant]
    params = make_tree(shapes, 0.1, settings.param_dtype)
    state = jax.jit(settings.make()[0])(params)
    grads = make_tree(shapes, 0.01, settings.grad_dtype) if grads is None else grads
    return jax.block_until_ready((params, state, grads))


def measure(
    tree: str,
    variant: str,
    copy: float,
    device_seconds: Callable[..., float] | None = None,
) -> Measured:
    """Compiles, warms up and times one variant on one tree.

    Args:
      tree: One of ``TREES``.
      variant: One of ``VARIANTS``.
      copy: The result of ``copy_bandwidth``.
      device_seconds: ``device_seconds(program, args)`` runs the compiled program with fewer steps
        and returns the device time alone.
    """
    shapes, settings = TREES[tree], VARIANTS[variant]
    parameters = sum(int(np.prod(shape)) for shape in shapes.values())
    floor = parameters * settings.bytes_per_parameter / copy
    on_device, loops = None, loops_for(floor)
    args = fresh_arrays(tree, variant)
    programs: dict[int, Program] = {}

    def make(steps: int) -> Program:
        programs[steps] = looped(settings.make()[1], steps).lower(*args).compile()
        return programs[steps]

    wall, args = slope(make, loops, args)
    if device_seconds is not None:
        on_device = device_seconds(programs[loops[0]], args) / loops[0]
    return Measured(
        tree=tree,
        leaves=len(shapes),
        parameters=parameters,
        variant=variant,
        wall_microseconds=wall * 1e6,
        wall_share_of_copy=floor / wall,
        device_microseconds=None if on_device is None else on_device * 1e6,
        device_share_of_copy=None if on_device is None else floor / on_device,
    )


def measure_hosts(tree: str, variants: Sequence[str], repeats: int = 20) -> dict[str, Any]:
    """Times calls of one step of several variants.

    If both are named, "float32" is checked against "optax.adamw" first. A call is timed until it
    returns, starting with an idle device. The variants are called in turn and then in reverse
    order, because each fills the host's caches for the next.

    Args:
      tree: One of ``TREES``.
      variants: Some of ``VARIANTS``; their gradients are those of the first.
      repeats: Number of calls of each.

    Returns:
      For each variant the fields ``host_microseconds``, a median, and ``compile_seconds``.

    Raises:
      AssertionError: Steps of "float32" and "optax.adamw" differ by more than a few units in the
        last place.
    """
    grads = make_tree(TREES[tree], 0.01, VARIANTS[variants[0]].grad_dtype)
    arrays = {variant: fresh_arrays(tree, variant, grads) for variant in variants}
    programs, results = {}, {}
    for variant in variants:
        start = time.perf_counter()
        step = one_step(VARIANTS[variant].make()[1])
        programs[variant] = step.lower(*arrays[variant]).compile()
        results[variant] = {"compile_seconds": time.perf_counter() - start}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for i in range(repeats + 3):
        for variant in list(variants)[:: (-1) ** i]:
            params, state, grads = arrays[variant]
            start = time.perf_counter()
            params, state = programs[variant](params, state, grads)
            times[variant].append(time.perf_counter() - start)
            arrays[variant] = jax.block_until_ready((params, state, grads))
        if i == 0 and {"float32", "optax.adamw"} <= set(variants):
            _check_equal(tree, arrays["float32"][0], arrays["optax.adamw"][0])
    for variant, seconds in times.items():
        results[variant]["host_microseconds"] = 1e6 * statistics.median(seconds[3:])
    return results


def _check_equal(tree: str, ours: Any, theirs: Any) -> None:
    if wrong := [name for name in ours if not _is_close(ours[name], theirs[name])]:
        raise AssertionError(f"{tree}: steps of ours and of optax differ in {', '.join(wrong)}")


@jax.jit
def _is_close(a: jax.Array, b: jax.Array) -> jax.Array:
    """Equal to a few units in the last place and no NaN, which a maximum can lose on a CPU."""
    return jnp.all(jnp.abs(a - b) <= 1e-7 + 1e-6 * jnp.abs(b))


def format_rows(rows: Sequence[Measured]) -> str:
    """Returns the rows as a table."""
    lines = [f"{'tree':<12} {'variant':<24} {'wall, us':>10} {'of copy':>8} {'device, us':>10} {'of copy':>8} {'host, us':>9} {'compile, s':>10}"]  # noqa: E501  # fmt: skip
    for r in rows:
        lines.append(
            f"{r.tree:<12} {r.variant:<24} {r.wall_microseconds:>10.0f} "
            f"{_number(r.wall_share_of_copy, 100, 1, ' %'):>8} "
            f"{_number(r.device_microseconds):>10} "
            f"{_number(r.device_share_of_copy, 100, 1, ' %'):>8} "
            f"{_number(r.host_microseconds):>9} {_number(r.compile_seconds, 1, 1):>10}"
        )
    return "\n".join(lines)


def _number(value: float | None, scale: float = 1, digits: int = 0, unit: str = "") -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}{unit}"
