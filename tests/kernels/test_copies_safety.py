"""Copies between devices: failures, ends and forks of processes, and transformations of jax.

A planted error is one of a single device: ``lax.cond`` by its place.
"""

import collections
import functools
import re
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.kernels import copies, native
from jdistadam.tools import hlo
from jdistadam.training.overlap import with_overlap
from support.bits import assert_trees_same_bits
from support.samples import few

native.status("cpu")  # registers the handlers

MAKE = """\
import contextlib, os, pathlib, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jdistadam import compat
from jdistadam.kernels import copies, native

assert native.status({"cpu": "cpu", "gpu": "cuda"}[PLATFORM]).available
devices = jax.devices(PLATFORM)[:NUMBER]
groups = (tuple(range(NUMBER)),)
mesh = jax.sharding.Mesh(np.asarray(devices), ("d",))


def made(local, groups=groups, mesh=mesh):
    x = jax.device_put(np.ones((64 * len(groups[0]), 7), np.float32), NamedSharding(mesh, P("d")))
    mapped = compat.shard_map(
        lambda x: local(x, dim=0, groups=groups), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    return jax.jit(mapped).lower(x).compile(), x


def gather(x, **where):
    return copies.gather(x, to="varying", **where)


def thread_names():
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names.append(pathlib.Path(f"/proc/self/task/{task}/comm").read_text())
    return names
"""
"""The beginning of a program of its own."""


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.multigpu)])
def mesh(request):
    """Four devices of the CPU, or all GPUs."""
    n = {"cpu": 4}.get(request.param) or max(
        n for n in (2, 4, 8) if n <= len(jax.devices(request.param))
    )
    assert native.status({"gpu": "cuda"}.get(request.param, request.param)).available
    return jax.sharding.Mesh(np.asarray(jax.devices(request.param)[:n]), ("d",))


def on_each(local, mesh):
    """Compiles a function of the array of a device."""
    mapped = compat.shard_map(
        lambda x: local(x[0])[None], mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    return jax.jit(mapped)


def draw(mesh, shape=(48, 7), seed=0):
    """An array of each device, of normal numbers."""
    x = np.random.default_rng(seed).normal(size=(mesh.size, *shape)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P("d")))


def groups_of(mesh):
    return (tuple(range(mesh.size)),)


def exchanged(mesh):
    return functools.partial(copies.exchange, dim=0, groups=groups_of(mesh))


def gathered(mesh):
    return functools.partial(copies.gather, dim=0, groups=groups_of(mesh), to="varying")


def call_again(eqn, *values, **changed):
    """Calls what a traced call does, with other operands and parameters."""
    return eqn.primitive.bind(*values, **eqn.params | changed)[0]


def exchange_in_parts(x, n):
    """Returns a start and a wait of an exchange."""
    whole = functools.partial(copies.exchange, dim=0, groups=(tuple(range(n)),))
    eqns = jax.make_jaxpr(whole)(x).eqns
    start, wait = [eqn for eqn in eqns if "target_name" in eqn.params]
    return functools.partial(call_again, start), functools.partial(call_again, wait)


def at_the_last_place(n, function, x):
    """A scalar, which is that of a function on the last device."""
    is_last = lax.axis_index("d") == n - 1
    return lax.cond(is_last, function, lambda x: x.reshape(-1)[0], x)


def with_a_failure(x, n, failing):
    """An exchange, on the last device with a failing call between start and wait; and another."""
    start, wait = exchange_in_parts(x, n)
    target = start(x)
    scale = at_the_last_place(n, failing, x)
    received = wait(target, x) * scale
    again = jnp.tile(received[0], (n, 1))
    return copies.exchange(again, dim=0, groups=(tuple(range(n)),))


def fails_in_start(x, n):
    start, _ = exchange_in_parts(x, n)
    return with_a_failure(x, n, lambda x: start(x, rows=(x.size + 1,)).reshape(-1)[0])


def fails_in_wait(x, n):
    """It waits for an array that no copy goes to."""
    _, wait = exchange_in_parts(x, n)
    other = lambda x: jnp.stack([x[: x.shape[0] // n] * 2] * (n - 1))  # noqa: E731
    return with_a_failure(x, n, lambda x: wait(other(x), x).reshape(-1)[0])


def fails_between(x, n):
    """Another call lacks its attributes, so that the copies are abandoned."""
    call = lambda x: jax.ffi.ffi_call("jdistadam_sum", x)(x)  # noqa: E731
    return with_a_failure(x, n, lambda x: call(x).reshape(-1)[0])


PLANTED = {
    fails_in_start: "the device at place {last} failed: .* of copies has a wrong size",
    fails_in_wait: "the device at place {last} failed: a wait for copies that were not started",
    fails_between: "devices did not come within 2 s: place {last}|Wrong number of attributes",
}


def errors_of(function, mesh):
    """What each device says, for an array of 64 MiB."""
    x = jax.device_put(
        np.ones((mesh.size, 1 << 14, 1 << 10), np.float32), NamedSharding(mesh, P("d"))
    )
    errors = []
    try:
        shards = on_each(functools.partial(function, n=mesh.size), mesh)(x).addressable_shards
    except jax.errors.JaxRuntimeError as error:  # in the caller's thread
        return [str(error)] * mesh.size
    for shard in shards:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.block_until_ready(shard.data)
        errors.append(str(error.value))
    return errors


@few(1)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda f: f.__name__)
def test_all_devices_name_the_one_that_failed_and_good_executions_follow(mesh, planted, short_wait):
    step = on_each(lambda x: gathered(mesh)(exchanged(mesh)(x).reshape(-1, x.shape[1])), mesh)
    x = draw(mesh)
    want = np.asarray(step(x))
    what = PLANTED[planted].format(last=mesh.size - 1)
    for message in errors_of(planted, mesh):
        assert re.search(what, message), message
    for _ in range(10):
        assert_trees_same_bits(step(x), want)


def operands_by_target(program):
    """Of each call in a compiled program: its name, its target, and its operands."""
    call = r'(%\S+) = \S+ custom-call\(([^)]*)\), custom_call_target="([^"]+)"'
    found = re.findall(call, program.as_text())
    return [(name, target, re.findall(r"%[\w.-]+", given)) for name, given, target in found]


@pytest.mark.parametrize("make", [exchanged, gathered])
def test_a_wait_takes_the_sources_so_that_they_live_until_then(mesh, make):
    """In the traced program and in the compiled one."""
    x = draw(mesh)
    step = on_each(lambda x: make(mesh)(x * 2), mesh)

    def calls(jaxpr):
        for eqn in jaxpr.eqns:
            if "target_name" in eqn.params:
                yield eqn
            for inner in eqn.params.values():
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from calls(inner)

    start, wait = calls(jax.make_jaxpr(step)(x).jaxpr)
    assert (*start.outvars, *start.invars) == tuple(wait.invars)
    start, wait = operands_by_target(step.lower(x).compile())
    assert (start[1], wait[1]) == (copies.START, copies.WAIT)
    assert wait[2] == [start[0], *start[2]]


def test_programs_of_two_threads_do_not_meet(mesh):
    """Each has its own values; one program that both run, and one each; a device is late."""

    def late(x):
        busy = lambda x: lax.fori_loop(0, 500, lambda i, y: jnp.sin(y), x).reshape(-1)[0]  # noqa: E731
        return jnp.where(jnp.isnan(at_the_last_place(mesh.size, busy, x)), 0, x)

    shared = on_each(lambda x: gathered(mesh)(late(x)), mesh)
    own = [on_each(lambda x, i=i: gathered(mesh)(late(x) + i), mesh) for i in range(2)]
    wrong = []

    def run(i):
        x = draw(mesh, seed=i)
        want = [np.asarray(x).reshape(-1, 7), (np.asarray(x) + np.float32(i)).reshape(-1, 7)]
        for program, whole in zip((shared, own[i]) * 5, want * 5, strict=True):
            for out in [program(x) for _ in range(8)]:  # in flight together
                wrong.extend(y for y in np.asarray(out) if not np.array_equal(y, whole))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    if mesh.devices.flat[0].platform == "gpu":
        threads = threads[:1]  # programs must reach all GPUs in one order
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def scaled_loss(mesh, around):
    """A loss of a shard, which is gathered for it; its gradient is exchanged and summed."""
    groups = groups_of(mesh)

    @jax.custom_vjp
    def whole(shard):
        return copies.gather(shard, dim=0, groups=groups, to="varying")

    def backward(_, grad):
        received = copies.exchange(grad, dim=0, groups=groups)
        size = received.shape[1]
        own = lax.dynamic_slice_in_dim(grad, lax.axis_index("d") * size, size)
        return (own + received.sum(0),)

    whole.defvjp(lambda shard: (whole(shard), None), backward)
    layer = around(lambda x, shard: jnp.tanh(x @ whole(shard)))

    def loss(shards, x):
        return layer_by_layer(layer, x, shards).sum()

    return loss


def collective_loss(mesh):
    layer = lambda x, shard: jnp.tanh(x @ lax.all_gather(shard, "d", tiled=True))  # noqa: E731
    return lambda shards, x: layer_by_layer(layer, x, shards).sum()


def layer_by_layer(layer, x, shards):
    if isinstance(shards, tuple):
        return functools.reduce(layer, shards, x)
    return lax.scan(lambda x, shard: (layer(x, shard), None), x, shards)[0]


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_no_call_of_a_scan_takes_a_slice(h200s, around):
    """Otherwise a wait would return another array than it takes: native.unfused."""
    mesh = h200s(4, names=("d",))
    sharding = NamedSharding(mesh, P("d"))
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=sharding)
    loss = scaled_loss(mesh, around)
    local = lambda shards, x: jax.grad(loss)(shards[0], x[0])[None]  # noqa: E731
    mapped = compat.shard_map(
        local, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False
    )
    text = jax.jit(mapped).lower(like((4, 3, 4, 16)), like((4, 5, 16))).compile().as_text()
    calls = [name for name, line in hlo.instructions(text) if "jdistadam_copy" in line]
    assert len(calls) >= 4 and not any("fusion" in name for name in calls)


Counts = collections.namedtuple("Counts", ["gathers", "exchanges"])

TRANSFORMED = {
    # name: what is around a layer, the number of layers, whether they are a scan, the starts
    "custom_vjp": (lambda f: f, 3, False, Counts(3, 3)),
    "checkpoint": (jax.checkpoint, 3, False, Counts(6, 3)),
    "one checkpoint": (jax.checkpoint, 1, False, Counts(2, 1)),
    "scan": (lambda f: f, 3, True, Counts(1, 1)),
    "scan of checkpoint": (jax.checkpoint, 3, True, Counts(2, 1)),
}
# In the text of a pipelined scan, whose first and last steps are apart; each still runs three times.
PIPELINED = {"scan": Counts(2, 2), "scan of checkpoint": Counts(5, 3)}


@few(2)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_keep_values_and_starts(mesh, name, overlaps):
    """The compiler neither merges starts nor loses some."""
    around, layers, is_scan, want = TRANSFORMED[name]
    want = PIPELINED.get(name, want) if overlaps else want
    n = mesh.size
    rng = np.random.default_rng(0)
    shards = jnp.asarray(rng.normal(size=(n, layers, 16 // n, 16)).astype(np.float32) / 4)
    x = jnp.asarray(rng.normal(size=(n, 5, 16)).astype(np.float32))
    given = jax.device_put((shards, x), NamedSharding(mesh, P("d")))

    def gradient(loss, shards, x):
        shards = shards[0] if is_scan else tuple(shards[0])
        value, grads = jax.value_and_grad(loss)(shards, x[0])  # the forward pass is needed, too
        return jnp.stack(grads)[None] + value

    def compiled(loss):
        local = functools.partial(gradient, loss)
        local = with_overlap(local) if overlaps else local
        mapped = compat.shard_map(
            local, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False
        )
        return jax.jit(mapped).lower(*given).compile()

    program = compiled(scaled_loss(mesh, around))
    np.testing.assert_allclose(
        program(*given), compiled(collective_loss(mesh))(*given), rtol=1e-5, atol=1e-5
    )
    starts = re.findall(r'custom_call_target="jdistadam_copy_start".*', program.as_text())
    kinds = collections.Counter()
    for start in starts:  # several may travel together
        kinds["gathers = true" in start] += int(re.search(r"rows = .*?<(\d+)xi64>", start)[1])
    found = Counts(kinds[True], kinds[False])
    # XLA drops barriers of a checkpoint: some recomputed copies are the first ones, entirely.
    least = want.gathers if is_scan or overlaps else layers
    assert least <= found.gathers <= want.gathers and found.exchanges == want.exchanges
    # With overlap one wait is for all that travel together.
    waits = program.as_text().count(f'custom_call_target="{copies.WAIT}"')
    assert waits == (len(starts) if overlaps else sum(found))


def run_alone(text, platform, number):
    """Runs a program in a process of its own. Returns what it printed."""
    constants = f"PLATFORM, NUMBER = {platform!r}, {number}\n"
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", constants + MAKE + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


PLATFORMS = pytest.mark.parametrize(
    ("platform", "number"),
    [("cpu", 4), pytest.param("gpu", 2, marks=pytest.mark.multigpu)],
)


@PLATFORMS
def test_a_forked_process_is_refused(platform, number):
    """A program of one device, because XLA itself has no threads there for several.

    CUDA itself works in no forked process: no copy is made there, whoever refuses it.
    """
    out, _ = run_alone(
        """
        import signal
        step, x = made(gather, ((0,),), jax.sharding.Mesh(np.asarray(devices[:1]), ("d",)))
        jax.block_until_ready(step(x))
        if (pid := os.fork()) == 0:
            signal.alarm(30)
            try:
                print("made", step(x).block_until_ready(), flush=True)
            except Exception as error:
                print("refused:", error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print("still", step(x).block_until_ready().shape)
        """,
        platform,
        number,
    )
    assert "still (64, 7)" in out and "made" not in out, out
    assert platform == "gpu" or ("refused:" in out and "forked" in out), out


@pytest.mark.slow
@PLATFORMS
def test_a_process_ends_in_the_middle_of_copies(platform, number):
    """Nobody waits for the results; the last device of the second program never comes."""
    out, err = run_alone(
        """
        step, x = made(gather)
        for _ in range(5):
            out = step(x)
        from jax import lax

        def never(x, dim, groups):
            alone = lambda x: x
            several = lambda x: gather(x, dim=dim, groups=groups)[: x.shape[0]]
            return lax.cond(lax.axis_index("d") == len(groups[0]) - 1, alone, several, x)

        if PLATFORM == "gpu":  # a call returns when all devices have done what the host does
            from jdistadam.core import waits
            waits.set_wait_limit(2)
        step, x = made(never)
        try:
            out = step(x)
        except Exception:
            assert PLATFORM == "gpu"
        print("end")
        """,
        platform,
        number,
    )
    assert out == "end\n" and "terminate" not in err, err


@PLATFORMS
def test_programs_under_way_end_before_python_does(platform, number):
    _, err = run_alone(
        """
        step, x = made(gather)
        for _ in range(20):
            out = step(x)
        """,
        platform,
        number,
    )
    assert "not finished" not in err, err


@PLATFORMS
def test_no_copy_starts_after_the_end(platform, number):
    out, _ = run_alone(
        """
        import threading
        step, x = made(gather)
        jax.block_until_ready(step(x))
        module = __import__(f"jdistadam._{'cuda' if PLATFORM == 'gpu' else PLATFORM}", fromlist="_")
        for _ in range(2):
            module.stop_copies()
        assert not any(name.startswith("jda copies") for name in thread_names())
        try:
            jax.block_until_ready(step(x))
        except Exception as error:
            print(error)
        """,
        platform,
        number,
    )
    assert "Python has ended, or is about to" in out, out


@pytest.mark.multigpu
def test_threads_of_copies_have_names():
    out, _ = run_alone(
        """
        step, x = made(gather)
        jax.block_until_ready(step(x))
        print(*thread_names())
        """,
        "gpu",
        2,
    )
    assert "jda copies 0" in out and "jda copies 1" in out, out


@pytest.mark.multigpu
def test_links_between_gpus_are_measured():
    assert native.status("cuda").available
    for one, other in ((0, 1), (1, 0)):
        speed = native.link_speed(one, other)
        assert 5 < speed < 2000
        assert native.link_speed(one, other) == speed  # measured once


IN_TURNS = """
import time
import jax.numpy as jnp
import jdistadam as jda

PARAMS = {name: np.ones((16, 1024), np.float32) for name in "abcdef"}


def loss_fn(params, x):  # several arrays of one size, which travel together
    h = x
    for name in PARAMS:
        h = jnp.tanh(h @ params[name] @ params[name].T)
    return jnp.mean(h**2)


def steps(number, communication):
    tx = jda.distributed(
        jda.fused_adamw(1e-2, weight_decay=0.1),
        mesh=jax.sharding.Mesh(jax.devices(PLATFORM)[:number], ("data",)),
        policy=jda.MixedPrecisionPolicy(grad_reduce_dtype="float32"),
        communication=communication,
        bucket_bytes=256,
    )
    state, step = jda.TrainState.create(PARAMS, tx), jda.train_step(loss_fn, tx)
    for i in range(8):
        x = np.random.default_rng(i).normal(size=(number, 16)).astype(np.float32)
        state, metrics = jax.block_until_ready(step(state, x))
        yield float(metrics["loss"])


runs = {(n, c): steps(n, c) for n in (NUMBER, NUMBER // 2 or 1) for c in ("peer", "xla") if n > 1}
for _ in range(8):
    losses = {key: next(run) for key, run in runs.items()}
    assert all(losses[n, "peer"] == losses[n, "xla"] for n, _ in runs), losses
begin = time.monotonic()
__import__(f"jdistadam._{'cuda' if PLATFORM == 'gpu' else PLATFORM}", fromlist="_").stop_copies()
print("in turns; ended within", time.monotonic() - begin, "s")
"""


@PLATFORMS
def test_optimizers_take_turns_over_several_meshes(platform, number):
    """A wait is for all arrays that started together: none looks abandoned to the next program."""
    out, _ = run_alone(IN_TURNS, platform, number)
    assert float(re.search(r"in turns; ended within (\S+) s", out)[1]) < 2, out
