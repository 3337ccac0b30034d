"""Parameters that rest as shards between steps: the bits of whole ones, their memory and traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import often

pytestmark = pytest.mark.slow

SHAPES = {
    "rows": (128, 192),  # large: a bucket of its own
    "columns": (3, 8192),  # large, cut along its second dimension
    "bias": (24,),  # small leaves that divide are packed shard by shard
    "small": (16, 3),
    "turned": (3, 16),
    "odd": (5,),  # does not divide: stays whole, and so do the next two
    "scalar": (),
    "empty": (0, 8),
}
HELD = {"rows", "columns", "bias", "small", "turned"}
FEW = ("rows", "bias", "turned", "odd")  # one of each kind, where a test compiles much
HYPER = dict(b1=0.87, b2=0.93, eps=1e-3, weight_decay=0.11)
MESHES = {
    "flat": ((8,), ("data",), {}),
    "hybrid": ((2, 4), ("replica", "data"), dict(replica_axis="replica")),
    "twice": (
        (2, 4),
        ("replica", "data"),
        dict(replica_axis="replica", outer_sharding_strategy="optim"),
    ),
    "tuple": ((2, 4), ("node", "data"), dict(shard_axis=("node", "data"))),
}
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
POLICIES = {  # dtype of the params, and the policy
    "float32": ("float32", dict()),
    "main": ("bfloat16", dict(grad_comm_dtype="bfloat16")),
    "remainder": ("bfloat16", dict(main_params_dtype="remainder16")),
    "no main": ("bfloat16", dict(main_params_dtype=None)),
    "float32 sum": ("float32", dict(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")),
    "float16 sent": ("float32", dict(param_comm_dtype="float16")),
}


def make_tx(mesh="flat", kind="explicit", *, policy=None, **kwargs):
    shape, names, axes = MESHES[mesh]
    mesh = jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))
    policy = jda.MixedPrecisionPolicy(**(policy or {}))
    return jda.distributed_fused_adamw(
        optax.linear_schedule(0.02, 0.01, 7), mesh=mesh, policy=policy, **HYPER | axes | kwargs
    )


def params_of(dtype, names=SHAPES):
    """Numbers that float16 holds too: what is rounded to be sent is so from the first step on."""
    rng = np.random.default_rng(0)
    return {
        k: jnp.asarray(jnp.asarray(rng.normal(size=SHAPES[k]), jnp.float16), dtype) for k in names
    }


def loss_fn(params, batch):
    """Its gradients are sums of two in 16 bits, which XLA would not round if it could fuse them."""
    rows = {k: x.mean(0) for k, x in batch.items()}
    sines = [jnp.sum(jnp.sin(p.astype(jnp.float32) * rows[k])) for k, p in params.items()]
    products = [jnp.sum(p.astype(jnp.float32) * rows[k]) for k, p in params.items()]
    return sum(sines) + sum(products)


def batches(steps, names=SHAPES):
    rng = np.random.default_rng(1)
    for _ in range(steps):
        yield {k: rng.normal(size=(16, *SHAPES[k])).astype(np.float32) for k in names}


def run(tx, dtype, *, steps=10, micro=1, names=SHAPES):
    """After each step: full params, main parameters, optax's state, and the loss."""
    state = jda.TrainState.create(params_of(dtype, names), tx)
    step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
    found = []
    for batch in batches(steps, names):
        state, metrics = step(state, batch)
        main, opt_state, _ = jda.to_optax_state(state, tx)
        found.append(jax.device_get((jda.full_params(state, tx), main, opt_state, metrics["loss"])))
    return found, state


@functools.cache
def whole(mesh, strategy, policy, micro):
    dtype, dtypes = POLICIES[policy]
    return run(make_tx(mesh, policy=dtypes, sharding_strategy=strategy), dtype, micro=micro)[0]


OFTEN = {
    ("flat", "explicit", "optim", "main", 2),
    ("hybrid", "auto", "optim_grads", "no main", 1),
    ("twice", "explicit", "optim", "float16 sent", 2),
    ("tuple", "auto", "optim_grads", "float32 sum", 2),
}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
@often(lambda mesh, kind, strategy, policy, micro: (mesh, kind, strategy, policy, micro) in OFTEN)
def test_ten_steps_have_the_bits_of_whole_params(mesh, kind, strategy, policy, micro):
    dtype, dtypes = POLICIES[policy]
    tx = make_tx(mesh, kind, policy=dtypes, sharding_strategy=strategy, params_at_rest="shard")
    got, _ = run(tx, dtype, micro=micro)
    for i, (a, b) in enumerate(zip(got, whole(mesh, strategy, policy, micro), strict=True)):
        for name, x, y in zip(("params", "main", "state", "loss"), a, b, strict=True):
            try:
                assert_trees_same_bits(x, y)
            except AssertionError as error:
                raise AssertionError(f"step {i + 1}, {name}: {error}") from None


@pytest.mark.parametrize(("policy", "mesh"), [("float32", "twice"), ("main", "flat")])
def test_a_device_holds_one_part_of_each_parameter_and_none_twice(policy, mesh):
    """Float32 shards are the main parameters; of those in 16 bits the main ones are float32."""
    dtype, dtypes = POLICIES[policy]
    tx = make_tx(mesh, policy=dtypes, params_at_rest="shard")
    state = jda.TrainState.create(params_of(dtype), tx)
    for name, x in state.params.items():
        part = x.size // (8 if name in HELD else 1)
        assert {s.data.size for s in x.addressable_shards} == {part}, name
    layout = tx.layout(state.params)
    with_main = {layout.leaves[i].path for b in layout.buckets if b.has_main for i in b.leaves}
    kept = {"odd", "scalar"} | (HELD if policy == "main" else set())
    assert with_main == {f"params['{name}']" for name in kept}
    held = jda.plan(params_of(dtype), tx).held
    assert held["params"] == sum(x.addressable_shards[0].data.nbytes for x in state.params.values())
    for name in ("main_params", "mu", "nu"):
        flat = getattr(state.opt_state, name)
        assert held[name] == flat.addressable_shards[0].data.nbytes
    shapes = jda.TrainState.shapes(params_of(dtype), tx)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_parameters_are_gathered_once_and_only_what_does_not_divide_after_the_update(strategy):
    tx = make_tx("twice", sharding_strategy=strategy, params_at_rest="shard")
    params = params_of("float32")
    step = jda.train_step(loss_fn, tx, accumulate_steps=2)
    batch = next(batches(1))
    assert jda.audit(step, jda.TrainState.create(params, tx), batch).passed
    planned = jda.plan(params, tx, accumulate_steps=2)
    gathers = [c for c in planned.collectives if c.op == "all-gather"]
    assert {(c.times, c.when) for c in gathers} == {(1, "step")}
    full = jda.plan(params, make_tx("twice", sharding_strategy=strategy), accumulate_steps=2)
    assert planned.bytes_sent == full.bytes_sent  # the same, at another time
    for entry in tx.config.schedule(params).buckets:
        assert [c.axes for c in entry.gather] == (
            [("replica",), ("data",)] if entry.bucket.held else [("data",)]
        )
        assert bool(entry.after_update) == (not entry.bucket.held)


def test_states_move_between_whole_and_resting_parameters():
    """Through optax's state, both ways; training goes on with the same bits."""
    kinds = [
        make_tx(policy=dict(grad_comm_dtype="bfloat16"), params_at_rest=x)
        for x in ("full", "shard")
    ]
    ends = []
    for first, second in (kinds, kinds[::-1]):
        _, state = run(first, "bfloat16", steps=3, names=FEW)
        moved = jda.from_optax_state(
            *jda.to_optax_state(state, first)[:2], second, param_dtypes=jnp.bfloat16
        )
        step = jda.train_step(loss_fn, second)
        for batch in batches(2, FEW):
            moved, _ = step(moved, batch)
        ends.append((jda.full_params(moved, second), *jda.to_optax_state(moved, second)[:2]))
    assert_trees_same_bits(*ends)


def test_a_state_of_the_other_kind_is_found():
    """Packed leaves belong elsewhere, so the layout differs."""
    full, rest = make_tx(), make_tx(params_at_rest="shard")
    state, batch = jda.TrainState.create(params_of("float32"), full), next(batches(1))
    with pytest.raises(jda.LayoutError, match="to_optax_state"):
        jda.train_step(loss_fn, rest)(state, batch)


def test_a_step_of_another_layout_says_nan():
    tx = make_tx(params_at_rest="shard")
    own = jda.TrainState.create(params_of("float32"), tx)
    digest = own.opt_state.layout_digest + jnp.uint8(1)
    changed = jda.TrainState(own.params, own.opt_state._replace(layout_digest=digest))
    batch = jda.shard_batch(next(batches(1)), tx)
    new, metrics = jax.jit(jda.train_step(loss_fn, tx))(changed, batch)
    assert np.isnan(metrics["loss"]) and all(np.isnan(x).all() for x in jax.tree.leaves(new.params))


def test_skipped_steps_and_injected_numbers():
    """A non-finite gradient leaves all shards; chain and inject_hyperparams know of rest."""

    def make(at_rest):
        shape, names, _ = MESHES["flat"]
        inner = jda.inject_hyperparams(jda.distributed_fused_adamw)(
            learning_rate=0.02, mesh=jax.make_mesh(shape, names), params_at_rest=at_rest,
            policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16"), loss_scale=8.0, **HYPER
        )  # fmt: skip
        return jda.chain(optax.scale(0.5), inner)

    ends = []
    for at_rest in ("full", "shard"):
        tx = make(at_rest)
        state = jda.TrainState.create(params_of("bfloat16", FEW), tx)
        step = jda.train_step(loss_fn, tx)
        for i, batch in enumerate(batches(3, FEW)):
            if i == 1:
                before = jax.device_get(state.params)
                batch["bias"][3] = np.inf
            state, metrics = step(state, batch)
            if i == 1:
                assert_trees_same_bits(jax.device_get(state.params), before)
        assert int(metrics["skipped"]) == 1
        ends.append((jda.full_params(state, tx), *jda.to_optax_state(state, tx)[:2]))
    assert_trees_same_bits(*ends)


def own_step(tx, specs, micro, check_vma):
    """As a user writes it: gathered once, then micro-batches, in a jax.shard_map."""

    def local_step(params, state, batch):
        local = jda.local_params(jda.gather_params(params, tx), tx)
        parts = jax.tree.map(lambda x: x.reshape(micro, x.shape[0] // micro, *x.shape[1:]), batch)
        acc = tx.init_grads(params)
        for i in range(micro):
            grads = jax.grad(loss_fn)(local, jax.tree.map(lambda x, i=i: x[i], parts))
            acc = tx.accumulate(acc, grads)
        return tx.step(acc, state, params)

    return jax.jit(
        jax.shard_map(
            local_step, mesh=tx.config.mesh, in_specs=(specs, tx.state_specs(), tx.config.parallel.batch_spec),
            out_specs=(specs, tx.state_specs()), check_vma=check_vma,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("strategy", "check_vma"), [("optim", True), ("optim_grads", False)])
def test_a_loop_of_ones_own(strategy, check_vma):
    """The same loop under both: there is nothing to gather where params rest whole."""
    ends = []
    for at_rest in ("full", "shard"):
        tx = make_tx("hybrid", sharding_strategy=strategy, params_at_rest=at_rest)
        state = jda.TrainState.create(params_of("float32", FEW), tx)
        params, opt_state = state.params, state.opt_state
        step = own_step(tx, tx.param_specs(params), 2, check_vma)
        for batch in batches(2, FEW):
            params, opt_state = step(params, opt_state, jda.shard_batch(batch, tx))
        assert int(opt_state.count) == 2
        ends.append(jda.full_params(jda.TrainState(params, opt_state), tx))
    assert_trees_same_bits(*ends)


def shard_mapped(function, tx, params, *arguments):
    specs = tx.param_specs(params)
    mapped = jax.shard_map(
        function, mesh=tx.config.mesh, in_specs=(specs, *(P() for _ in arguments)), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    return jax.eval_shape(mapped, params, *arguments)


def test_what_is_not_supported_raises_with_a_way_out():
    tx = make_tx(params_at_rest="shard", stacked=lambda path: "columns" in path)
    names = [*FEW, "columns"]
    state = jda.TrainState.create(params_of("float32", names), tx)
    params = state.params
    with pytest.raises(jda.PolicyError, match=r"params_at_rest: nothing is sharded.*'optim'"):
        make_tx(sharding_strategy="no_shard", params_at_rest="shard")
    with pytest.raises(jda.PolicyError, match=r"params_at_rest: unknown.*'full' or 'shard'"):
        make_tx(params_at_rest="shards")
    policy = dict(grad_reduce_dtype="float32")
    with pytest.raises(jda.PolicyError, match=r"peer memory is not supported.*params_at_rest"):
        make_tx(policy=policy, params_at_rest="shard", communication="peer")
    assert "params_at_rest 'shard'" in str(jda.plan(params, tx))

    def differentiated(params):
        def loss(p):
            return sum(jnp.sum(x) for x in jax.tree.leaves(jda.gather_params(p, tx)))

        return jax.grad(loss)(params)["odd"]

    with pytest.raises(jda.PolicyError, match=r"cannot be differentiated.*before jax.grad"):
        shard_mapped(differentiated, tx, params)
    with pytest.raises(jda.MeshError, match=r"all are gathered at once.*before a scan"):
        layer = lambda params: jda.gather_params({"columns": params["columns"][0]}, tx)  # noqa: E731
        shard_mapped(layer, tx, params)

    def shard_grads(params):
        acc = tx.accumulate(tx.init_grads(params), params)
        return acc.weight

    with pytest.raises(jda.ShapeError, match=r"grads\['bias'\]"):
        shard_mapped(shard_grads, tx, params)
    with pytest.raises(jda.MeshError, match="not placed as sharding_strategy and params_at_rest"):
        whole = jax.device_put(params, jax.NamedSharding(tx.config.mesh, P()))
        batch = jda.shard_batch(next(batches(1, names)), tx)
        own_step(tx, P(), 1, False).lower(whole, state.opt_state, batch)


def test_under_optim_grads_params_both_values_are_the_same():
    """Parameters are shards already: one layout, one placement, one schedule."""
    full, rest = (
        make_tx("twice", sharding_strategy="optim_grads_params", params_at_rest=x)
        for x in ("full", "shard")
    )
    params = params_of("float32")
    assert full.layout(params) == rest.layout(params)
    assert full.param_specs(params) == rest.param_specs(params)
    assert full.config.schedule(params) == rest.config.schedule(params)


def test_layers_of_a_scan_are_gathered_before_it():
    """The model gathers in its scan, as under "optim_grads_params": there layers are whole."""

    def scanned(tx):
        def loss(params, x):
            def body(x, layer):
                layer = jda.gather_params(layer, tx)
                return jnp.tanh(x @ layer["w"] + layer["scale"][None]), None

            return jnp.mean(jax.lax.scan(body, x, params["layers"])[0])

        return loss

    rng = np.random.default_rng(4)
    shapes = dict(w=(3, 96, 96), scale=(3, 96))
    params = {"layers": {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}}
    batches = rng.normal(size=(2, 16, 96)).astype(np.float32)
    ends = []
    for at_rest in ("full", "shard"):
        tx = make_tx(params_at_rest=at_rest, stacked=lambda path: "layers" in path)
        step = jda.train_step(scanned(tx), tx)
        state = jda.TrainState.create(params, tx)
        for batch in batches:
            state, _ = step(state, batch)
        ends.append((jda.full_params(state, tx), state.opt_state.count))
    assert_trees_same_bits(*ends)
    assert state.params["layers"]["scale"].sharding.spec == P(None, "data")


@pytest.mark.parametrize("kind", KINDS)
@often(lambda kind: kind == "explicit")
def test_a_model_that_xla_partitions(kind):
    """State sharded over two axes of data, and one dimension that these and the model cut."""
    names = ("replica", "data", "model")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(KINDS[kind],) * 3)
    axes = dict(replica_axis="replica", outer_sharding_strategy="optim")
    specs = dict(rows=P("model"), bias=P("model"), turned=P(None, "model"), odd=None)
    ends = []
    for at_rest in ("full", "shard"):
        tx = jda.distributed_fused_adamw(
            0.02, mesh=mesh, param_specs=specs, params_at_rest=at_rest, **HYPER, **axes
        )
        found, state = run(tx, "float32", steps=2, names=FEW)
        ends.append(found)
    assert_trees_same_bits(*ends)
    assert state.params["rows"].sharding.spec[0] == ("model", "data", "replica")


def test_new_params_reach_the_shards():
    """reload_main_params: what is put into a state is cut as the state is."""
    tx = make_tx("twice", params_at_rest="shard")
    state = jda.TrainState.create(params_of("float32"), tx)
    new = jax.tree.map(lambda x: x + 1, params_of("float32"))
    state = state.replace(params=new, tx=tx)
    assert_trees_same_bits(jax.device_get(jda.full_params(state, tx)), jax.device_get(new))
    main = jda.to_optax_state(state, tx)[0]
    for name in SHAPES:
        assert_same_bits(main[name], np.asarray(new[name]), name)
