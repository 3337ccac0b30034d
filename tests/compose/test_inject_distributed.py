"""jda.inject_hyperparams of a distributed optimizer: numbers as state, in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.compilations import num_compilations
from support.exact_sums import (
    HYPER,
    decays,
    exact_batch,
    linear_loss,
    random_params,
    without_empty,
)
from support.optimizers import distributed_adam, distributed_adamw
from support.own_loop import jit_over_mesh
from support.samples import often

F32, BF16 = jnp.float32, jnp.bfloat16
NUMBERS = dict(HYPER, max_grad_norm=20.0)
LABELS = {"rows": "slow", "columns": "", "prime": "", "small": "own", "scalar": "", "empty": ""}
GROUPS = {"": {}, "slow": dict(lr_scale=0.5), "own": dict(weight_decay=0.7, b1=0.5)}
SETTINGS = {
    "optim": dict(mask=decays, param_labels=LABELS, groups=GROUPS),
    "optim_grads_params": dict(mask=decays),
    "no_shard": {},
    "optim_grads": {},
}


def numbers_of_step(i):
    """Other numbers in each step, all of them; the norm of the batches is above and below."""
    return {
        "learning_rate": 3e-3 * (1 - i / 20),
        "b1": 0.8 + i / 100,
        "b2": 0.99 + i / 2000,
        "eps": 1e-7 * (1 + i),
        "eps_root": 1e-12 * (1 + i),
        "weight_decay": 0.13 / (1 + i),
        "max_grad_norm": 10.0 + 500.0 * (i % 3),
    }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("strategy", list(SETTINGS))
@often(lambda strategy, dtype: (strategy, dtype) == ("optim", BF16))
def test_step_uses_the_hyperparameters_in_the_state(cpu_mesh, strategy, dtype):
    """Four steps, all numbers changed before each: the bits of an optimizer made with them.

    That one is made within a program that takes the numbers as operands. Sums are exact.
    """
    fixed = dict(mesh=cpu_mesh(8), sharding_strategy=strategy, **SETTINGS[strategy])
    tx = jda.inject_hyperparams(distributed_adamw)(**NUMBERS, **fixed)
    step = jda.train_step(linear_loss, tx, accumulate_steps=3)
    state = jda.TrainState.create(random_params(dtype), tx)
    plain = distributed_adamw(**NUMBERS, **fixed)
    want = jda.TrainState.create(random_params(dtype), plain)

    @jax.jit
    def plain_step(numbers, state, batch):
        made = distributed_adamw(**numbers, **fixed)
        made.param_specs(state.params)  # the shapes of the unsharded params, which init saw
        return jda.train_step(linear_loss, made, accumulate_steps=3)(state, batch)

    rng = np.random.default_rng(0)
    compiled = None
    for i in range(4):
        batch = exact_batch(rng)
        numbers = numbers_of_step(i)
        want, want_metrics = plain_step(
            {k: jnp.float32(x) for k, x in numbers.items()}, want, batch
        )
        for name, x in numbers.items():
            state.opt_state.hyperparams[name] = x
        if compiled is None:
            before = num_compilations()
        state, metrics = step(state, batch)
        compiled = num_compilations() - before if compiled is None else compiled
        assert metrics.keys() == want_metrics.keys()
        assert float(metrics["learning_rate"]) == np.float32(numbers["learning_rate"])
        assert_trees_same_bits(metrics, want_metrics)
    assert step._jitted._cache_size() == 1
    assert_trees_same_bits(state.params, want.params)
    got = state.opt_state.inner_state
    for name in ("count", "main_params", "mu", "nu"):
        assert_trees_same_bits(getattr(got, name), getattr(want.opt_state, name))


@pytest.mark.slow
def test_a_hundred_steps_compile_one_program(cpu_mesh):
    """Python numbers, NumPy scalars, arrays anywhere: whatever is put into the state."""
    tx = jda.inject_hyperparams(distributed_adamw)(
        optax.cosine_decay_schedule(1e-2, 100), b2=0.99, max_grad_norm=1, mesh=cpu_mesh(4)
    )
    step = jda.train_step(lambda params, x: jnp.mean(jnp.square(x @ params["w"])), tx)
    state = jda.TrainState.create({"w": jnp.ones((8, 4))}, tx)
    x = jda.shard_batch(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32), tx)
    forms = (float, int, np.float32, np.float64, np.asarray, jnp.float32, np.int32)
    state, _ = step(state, x)
    compiled, rates = num_compilations(), set()
    for i in range(100):
        state.opt_state.hyperparams["max_grad_norm"] = forms[i % len(forms)](1 + i % 5)
        state.opt_state.hyperparams["b2"] = 0.9 + i / 2000
        state, metrics = step(state, x)
        rates.add(float(metrics["learning_rate"]))
        assert float(state.opt_state.hyperparams["max_grad_norm"]) == 1 + i % 5
    assert num_compilations() == compiled
    assert len(rates) > 90  # and the schedule went on
    assert int(state.opt_state.inner_state.count) == 101


def test_a_hundred_fused_steps_compile_one_program():
    tx = jda.inject_hyperparams(jda.fused_adamw)(1e-2, weight_decay=0.1)
    step = jda.jit_step(tx)
    params = {"w": jnp.ones((8, 4))}
    state = tx.init(params)
    grads = {"w": jnp.full((8, 4), 0.5)}
    params, state = step(grads, state, params)
    compiled = num_compilations()
    for i in range(100):
        state.hyperparams["learning_rate"] = np.float32(1e-2 / (1 + i))
        params, state = step(grads, state, params)
    assert num_compilations() == compiled


def test_a_skipped_step_leaves_the_schedule_where_it_was(cpu_mesh):
    """As the schedule of an optimizer that is not injected, whose count stays as well."""
    schedule = optax.linear_schedule(0.5, 0.0, 8)  # exact values
    kwargs = dict(mesh=cpu_mesh(4), loss_scale=jda.DynamicLossScale(8.0), b1=0.5, b2=0.25)
    txs = (
        distributed_adamw(schedule, **kwargs),
        jda.inject_hyperparams(distributed_adamw)(schedule, **kwargs),
    )
    results = []
    for tx in txs:
        step = jda.train_step(lambda params, x: jnp.sum(params["w"] * jnp.mean(x, 0)), tx)
        state = jda.TrainState.create({"w": jnp.ones(8)}, tx)
        rates = []
        for i in range(6):
            x = np.full((8, 8), np.nan if i in (1, 2) else i + 1, np.float32)
            state, metrics = step(state, x)
            rates.append(float(metrics["learning_rate"]))
        results.append((state, rates))
    (plain, rates), (injected, injected_rates) = results
    assert rates == injected_rates == [0.5, 0.4375, 0.4375, 0.4375, 0.375, 0.3125]
    assert int(injected.opt_state.count) == int(plain.opt_state.count) == 4
    assert int(injected.opt_state.inner_state.scaling.skipped) == 2
    assert_trees_same_bits(plain.params, injected.params)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@often(lambda check_vma: check_vma)
def test_injected_hyperparameters_work_in_custom_loops_and_chains(cpu_mesh, check_vma):
    """A custom training loop takes the state of a chain, with numbers changed outside of it."""
    make = functools.partial(distributed_adamw, mesh=cpu_mesh(2), b1=0.5, b2=0.25)
    inject = jda.inject_hyperparams(make)
    chained = jda.chain(optax.scale(0.5), inject(learning_rate=1e-2, max_grad_norm=1.0))
    within = jda.inject_hyperparams(
        lambda learning_rate, scale: jda.chain(
            optax.scale(scale), make(learning_rate, max_grad_norm=1.0)
        )
    )(1e-2, scale=0.5)
    plain = jda.chain(optax.scale(0.5), make(optax.linear_schedule(1e-2, 0, 4), max_grad_norm=1.0))
    rng = np.random.default_rng(2)
    batches = [without_empty(exact_batch(rng)) for _ in range(2)]
    results = []
    for tx, find in (
        (plain, None),
        (chained, lambda state: state[1]),
        (within, lambda state: state),
    ):
        params = without_empty(random_params())
        state = tx.init(params)

        def local_step(params, state, batch, tx=tx):
            grads = jax.grad(linear_loss)(jda.local_params(params, tx), batch)
            return tx.step(grads, state, params)

        step = jit_over_mesh(local_step, tx, params, check_vma)
        for i, batch in enumerate(batches):
            if find is not None:
                find(state).hyperparams["learning_rate"] = optax.linear_schedule(1e-2, 0, 4)(i)
            params, state = step(params, state, jda.shard_batch(batch, tx))
        results.append(params)
    assert_trees_same_bits(results[1], results[0])
    assert_trees_same_bits(results[2], results[0])


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@often(lambda strategy: strategy == "optim_grads_params")
def test_injected_states_pass_the_audit_and_convert_to_optax_and_back(cpu_mesh, strategy):
    """The state of optax's injection and back, onto another mesh; the next steps are the same."""
    inject = jda.inject_hyperparams(distributed_adamw)
    tx = inject(**HYPER, mesh=cpu_mesh(8), sharding_strategy=strategy)
    theirs = optax.inject_hyperparams(optax.adamw)(**HYPER)
    rng = np.random.default_rng(3)
    step = jda.train_step(linear_loss, tx)
    state = jda.TrainState.create(random_params(), tx)
    for _ in range(3):
        state.opt_state.hyperparams["weight_decay"] = 0.3
        state, _ = step(state, exact_batch(rng))
    main, opt_state, *_ = jda.to_optax_state(state, tx)
    assert jax.tree.structure(opt_state) == jax.tree.structure(theirs.init(main))
    assert float(opt_state.hyperparams["weight_decay"]) == np.float32(0.3)
    batch = exact_batch(rng)
    found = jda.audit(step, state, batch)
    assert found.passed, found
    other = inject(**HYPER, mesh=cpu_mesh(3), bucket_bytes=4096)
    moved = jda.from_optax_state(main, opt_state, other)
    scale = np.float32(3 / 8)  # the mean over three devices of sums that are the same
    moved_batch = jax.tree.map(lambda x: x * scale, batch)
    moved, _ = jda.train_step(linear_loss, other)(moved, moved_batch)
    state, _ = step(state, batch)
    assert_trees_same_bits(jda.full_params(moved, other), jda.full_params(state, tx))
    assert moved.opt_state.hyperparams.keys() == state.opt_state.hyperparams.keys()


@pytest.mark.slow
def test_metrics_report_the_learning_rate_of_every_optimizer(cpu_mesh):
    """Of the step that was taken: a number, a schedule, beside groups and in a chain."""
    mesh, loss = cpu_mesh(2), lambda params, x: jnp.sum(params["w"] * jnp.mean(x))
    schedule = optax.linear_schedule(0.5, 0.0, 4)
    groups = dict(param_labels={"w": "head"}, groups={"head": dict(lr_scale=0.1)})
    for tx, want in (
        (distributed_adamw(0.25, mesh=mesh), [0.25, 0.25]),
        (distributed_adam(schedule, mesh=mesh), [0.5, 0.375]),
        (distributed_adamw(schedule, mesh=mesh, **groups), [0.5, 0.375]),
        (
            jda.chain(optax.scale(2.0), distributed_adamw(schedule, mesh=mesh)),
            [0.5, 0.375],
        ),
    ):
        state, got = jda.TrainState.create({"w": jnp.ones(4)}, tx), []
        step = jda.train_step(loss, tx)
        for _ in want:
            state, metrics = step(state, np.ones((2, 3), np.float32))
            assert metrics["learning_rate"].dtype == jnp.float32
            got.append(float(metrics["learning_rate"]))
        assert got == want


def test_arrays_set_as_hyperparameters_stay_valid(cpu_mesh):
    """A step donates its state, but not the array that a user sets again and again."""
    mesh, loss = cpu_mesh(4), lambda params, x: jnp.sum(params["w"]) * jnp.mean(x)
    tx = jda.distributed(jda.inject_hyperparams(jda.fused_adamw)(1.0), mesh=mesh)
    state, step = jda.TrainState.create({"w": jnp.ones(512)}, tx), jda.train_step(loss, tx)
    rates = [
        jnp.float32(0.25),
        jax.device_put(jnp.float32(0.5), jax.NamedSharding(mesh, P())),
        jax.device_put(jnp.float32(0.125), mesh.devices.flat[-1]),
    ]
    for i in range(9):
        state.opt_state.hyperparams["learning_rate"] = rates[i % 3]
        state, metrics = step(state, np.ones((4, 3), np.float32))
        assert float(metrics["learning_rate"]) == float(rates[i % 3])
    assert [float(x) for x in rates] == [0.25, 0.5, 0.125]


def test_wrong_hyperparameters_raise(cpu_mesh):
    inject = jda.inject_hyperparams(distributed_adamw)
    mesh = cpu_mesh(2)
    with pytest.raises(jda.HyperparameterError, match=r"b2: out of range: got 1.5"):
        inject(1e-3, b2=1.5, mesh=mesh)
    with pytest.raises(jda.HyperparameterError, match=r"max_grad_norm: out of range: got -1"):
        inject(1e-3, max_grad_norm=-1, mesh=mesh)
    with pytest.raises(jda.HyperparameterError, match=r"b1: not a schedule: .* static_args='b1'"):
        inject(1e-3, b1=lambda count: "many", mesh=mesh)
    with pytest.raises(jda.HyperparameterError, match="max_grad_norm: not a single number"):
        distributed_adamw(1e-3, max_grad_norm=jnp.ones(2), mesh=mesh)
    tx = inject(1e-3, mesh=mesh)
    loss = lambda params, x: jnp.sum(params["w"] * jnp.mean(x))  # noqa: E731
    step, x = jda.train_step(loss, tx), np.ones((2, 3), np.float32)
    params = {"w": jnp.ones(4)}
    made = jda.TrainState.create(params, tx)
    for name, value, message in (
        ("max_grad_norm", 1.0, r"\['max_grad_norm'\]: no hyperparameter of this optimizer"),
        ("learning_rate", jnp.ones(2), r"\['learning_rate'\]: not one real number"),
        ("b1", "half", r"\['b1'\]: not one real number: got 'half'"),
        ("b2", True, r"\['b2'\]: not one real number: got True"),
    ):
        state = jax.tree.map(lambda x: x, made)
        state.opt_state.hyperparams[name] = value
        with pytest.raises(jda.HyperparameterError, match=message):
            step(state, x)
    state = jax.tree.map(lambda x: x, made)
    del state.opt_state.hyperparams["b1"]
    with pytest.raises(jda.HyperparameterError, match=r"\['b1'\]: missing"):
        step(state, x)
    plain = jda.TrainState.create(params, distributed_adamw(1e-3, mesh=mesh))
    with pytest.raises(
        jda.TreeError, match="opt_state: not the state of this optimizer: got Distr"
    ):
        step(plain, x)


def test_state_specs_include_injected_hyperparameters(cpu_mesh):
    tx = jda.inject_hyperparams(distributed_adamw)(1e-3, mesh=cpu_mesh(2))
    specs = tx.state_specs()
    assert specs.hyperparams == P() and specs.inner_state.mu == P("data")
    shapes = jda.TrainState.shapes({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, tx)
    assert shapes.opt_state.hyperparams["learning_rate"].sharding.spec == P()


def test_either_order_of_nesting_is_one_optimizer(cpu_mesh):
    """distributed around inject_hyperparams, the reverse, and a chain around either: one state."""
    fixed = dict(mesh=cpu_mesh(4), max_grad_norm=20.0)
    groups = dict(param_labels=without_empty(LABELS), groups=GROUPS)
    numbers = HYPER | dict(learning_rate=optax.linear_schedule(3e-3, 1e-3, 5))
    inside = jda.distributed(jda.inject_hyperparams(jda.fused_adamw)(**numbers, **groups), **fixed)

    def make(**given):
        return jda.distributed(jda.fused_adamw(**given, **groups), **fixed)

    def from_numbers(learning_rate, b1, b2, eps, eps_root, weight_decay):
        given = dict(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
        return make(**given, weight_decay=weight_decay)

    outside = jda.inject_hyperparams(from_numbers)(**numbers)
    halved = [jda.chain(optax.scale(0.5), tx) for tx in (inside, outside)]
    params = without_empty(random_params())
    for one, other in ((inside, outside), halved):
        states = [jda.TrainState.create(params, tx) for tx in (one, other)]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
        steps = [jda.train_step(linear_loss, tx) for tx in (one, other)]
        rng = np.random.default_rng(3)
        for _ in range(3):
            batch = without_empty(exact_batch(rng))
            states = [step(state, batch)[0] for step, state in zip(steps, states, strict=True)]
        assert_trees_same_bits(states[0].params, states[1].params)
    assert states[0].opt_state[1].hyperparams.keys() == set(numbers)
