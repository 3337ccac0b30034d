"""Coded moments and stochastic rounding over a mesh: the bits of one device, however it is cut."""

import functools
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.checkpoint.parts import adam_of
from jdistadam.core.codecs import BLOCK8, BLOCK16, BlockCodes, codec_of, is_codes
from support.bits import assert_same_bits, assert_trees_same_bits
from support.dtypes import dtypes
from support.exact_sums import decays
from support.h200 import compile_step
from support.optimizers import distributed_adamw
from support.own_loop import jit_over_mesh
from support.samples import few, often

SHAPES = {
    "rows": (256, 96),
    "inner": (3, 2048, 4),  # cut along its second dimension
    "columns": (5, 7200),  # packed: on 8 devices no dimension divides into whole blocks
    "middle": (4100,),  # coded, in a packed bucket, its last block not full
    "prime": (20_011,),
    "small": (7, 3),
    "row": (1024,),  # not coded; divides
    "scalar": (),
}
FEW = {k: SHAPES[k] for k in ("inner", "columns", "small")}
TWO = {k: SHAPES[k] for k in ("columns", "small")}
DTYPE = jnp.bfloat16
HYPER = dict(learning_rate=3e-3, b1=0.81, b2=0.88, eps=1e-7, eps_root=1e-12, weight_decay=0.13)
CODED = dict(mu_dtype="block8", nu_dtype="block8", main_params_dtype=None)
CODED_16 = CODED | dict(mu_dtype="block16", nu_dtype="block16")
KINDS = {
    "8 bits": CODED,
    "8 bits at random": CODED | dict(rounding="stochastic", seed=77),
    "remainders": CODED | dict(main_params_dtype="remainder16", rounding="stochastic", seed=2**40),
    "main": CODED | dict(main_params_dtype=jnp.float32),
    "bfloat16 at random": dict(
        main_params_dtype=None,
        mu_dtype=jnp.bfloat16,
        nu_dtype=jnp.bfloat16,
        rounding="stochastic",
    ),
    "nu alone, not rows": CODED
    | dict(mu_dtype=jnp.bfloat16, float32_moments=lambda path: "rows" in path),
    "16 bits": CODED_16,
    "16 bits at random": CODED_16 | dict(main_params_dtype="remainder16", rounding="stochastic"),
    "16 and 8 bits": CODED_16 | dict(nu_dtype="block8", rounding="stochastic", seed=3),
}
STEPS = 10
EXAMPLES = 16


def random_params(shapes=SHAPES):
    rng = np.random.default_rng(0)
    make = lambda shape: jnp.asarray(rng.normal(size=shape).astype(DTYPE))  # noqa: E731
    return {name: make(shape) for name, shape in shapes.items()}


def batches(steps=STEPS, shapes=SHAPES):
    """Signs for each example: every sum over them is exact, in every order."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        scale = {name: 2.0 ** rng.integers(-20, 3) for name in shapes}
        yield {
            name: (np.sign(rng.integers(-64, 65, (EXAMPLES, *s))) * scale[name]).astype(np.float32)
            for name, s in shapes.items()
        }


def summed(batch):
    """The gradients of one device."""
    return jax.tree.map(lambda x: jnp.asarray(x.sum(0).astype(DTYPE)), batch)


def loss(params, batch):
    terms = jax.tree.map(lambda p, x: jnp.sum(p.astype(jnp.float32) * jnp.sum(x, 0)), params, batch)
    return sum(jax.tree.leaves(terms))


def stepped_by_one(kind, steps, shapes):
    """Params and state by ``fused_adamw``, which has no buckets."""
    tx = jda.fused_adamw(**HYPER, mask=decays, **KINDS[kind])
    params = random_params(shapes)
    state, step = tx.init(params), jax.jit(tx.step)
    for batch in batches(steps, shapes):
        params, state = step(summed(batch), state, params)
    return params, state


def make_tx(shape, kind, *, explicit=False, **kwargs):
    names = {1: ("data",), 2: ("replica", "data")}[len(shape)]
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices("cpu")[: np.prod(shape)]
    mesh = jax.make_mesh(shape, names, (axis_type,) * len(shape), devices=devices)
    if len(shape) == 2:
        kwargs["replica_axis"] = "replica"
    given = dtypes(grad_reduce_dtype=jnp.float32, **KINDS[kind])
    return distributed_adamw(mesh=mesh, **given, mask=decays, **HYPER, **kwargs)


def trained(tx, shapes=SHAPES, *, steps=STEPS, accumulate_steps=1, state=None, skip=0):
    if state is None:
        state = jda.TrainState.create(random_params(shapes), tx)
    n = tx.config.parallel.num_devices * accumulate_steps
    step = jda.train_step(
        lambda p, b: loss(p, b) * n, tx, accumulate_steps=accumulate_steps
    )  # the mean over devices is the sum over examples
    for batch in list(batches(skip + steps, shapes))[skip:]:
        state, _ = step(state, batch)
    return state


def assert_trained_alike(tx, state, params, own):
    """Params, exact params, and moments as floats, of a state over a mesh and of one program's."""
    main, opt_state, _ = jda.to_optax_state(state, tx)
    assert_trees_same_bits(jda.full_params(state, tx), params)
    wanted = jax.tree.map(lambda x: np.asarray(x, np.float32), jda.main_params(params, own))
    assert_trees_same_bits(main, wanted)
    got, want = adam_of(opt_state), adam_of(own)
    for name in ("mu", "nu"):
        pair = (as_floats(name, getattr(adam, name)) for adam in (got, want))
        assert_trees_same_bits(*pair, name)


def as_floats(name, moments):
    """The moment "mu" or "nu" of all leaves, by the reference in numpy."""

    def one(x):
        if not is_codes(x):
            return np.asarray(x, np.float32)
        moment = BlockCodes(*map(np.asarray, x))
        return codec_of(moment).decode(name, moment, np)

    return jax.tree.map(one, moments, is_leaf=is_codes)


NOT_AT_BLOCKS = r"not cut at the ends of blocks.* elements\. Leave it whole in param_specs"
NAMED = CODED | dict(float32_moments=lambda path: path == "['w']")


@pytest.mark.parametrize(
    ("policy", "where", "advice"),
    [
        (CODED, "w", ", or name it in float32_moments"),
        (NAMED, None, None),
        (dict(rounding="stochastic", mu_dtype=jnp.bfloat16), "b", ", or round to nearest"),
        (CODED | dict(rounding="stochastic", mu_dtype=jnp.bfloat16), "b", ", or round to nearest"),
        (CODED | dict(rounding="stochastic"), "w", ", or name it in float32_moments"),
        (NAMED | dict(rounding="stochastic"), None, None),
    ],
)
def test_a_model_axis_that_cuts_blocks_raises(policy, where, advice):
    """And what it advises besides helps."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices("cpu")[:4])
    params = {"w": jnp.zeros((96, 96)), "b": jnp.zeros(96)}
    specs = {"w": P(None, "model"), "b": P("model")}
    tx = distributed_adamw(mesh=mesh, **dtypes(**policy), param_specs=specs, **HYPER)
    if where is None:
        tx.init(params)
        return
    with pytest.raises(jda.PolicyError, match=f"{NOT_AT_BLOCKS}{advice}\\.$") as caught:
        tx.init(params)
    assert str(caught.value).startswith(f"params['{where}']: ")


def test_a_coded_leaf_whose_param_is_rounded_must_be_whole():
    """Neither float32_moments nor rounding to nearest would do."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices("cpu")[:4])
    given = dtypes(**KINDS["8 bits at random"])
    specs = {"w": P(None, "model")}
    tx = distributed_adamw(mesh=mesh, **given, param_specs=specs, **HYPER)
    with pytest.raises(jda.PolicyError, match=rf"{NOT_AT_BLOCKS}\.$"):
        tx.init({"w": jnp.zeros((96, 96), jnp.bfloat16)})


@pytest.mark.slow
def test_custom_training_loop_is_train_step(cpu_mesh):
    """``tx.step`` in a shard_map, with its type checker, and with a state that is not verified."""
    tx = make_tx((4,), "remainders")
    params = random_params(FEW)
    state = tx.init(params)

    grads = jax.grad(lambda p, batch: loss(p, batch) * 4)

    def local(params, state, batch):
        return tx.step(grads(jda.local_params(params, tx), batch), state, params)

    step = jit_over_mesh(local, tx, params)
    for batch in batches(3, FEW):
        params, state = step(params, state, jda.shard_batch(batch, tx))
    state = jda.TrainState(params, state)
    assert_trained_alike(tx, state, *stepped_by_one("remainders", 3, FEW))


def with_dtypes(tx, given, **other):
    """The same optimizer with other dtypes; ``given`` is what it was made with."""
    given = {k: v for k, v in given.items() if k != "shape"}
    if tx.config.parallel.replica_axes:
        given["replica_axis"] = "replica"
    return distributed_adamw(mesh=tx.config.mesh, **dtypes(**other), mask=decays, **HYPER, **given)


def reseeded(tx, given, kind):
    """With another seed, which states that have one do not take."""
    other = dict(grad_reduce_dtype=jnp.float32) | KINDS[kind] | dict(seed=1)
    return with_dtypes(tx, given, **other)


FLOATS = dict(main_params_dtype=None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits", "16 bits"])
@often(lambda kind: kind == "16 bits")
def test_checkpoint_converts_between_codes_and_float32(tmp_path, kind):
    """From codes into float32, exactly; and from float32 into codes, rounded to nearest."""
    coded, form = make_tx((4,), kind), {"8 bits": BLOCK8, "16 bits": BLOCK16}[kind]
    floats = with_dtypes(coded, {}, **FLOATS)
    state = trained(coded, TWO, steps=2)
    shapes = lambda tx: jda.TrainState.shapes(random_params(TWO), tx)  # noqa: E731
    jda.save(tmp_path / "coded", state, coded)
    wide = jda.restore(tmp_path / "coded", shapes(floats), floats)
    assert_trees_same_bits(
        *(jda.to_optax_state(*x)[1][0] for x in ((wide, floats), (state, coded)))
    )
    moved = trained(floats, TWO, steps=1, state=wide, skip=2)
    jda.save(tmp_path / "floats", moved, floats)
    back = jda.restore(tmp_path / "floats", shapes(coded), coded)
    want, got = (jda.to_optax_state(*x)[1][0] for x in ((moved, floats), (back, coded)))
    for name in ("mu", "nu"):
        for path, x in getattr(want, name).items():
            if x.size >= 4096:
                x = form.decode(name, form.encode(name, x, None, np), np)
            assert_same_bits(getattr(got, name)[path], x, f"{name} {path}")


@pytest.mark.slow
def test_checkpoint_restores_onto_one_device_with_explicit_axes(tmp_path):
    """JAX then spells the sharding of what is decoded in another way."""
    tx, there = (make_tx(shape, "16 bits", explicit=True) for shape in ((2,), (1,)))
    params = random_params({"rows": SHAPES["rows"]})
    state = jda.TrainState.create(params, tx)
    jda.save(tmp_path, state, tx)
    found = jda.restore(tmp_path, jda.TrainState.shapes(params, there), there)
    assert_trees_same_bits(jda.to_optax_state(found, there)[:2], jda.to_optax_state(state, tx)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits", "16 bits"])
@often(lambda kind: kind == "16 bits")
def test_a_checkpoint_holds_codes_and_scales(tmp_path, kind):
    """Of the shapes of leaves, as ``fused_adamw`` has them; so one restores the other's."""
    codes_dtype = {"8 bits": "uint8", "16 bits": "uint16"}[kind]
    tx, alone = make_tx((8,), kind), jda.fused_adamw(**HYPER, mask=decays, **KINDS[kind])
    state = trained(tx, TWO, steps=3)
    jda.save(tmp_path / "many", state, tx)
    header = json.loads((tmp_path / "many/3/state/header.json").read_text())["header"]
    assert header["leaves"]["mu['columns'].codes"]["dtype"] == codes_dtype
    assert header["leaves"]["nu['columns'].scales"]["shape"] == [282]
    params, own = stepped_by_one(kind, 3, TWO)
    template = jax.eval_shape(lambda p: {"params": p, "opt_state": alone.init(p)}, params)
    one = jda.restore(tmp_path / "many", template)
    assert_trees_same_bits(one, {"params": params, "opt_state": own})
    jda.save(tmp_path / "one", one)
    there = make_tx((2, 2), kind, sharding_strategy="optim_grads_params")
    back = jda.restore(tmp_path / "one", jda.TrainState.shapes(params, there), there)
    assert_trained_alike(there, back, params, own)
    floats = jda.fused_adamw(**HYPER, mask=decays, mu_dtype=jnp.float32, nu_dtype=jnp.float32)
    template = jax.eval_shape(lambda p: {"params": p, "opt_state": floats.init(p)}, params)
    wide = adam_of(jda.restore(tmp_path / "many", template)["opt_state"])
    assert_trees_same_bits(wide, adam_of(jda.decoded(own)))


@pytest.mark.slow
def test_checkpoint_converts_between_8_and_16_bits(tmp_path):
    """From 8 bits into 16, exactly, whichever optimizer reads it; and from 16 into 8, to nearest."""
    shapes, params = jda.TrainState.shapes, random_params()
    eight, sixteen = make_tx((2,), "8 bits"), make_tx((4,), "16 bits")
    in_floats = lambda state, tx: adam_of(jda.to_optax_state(state, tx)[1])  # noqa: E731
    state = trained(eight, steps=1)
    jda.save(tmp_path / "8", state, eight)
    wide = jda.restore(tmp_path / "8", shapes(params, sixteen), sixteen)
    assert wide.opt_state.mu.codes.dtype == jnp.uint16
    assert_trees_same_bits(in_floats(wide, sixteen), in_floats(state, eight))
    alone = jda.fused_adamw(**HYPER, mask=decays, **KINDS["16 bits"])
    template = jax.eval_shape(lambda p: {"params": p, "opt_state": alone.init(p)}, state.params)
    one = jda.restore(tmp_path / "8", template)["opt_state"]
    assert adam_of(one).nu["rows"].codes.dtype == jnp.uint16
    assert_trees_same_bits(adam_of(jda.decoded(one)), in_floats(state, eight))
    jda.save(tmp_path / "16", trained(sixteen, steps=1, state=wide, skip=1), sixteen)
    back = jda.restore(tmp_path / "16", shapes(params, eight), eight)
    found = jda.restore(tmp_path / "16", shapes(params, sixteen), sixteen)
    want, got = in_floats(found, sixteen), in_floats(back, eight)
    for name in ("mu", "nu"):
        for path, x in getattr(want, name).items():
            if x.size >= 4096:
                x = BLOCK8.decode(name, BLOCK8.encode(name, x, None, np), np)
            assert_same_bits(getattr(got, name)[path], x, f"{name} {path}")


def test_unsupported_options_raise():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    make = functools.partial(distributed_adamw, mesh=mesh)
    for b2, given in ((0.9, CODED), (0.9995, CODED_16)):
        with pytest.raises(
            jda.PolicyError, match=r"nu_dtype: .* cannot follow the gradients at this b2"
        ):
            make(1e-3, b2=b2, **given)
    make(1e-3, **CODED_16)
    for of_slow, moment in ((dict(b1=0.9, b2=0.89), "mu"), (dict(b2=0.99), "nu")):
        given = dict(param_labels=lambda p: {"w": "slow"}, groups={"slow": of_slow, "fast": {}})
        with pytest.raises(
            jda.PolicyError, match=f"{moment}_dtype: .* cannot follow the gradients at this b"
        ):
            make(1e-3, b1=0.8, b2=0.88, **CODED, **given)
    wrong = {"rounding": "up", "seed": 3, "float32_moments": lambda path: True}
    for name, value in wrong.items():
        with pytest.raises(jda.PolicyError, match=rf"^{name}: "):
            make(1e-3, **{name: value})


def test_random_rounding_that_rounds_nothing_raises():
    """At any b2 it lets a second moment of 16 bits decay; with nothing in 16 bits it raises."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    for nu_dtype, is_good in ((jnp.bfloat16, True), (jnp.float32, False)):
        given = dict(nu_dtype=nu_dtype, rounding="stochastic")
        tx = distributed_adamw(1e-3, b2=0.999, mesh=mesh, **given)
        if is_good:
            tx.init(random_params())
            continue
        with pytest.raises(jda.PolicyError, match=r"rounding: has no effect: .* for float32,"):
            tx.init(random_params())


def test_a_predicate_that_selects_no_leaf_raises():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    given = CODED | dict(float32_moments=lambda path: "rosw" in path)
    tx = distributed_adamw(1e-3, b1=0.8, b2=0.88, mesh=mesh, **given)
    with pytest.raises(jda.TreeError, match=r"selects no leaf of 4096 elements or more: .* \['"):
        tx.init(random_params())


KINDS_TO_MIX = ("8 bits at random", "8 bits", "16 bits", "bfloat16 at random")


def test_states_of_another_policy_raise():
    """Moments of another kind, or without the seed: before anything is computed."""
    params = random_params(FEW)
    txs = [make_tx((2,), kind) for kind in KINDS_TO_MIX]
    batch = next(batches(1, FEW))
    for tx, other in itertools.permutations(txs, 2):
        state = jda.TrainState.create(params, tx)
        with pytest.raises(jda.JDistAdamError, match=r"(another |opt_state\.)(mu|key|layout)"):
            jda.train_step(loss, other)(state, batch)
    eight, sixteen = txs[1:3]
    message = r"opt_state\.mu: is not stored as the optimizer expects: got block8, expected block16"
    with pytest.raises(jda.DtypeError, match=message):
        jda.train_step(loss, sixteen)(jda.TrainState.create(params, eight), batch)


def test_decoded_raises_for_distributed_states():
    state = make_tx((2,), "8 bits").init(random_params(FEW))
    with pytest.raises(jda.TreeError, match="to_optax_state"):
        jda.decoded(state)


def test_another_seed_draws_other_bits():
    kind = "8 bits at random"
    tx = make_tx((2,), kind)
    found = [trained(x, TWO, steps=1) for x in (tx, reseeded(tx, {}, kind))]
    a, b = (np.asarray(x.params["columns"]).view(np.uint16) for x in found)
    assert 0 < np.mean(a != b) < 0.9


@few(1)
@pytest.mark.parametrize("kind", ["8 bits at random", "remainders", "main", "16 bits at random"])
@often(lambda kind: kind in ("remainders", "16 bits at random"))
def test_state_is_updated_in_place_on_gpus(h200s, kind):
    """No copy of codes, scales or floats; one more call for what is not coded."""
    _, _, compiled = compile_step(
        h200s(8), jnp.bfloat16, jnp.bfloat16, KINDS[kind], b1=0.8, b2=0.85, communication="xla"
    )
    text = compiled.as_text()
    assert text.count('custom_call_target="jdistadam_quantized"') == 2
    copies = re.findall(r"= (?:\()?(\w+)\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    assert [x for x in copies if math.prod(map(int, x[1].split(","))) > 512] == []


@pytest.mark.parametrize(("kind", "itemsize"), [("remainders", 1), ("16 bits at random", 2)])
def test_planned_state_bytes_per_device(kind, itemsize):
    """2 + 4.1 / N bytes per parameter, or 2 + 6.1 / N, where 2 are those of bfloat16 params."""
    params = {"w": jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)}
    for n in (1, 2, 8):
        planned = jda.plan(params, make_tx((n,), kind))
        state = planned.held["main_params"] + planned.held["mu"] + planned.held["nu"]
        floats = 2 * 128 * 4  # the place of small leaves, of which there are none
        assert state == 8192 * 1024 * (2 + 2 * (itemsize + 4 / 128)) / n + floats
