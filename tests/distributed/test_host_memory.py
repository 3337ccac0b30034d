"""A state in pinned memory of the host: the bits of one on the device, wherever states go."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed import calls, host_memory, update
from jdistadam.distributed.flat_arrays import FLAT_ARRAYS
from jdistadam.distributed.host_memory import map_arrays
from jdistadam.kernels.host_copy import Rows
from support import h200, own_loop
from support.bits import assert_trees_same_bits
from support.exact_steps import GROUPS, LABELS, batches, make_tx
from support.exact_sums import HYPER, linear_loss, random_params
from support.samples import few, often

BOTH, GPU = ("device", "pinned_host"), "gpu"
FACTORS = {3: np.nan, 6: 0.25}
SMALL = dict(bucket_bytes=1 << 12)
DYNAMIC = jda.DynamicLossScale(init_scale=8.0, growth_interval=2)
GUARD = jda.NormGuard(max_ratio=3.0, window=4, warmup_steps=2)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """States of a few thousand elements have several."""
    monkeypatch.setattr(calls, "WINDOW", 2048)
    monkeypatch.setattr(host_memory, "WINDOWS_BYTES", 1)


def of_few(tree):
    return {name: tree[name] for name in ("rows", "columns", "small")}


def small_state(tx, policy):
    """A first state, of few parameters: conversions compile a program for each."""
    dtype = "float32" if policy == "float32" else "bfloat16"
    return jda.TrainState.create(of_few(random_params()), tx, param_dtypes=dtype)


def memories(opt_state):
    """The kinds of memory of flat arrays; all others are on the device."""
    found = []
    rest = map_arrays(FLAT_ARRAYS, lambda x: found.append(x.sharding.memory_kind), opt_state)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(rest)} == {"device"}
    return set(found)


def on_host(*names):
    """The argument ``state_memory`` that moves only these."""
    return dict.fromkeys(names, "pinned_host")


def names_on_host(opt_state):
    """The flat arrays that are in host memory."""
    kinds = {
        name: {x.sharding.memory_kind for x in jax.tree.leaves(getattr(opt_state, name))}
        for name in FLAT_ARRAYS
    }
    assert all(len(kind) <= 1 for kind in kinds.values())
    return {name for name, kind in kinds.items() if kind == {"pinned_host"}}


def run(tx, state, count=10, micro=3):
    step = jda.train_step(linear_loss, tx, accumulate_steps=micro)
    for batch in batches(count, FACTORS):
        state, metrics = step(state, of_few(batch))
    return state, metrics


CASES = {
    "one device": ("one device", "float32", {}),
    "ZeRO-0": ("flat-no_shard", "bfloat16", dict(max_grad_norm=1.0)),
    "ZeRO-1": ("hybrid-optim", "none", dict(param_labels=of_few(LABELS), groups=GROUPS)),
    "ZeRO-2": ("twice-optim_grads", "remainder16", dict(norm_guard=GUARD)),
    "ZeRO-3": ("tuple-optim_grads_params", "8 bits", dict(loss_scale=DYNAMIC)),
    "gathered once": ("flat-optim_grads_params", "comm", dict(reshard_after_forward=False)),
}


APART = ("mu",), ("mu", "nu"), ("main_params", "ema"), ("nu", "main_params", "ema"), ("ema",)
OFTEN = [
    ("bfloat16", APART[0], None),
    ("remainder16", APART[1], None),
    ("8 bits", APART[2], None),
    ("8 bits", APART[3], "leaves"),
    ("8 bits", APART[4], None),
]


@few(1)
@pytest.mark.parametrize("norms", [None, "leaves"])
@pytest.mark.parametrize("names", APART, ids="-".join)
@pytest.mark.parametrize("policy", ["bfloat16", "remainder16", "8 bits"])
@often(lambda policy, names, norms: (policy, names, norms) in OFTEN)
def test_states_partly_on_the_host_have_the_bits_of_device_memory(policy, names, norms):
    """A kernel call then takes windows of some arrays, and all of the others in place."""
    found, micro = [], 1 if norms is None else 3  # the update follows the backward pass, or not
    for memory in ("device", on_host(*names)):
        tx = over(2, policy, memory, norms=norms, **SMALL)
        found.append(run(tx, small_state(tx, policy), micro=micro))
        assert names_on_host(found[-1][0].opt_state) == (set(names) if found[1:] else set())
    assert_trees_same_bits(*found)
    params = found[0][0].params
    planned, on_device = (jda.plan(params, x) for x in (tx, over(2, policy, "device")))
    assert set(planned.on_host) == set(names)
    assert planned.held.keys() | planned.on_host.keys() == on_device.held.keys()


def test_state_memory_dict_is_copied_when_given():
    """In the order of the arrays of a state: programs of several processes are equal."""
    given = on_host("ema", "nu", "mu", "main_params")
    tx = over(2, "bfloat16", given)
    assert tx.config.on_host == FLAT_ARRAYS
    mesh, adam = tx.config.mesh, jda.inject_hyperparams(jda.fused_adamw)(1e-3)
    given = on_host("mu")
    tx = jda.distributed(adam, mesh=mesh, state_memory=given)
    given["nu"] = "pinned_host"
    state = jda.TrainState.create(of_few(random_params()), tx)
    assert names_on_host(state.opt_state.inner_state) == {"mu"}


def test_another_choice_of_arrays_is_an_error():
    first, second = (over(2, "bfloat16", on_host(*names)) for names in (("mu",), ("nu",)))
    state, step = small_state(first, "bfloat16"), jda.train_step(linear_loss, second)
    given = of_few(next(iter(batches(1))))
    with pytest.raises(
        jda.MeshError, match=r"mu: in host memory.* names only nu\. .*state_shardings"
    ):
        step(state, given)
    moved = jax.device_put(state.opt_state, second.state_shardings())
    state = dataclasses.replace(state, opt_state=moved)
    params = jax.device_put(state.params, jax.memory.Space.Host)
    with pytest.raises(jda.MeshError, match=r"params.*in host memory.* jax\.memory\.Space\.Device"):
        step(dataclasses.replace(state, params=params), given)
    step(state, given)


@pytest.fixture(scope="module", params=["bfloat16", "8 bits"])
def trained(request):
    """By memory: an optimizer over two shards, its step, and a state of two steps."""
    found = {}
    for memory in BOTH:
        tx = over(2, request.param, memory)
        state, step = small_state(tx, request.param), jda.train_step(linear_loss, tx)
        for batch in batches(2):
            state, _ = step(state, of_few(batch))
        found[memory] = tx, step, state
    return request.param, found


def over(n, policy, memory, **options):
    mesh = jax.make_mesh((n,), ("data",), devices=jax.devices("cpu")[:n])
    options |= dict(state_memory=memory, ema_decay=0.9)
    return make_tx("one device", policy, mesh=mesh, **options)


fewer = often(lambda trained: trained == "bfloat16")


@pytest.mark.slow
@fewer
def test_checkpoints_go_from_each_memory_to_the_other(trained, tmp_path):
    policy, found = trained
    exact = {memory: jda.to_optax_state(state, tx) for memory, (tx, _, state) in found.items()}
    assert_trees_same_bits(*exact.values())
    for memory, (tx, _, state) in found.items():
        jda.save(tmp_path / memory, state, tx)
    moves = ("device", "pinned_host", 2), ("pinned_host", "device", 2), ("pinned_host",) * 2 + (4,)
    for source, memory, n in moves:
        tx = over(n, policy, memory)
        template = jda.TrainState.shapes(found[source][2].params, tx)
        got = jda.restore(tmp_path / source, template, tx)
        assert memories(got.opt_state) == {memory}
        assert_trees_same_bits(jda.to_optax_state(got, tx), exact[source])
    tx = over(2, policy, on_host("mu", "ema"))
    got = jda.restore(tmp_path / "pinned_host", jda.TrainState.shapes(got.params, tx), tx)
    assert names_on_host(got.opt_state) == {"mu", "ema"}
    assert_trees_same_bits(jda.to_optax_state(got, tx), exact["device"])
    tx, _, state = found["pinned_host"]
    again = jda.restore(tmp_path / "device", state, tx)  # into arrays
    assert memories(again.opt_state) == {"pinned_host"}
    assert_trees_same_bits(again, state)


@pytest.mark.slow
@fewer
def test_conversions_and_averages_of_each_memory_are_the_same(trained):
    """And a state on the device is moved by a step."""
    _, found = trained
    (on_device, first, state), (tx, step, moved) = found.values()
    main, opt_state, extra = jda.to_optax_state(state, on_device)
    dtypes = jax.tree.map(lambda x: x.dtype, state.params)
    made = jda.from_optax_state(main, opt_state, tx, extra, param_dtypes=dtypes)
    reloaded = jda.reload_main_params(moved, tx)
    for new in (made, reloaded):
        assert memories(new.opt_state) == {"pinned_host"}
    assert_trees_same_bits(made.opt_state.mu, state.opt_state.mu)
    assert_trees_same_bits(made.opt_state.ema, state.opt_state.ema)
    assert_trees_same_bits(reloaded, jda.reload_main_params(state, on_device))
    assert_trees_same_bits(jda.ema_params(moved, tx), jda.ema_params(state, on_device))
    given = of_few(next(iter(batches(1))))
    pairs = ((state, on_device), (moved, tx))
    assert_trees_same_bits(*(jda.eval_step(linear_loss, t)(s, given) for s, t in pairs))
    want, got = (f(jax.tree.map(jnp.copy, state), given) for f in (first, step))
    assert memories(got[0].opt_state) == {"pinned_host"}
    assert_trees_same_bits(got, want)


@pytest.mark.slow
def test_scans_and_custom_loops_have_the_bits_of_device_memory():
    """A scan of steps, and a step in a region of one's own; no out_shardings anywhere."""
    found = {}
    for memory in BOTH:
        tx = over(2, "bfloat16", memory)
        step = jda.train_step(linear_loss, tx)
        given = jax.tree.map(lambda *x: np.stack(x), *map(of_few, batches(3)))
        scanned = jax.jit(lambda s, b, step=step: jax.lax.scan(step, s, b), donate_argnums=0)
        state, _ = scanned(small_state(tx, "bfloat16"), given)
        mesh = tx.config.mesh
        own = jda.distributed(jda.fused_adamw(**HYPER), mesh=mesh, state_memory=memory, **SMALL)
        params, opt_state = own_loop.own_state(own, of_few(random_params()), True)
        run_own = own_loop.make_own_step(own, linear_loss, True, micro_batches=2)
        for batch in batches(3):
            given = jda.shard_batch(of_few(batch), own)
            params, opt_state, _ = run_own(params, opt_state, given)
        assert memories(state.opt_state) == memories(opt_state) == {memory}
        found[memory] = state, params, opt_state
    assert_trees_same_bits(*found.values())


CODED = dict(main_params_dtype="remainder16", mu_dtype="block8", nu_dtype="block8")
CODED |= dict(rounding="stochastic", seed=3)


@few(1)
@pytest.mark.parametrize("wrap", [lambda loss: loss, jax.jit, jax.checkpoint])
def test_windows_follow_the_backward_pass(wrap, monkeypatch):
    """The last layers come first; a leaf that the first and the last one use comes last."""
    monkeypatch.setattr(calls, "WINDOW", 1024)
    orders, make_calls = [], update.make_calls

    def noted(*args):
        found = make_calls(*args)
        orders.append([x.bucket.leaves[0] for call in found for x in call.spans])
        return found

    monkeypatch.setattr(update, "make_calls", noted)

    def loss(params, x):
        h = x @ params["a tied"]
        for name in "bcd":
            h = jnp.tanh(h @ params[name])
        return jnp.mean(jnp.square(h @ params["a tied"].T))

    params = {name: jnp.eye(32) for name in ("a tied", "b", "c", "d")}
    mesh = jax.make_mesh((1,), ("data",))
    for options in ({}, dict(max_grad_norm=1.0)):
        tx = jda.distributed(
            jda.fused_adamw(1e-3), mesh=mesh, state_memory="pinned_host", bucket_bytes=1, **options
        )
        step = jda.train_step(wrap(loss), tx)
        step(jda.TrainState.create(params, tx), jnp.ones((4, 32)))
    assert orders == [[3, 2, 1, 0], [0, 1, 2, 3]]


def squares(params, x):
    return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)) * jnp.mean(x)


def test_a_plan_has_the_bytes_of_each_memory(monkeypatch):
    tx = over(2, "8 bits", "pinned_host")
    with monkeypatch.context() as patched:  # shapes make no array
        patched.delattr(jax, "make_array_from_callback")
        state = jda.TrainState.shapes(of_few(random_params(jnp.bfloat16)), tx)
    planned = jda.plan(state.params, tx)
    here = lambda tree: sum(  # noqa: E731
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    moved = map_arrays(FLAT_ARRAYS, lambda _: None, state)
    assert planned.held_bytes == here(moved)
    assert sum(planned.on_host.values()) == here(state) - here(moved)
    assert list(planned.on_host) == ["main_params", "mu", "nu", "ema"]
    assert re.search(r"\nema +on the host +\d", str(planned)) and "windows" in str(planned)
    assert jda.plan(state.params, over(2, "8 bits", "device")).on_host == {}
    three, name = planned.buffers["windows of the state"], "windows of the state"
    for times, windows in (
        (2, 6),
        (1000, len(calls.consecutive_spans(tx.layout(state.params), splits=True))),
    ):
        monkeypatch.setattr(host_memory, "WINDOWS_BYTES", times * three)
        assert 3 * jda.plan(state.params, tx).buffers[name] == windows * three


@few(1)
@pytest.mark.parametrize("memory", ["pinned_host", ("mu", "ema"), ("main_params", "ema"), ("ema",)])
@pytest.mark.parametrize("buffer_bytes", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("case", ["float32", "bfloat16", "8 bits", "mixed"])
@often(lambda case, buffer_bytes, memory: memory == "pinned_host" or buffer_bytes == 1)
def test_a_plan_has_the_bytes_of_windows(case, buffer_bytes, memory, monkeypatch):
    if case == "float32" and "main_params" in memory:
        memory = ("nu",)  # it has none
    options, policy = dict(ema_decay=0.9), case
    monkeypatch.setattr(host_memory, "WINDOWS_BYTES", buffer_bytes)
    if case == "mixed":  # moments in codes and in float32
        policy = "8 bits"
        adam = functools.partial(jda.fused_adamw, float32_moments=lambda path: "rows" in path)
        options |= dict(adam=adam)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    memory = memory if memory == "pinned_host" else on_host(*memory)
    tx = make_tx("one device", policy, mesh=mesh, state_memory=memory, **options)
    params = of_few(random_params("float32" if policy == "float32" else jnp.bfloat16))
    found, made = [], host_memory.Stream.__init__

    def noted(stream, arrays, rows, after):
        made(stream, arrays, rows, after)
        sizes = []
        for window, parts in zip(arrays, rows, strict=True):
            parts = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, Rows))
            pairs = zip(jax.tree.leaves(window), parts, strict=True)
            sizes.append(sum(x.dtype.itemsize * y.num_rows * y.width for x, y in pairs))
        if sizes:
            found.append(max(sizes) * min(len(sizes), max(3, buffer_bytes // max(sizes))))

    monkeypatch.setattr(host_memory.Stream, "__init__", noted)
    state = jda.TrainState.shapes(params, tx)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), of_few(next(batches(1))))
    jax.eval_shape(jda.train_step(linear_loss, tx), state, batch)
    assert jda.plan(params, tx).buffers["windows of the state"] == max(found)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "8 bits"])
def test_host_state_on_one_gpu_has_the_bits_of_device_memory(policy, tmp_path):
    """Steps, checkpoints from each memory into the other, conversions and averages."""
    mesh, found = jax.make_mesh((1,), ("data",), devices=jax.devices(GPU)[:1]), {}
    for memory in BOTH:
        tx = make_tx("one device", policy, mesh=mesh, state_memory=memory, ema_decay=0.9)
        state, metrics = run(tx, small_state(tx, policy))
        assert memories(state.opt_state) == {memory} and int(metrics["skipped"]) == 1
        jda.save(tmp_path / memory, state, tx)
        found[memory] = tx, state
    (on_device, want), (tx, got) = found.values()
    assert_trees_same_bits(got, want)
    assert_trees_same_bits(jda.ema_params(got, tx), jda.ema_params(want, on_device))
    for memory, source in zip(BOTH, BOTH[::-1], strict=True):
        tx = found[memory][0]
        restored = jda.restore(tmp_path / source, jda.TrainState.shapes(want.params, tx), tx)
        assert memories(restored.opt_state) == {memory}
        assert_trees_same_bits(restored, want)
        assert_trees_same_bits(jda.reload_main_params(restored, tx).params, want.params)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["codes", "floats"])
def test_many_windows_on_one_gpu_change_no_bit(case, monkeypatch):
    """Six of them at a time, large enough for copies and kernels to overlap."""
    monkeypatch.setattr(calls, "WINDOW", 1 << 20)
    mesh, found = jax.make_mesh((1,), ("data",), devices=jax.devices(GPU)[:1]), {}
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(3 << 10, 1 << 10)) for i in range(4)}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    adam = jda.fused_adamw(**HYPER, **(CODED if case == "codes" else {}))
    for memory in (*BOTH, *map(lambda names: on_host(*names), APART)):
        tx = jda.distributed(adam, mesh=mesh, state_memory=memory, ema_decay=0.9)
        monkeypatch.setattr(host_memory, "WINDOWS_BYTES", 1)
        three = jda.plan(params, tx).buffers.get("windows of the state", 1)
        monkeypatch.setattr(host_memory, "WINDOWS_BYTES", 2 * three)
        step, state = jda.train_step(squares, tx), jda.TrainState.create(params, tx)
        for i in range(10):
            state, _ = step(state, np.linspace(1 + i, -2, 8, dtype=np.float32))
        found[str(memory)] = state
    for got in found.values():
        assert_trees_same_bits(got, found["device"])


@few(1)
@pytest.mark.parametrize(("policy", "count"), [("float32", 3), ("8 bits", 3), ("8 bits", 6)])
@often(lambda policy, count: (policy, count) != ("8 bits", 3))
def test_state_is_updated_in_place_window_by_window_on_h200s(h200s, policy, count, monkeypatch):
    """The state is updated in place on the host, window by window, with copies in both directions."""
    monkeypatch.setattr(calls, "WINDOW", 1 << 18)
    monkeypatch.setattr(host_memory, "num_windows", lambda *_: count)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    tx = make_tx(
        "one device", policy, mesh=mesh, state_memory="pinned_host", ema_decay=0.9, loss_scale=None
    )
    params = h200.params_of(jnp.bfloat16)
    state = jda.TrainState.shapes(params, tx)
    batch = jax.ShapeDtypeStruct(
        (64, h200.WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
    )
    small = {"xla_gpu_reduce_scatter_combine_threshold_bytes": "1"}  # of a small model
    step = jda.train_step(h200.loss_fn, tx)
    text, memory = h200.compile_here(h200s(2), step, state, batch, small)
    planned = jda.plan(params, tx)
    on_host = sum(planned.on_host.values())
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == on_host
    assert memory.host_output_size_in_bytes == on_host and memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes <= planned.buffer_bytes + planned.held["params"]
    entry = text[text.index("\nENTRY") :]
    assert "_xla_compute_type" not in text  # nothing is computed on the host
    assert (
        "%dynamic_slice_fusion" not in entry
    )  # its results would not have its operands' addresses
    flat_size = tx.layout(params).flat_size
    assert not re.search(rf"\[{flat_size}\]\S* copy(-start)?\(", entry)
    spaces = re.findall(rf"\[{flat_size}\]\{{0(:S\(5\))?\}} parameter\(", entry)
    assert len(spaces) >= 2 and set(spaces) == {":S(5)"}
    # Half of the windows on the device arrive, the others leave.
    first = {}
    for place, line in enumerate(entry.splitlines()):
        if found := re.search(
            r'target="jdistadam_(host_cop\w+)".*index = (\d+).*to_host = (\w+)', line
        ):
            name, index, to_host = found.groups()
            first.setdefault((name, to_host, int(index)), place)
    # Most products of the backward pass come after the first window has arrived.
    lines, arrived = entry.splitlines(), first["host_copied", "false", 0]
    before, after = (sum("gemm" in x for x in part) for part in (lines[:arrived], lines[arrived:]))
    assert after > before
    windows = 1 + max(index for _, _, index in first)

    def left_by(i):  # windows leave in order
        waits = [k for k in first if k[:2] == ("host_copied", "true") and k[2] >= i]
        return min(first[k] for k in waits)

    assert windows > 4
    for i in range(windows):
        start, arrived = first["host_copy", "false", i], first["host_copied", "false", i]
        leave, left = first["host_copy", "true", i], left_by(i)
        assert start < arrived < leave < left
        ahead = count - count // 2
        if i >= ahead:
            assert first["host_copy", "true", i - ahead] < start
            assert start < first["host_copied", "false", i - ahead + 1]
        if i >= count:
            assert left_by(i - count) < start
        if i + count // 2 < windows:  # a window leaves while others are updated
            assert first["host_copy", "true", i + count // 2] < left
    # Those of the average come after all others: both have no more than the planned bytes.
    call = re.compile(r'target="jdistadam_host_copy".*index = 0.*to_host = false')
    starts = [place for place, line in enumerate(entry.splitlines()) if call.search(line)]
    assert len(starts) == 2 and left_by(windows - 1) < starts[1]


def compiled_layers(
    h200s, monkeypatch, *, devices=1, micro=1, layers=12, parts=1, rows=64, **options
):
    """Compiles a step of some layers, each of which is cut into parts: text and memory."""
    monkeypatch.setattr(calls, "WINDOW", h200.WIDTH**2 // devices // parts)
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices("cpu")[:devices])
    options = dict(loss_scale=None, max_grad_norm=None) | options
    tx = make_tx("one device", "8 bits", mesh=mesh, **options)
    matrix = jax.ShapeDtypeStruct((h200.WIDTH, h200.WIDTH), jnp.bfloat16)
    params = {f"layer{i:02d}": matrix for i in range(layers)}

    def loss(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct(
        (rows * devices * micro, h200.WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
    )
    step = jda.train_step(loss, tx, accumulate_steps=micro)
    small = {"xla_gpu_reduce_scatter_combine_threshold_bytes": "1"}
    state = jda.TrainState.shapes(params, tx)
    return h200.compile_here(h200s(devices), step, state, batch, small)


@few(1)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("state_memory", ["pinned_host", on_host("mu", "nu")], ids=["all", "some"])
@often(
    lambda devices, micro, state_memory: (
        ((devices == 2) == (micro == 1)) == (state_memory == "pinned_host")
    )
)
def test_updates_run_between_products_on_h200s(h200s, devices, micro, state_memory, monkeypatch):
    """As soon as gradients are known, but on two devices beside their sums.

    Without this order XLA runs all updates after the backward pass, on one device.
    """
    layers = 12
    text, _ = compiled_layers(
        h200s, monkeypatch, devices=devices, micro=micro, layers=layers, state_memory=state_memory
    )
    order = ""
    for line in text[text.index("\nENTRY") :].splitlines():
        order += "K" if "jdistadam_quantized" in line else "G" if h200.is_product(line) else ""
    last = order.rindex("G")
    assert order.count("K") == layers
    assert order[:last].count("K") >= layers - 5, order


@few(1)
@pytest.mark.parametrize("options", [dict(state_memory="pinned_host"), dict(early_updates=True)], ids=["host", "device"])  # fmt: skip
def test_gradients_are_freed_early_on_h200s(h200s, options, monkeypatch):
    """Also those of parts of leaves, and although the norm needs all; no parameter is copied."""
    layers, width = 24, h200.WIDTH
    text, memory = compiled_layers(h200s, monkeypatch, layers=layers, parts=2, rows=8, **options)
    assert not re.search(rf"\[{width},{width}\]\S* copy(-start)?\(", text)
    all_gradients = 4 * layers * width**2  # float32
    assert memory.temp_size_in_bytes < all_gradients / 3


def test_parts_of_leaves_are_joined_once_on_h200s(h200s, monkeypatch):
    """Written one by one into an array, each would copy it, and XLA's scheduler would delay the
    gradients of weights to run these copies beside them: three times the memory.
    """
    monkeypatch.setattr(calls, "WINDOW", 1 << 18)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    tx = make_tx("one device", "8 bits", mesh=mesh, state_memory="pinned_host", max_grad_norm=1.0)
    params = h200.params_of(jnp.bfloat16)
    state = jda.TrainState.shapes(params, tx)
    batch = jax.ShapeDtypeStruct(
        (64, h200.WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
    )
    text, _ = h200.compile_here(h200s(1), jda.train_step(h200.loss_fn, tx), state, batch)
    assert len(re.findall('target="jdistadam_quantized"', text)) > 24  # 6 leaves of 4 parts
    assert not re.search("dynamic.update.slice", text)


def test_a_loop_over_steps_compiled_for_h200s_keeps_the_state_in_place(h200s, monkeypatch):
    monkeypatch.setattr(calls, "WINDOW", 1 << 18)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    tx = make_tx("one device", "8 bits", mesh=mesh, state_memory="pinned_host", loss_scale=None)
    params = h200.params_of(jnp.bfloat16)
    batch = jax.ShapeDtypeStruct(
        (3, 64, h200.WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "data"))
    )
    step = jda.train_step(h200.loss_fn, tx)
    loop = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs), donate_argnums=0)
    state = jda.TrainState.shapes(params, tx)
    _, memory = h200.compile_here(h200s(1), loop, state, batch)
    on_host = sum(jda.plan(params, tx).on_host.values())
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == on_host
    assert memory.host_temp_size_in_bytes == 0
