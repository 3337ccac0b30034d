"""Steps over peer memory: the bits of float32 sums over XLA, and what is not supported."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed.transport import choose_transport
from jdistadam.tools import diagnostics
from support.bits import assert_trees_same_bits
from support.exact_sums import HYPER, decays, random_params, without_empty
from support.optimizers import distributed_adamw
from support.own_loop import make_own_step, own_state
from support.samples import few, often

BF16 = jnp.bfloat16
LABELS = {"rows": "slow", "columns": "", "prime": "", "small": "own", "scalar": "", "empty": "ice"}
GROUPS = {"": {}, "slow": dict(lr_scale=0.5), "own": dict(weight_decay=0.7, b1=0.5)}
GROUPS |= {"ice": dict(frozen=True)}
BLOCK8 = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")
SETTINGS = {
    "plain": {},
    "summed": dict(accumulate_steps=2),
    "clipped": dict(max_grad_norm=1.0),
    "scaled": dict(loss_scale=jda.DynamicLossScale(8.0)),
    "groups": dict(param_labels=LABELS, groups=GROUPS, nesterov=True, bucket_bytes=4096),
    "clipped sums": dict(max_grad_norm=1.0, accumulate_steps=2),
    "norms": dict(norms="leaves", ema_decay=0.9),
    "codes": BLOCK8 | dict(main_params_dtype="remainder16"),
    "rounded to send": dict(param_comm_dtype="bfloat16", max_grad_norm=1.0),
    "16-bit moments": dict(mu_dtype="bfloat16"),
}
ONCE = dict(sharding_strategy="optim_grads_params", reshard_after_forward=False)
STRATEGIES = {
    "optim": {},
    "gathered once": ONCE,
    "some whole": ONCE | dict(reshard_after_backward=lambda path: "columns" not in path),
    "gradients": dict(sharding_strategy="optim_grads"),
    "parameters": dict(sharding_strategy="optim_grads_params"),
}
HOST = dict(state_memory="pinned_host", early_updates=False)
REPLICAS = dict(replica_axis="replica")


def loss_fn(params, x):
    """Gradients that differ between elements, devices and steps, and are rounded."""
    terms = [
        jnp.sum(v.astype(jnp.float32).ravel() * jnp.cos(jnp.arange(v.size) * x[0, 0]))
        for v in jax.tree.leaves(params)
        if v.size
    ]
    return sum(terms)


def trained(mesh, means, comm, dtype, steps=10, accumulate_steps=1, **kwargs):
    given = {k: kwargs.pop(k) for k in ("main_params_dtype", "param_comm_dtype") if k in kwargs}
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=comm, grad_reduce_dtype="float32", **given)
    hyper = HYPER | {k: kwargs.pop(k) for k in ("nesterov",) if k in kwargs}
    tx = distributed_adamw(
        **hyper, mesh=mesh, policy=policy, mask=decays, communication=means, **kwargs
    )
    assert tx.config.transport.name == means
    params = random_params()
    state = jda.TrainState.create(params, tx, param_dtypes=dtype)
    step = jda.train_step(loss_fn, tx, accumulate_steps=accumulate_steps)
    rng, metrics = np.random.default_rng(1), []
    for i in range(steps):
        x = rng.normal(size=(2 * mesh.size, 3)).astype(np.float32)
        if kwargs.get("loss_scale") is not None and i in (3, 4):
            x[2, 0] = np.nan  # on one device
        # Two programs in flight may hang on CPUs, also over XLA's collectives.
        state, found = jax.block_until_ready(step(state, x))
        metrics.append(found)
    return state, metrics


def mixed(params):
    """Leaves of two dtypes: two calls, one after the other."""
    return {k: BF16 if k in ("rows", "prime", "scalar") else jnp.float32 for k in params}


def supported(setting, comm, dtype):
    """Whether the options fit: remainders and codes need parameters of 16 bits."""
    return setting not in ("codes", "rounded to send") or dtype != "float32"


CASES = [
    (n, strategy, setting, comm, dtype)
    for n in (2, 3, 4, 8)
    for strategy in STRATEGIES
    for setting in SETTINGS
    for comm in ("float32", "bfloat16", "float16")
    for dtype in ("float32", "bfloat16", "mixed")
    if supported(setting, comm, dtype)
]
OFTEN = {
    (4, "optim", "clipped sums", "float16", "mixed"),
    (3, "gathered once", "scaled", "bfloat16", "bfloat16"),
    (2, "some whole", "groups", "bfloat16", "mixed"),
    (4, "some whole", "codes", "bfloat16", "bfloat16"),
    (4, "optim", "norms", "bfloat16", "bfloat16"),
    (8, "gradients", "summed", "bfloat16", "mixed"),
    (3, "parameters", "clipped sums", "bfloat16", "bfloat16"),
}


@few(1)
@pytest.mark.parametrize(("n", "strategy", "setting", "comm", "dtype"), CASES)
@often(lambda n, strategy, setting, comm, dtype: (n, strategy, setting, comm, dtype) in OFTEN)
def test_peer_memory_gives_the_bits_of_float32_sums_over_xla(
    cpu_mesh, n, strategy, setting, comm, dtype
):
    """Ten steps: params, state and metrics; padded, cut along any dimension."""
    dtype = mixed(random_params()) if dtype == "mixed" else dtype
    options = SETTINGS[setting] | STRATEGIES[strategy]
    one, two = (trained(cpu_mesh(n), means, comm, dtype, **options) for means in ("xla", "peer"))
    assert_trees_same_bits(two[1], one[1])
    assert_trees_same_bits(two[0].params, one[0].params)
    assert_trees_same_bits(two[0].opt_state, one[0].opt_state)
    if setting == "scaled":
        assert int(two[1][-1]["skipped"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("options", [REPLICAS, REPLICAS | dict(outer_sharding_strategy="optim")])
@pytest.mark.parametrize("setting", ["plain", "clipped sums", "codes"])
@often(
    lambda shape, strategy, options, setting: (
        (shape, strategy, len(options), setting)
        in {
            ((2, 2), "optim", 1, "plain"),
            ((2, 4), "parameters", 2, "clipped sums"),
            ((4, 2), "gathered once", 2, "codes"),
        }
    )
)
def test_devices_copy_along_one_axis_and_replicas_go_over_xla(shape, strategy, options, setting):
    options = SETTINGS[setting] | STRATEGIES[strategy] | options
    for names in (("replica", "data"), ("data", "replica")):
        mesh = jax.make_mesh(shape, names)
        one, two = (
            trained(mesh, means, "bfloat16", "bfloat16", **options) for means in ("xla", "peer")
        )
        assert_trees_same_bits(two, one)


@few(1)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("setting", ["plain", "clipped sums", "codes"])
@often(
    lambda strategy, setting: (strategy, setting) in {("optim", "codes"), ("parameters", "plain")}
)
def test_a_state_in_host_memory_gets_the_same_bits(cpu_mesh, strategy, setting):
    options = SETTINGS[setting] | STRATEGIES[strategy] | HOST
    one, two = (
        trained(cpu_mesh(4), means, "bfloat16", "bfloat16", **options) for means in ("xla", "peer")
    )
    assert_trees_same_bits(two, one)


UNSUPPORTED = [
    (dict(sharding_strategy="no_shard"), "sharding_strategy 'no_shard'"),
    (dict(policy=jda.MixedPrecisionPolicy()), "grad_reduce_dtype=None"),
    (dict(state_memory="pinned_host"), "updates during the backward pass"),
    (dict(early_updates=True), "updates during the backward pass"),
]


@pytest.mark.parametrize(("kwargs", "why"), UNSUPPORTED, ids=[why for _, why in UNSUPPORTED])
def test_unsupported_options_use_xla_or_raise(cpu_mesh, kwargs, why):
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    kwargs = dict(learning_rate=1e-3, mesh=cpu_mesh(4), policy=policy) | kwargs
    tx = distributed_adamw(**kwargs)
    assert tx.config.transport.name == "xla"
    assert tx.config.transport.why_not_peer == why
    with pytest.raises(jda.PolicyError, match=f"communication: .* not supported here: got {why}"):
        distributed_adamw(communication="peer", **kwargs)


def test_unsupported_meshes_and_unknown_transports_raise(cpu_mesh):
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    make = lambda mesh, **kwargs: distributed_adamw(  # noqa: E731
        1e-3, mesh=mesh, policy=policy, **kwargs
    )
    with pytest.raises(jda.PolicyError, match="got 1 device"):
        make(cpu_mesh(1), communication="peer")
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(jda.PolicyError, match="got a mesh with axes data, model"):
        whole = lambda params: jax.tree.map(lambda _: P(), params)  # noqa: E731
        make(mesh, param_specs=whole, communication="peer")
    with pytest.raises(jda.PolicyError, match="got shard axes data, model"):
        make(mesh, shard_axis=("data", "model"), communication="peer")
    with pytest.raises(
        jda.PolicyError, match="communication: unknown: got 'nccl', expected 'auto'"
    ):
        make(cpu_mesh(2), communication="nccl")
    # CPU devices share memory for tests: nothing is won by it, so that "auto" does not choose it.
    assert make(cpu_mesh(2)).config.transport.why_not_peer.startswith("platform cpu; ")


@few(1)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_an_evaluation_without_products_gives_the_bits_of_xla(cpu_mesh, strategy):
    """Nothing is there for copies to overlap."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    losses = []
    for means in ("xla", "peer"):
        tx = distributed_adamw(
            1e-3, mesh=cpu_mesh(4), policy=policy, communication=means, **STRATEGIES[strategy]
        )
        state = jda.TrainState.create(random_params(), tx)
        losses.append(jda.eval_step(loss_fn, tx)(state, np.ones((8, 3), np.float32)))
    assert_trees_same_bits(*losses)


@few(1)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_plan_and_audit_know_the_transport(cpu_mesh, strategy):
    """Every gradient is exchanged by copies, every parameter is gathered by copies, once."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    tx = distributed_adamw(
        1e-3, mesh=cpu_mesh(4), policy=policy, communication="peer", **STRATEGIES[strategy]
    )
    params = random_params()
    planned = jda.plan(params, tx)
    assert {c.op for c in planned.collectives} == {"all-to-all", "all-gather"}
    assert {c.transport for c in planned.collectives} == {"peer"}
    assert str(planned).endswith("\ncommunication: peer")
    state = jda.TrainState.create(params, tx)
    for micro in (2, 1):
        step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
        found = jda.audit(step, state, np.ones((8, 3), np.float32))
        assert found.passed, found
    size = sum(c.elements for c in planned.collectives if c.op == "all-gather")
    rows = [(row.op, row.planned, row.found) for row in found.rows]
    assert rows == [(f"copied {op}", size, size) for op in ("all-gather", "all-to-all")]
    over_xla = str(jda.plan(params, distributed_adamw(1e-3, mesh=cpu_mesh(4))))
    assert over_xla.endswith("\ncommunication: xla (grad_reduce_dtype=None)")
    assert "transport" not in over_xla


def test_a_program_that_fell_back_fails_the_audit(cpu_mesh):
    """It was planned over peer memory and went over XLA; and the other way round."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")

    def made(means):
        tx = distributed_adamw(
            1e-3, mesh=cpu_mesh(4), policy=policy, max_grad_norm=1.0, communication=means
        )
        return jda.train_step(loss_fn, tx), jda.TrainState.create(random_params(), tx)

    batch = np.ones((8, 3), np.float32)
    for planned, run in (("peer", "xla"), ("xla", "peer")):
        (step, state), (other, _) = made(planned), made(run)
        step.lower = other.lower
        found = jda.audit(step, state, batch)
        notes = {row.op: row.note for row in found.rows}
        words = ("MISSING", "NOT PLANNED")[:: 1 if planned == "peer" else -1]
        assert notes == {
            f"{copied}{op}": word
            for copied, word in zip(("copied ", ""), words, strict=True)
            for op in ("all-gather", "all-to-all")
        }
        assert not found.passed and not found.only_widened


class Gpu:
    """A GPU as far as the choice of the means looks at it."""

    platform = "gpu"

    def __init__(self, number, process_index=0):
        self.id = self.local_hardware_id = number
        self.process_index = process_index


class Mesh:
    """A mesh of them along "data"."""

    axis_names = ("data",)

    def __init__(self, devices):
        self.devices, self.shape = np.asarray(devices), {"data": len(devices)}


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs of this process, of which number 2 and 3 do not reach each other."""
    from jdistadam.distributed import transport
    from jdistadam.kernels import native

    found = [Gpu(i) for i in range(4)]
    monkeypatch.setattr(transport.jax, "devices", lambda backend=None: found)
    monkeypatch.setattr(transport.jax, "local_devices", lambda backend=None: found)
    monkeypatch.setattr(native, "reachable_peers", lambda: lambda a, b: a == b or a + b != 5)
    monkeypatch.setattr(native, "link_speed", lambda a, b: 340.2)
    monkeypatch.setattr(transport, "_attempt", lambda mesh, axes, groups: ("", 340.2))
    monkeypatch.setattr(native, "status", lambda name: native.Status(True, ""))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    return found


def chosen(means, devices):
    """What a mesh of these devices gets."""
    parallel = types.SimpleNamespace(
        strategy="optim",
        mesh=Mesh(devices),
        tensor_axes=(),
        shard_axes=("data",),
        size=lambda axes: len(devices),
    )
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    return choose_transport(means, parallel, policy)


def test_gpus_that_do_not_reach_each_other_go_over_xla(gpus, monkeypatch):
    from jdistadam.distributed import transport

    assert str(chosen("auto", gpus[:2])) == str(chosen("peer", gpus[:2])) == "peer"
    why = "GPU 2 cannot reach the memory of GPU 3"
    assert str(chosen("auto", gpus)) == f"xla ({why})"
    with pytest.raises(jda.PolicyError, match=why):
        chosen("peer", gpus)
    monkeypatch.setattr(transport.native, "link_speed", lambda a, b: 25.4 if a else 340.2)
    assert chosen("auto", gpus[:2]).why_not_peer == "25 GB/s from GPU 1 to 0, less than 60"
    assert chosen("peer", gpus[:2]).is_peer
    monkeypatch.setattr(transport.native, "link_speed", lambda a, b: -1 if b else 340.2)
    why = "copies from GPU 0 to 1 that bring other values"
    assert chosen("auto", gpus[:2]).why_not_peer == why
    with pytest.raises(jda.PolicyError, match=why):
        chosen("peer", gpus[:2])
    monkeypatch.setattr(transport.native, "link_speed", lambda a, b: 340.2)
    why = "copies between devices fail: broken"
    monkeypatch.setattr(transport, "_attempt", lambda mesh, axes, groups: (why, 0.0))
    assert chosen("auto", gpus[:2]).why_not_peer == why
    with pytest.raises(jda.PolicyError, match=why):
        chosen("peer", gpus[:2])
    elsewhere = [Gpu(8), Gpu(9)]
    assert chosen("auto", elsewhere).why_not_peer == "devices that this process does not have"
    assert chosen("peer", elsewhere).is_peer  # to be compiled alone
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    assert "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async" in chosen("auto", gpus[:2]).why_not_peer


@pytest.mark.parametrize("options", ["x:1;allocator:{}", dict(allocator="{}")], ids=str)
def test_options_of_the_client_select_the_allocator(gpus, monkeypatch, options):
    """jax prefers them to the variable."""
    found = []
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "vmm")
    for name in ("bfc", "cuda_async"):
        filled = options.format(name) if isinstance(options, str) else dict(allocator=name)
        jax.config.update("jax_pjrt_client_create_options", filled)
        try:
            found.append(chosen("auto", gpus[:2]).why_not_peer)
        finally:
            jax.config.update("jax_pjrt_client_create_options", None)
    why = "jax_pjrt_client_create_options=allocator:cuda_async, whose memory peers do not reach"
    assert found == ["", why]


def test_processes_copy_if_it_works_fast_enough_within_hosts(gpus, monkeypatch):
    from jdistadam.distributed import transport
    from jdistadam.kernels.processes import Joined

    gpus[:] = [Gpu(i, process_index=i // 2) for i in range(4)]
    hosts, tried = {0: "a", 1: "a"}, ["", 300.0]
    monkeypatch.setattr(transport, "join", lambda platform: Joined(hosts, ""))
    monkeypatch.setattr(transport, "_tried_copies", lambda mesh, axes: tuple(tried))
    monkeypatch.setattr(transport, "_moved_last", lambda mesh, axes, values: [list(values)])
    assert str(chosen("auto", gpus)) == str(chosen("peer", gpus)) == "peer"
    tried[1] = 20.0
    assert chosen("auto", gpus).why_not_peer == "20 GB/s between processes, less than 60"
    assert chosen("peer", gpus).is_peer
    tried[:] = "no memory", 0.0
    assert chosen("auto", gpus).why_not_peer == "no memory"
    hosts[1] = "b"
    assert chosen("auto", gpus).why_not_peer == "devices of several hosts along data"
    with pytest.raises(jda.PolicyError, match="devices of several hosts"):
        chosen("peer", gpus)
    monkeypatch.setattr(transport.jax, "process_count", lambda: 3)
    assert chosen("auto", gpus).why_not_peer == "devices of some of the processes"
    elsewhere = [Gpu(8), Gpu(9, process_index=1)]
    assert chosen("auto", elsewhere).why_not_peer == "devices that no process has"


def test_processes_find_the_same_of_copies_that_they_try(cpu_mesh, monkeypatch):
    from jdistadam.distributed import transport
    from jdistadam.kernels import native

    assert native.status("cpu").available
    said, compiled = {1: ["", 1e-6]}, {1: ""}
    monkeypatch.setattr(
        transport,
        "say_to_all",
        lambda name, found, limits: (compiled if "compiled" in name else said) | {0: found},
    )
    monkeypatch.setattr(transport, "_TRIED", {})
    monkeypatch.setattr(transport, "leave", lambda platform, why: left.append(why))
    left = []
    assert transport._tried_copies(cpu_mesh(4), ("data",)) == ("", 1e-6)
    said[1][0] = "no memory"
    assert transport._tried_copies(cpu_mesh(2), ("data",)) == ("no memory", 1e-6)
    said[1][0] = ""
    monkeypatch.setattr(transport.copies, "gather", failing)
    with jax.set_mesh(cpu_mesh(4)):  # it has its own
        why, speed = transport._tried_copies(cpu_mesh(3), ("data",))
    assert why == "copies between devices do not compile: broken" and speed == 0
    assert not left  # other copies need the connections
    transport._TRIED.clear()
    said[1][0] = "no memory"
    assert transport._tried_copies(cpu_mesh(4), ("data",)) == ("no memory", 1e-6)
    assert left == ["no memory"]
    transport._TRIED.clear()
    compiled[1] = "no compiler"
    assert transport._tried_copies(cpu_mesh(4), ("data",)) == ("no compiler", 0)
    assert left == ["no memory", "no compiler"]


def failing(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("broken")


def test_info_prints_the_matrix_of_peers(gpus, monkeypatch):
    report = diagnostics.info()
    assert report["peers"]["reached"]["2"] == [0, 1]
    assert report["peers"]["gb_per_s"]["3 to 1"] == 340.2
    report = diagnostics.info() | {"backends": "", "devices": ""}
    assert "link      GPU 0 to 1: 340 GB/s" in diagnostics.format_info(report).splitlines()
    assert diagnostics.format_info(report).splitlines()[-6:] == [
        "peers     0    1    2    3",
        "  GPU 0   -    x    x    x",
        "  GPU 1   x    -    x    x",
        "  GPU 2   x    x    -    .",
        "  GPU 3   x    x    .    -",
        "peers     memory not used: GPU 2 cannot reach the memory of GPU 3",
    ]
    monkeypatch.undo()
    no_gpus = "peers     memory not used: 0 GPUs in this process"
    assert diagnostics.format_info(diagnostics.info()).endswith(no_gpus)


@pytest.mark.slow
def test_scans_and_custom_loops_give_the_bits_of_xla(cpu_mesh):
    """A scan comes to one call many times; a region of the user's own, checked."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    make = lambda means: distributed_adamw(  # noqa: E731
        **HYPER, mesh=cpu_mesh(4), policy=policy, communication=means
    )
    batches = np.random.default_rng(0).normal(size=(3, 8, 3)).astype(np.float32)
    results = []
    for means in ("xla", "peer"):
        tx = make(means)
        step = jda.train_step(loss_fn, tx)
        state = jda.TrainState.create(random_params(), tx)
        results.append(jax.jit(lambda s, b, step=step: jax.lax.scan(step, s, b))(state, batches))
    assert_trees_same_bits(results[1], results[0])
    results = []
    for means in ("xla", "peer"):
        tx = make(means)
        params, state = own_state(tx, without_empty(random_params()), check_vma=True)
        step = make_own_step(tx, loss_fn, check_vma=True, micro_batches=2)
        for batch in batches:
            params, state, norm = step(params, state, jda.shard_batch(batch, tx))
        results.append((params, state, norm))
    assert_trees_same_bits(results[1], results[0])


@few(1)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_custom_loop_may_differentiate_shards(cpu_mesh, clip):
    """Gradients of shards are added in the backward pass, those of small leaves in the step."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    results = []
    for means in ("xla", "peer"):
        tx = distributed_adamw(
            1e-3, mesh=cpu_mesh(4), policy=policy, communication=means, max_grad_norm=clip, **ONCE
        )
        made = jda.TrainState.create(without_empty(random_params()), tx)
        tx = tx.bind(made.params)

        def local(params, state, x, tx=tx):
            shards = jda.local_params(params, tx)
            grads = jax.grad(lambda p: loss_fn(jda.gather_params(p, tx), x))(shards)
            norm = tx.grad_norm(grads, state)
            return *tx.step(grads, state, params), norm

        specs = tx.param_specs(made.params), tx.state_specs()
        program = jax.shard_map(
            local,
            mesh=tx.config.mesh,
            in_specs=(*specs, P("data")),
            out_specs=(*specs, P()),
            check_vma=False,
        )
        x = jda.shard_batch(np.arange(24, dtype=np.float32).reshape(8, 3), tx)
        results.append(jax.jit(program)(made.params, made.opt_state, x))
    assert_trees_same_bits(*results)


def test_what_follows_a_step_flushes_denormals_as_over_xla(cpu_mesh):
    """XLA goes on in the thread in which a step ended."""
    small = np.float32(1e-20) * np.arange(1, 9, dtype=np.float32)

    def squares_after(means):
        mesh = cpu_mesh(4)
        policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
        tx = distributed_adamw(1e-3, mesh=mesh, policy=policy, communication=means)
        params = {"w": jnp.ones((8, 1024))}
        state = tx.init(params)

        def local(params, state, x):
            params, state = tx.step(params, state, params)
            x = x + 0 * params["w"][:, 0]
            return jax.lax.fori_loop(0, 2, lambda i, y: jnp.where(i == 0, y * x, y * 1e10), x)

        specs = P(), tx.state_specs(), P()
        program = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False
        )
        return jax.jit(program)(params, state, small)

    got = [np.asarray(squares_after(means)) for means in ("xla", "peer")]
    assert_trees_same_bits(got[1], got[0])
    assert not got[0].any()


@pytest.mark.multigpu
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_peer_memory_on_gpus_gives_the_bits_of_float32_sums_over_xla(setting):
    gpus = jax.devices("gpu")
    mesh = jax.make_mesh((len(gpus),), ("data",), devices=gpus)
    for comm, dtype in (("bfloat16", "bfloat16"), ("float32", "mixed")):
        dtype = mixed(random_params()) if dtype == "mixed" else dtype
        one, two = (
            trained(mesh, means, comm, dtype, **SETTINGS[setting]) for means in ("xla", "peer")
        )
        assert_trees_same_bits(two, one)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", [x for x in STRATEGIES if x != "optim"])
@pytest.mark.parametrize("kind", ["one axis", "replicas", "host"])
def test_strategies_get_the_same_bits_on_gpus(strategy, kind):
    """The loss itself is a sum, in the order of the fusion that XLA chose for each program."""
    gpus = jax.devices("gpu")
    mesh = jax.make_mesh((len(gpus),), ("data",), devices=gpus)
    options = STRATEGIES[strategy] | dict(max_grad_norm=1.0)
    if kind == "host":
        options |= HOST
    if kind == "replicas":
        if len(gpus) % 4:
            pytest.skip("needs four GPUs")
        mesh = jax.make_mesh((2, len(gpus) // 2), ("replica", "data"), devices=gpus)
        options |= REPLICAS
    found = []
    for means in ("xla", "peer"):
        state, metrics = trained(mesh, means, "bfloat16", "bfloat16", **options)
        found.append((state, [x["grad_norm"] for x in metrics]))
    assert_trees_same_bits(*found)


@pytest.mark.multigpu
def test_ten_thousand_steps_on_gpus():
    gpus = jax.devices("gpu")
    mesh = jax.make_mesh((len(gpus),), ("data",), devices=gpus)
    one, two = (
        trained(mesh, means, "bfloat16", "bfloat16", steps=10_000) for means in ("xla", "peer")
    )
    assert_trees_same_bits(two[0], one[0])
