"""What a first user may pass wrongly, with the words that come back; and what is taken, and why.

A case that is neither an error of this package nor taken on purpose does not belong here: raise in
words, or say in the last table why it is harmless.
"""

import copy
import dataclasses
import functools
import pickle
import re
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam import errors
from support.optimizers import distributed_adamw
from support.samples import few

BF16 = jnp.bfloat16
PARAMS = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
GRADS = {"w": np.full((4, 3), 0.5, np.float32), "b": np.full(3, -0.5, np.float32)}
BATCH = np.ones((4, 4), np.float32)
NO_PARAMS = "requires the current value of parameters, but you are not passing `params`"


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tree)


# --- one program


def fused(*args, **kwargs):
    return jda.fused_adamw(*(args or (1e-2,)), **kwargs)


def fused_step(tx=None, grads=GRADS, params=PARAMS, state=None, method="step"):
    tx = tx or fused()
    return getattr(tx, method)(grads, tx.init(params) if state is None else state, params)


def adam_state(**changes):
    """A state of fused_adamw in which something was replaced."""
    adam, *rest = fused().init(PARAMS)
    return (adam._replace(**changes), *rest)


def step_of(leaf, **kwargs):
    """Steps a tree of one leaf, which is its own gradient."""
    return fused_step(fused(**kwargs), {"w": leaf}, {"w": leaf})


# --- several devices


@functools.cache
def mesh(*shape, names=("data",)):
    shape = shape or (2,)
    return jax.make_mesh(shape, names, devices=jax.devices("cpu")[: int(np.prod(shape))])


def mesh24():
    return mesh(2, 4, names=("data", "model"))


def make_tx(*args, **kwargs):
    return distributed_adamw(*(args or (1e-2,)), **{"mesh": mesh()} | kwargs)


@functools.cache
def tx(**kwargs):
    return make_tx(**kwargs)


@functools.cache
def state(**kwargs):
    """A state that no step took, and none may take."""
    return jda.TrainState.create(PARAMS, tx(**kwargs))


def create(params=PARAMS, **kwargs):
    return jda.TrainState.create(params, tx(), **kwargs)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None] - 1) ** 2)


def train(loss=loss_fn, batch=BATCH, state=None, tx=None, **kwargs):
    """Takes a step that raises while it is traced, so that its state stays; it is made once."""
    tx = tx or globals()["tx"]()
    state = globals()["state"]() if state is None else state
    return jda.train_step(loss, tx, **kwargs)(state, batch)


def train_in_jit(state, tx):
    """Takes a step inside a program, where a state cannot be looked at."""
    return jax.jit(jda.train_step(loss_fn, tx))(state, BATCH)


def trained(*args, tx=None, **kwargs):
    """Takes a step of a new state; returns its metrics."""
    tx = tx or globals()["tx"]()
    return train(*args, tx=tx, **{"state": jda.TrainState.create(PARAMS, tx)} | kwargs)[1]


def train_with(loss, **create_kwargs):
    return train(loss, state=create(**create_kwargs))


def with_model_state(new, train=train):
    """Trains with a loss that returns ``new`` in place of the model state {"m": zeros}."""
    state = create(model_state={"m": np.zeros(2)})
    return train(lambda p, b, model_state: (loss_fn(p, b), new), state=state)


def inside(function, tx=None):
    """Traces ``function(params, opt_state)`` inside of shard_map; nothing is compiled."""
    used = tx or globals()["tx"]()
    specs = (P(), used.state_specs())
    mapped = jax.shard_map(
        function, mesh=used.config.mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    return jax.eval_shape(mapped, PARAMS, jax.eval_shape(used.init, PARAMS))


def donated():
    """A state that was passed to a step."""
    new = create()
    jax.tree.map(lambda x: x.delete(), new.opt_state._replace(layout_digest=None))
    return new


@functools.cache
def coded_tx():
    return make_tx(mu_dtype="block16")


def coded_state(scales_dtype):
    """A state with codes, which says of no option in which dtype its scales are."""
    made = jda.TrainState.create({"w": np.ones((64, 128), np.float32)}, coded_tx())
    mu = made.opt_state.mu
    mu = mu._replace(scales=mu.scales.astype(scales_dtype))
    return dataclasses.replace(made, opt_state=made.opt_state._replace(mu=mu))


def optax_state(**changes):
    adam, *rest = optax.adamw(1e-2).init(PARAMS)
    return (adam._replace(**changes), *rest)


def from_optax(opt_state, params=PARAMS, **kwargs):
    return jda.from_optax_state(params, opt_state, tx(), **kwargs)


@functools.cache
def exported(**kwargs):
    return jda.to_optax_state(state(**kwargs), tx(**kwargs))


def extra_state():
    return exported()[2]


def with_extra(scaling=(), **changes):
    """A state made with a third value of which something is changed."""
    *rest, extra = exported(loss_scale=jda.DynamicLossScale())
    scaling = extra.scaling._replace(**dict(scaling))
    return jda.from_optax_state(*rest, tx(), extra._replace(**dict(scaling=scaling) | changes))


def mains(params, kind=jnp.float32):
    """The exact parameters of ``params``, with a state of others in 16 bits."""
    return jda.main_params(params, fused(main_params_dtype=kind).init({"w": jnp.ones(3, BF16)}))


def injected(**hyperparams):
    """Steps after numbers in the state of inject_hyperparams were set."""
    made = jda.inject_hyperparams(jda.fused_adamw)(1e-2)
    opt_state = made.init(PARAMS)
    opt_state.hyperparams.update(hyperparams)
    return made.step(GRADS, opt_state, PARAMS)


def labelled(**settings):
    return make_tx(param_labels={"w": "a", "b": "a"}, groups={"a": settings})


def policy(**dtypes):
    return jda.MixedPrecisionPolicy(**dtypes)


NOT_DISTRIBUTED = r"^tx: not a distributed optimizer: got {}, expected DistributedTransformation\. Make it with distributed\(fused_adamw\(\.\.\.\), mesh=mesh\)"
NOT_INSIDE = r"^{}: called outside of jax\.shard_map: got no manual axis 'data', expected axes 'data'\. Use train_step or eval_step, or"
NOT_A_TRAIN_STATE = r"^state: not a train state: got {}, expected jdistadam\.TrainState\. Make it with TrainState\.create"
NO_DISTRIBUTED_STATE = r"^opt_state: not the state of a distributed optimizer: got {} with 0 DistributedState in it, expected a DistributedState, or .*\. Call step\(grads, opt_state, params\) with what init"
DONATED = r"^state: its arrays were donated to an earlier step, and are gone: .* expected the state that this step returned\. Write state, metrics = step"
A_STATE = r"^{}: a state, not parameters: got {}, expected a tree of parameters\. Call {}\("
RETURNED = r"^loss_fn: returned something other than expected: got {}, expected {}\. A second value .*has_aux=True.*weighted=True.*model_state must be given to TrainState\.create"
CALLED = r"^loss_fn: cannot be called with what the state holds: {}: got loss_fn{}, expected a function that can be called as loss_fn\({}\)\. Accept"
BATCH_SPEC = r"^batch_spec: not a PartitionSpec over the axes of the mesh, each at most once: got {}, expected one PartitionSpec for all leaves, over \('data',\)\. Pass PartitionSpec\('data',\), or"
NOT_A_RATE = r"^learning_rate: out of range: got {}, expected {}\. Change learning_rate\.$"
NOT_A_DTYPE = r"^{}: not a dtype that can be used: got {}, expected float32, bfloat16, float16.*\. Pass one of these"
NOT_A_BOOL = r"^{0}: not a bool: got {1}, expected True or False\. Change {0}\.$"
A_TRAIN_STATE = r"^{}: a whole train state: got TrainState, expected a tree of arrays\. Pass the part that is meant, such as state\.params\.$"
NOT_A_FOLDER = r"^folder: not a path: got {}, expected a string or a path\. Pass the folder first: save\(folder, state, tx\)"
NOT_A_STATE = r"^opt_state: not a state of this optimizer: got {}, expected the state that init\(params\) returned\. Pass opt_state as"
NEEDS_A_LOSS = r"^chain, transformation 0: it needs more than gradients, state and params: got .*missing 1 required keyword-only argument: 'value', expected no such argument before a distributed optimizer\. For a learning rate that follows the loss, set hyperparams"
CHAIN_STATE = r"^opt_state: not a state of this chain: got {}, expected 2 parts\. Pass opt_state as"
NOT_A_TRANSFORMATION = r"^chain, transformation {}: not a gradient transformation: got {}, expected what optax\.scale\(0\.5\) or .*\. Call chain\(first, second\), without a list"

# fmt: off
ERRORS = [
    # -- fused_adamw: leaves
    ("a bool parameter", lambda: step_of(jnp.ones(3, bool)), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got bool, expected float32"),
    ("a float8 parameter", lambda: step_of(jnp.ones(3, jnp.float8_e4m3fn)), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got float8_e4m3fn, expected float32"),
    ("a string as parameter", lambda: fused().init({"w": "x"}), jda.DtypeError, r"^params\['w'\]: not an array: got 'x', expected a jax or numpy array, or a number\. Leave it out of the tree, or put None"),
    ("a function among the parameters", lambda: fused().init({"act": jnp.sin}), jda.DtypeError, r"^params\['act'\]: not an array: got .*sin.*, expected a jax or numpy array"),
    ("an object as parameters", lambda: fused().init(object()), jda.DtypeError, r"^params: not an array: got <object"),
    ("no gradient for a parameter", lambda: fused_step(grads=GRADS | {"b": None}), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 1 leaves, expected the 2 leaves of params\. Pass grads with"),
    ("a gradient is missing", lambda: fused_step(grads={"w": GRADS["w"]}), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 1 leaves, expected the 2 leaves of params\. Pass grads with"),
    ("a gradient too many", lambda: fused_step(grads=GRADS | {"z": np.ones(1)}), jda.TreeError, r"^grads\['z'\]: unexpected, params does not have it: got 3 leaves, expected the 2 leaves of params\. Pass grads with"),
    ("a gradient under another key", lambda: fused_step(grads={"w": GRADS["w"], "bias": GRADS["b"]}), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 2 leaves, among them \['bias'\], expected the 2 leaves"),
    ("gradients in another container", lambda: fused_step(grads=(GRADS["b"],), params=[PARAMS["b"]]), jda.TreeError, r"^grads: tree structure differs from params: got tuple, expected list\. Build grads with the same containers"),
    ("a container that differs further down", lambda: fused_step(grads={"a": [(GRADS["b"],)]}, params={"a": [[PARAMS["b"]]]}), jda.TreeError, r"^grads\['a'\]\[0\]: tree structure differs from params: got tuple, expected list\. Build grads"),
    ("labels without groups", lambda: fused(param_labels={"w": "a"}), jda.HyperparameterError, r"^groups: labels and groups belong together: got param_labels=\{'w': 'a'\}, groups=None, expected both"),
    ("groups of fused_adam without labels", lambda: jda.fused_adam(1e-2, groups={"a": {}}), jda.HyperparameterError, r"^groups: labels and groups belong together"),
    ("labels of other groups", lambda: fused(param_labels={"w": "b", "b": "b"}, groups={"a": {}}).init(PARAMS), jda.TreeError, r"^params\[.*\]: its label belongs to no group: got 'b', expected 'a'"),
    ("no gradients", lambda: fused_step(grads=None), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 0 leaves"),
    ("a gradient of another shape", lambda: fused_step(grads=GRADS | {"w": GRADS["w"].T}), jda.ShapeError, r"^grads\['w'\]: shape differs from params: got \(3, 4\), expected \(4, 3\)\. Nothing is broadcast"),
    ("a gradient that could be broadcast", lambda: fused_step(grads=GRADS | {"b": np.ones(1, np.float32)}), jda.ShapeError, r"^grads\['b'\]: shape differs from params: got \(1,\), expected \(3,\)\. Nothing is broadcast"),
    ("a gradient of another shape in update", lambda: fused_step(grads=GRADS | {"w": GRADS["w"].T}, method="update"), jda.ShapeError, r"^grads\['w'\]: shape differs from params: got \(3, 4\), expected \(4, 3\)\. Nothing is broadcast"),
    ("a gradient is missing in update", lambda: fused_step(grads={"w": GRADS["w"]}, method="update"), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 1 leaves"),
    ("integer gradients in update", lambda: fused_step(grads=cast(GRADS, np.int32), method="update"), jda.DtypeError, r"^grads\['b'\]: dtype cannot be used: got int32, expected float32 .*\. Cast the gradients\."),
    ("a bool parameter in update", lambda: fused_step(grads=GRADS, params=cast(PARAMS, bool), state=fused().init(PARAMS), method="update"), jda.DtypeError, r"^params\['b'\]: dtype cannot be used: got bool"),
    ("integer gradients", lambda: fused_step(grads=cast(GRADS, np.int32)), jda.DtypeError, r"^grads\['b'\]: dtype cannot be used: got int32, expected float32 .*\. Cast the gradients\."),
    ("a first moment in integers", lambda: fused_step(state=adam_state(mu=cast(GRADS, np.int32))), jda.DtypeError, r"^opt_state\[0\]\.mu\['b'\]: dtype cannot be used: got int32, expected float32 .*\. Cast mu\."),
    ("a second moment in integers", lambda: fused_step(state=adam_state(nu=cast(GRADS, np.int32))), jda.DtypeError, r"^opt_state\[0\]\.nu\['b'\]: dtype cannot be used: got int32, expected float32 .*\. Cast nu\."),
    ("bool gradients of integers", lambda: fused_step(grads={"n": jnp.ones(3, bool)}, params={"n": jnp.ones(3, jnp.int32)}), jda.DtypeError, r"^grads\['n'\]: dtype cannot be used: got bool, expected float32 .* or uint64\. Cast the gradients\."),
    ("complex gradients of real parameters", lambda: fused_step(grads=cast(GRADS, np.complex64)), jda.DtypeError, r"^grads\['b'\]: .*got complex64, expected "),
    ("a string as gradient", lambda: fused_step(grads=GRADS | {"b": "x"}), jda.DtypeError, r"^grads\['b'\]: not an array: got 'x', expected a jax or numpy array"),
    ("no params in update", lambda: fused().update(GRADS, fused().init(PARAMS)), ValueError, NO_PARAMS),
    ("no params in step", lambda: fused().step(GRADS, fused().init(PARAMS), None), ValueError, NO_PARAMS),
    ("no params where l2 needs them", lambda: jda.fused_adam(1e-2, l2=0.1).update(GRADS, jda.fused_adam(1e-2).init(PARAMS)), ValueError, NO_PARAMS),
    # -- fused_adamw: states
    ("the state of other params", lambda: fused_step(state=fused().init({"q": np.ones(3, np.float32)})), jda.TreeError, r"^opt_state\[0\]\.mu\['b'\]: missing, params has it: got 1 leaves, among them \['q'\], expected the 2 leaves"),
    ("the state of other shapes", lambda: fused_step(state=fused().init({"w": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)})), jda.ShapeError, r"^opt_state\[0\]\.mu\['b'\]: shape differs from params: got \(2,\), expected \(3,\)"),
    ("the state of optax.sgd", lambda: fused_step(state=optax.sgd(1e-2).init(PARAMS)), jda.TreeError, NOT_A_STATE.format("tuple")),
    ("no state", lambda: fused().update(GRADS, None, PARAMS), jda.TreeError, NOT_A_STATE.format("NoneType")),
    ("step(grads, params, state)", lambda: fused().step(GRADS, PARAMS, fused().init(PARAMS)), jda.TreeError, NOT_A_STATE.format("dict")),
    ("a state without a first moment", lambda: fused_step(state=adam_state(mu=None)), jda.TreeError, r"^opt_state\[0\]\.mu\['b'\]: missing, params has it: got 0 leaves"),
    ("strings in a state", lambda: fused_step(state=adam_state(mu={"w": "x", "b": "y"})), jda.DtypeError, r"^opt_state\[0\]\.mu\['b'\]: not an array: got 'y', expected a jax or numpy array"),
    ("a count of several numbers", lambda: fused_step(state=adam_state(count=jnp.zeros(3, jnp.int32))), jda.ShapeError, r"^opt_state's count: not a number of steps: got int32, shape \(3,\), expected int32, shape \(\)\. Pass opt_state as"),
    ("a count of steps in float", lambda: fused_step(state=adam_state(count=jnp.float32(0))), jda.DtypeError, r"^opt_state's count: not a number of steps: got float32, shape \(\), expected int32"),
    ("a second moment in bfloat16", lambda: fused_step(state=fused(b2=0.9, nu_dtype=BF16).init(PARAMS)), jda.DtypeError, r"^opt_state\[0\]\.nu\['b'\]: dtype cannot be used: got bfloat16, expected float32\. Cast nu to float32, or set nu_dtype"),
    ("the state of optax.adamw of 16-bit params", lambda: fused_step(grads=cast(GRADS, BF16), params=cast(PARAMS, BF16), state=optax.adamw(1e-2).init(cast(PARAMS, BF16))), jda.DtypeError, r"^opt_state\[0\]\.nu\['b'\]: dtype cannot be used: got bfloat16, expected float32\. Cast"),
    ("a state without main parameters", lambda: fused_step(fused(main_params_dtype=jnp.float32), params=cast(PARAMS, BF16), state=fused().init(PARAMS)), jda.TreeError, r"^opt_state: does not fit main_params_dtype: got tuple, expected MainParamsState\. Make it with init"),
    ("a state with main parameters", lambda: fused_step(params=cast(PARAMS, BF16), state=fused(main_params_dtype=jnp.float32).init(cast(PARAMS, BF16))), jda.TreeError, r"^opt_state: does not fit main_params_dtype: got MainParamsState, expected optax's own state"),
    ("main parameters where remainders belong", lambda: fused_step(fused(main_params_dtype="remainder16"), params=cast(PARAMS, BF16), state=fused(main_params_dtype=jnp.float32).init(cast(PARAMS, BF16))), jda.DtypeError, r"^opt_state\.main_params\['b'\]: does not fit its parameter: got \(\(3,\), dtype\('float32'\)\), expected \(\(3,\), 'uint16'\)"),
    # -- fused_adamw: numbers
    ("a learning rate of nan", lambda: fused(float("nan")), jda.HyperparameterError, NOT_A_RATE.format("nan", "a finite number or a schedule")),
    ("a learning rate without end", lambda: fused(float("inf")), jda.HyperparameterError, NOT_A_RATE.format("inf", "a finite number or a schedule")),
    ("a learning rate in a string", lambda: fused("1e-3"), jda.HyperparameterError, NOT_A_RATE.format("'1e-3'", "a finite number or a schedule")),
    ("no learning rate", lambda: fused(None), jda.HyperparameterError, NOT_A_RATE.format("None", "a finite number or a schedule")),
    ("a learning rate of True", lambda: fused(True), jda.HyperparameterError, NOT_A_RATE.format("True", "a finite number or a schedule")),
    ("an optimizer as learning rate", lambda: fused(optax.sgd(1e-2)), jda.HyperparameterError, NOT_A_RATE.format(r"GradientTransformationExtraArgs\(.*", "a finite number or a schedule")),
    ("params before the learning rate, as in torch", lambda: fused(PARAMS | {"long": np.arange(999)}, 1e-3), jda.HyperparameterError, NOT_A_RATE.format(r"\{'w': array(?s:.{,200})\.\.\.", "a finite number or a schedule")),
    ("a vector of learning rates", lambda: fused(jnp.ones(3)), jda.HyperparameterError, NOT_A_RATE.format(r"Array\(\[1., 1., 1.\].*", "a scalar")),
    ("a complex learning rate", lambda: fused(jnp.complex64(1)), jda.HyperparameterError, NOT_A_RATE.format(r"Array\(1.*complex64\)", "a real number")),
    ("a schedule of vectors", lambda: fused_step(fused(lambda count: jnp.ones(3))), jda.HyperparameterError, r"^learning_rate: not one number: got shape \(3,\), expected a scalar, also from a schedule\. Return a number"),
    ("a schedule that returns nothing", lambda: fused_step(fused(lambda count: None)), jda.HyperparameterError, r"^learning_rate: not one number: got None, expected a scalar, also from a schedule"),
    ("a schedule of strings", lambda: fused_step(fused(lambda count: "x")), jda.HyperparameterError, r"^learning_rate: not one number: got 'x', expected a scalar"),
    ("a schedule of complex numbers", lambda: fused_step(fused(lambda count: 1j)), jda.HyperparameterError, r"^learning_rate: not one number: got 1j, expected a scalar"),
    ("a schedule of two arguments", lambda: fused(lambda count, epoch: 1e-3), jda.HyperparameterError, r"^learning_rate: not a schedule of the step count: missing a required argument: 'epoch': got a function of \(count, epoch\), expected a function of one number"),
    ("b1 above 1", lambda: fused(b1=1.5), jda.HyperparameterError, r"^b1: out of range: got 1\.5, expected a number in \[0, 1\)\. Change b1\.$"),
    ("b1 below 0", lambda: fused(b1=-0.1), jda.HyperparameterError, r"^b1: out of range: got -0\.1, expected a number in \[0, 1\)"),
    ("b1 in a string", lambda: fused(b1="x"), jda.HyperparameterError, r"^b1: out of range: got 'x', expected a number in"),
    ("b1 of True", lambda: fused(b1=True), jda.HyperparameterError, r"^b1: out of range: got True, expected a number in"),
    ("b2 below 0", lambda: fused(b2=-0.1), jda.HyperparameterError, r"^b2: out of range: got -0\.1, expected a number in \[0, 1\)"),
    ("b2 of 1 on several devices", lambda: make_tx(b2=1.0), jda.HyperparameterError, r"^b2: out of range: got 1\.0, expected a number in \[0, 1\)"),
    ("optax.inject_hyperparams of 16-bit params", lambda: optax.inject_hyperparams(jda.fused_adamw)(1e-2).init(cast(PARAMS, BF16)), jda.HyperparameterError, r"^b2: rounded to 16 bits, which turns 0\.999 into 1: got bfloat16, expected float32, or a Python number\. .*use jda\.inject_hyperparams"),
    ("b2 of 1", lambda: fused(b2=1.0), jda.HyperparameterError, r"^b2: out of range: got 1\.0, expected a number in \[0, 1\)"),
    ("both betas at once, as in torch", lambda: fused(1e-2, (0.9, 0.99)), jda.HyperparameterError, r"^b1: out of range: got \(0\.9, 0\.99\), expected a number in \[0, 1\)"),
    ("a schedule for b1", lambda: fused(b1=lambda count: 0.9), jda.HyperparameterError, r"^b1: out of range: got <function .*, expected a number in \[0, 1\)"),
    ("eps below 0", lambda: fused(eps=-1e-8), jda.HyperparameterError, r"^eps: out of range: got -1e-08, expected a finite number >= 0\. Change eps\.$"),
    ("eps without end", lambda: fused(eps=float("inf")), jda.HyperparameterError, r"^eps: out of range: got inf, expected a finite number >= 0"),
    ("eps_root of nan", lambda: fused(eps_root=float("nan")), jda.HyperparameterError, r"^eps_root: out of range: got nan, expected a finite number >= 0"),
    ("weight decay below 0", lambda: fused(weight_decay=-0.1), jda.HyperparameterError, r"^weight_decay: out of range: got -0\.1, expected a finite number >= 0"),
    ("no weight decay, but None", lambda: fused(weight_decay=None), jda.HyperparameterError, r"^weight_decay: out of range: got None, expected a finite number >= 0"),
    ("l2 below 0", lambda: jda.fused_adam(1e-2, l2=-1.0), jda.HyperparameterError, r"^l2: out of range: got -1\.0, expected a finite number >= 0"),
    ("nesterov as a word", lambda: fused(nesterov="no"), jda.HyperparameterError, NOT_A_BOOL.format("nesterov", "'no'")),
    ("bias_correction of None", lambda: fused(bias_correction=None), jda.HyperparameterError, NOT_A_BOOL.format("bias_correction", "None")),
    # -- fused_adamw: masks and dtypes
    ("a mask of another tree", lambda: fused(mask={"q": True}).init(PARAMS), jda.TreeError, r"^mask: structure differs from params: got PyTreeDef\(\{'q': \*\}\), expected PyTreeDef\(\{'b': \*, 'w': \*\}\)\. Give each leaf of params, or each subtree, True or False, in the same containers\.$"),
    ("a mask of another tree, in a step", lambda: fused_step(fused(mask={"q": True}), state=fused().init(PARAMS)), jda.TreeError, r"^mask: structure differs from params: got PyTreeDef\(\{'q': \*\}\)"),
    ("a mask that takes a path", lambda: fused(mask=lambda path: "bias" not in path).init(PARAMS), jda.TreeError, r"^mask: a function that returns one value: it is called with the tree, not with a path: got True, expected a tree of bools, for 2 leaves\. Write lambda params: jax\.tree\.map_with_path"),
    ("a mask of floats", lambda: fused(mask={"w": 1.0, "b": 0.0}).init(PARAMS), jda.DtypeError, r"^mask\['b'\]: not a bool: got 0\.0, expected True or False\. Fix mask\.$"),
    ("a mask in a mapping that is no tree", lambda: fused(mask=types.MappingProxyType({"w": True, "b": False})).init(PARAMS), jda.DtypeError, r"^mask: a mapping that jax does not take as a tree: got mappingproxy, expected a dict, with True or False for each leaf\. Turn it into a dict\.$"),
    ("a mask of jda.masked in a mapping that is no tree", lambda: jda.masked(fused(), types.MappingProxyType({"w": True, "b": False})).step(PARAMS, optax.MaskedState(fused().init(PARAMS)), PARAMS), jda.DtypeError, r"^mask: a mapping that jax does not take as a tree: got mappingproxy"),
    ("a mask that is a name", lambda: fused(mask="bias").init(PARAMS), jda.DtypeError, r"^mask: not a bool: got 'bias', expected True or False"),
    ("a mask that is no tree", lambda: fused(mask=object()).init(PARAMS), jda.DtypeError, r"^mask: not a bool: got <object object"),
    ("a mask function that returns nothing", lambda: fused(mask=lambda params: None).init(PARAMS), jda.TreeError, r"^mask: structure differs from params: got NoneType, expected dict"),
    ("mu_dtype of whole numbers", lambda: fused(mu_dtype=jnp.int8), jda.PolicyError, NOT_A_DTYPE.format("mu_dtype", r"<class 'jax\.numpy\.int8'>")),
    ("mu_dtype by an unknown name", lambda: fused(mu_dtype="bf16"), jda.PolicyError, NOT_A_DTYPE.format("mu_dtype", "'bf16'")),
    ("nu_dtype by an unknown name", lambda: fused(nu_dtype="garbage"), jda.PolicyError, NOT_A_DTYPE.format("nu_dtype", "'garbage'")),
    ("an array as mu_dtype", lambda: fused(mu_dtype=jnp.ones(3)), jda.PolicyError, NOT_A_DTYPE.format("mu_dtype", r"Array\(.*\)")),
    ("nu_dtype that cannot decay", lambda: fused(nu_dtype=BF16), jda.PolicyError, r"^nu_dtype: a second moment in 16 bits, rounded to nearest, cannot follow the gradients at this b2: got \"bfloat16\" with rounding=\"nearest\" and b2=0\.999, expected rounding=\"stochastic\", or a number b2 <= 0\.992\. Set rounding=\"stochastic\", or leave nu_dtype at float32"),
    ("nu_dtype of float16", lambda: fused(nu_dtype=jnp.float16), jda.PolicyError, r"^nu_dtype: a second moment in float16 loses squares below 6e-8: got float16"),
    ("main_params_dtype of float16", lambda: fused(main_params_dtype=jnp.float16), jda.PolicyError, r"^main_params_dtype: not supported in this version: got float16, expected None or float32 or remainder16\. Leave main_params_dtype"),
    ("remainders of float16 on a mesh", lambda: make_tx(policy=policy(main_params_dtype="remainder16")).init(cast(PARAMS, np.float16)), jda.DtypeError, r"^params\['b'\]: has no remainder: got float16, expected bfloat16"),
    ("remainders of 8 bits", lambda: fused(main_params_dtype="remainder8"), jda.PolicyError, r"^main_params_dtype: not supported in this version: got 'remainder8', expected None or float32 or remainder16"),
    ("a policy's main_params_dtype of bfloat16", lambda: policy(main_params_dtype=BF16), jda.PolicyError, r"^main_params_dtype: not supported in this version: got bfloat16, expected"),
    ("main_params_dtype in optax.inject_hyperparams", lambda: optax.inject_hyperparams(jda.fused_adamw)(1e-2, main_params_dtype=jnp.float32).init(PARAMS), jda.PolicyError, r"^main_params_dtype: .*: got Array.*\. If optax\.inject_hyperparams made the array, pass it static_args='main_params_dtype', or use jda\.inject_hyperparams\.$"),
    ("mu_dtype in optax.inject_hyperparams", lambda: optax.inject_hyperparams(jda.fused_adamw)(1e-2, mu_dtype=jnp.float32).init(PARAMS), jda.PolicyError, r"^mu_dtype: .*: got Array.*\. If optax\.inject_hyperparams made the array, pass it static_args='mu_dtype', or use jda\.inject_hyperparams\.$"),
    ("nu_dtype in optax.inject_hyperparams", lambda: optax.inject_hyperparams(jda.fused_adamw)(1e-2, nu_dtype=jnp.float32).init(PARAMS), jda.PolicyError, r"^nu_dtype: .*: got Array.*\. If optax\.inject_hyperparams made the array, pass it static_args='nu_dtype', or use jda\.inject_hyperparams\.$"),
    ("a random key in params", lambda: fused().init({"w": PARAMS["w"], "key": jax.random.key(0)}), jda.DtypeError, r"^params\['key'\]: not an array of numbers: got key<fry>, expected a jax or numpy array, or a number\. Leave it out"),
    ("a random key that is stepped", lambda: fused_step(grads={"key": jax.random.key(0)}, params={"key": jax.random.key(0)}, state=fused().init({"key": 1.0})), jda.DtypeError, r"^grads\['key'\]: not an array of numbers: got key<fry>, expected a jax"),
    ("a random key in params of several devices", lambda: jda.TrainState.create({"key": jax.random.key(0)}, tx()), jda.DtypeError, r"^params\['key'\]: dtype cannot be used: got key<fry>, expected float32 or .*\. Cast the leaf, or keep it elsewhere: in model_state of a TrainState"),
    ("main_params_dtype of True", lambda: fused(main_params_dtype=True), jda.PolicyError, r"^main_params_dtype: not supported in this version: got True, expected None or float32"),
    ("remainders of float16", lambda: fused(main_params_dtype="remainder16").init(cast(PARAMS, np.float16)), jda.DtypeError, r"^params\['b'\]: has no remainder: got float16, expected bfloat16, the upper half of a float32\. Use main_params_dtype=jnp\.float32"),
    # -- chain, inject_hyperparams
    ("a chain of nothing", lambda: jda.chain(), jda.PolicyError, r"^chain: empty: got no transformation, expected at least one\. Pass an optimizer"),
    ("a chain of a list", lambda: jda.chain([optax.scale(1.0), fused()]), jda.PolicyError, NOT_A_TRANSFORMATION.format(0, "list")),
    ("a chain of a number", lambda: jda.chain(1.0, fused()), jda.PolicyError, NOT_A_TRANSFORMATION.format(0, "float")),
    ("a chain with a schedule", lambda: jda.chain(fused(), optax.constant_schedule(1.0)), jda.PolicyError, NOT_A_TRANSFORMATION.format(1, "<lambda>")),
    ("a chain with a factory", lambda: jda.chain(optax.scale, fused()), jda.PolicyError, NOT_A_TRANSFORMATION.format(0, "scale")),
    ("a distributed optimizer before the end", lambda: jda.chain(tx(), optax.scale(1.0)), jda.PolicyError, r"^chain, transformation 0: a distributed optimizer must come last: got others behind it, expected the last place\. Move it"),
    ("clipping before a distributed optimizer", lambda: jda.chain(optax.clip_by_global_norm(1.0), tx()), jda.PolicyError, r"^chain, transformation 0: it would see each device's gradients .* not linear in the gradients: .*\. For clipping pass max_grad_norm"),
    ("a plateau before a distributed optimizer", lambda: jda.chain(optax.contrib.reduce_on_plateau(), tx()), jda.PolicyError, NEEDS_A_LOSS),
    ("such a one in another chain", lambda: jda.chain(optax.identity(), optax.chain(optax.contrib.reduce_on_plateau()), tx()), jda.PolicyError, NEEDS_A_LOSS.replace("0", "1")),
    ("a plateau behind a distributed optimizer", lambda: jda.chain(tx(), optax.contrib.reduce_on_plateau()), jda.PolicyError, r"^chain, transformation 0: a distributed optimizer must come last: .* set hyperparams\['learning_rate'\] of inject_hyperparams"),
    ("noise before a distributed optimizer", lambda: jda.chain(optax.add_noise(0.1, 0.5, 0), tx()), jda.PolicyError, r"^chain, transformation 0: it would see each device's gradients .* not linear in the gradients: .* for noise see docs/recipes\.md"),
    ("something behind main parameters", lambda: jda.chain(fused(main_params_dtype=jnp.float32), optax.clip(1.0)).init(cast(PARAMS, BF16)), jda.PolicyError, r"^chain, transformation 0: params must follow its main parameters exactly: got others behind it"),
    ("a state of the last part alone", lambda: jda.chain(optax.scale(1.0), fused()).step(GRADS, fused().init(PARAMS), PARAMS), jda.TreeError, CHAIN_STATE.format("3 parts")),
    ("a chain's step without its state", lambda: jda.chain(optax.scale(1.0), fused()).step(GRADS, PARAMS, PARAMS), jda.TreeError, CHAIN_STATE.format("dict")),
    ("a chain's update without its state", lambda: jda.chain(optax.scale(1.0), fused()).update(GRADS, (), PARAMS), jda.TreeError, CHAIN_STATE.format("0 parts")),
    ("a chain's step without params", lambda: jda.chain(optax.scale(1.0), optax.sgd(1e-2)).step(GRADS, jda.chain(optax.scale(1.0), optax.sgd(1e-2)).init(PARAMS), None), ValueError, NO_PARAMS),
    ("a chain of optax and a gradient too few", lambda: jda.chain(optax.scale(1.0), optax.sgd(1e-2)).step({"w": GRADS["w"]}, jda.chain(optax.scale(1.0), optax.sgd(1e-2)).init(PARAMS), PARAMS), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 1 leaves"),
    ("injection into what is no optimizer", lambda: jda.inject_hyperparams(lambda: None)(), jda.PolicyError, r"^inject_hyperparams: cannot be used with this optimizer: got <lambda>, expected an optimizer of this package"),
    ("injection into an optimizer, not its factory", lambda: jda.inject_hyperparams(fused()), jda.PolicyError, r"^inject_hyperparams: cannot be used with this optimizer: got FusedTransformation, expected"),
    ("injection into optax's own", lambda: jda.inject_hyperparams(optax.adamw)(1e-2).init(PARAMS), jda.PolicyError, r"^inject_hyperparams: cannot be used with this optimizer: got adamw, expected"),
    ("injection of a string", lambda: jda.inject_hyperparams(jda.fused_adamw)("x"), jda.HyperparameterError, NOT_A_RATE.format("'x'", "a finite number or a schedule")),
    ("injected numbers as integers", lambda: jda.inject_hyperparams(jda.fused_adamw, hyperparam_dtype=jnp.int32), jda.PolicyError, r"^hyperparam_dtype: not a dtype that can be used: got <class 'jax\.numpy\.int32'>, expected float32, float64"),
    ("a static argument that there is not", lambda: jda.inject_hyperparams(jda.fused_adamw, static_args=["foo"]), jda.HyperparameterError, r"^static_args: names no argument of the optimizer: got 'foo', expected learning_rate, b1, .*\. Fix the name"),
    ("static_args of a number", lambda: jda.inject_hyperparams(jda.fused_adamw, static_args=3), jda.HyperparameterError, r"^static_args: names no argument of the optimizer: got 3, expected learning_rate"),
    ("a state without hyperparameters", lambda: jda.inject_hyperparams(jda.fused_adamw)(1e-2).step(GRADS, fused().init(PARAMS), PARAMS), jda.TreeError, r"^opt_state: not a state of inject_hyperparams: got tuple, expected a state with hyperparams in it\. Make it with init"),
    ("an update without hyperparameters", lambda: jda.inject_hyperparams(jda.fused_adamw)(1e-2).update(GRADS, fused().init(PARAMS), PARAMS), jda.TreeError, r"^opt_state: not a state of inject_hyperparams: got tuple"),
    ("an injected string", lambda: injected(learning_rate="x"), jda.HyperparameterError, NOT_A_RATE.format("'x'", "a finite number or a schedule")),
    ("injected vectors", lambda: injected(learning_rate=jnp.ones(3)), jda.HyperparameterError, NOT_A_RATE.format(r"Array\(.*\)", "a scalar")),
    # -- distributed
    ("an optimizer of optax, distributed", lambda: jda.distributed(optax.adamw(1e-3), mesh=mesh()), jda.PolicyError, r"^distributed: an optimizer of optax, which knows of no shards: got GradientTransformationExtraArgs, .* Use fused_adamw in place of optax\.adamw"),
    ("a chain of optax, distributed", lambda: jda.distributed(optax.chain(optax.clip_by_global_norm(1.0), fused()), mesh=mesh()), jda.PolicyError, r"^distributed: .* In place of optax\.chain, pass max_grad_norm for optax\.clip_by_global_norm, and put other parts before: jda\.chain\("),
    ("what jda.distributed returned", lambda: jda.distributed(make_tx(), mesh=mesh()), jda.PolicyError, r"^distributed: distributed already"),
    ("a chain inside", lambda: jda.distributed(jda.chain(optax.scale(0.5), fused()), mesh=mesh()), jda.PolicyError, r"^distributed: not an optimizer by itself, but a chain or a wrapper: .* Put the chain around: jda\.chain\(before, jda\.distributed"),
    ("an injected chain inside", lambda: jda.distributed(jda.inject_hyperparams(lambda rate: jda.chain(optax.scale(1.0), fused(rate)))(0.1), mesh=mesh()), jda.PolicyError, r"^distributed: not an optimizer by itself, but a chain"),
    ("a replaced function", lambda: jda.distributed(fused()._replace(step=print), mesh=mesh()), jda.PolicyError, r"^distributed: an optimizer whose functions were replaced"),
    ("a function in the place of an optimizer", lambda: jda.distributed(jda.fused_adamw, mesh=mesh()), jda.PolicyError, r"^distributed: not an optimizer: got fused_adamw, .* Pass what fused_adamw\(\.\.\.\) returns"),
    ("main parameters in two ways", lambda: jda.distributed(fused(main_params_dtype=None), mesh=mesh(), policy=policy(main_params_dtype="remainder16")), jda.PolicyError, r"^MixedPrecisionPolicy\.main_params_dtype: contradicts the optimizer's main_params_dtype: got remainder16, expected None"),
    ("moments in float64, sharded", lambda: jda.distributed(fused(mu_dtype=jnp.float64), mesh=mesh()), jda.PolicyError, r"^mu_dtype: not a dtype that can be used"),
    ("no mesh", lambda: make_tx(mesh=None), jda.MeshError, r"^mesh: not a mesh: got NoneType, expected jax\.sharding\.Mesh\. Make one with jax\.sharding\.Mesh\("),
    ("a number of devices as mesh", lambda: make_tx(mesh=8), jda.MeshError, r"^mesh: not a mesh: got int, expected jax\.sharding\.Mesh"),
    ("a list of devices as mesh", lambda: make_tx(mesh=jax.devices()), jda.MeshError, r"^mesh: not a mesh: got list, expected jax\.sharding\.Mesh"),
    ("a mesh without devices", lambda: make_tx(mesh=mesh().abstract_mesh), jda.MeshError, r"^mesh: not a mesh: got AbstractMesh, expected jax\.sharding\.Mesh"),
    ("an axis that is misspelt", lambda: make_tx(shard_axis="dta"), jda.MeshError, r"^shard_axis 'dta': not an axis of the mesh: got axes \('data',\), expected one of them, or a tuple of them\. Pass shard_axis='data'\?$"),
    ("an axis by its number", lambda: make_tx(shard_axis=0), jda.MeshError, r"^shard_axis 0: not an axis of the mesh"),
    ("an axis in two lists", lambda: make_tx(shard_axis=[["data"]]), jda.MeshError, r"^shard_axis \['data'\]: not an axis of the mesh: .*\. Pass shard_axis='data'\?$"),
    ("a PartitionSpec as axis", lambda: make_tx(shard_axis=P("data")), jda.MeshError, r"^shard_axis P(artitionSpec)?\('data',\): not an axis of the mesh"),
    ("no axis", lambda: make_tx(shard_axis=()), jda.MeshError, r"^shard_axis: names no axis, or one of replica_axis: got shard_axis=\(\), replica_axis=None, expected different axes, at least one"),
    ("an axis twice", lambda: make_tx(shard_axis=("data", "data")), jda.MeshError, r"^shard_axis: names an axis twice: got \('data', 'data'\), expected every axis once"),
    ("one axis for two purposes", lambda: make_tx(replica_axis="data"), jda.MeshError, r"^shard_axis: names no axis, or one of replica_axis: got shard_axis='data', replica_axis='data'"),
    ("a replica axis that there is not", lambda: make_tx(replica_axis="rep"), jda.MeshError, r"^replica_axis 'rep': not an axis of the mesh"),
    ("an axis of the mesh without a purpose", lambda: make_tx(mesh=mesh24()), jda.MeshError, r"^mesh: axis 'model' has no purpose: got \{'data': 2, 'model': 4\}, expected only axes that carry data, .*\. Name it in shard_axis or replica_axis"),
    ("no strategy", lambda: make_tx(sharding_strategy=None), jda.PolicyError, r"^sharding_strategy: unknown: got None, expected 'no_shard' or 'optim' or"),
    ("an outer strategy without replicas", lambda: make_tx(outer_sharding_strategy="optim"), jda.PolicyError, r"^outer_sharding_strategy: 'optim' shards the optimizer state .*: got sharding_strategy='optim', replica_axis=None, expected a replica_axis"),
    ("a gradient norm below 0", lambda: make_tx(max_grad_norm=-1.0), jda.HyperparameterError, r"^max_grad_norm: out of range: got -1\.0, expected a finite Python number > 0\. Change max_grad_norm"),
    ("a gradient norm of 0", lambda: make_tx(max_grad_norm=0.0), jda.HyperparameterError, r"^max_grad_norm: out of range: got 0\.0, expected"),
    ("a gradient norm of True", lambda: make_tx(max_grad_norm=True), jda.HyperparameterError, r"^max_grad_norm: out of range: got True, expected"),
    ("a gradient norm in a string", lambda: make_tx(max_grad_norm="1"), jda.HyperparameterError, r"^max_grad_norm: out of range: got '1', expected a finite"),
    ("a gradient norm for each leaf", lambda: make_tx(max_grad_norm=jnp.ones(2)), jda.HyperparameterError, r"^max_grad_norm: not a single number: got shape \(2,\), expected a scalar"),
    ("buckets of nothing", lambda: make_tx(bucket_bytes=0), jda.HyperparameterError, r"^bucket_bytes: out of range: got 0, expected"),
    ("buckets in words", lambda: make_tx(bucket_bytes="32MB"), jda.HyperparameterError, r"^bucket_bytes: out of range: got '32MB', expected"),
    ("a number of early updates", lambda: make_tx(early_updates=1), jda.HyperparameterError, r"^early_updates: not a bool: got 1, expected True or False"),
    ("gradients of no dtype", lambda: jda.MixedPrecisionPolicy(main_grads_dtype=None), jda.PolicyError, r"^MixedPrecisionPolicy\.main_grads_dtype: not a dtype that can be used: got None, expected float32"),
    ("average_grads as a word", lambda: make_tx(average_grads="no"), jda.HyperparameterError, NOT_A_BOOL.format("average_grads", "'no'")),
    ("a decay of 1", lambda: make_tx(ema_decay=1.0), jda.HyperparameterError, r"^ema_decay: out of range: got 1\.0, expected a Python number above 0 and below 1\. Change ema_decay"),
    ("early updates that are no bool", lambda: make_tx(early_updates="yes"), jda.HyperparameterError, r"^early_updates: .*got 'yes'"),
    ("early updates with a clip", lambda: make_tx(early_updates=True, max_grad_norm=1.0), jda.PolicyError, r"^early_updates: updates need all gradients first: got early_updates=True with max_grad_norm=1\.0, expected none of max_grad_norm, loss_scale, norm_guard and no model axes\. Leave out"),
    ("early updates with a model axis", lambda: make_tx(mesh=jax.make_mesh((2, 2), ("data", "model")), param_specs={"w": P(None, "model")}, early_updates=True), jda.PolicyError, r"^early_updates: .* with mesh axis 'model' of a model"),
    ("early updates over peer memory", lambda: make_tx(early_updates=True, communication="peer"), jda.PolicyError, r'^communication: a step over peer memory is not supported here: got updates during the backward pass, expected sharded state, float32 sums and no early updates, over'),
    ("what rests whole as a flag", lambda: make_tx(sharding_strategy="optim_grads_params", reshard_after_backward=False), jda.HyperparameterError, r"^reshard_after_backward: not a function: got False, expected a function of the path of a leaf\. Pass for example"),
    ("what rests whole where nothing is cut", lambda: make_tx(reshard_after_backward=lambda path: True), jda.PolicyError, r"^reshard_after_backward: parameters are not sharded under this strategy: got a function with sharding_strategy='optim'.*Leave it out"),
    ("what rests whole selects no leaf", lambda: make_tx(sharding_strategy="optim_grads_params", reshard_after_backward=lambda path: "embed" not in path).init({"w": jnp.ones(4)}), jda.TreeError, r"^reshard_after_backward: selects no leaf: got True for params\['w'\] and 0 more, expected False for the leaves .*Test for a part"),
    ("no answer about what rests whole", lambda: make_tx(sharding_strategy="optim_grads_params", reshard_after_backward=lambda path: None).init({"w": jnp.ones(4)}), jda.HyperparameterError, r"^reshard_after_backward: not a bool: got None for params\['w'\], expected"),
    ("a function as memory", lambda: make_tx(state_memory=lambda path: "device"), jda.PolicyError, r"^state_memory: unknown: got <function .* expected 'device' or 'pinned_host', or a dict\. Pass for"),
    ("an unknown memory", lambda: make_tx(state_memory="host"), jda.PolicyError, r"^state_memory: unknown: got 'host', expected 'device' or 'pinned_host', or a dict\. Pass for"),
    ("an unknown memory of an array", lambda: make_tx(state_memory={"mu": "device", "nu": 3}), jda.PolicyError, r"^state_memory\['nu'\]: unknown: got 3, expected 'device' or 'pinned_host'"),
    ("the memory of no array", lambda: make_tx(state_memory={"moments": "pinned_host"}), jda.PolicyError, r"^state_memory: an array that this state does not have: got 'moments', expected 'main_params', 'mu', 'nu'\. Use one .* \"ema\" with ema_decay"),
    ("the memory of an average without one", lambda: make_tx(state_memory={"ema": "pinned_host"}), jda.PolicyError, r"got 'ema', expected 'main_params', 'mu', 'nu'\."),
    ("an average on the device alone", lambda: make_tx(state_memory={"main_params": "pinned_host"}, ema_decay=0.9), jda.PolicyError, r"^state_memory: the average is made from main parameters.* Add \"ema\": \"pinned_host\""),
    ("a memory that is a list", lambda: make_tx(state_memory=["device"]), jda.PolicyError, r"^state_memory: unknown: got \['device'\], expected"),
    ("peer memory with a state on the host", lambda: make_tx(state_memory="pinned_host", communication="peer"), jda.PolicyError, r'^communication: a step over peer memory is not supported here: got updates during the backward pass, expected sharded state, float32 sums and no early updates, over'),
    ("a guard without limits", lambda: jda.NormGuard(), jda.HyperparameterError, r"^NormGuard: it has no effect without a max_ratio: got NormGuard\(.*\), expected max_ratio, or max_norm alone\. Pass"),
    ("a window without a ratio", lambda: jda.NormGuard(max_norm=1.0, window=5), jda.HyperparameterError, r"^NormGuard: window and warmup_steps have no effect without a max_ratio: got"),
    ("a guard with a ratio of 1", lambda: jda.NormGuard(max_ratio=1), jda.HyperparameterError, r"^max_ratio: out of range: got 1, expected a number above 1, finite in float32\. Change"),
    ("a guard with an infinite norm", lambda: jda.NormGuard(max_norm=1e39), jda.HyperparameterError, r"^max_norm: out of range: got 1e\+39, expected a number above 0, finite in float32"),
    ("a guard without warmup", lambda: jda.NormGuard(max_ratio=2.0, warmup_steps=0), jda.HyperparameterError, r"^warmup_steps: out of range: got 0, expected a whole number of at least 1"),
    ("a guard that is a number", lambda: make_tx(norm_guard=5.0), jda.HyperparameterError, r"^norm_guard: not a guard: got 5\.0, expected a NormGuard\. Pass for example norm_guard="),
    ("norms of a word", lambda: make_tx(norms="layers"), jda.PolicyError, r"^norms: unknown: got 'layers', expected None, \"total\", \"leaves\" or a function from the path of a leaf to a name\. Pass"),
    ("a decay of True", lambda: make_tx(ema_decay=True), jda.HyperparameterError, r"^ema_decay: out of range: got True, expected"),
    ("layers as a word", lambda: make_tx(layers="layers", sharding_strategy="optim_grads_params"), jda.HyperparameterError, r"^layers: not a function: got 'layers', expected a function of the path of a leaf that returns \"scan\", \"block\" or None\. Pass"),
    ("layers that find no leaf", lambda: make_tx(layers=lambda path: None, sharding_strategy="optim_grads_params").init(PARAMS), jda.TreeError, r"^layers: selects no leaf: got None for params\['b'\] and 1 more, expected \"scan\" or \"block\" for the layers that the model scans over or gathers\. Test for"),
    ("layers of a predicate", lambda: make_tx(layers=lambda path: "w" in path).init(PARAMS), jda.HyperparameterError, r"^layers: not a kind of layers: got False for params\['b'\], expected \"scan\" for .*, \"block\" for .*, or None\. Return"),
    ("layers of another word", lambda: make_tx(layers=lambda path: "layer").init(PARAMS), jda.HyperparameterError, r"^layers: not a kind of layers: got 'layer' for params\['b'\], expected"),
    # -- loss scales
    ("a loss scale of 0", lambda: make_tx(loss_scale=0.0), jda.HyperparameterError, r"^loss_scale: out of range: got 0\.0, expected a number between 0 and 1\.8\d*e\+19 in float32\. Change loss_scale"),
    ("a loss scale that no float32 holds", lambda: make_tx(loss_scale=1e40), jda.HyperparameterError, r"^loss_scale: out of range: got 1e\+40, expected a number between 0 and 1\.8\d*e\+19 in float32"),
    ("a loss scale that is 0 in float32", lambda: make_tx(loss_scale=1e-50), jda.HyperparameterError, r"^loss_scale: out of range: got 1e-50, expected a number between 0 and 1\.8\d*e\+19 in float32"),
    ("the class of a loss scale", lambda: make_tx(loss_scale=jda.DynamicLossScale), jda.HyperparameterError, r"^loss_scale: out of range: got <class .*DynamicLossScale'>, expected a number"),
    ("a loss scale of True", lambda: make_tx(loss_scale=True), jda.HyperparameterError, r"^loss_scale: out of range: got True"),
    ("a loss scale in a word", lambda: make_tx(loss_scale="dynamic"), jda.HyperparameterError, r"^loss_scale: out of range: got 'dynamic', expected a number"),
    ("a first scale of 0", lambda: jda.DynamicLossScale(init_scale=0.0), jda.HyperparameterError, r"^init_scale: out of range: got 0\.0, expected a number between 0 and 1\.8\d*e\+19"),
    ("a first scale in a string", lambda: jda.DynamicLossScale(init_scale="2**16"), jda.HyperparameterError, r"^init_scale: out of range: got '2\*\*16'"),
    ("a scale that does not grow", lambda: jda.DynamicLossScale(growth_factor=1.0), jda.HyperparameterError, r"^growth_factor: out of range: got 1\.0, expected a number between 1 and inf"),
    ("a scale that does not shrink", lambda: jda.DynamicLossScale(backoff_factor=1.0), jda.HyperparameterError, r"^backoff_factor: out of range: got 1\.0, expected a number between 0 and 1"),
    ("an interval of no steps", lambda: jda.DynamicLossScale(growth_interval=0), jda.HyperparameterError, r"^growth_interval: out of range: got 0, expected a whole number of at least 1"),
    ("an interval in float", lambda: jda.DynamicLossScale(growth_interval=2000.0), jda.HyperparameterError, r"^growth_interval: out of range: got 2000\.0, expected a whole number"),
    ("no hysteresis", lambda: jda.DynamicLossScale(hysteresis=0), jda.HyperparameterError, r"^hysteresis: out of range: got 0, expected a whole number of at least 1"),
    ("hysteresis of a step and a half", lambda: jda.DynamicLossScale(hysteresis=1.5), jda.HyperparameterError, r"^hysteresis: out of range: got 1\.5, expected a whole number"),
    ("a smallest scale of nan", lambda: jda.DynamicLossScale(min_scale=np.nan), jda.HyperparameterError, r"^min_scale: out of range: got nan, expected"),
    ("a smallest scale above the first", lambda: jda.DynamicLossScale(init_scale=1.0, min_scale=2.0), jda.HyperparameterError, r"^min_scale: above init_scale, .*: got min_scale=2\.0, init_scale=1\.0, expected min_scale <= init_scale"),
    # -- policies
    ("a dict as policy", lambda: make_tx(policy={"grad_comm_dtype": "bf16"}), jda.PolicyError, r"^policy: not a policy: got \{'grad_comm_dtype': 'bf16'\}, expected jdistadam\.MixedPrecisionPolicy\. Pass policy="),
    ("the class of policies", lambda: make_tx(policy=jda.MixedPrecisionPolicy), jda.PolicyError, r"^policy: not a policy: got <class .*, expected jdistadam\.MixedPrecisionPolicy"),
    ("gradients stored narrower than sent", lambda: policy(main_grads_dtype=BF16, grad_comm_dtype=jnp.float32), jda.PolicyError, r"^MixedPrecisionPolicy\.main_grads_dtype: gradients would be stored in fewer bits .*: got bfloat16 with grad_comm_dtype float32, expected .*\. Set main_grads_dtype"),
    ("gradients stored in float16 and sent in bfloat16", lambda: policy(main_grads_dtype=jnp.float16, grad_comm_dtype=BF16), jda.PolicyError, r"^MixedPrecisionPolicy\.main_grads_dtype: gradients would be stored in fewer bits .*: got float16 with grad_comm_dtype bfloat16, expected"),
    ("a policy's nu_dtype that cannot decay", lambda: make_tx(nu_dtype=BF16), jda.PolicyError, r"^nu_dtype: a second moment in 16 bits, rounded to nearest, cannot follow the gradients at this b2"),
    ("sums in float16", lambda: policy(grad_reduce_dtype=jnp.float16), jda.PolicyError, r"^MixedPrecisionPolicy\.grad_reduce_dtype: not supported in this version: got float16, expected None or float32"),
    ("gradients in float8", lambda: policy(grad_comm_dtype=jnp.float8_e5m2), jda.PolicyError, NOT_A_DTYPE.format(r"MixedPrecisionPolicy\.grad_comm_dtype", r"<class 'jax\.numpy\.float8_e5m2'>")),
    ("an unknown name of a dtype", lambda: policy(param_comm_dtype="bf16"), jda.PolicyError, NOT_A_DTYPE.format(r"MixedPrecisionPolicy\.param_comm_dtype", "'bf16'")),
    ("params in whole numbers of 8 bits", lambda: policy(param_comm_dtype="int8"), jda.PolicyError, r"^MixedPrecisionPolicy\.param_comm_dtype: not a dtype that can be used: got 'int8', expected float32, .*float8_e4m3fn"),
    ("a number as dtype", lambda: policy(main_grads_dtype=5), jda.PolicyError, NOT_A_DTYPE.format(r"MixedPrecisionPolicy\.main_grads_dtype", "5")),
    ("moments in float64", lambda: make_tx(mu_dtype=jnp.float64), jda.PolicyError, NOT_A_DTYPE.format(r"mu_dtype", r"dtype\(.float64.\)")),
    ("params sent where none are sent", lambda: make_tx(sharding_strategy="no_shard", policy=policy(param_comm_dtype=BF16)), jda.PolicyError, r"^param_comm_dtype: no parameters are communicated under this strategy: got bfloat16 with sharding_strategy='no_shard', expected None"),
    ("params sent wider than they are", lambda: make_tx(policy=policy(param_comm_dtype=jnp.float32)).init(cast(PARAMS, BF16)), jda.PolicyError, r"^params\['b'\]: param_comm_dtype is wider than the parameter: got float32 for bfloat16, expected bfloat16 or a narrower dtype"),
    ("params rounded at every step", lambda: make_tx(policy=policy(param_comm_dtype=BF16, main_params_dtype=None)).init(PARAMS), jda.PolicyError, r"^params\['b'\]: would be rounded to param_comm_dtype at every step: got bfloat16 for float32 and no float32 main"),
    ("remainders beside params rounded at every step", lambda: make_tx(policy=policy(main_params_dtype="remainder16", param_comm_dtype="float8_e5m2")).init(cast(PARAMS, BF16)), jda.PolicyError, r"^params\['b'\]: would be rounded to param_comm_dtype at every step: got float8_e5m2 for bfloat16"),
    # -- groups and param_specs
    ("groups without labels", lambda: make_tx(groups={"a": {}}), jda.HyperparameterError, r"^groups: labels and groups belong together: got param_labels=None, groups=\{'a': \{\}\}, expected both"),
    ("groups in a list", lambda: make_tx(param_labels="a", groups=["a"]), jda.HyperparameterError, r"^groups: labels and groups belong together: .*, groups=\['a'\], expected both, groups as a dict of dicts"),
    ("a checkpoint of several optimizers", lambda: jda.save(tempfile.mkdtemp(), {"params": PARAMS, "opt_state": optax.chain(fused(), fused()).init(PARAMS)}), jda.TreeError, r"^opt_state: not the state of one Adam: got tuple with 2 of them, .*\. Use one optimizer: a distributed one takes groups\. What optax joins"),
    ("a label without a group", lambda: make_tx(param_labels={"w": "a", "b": "z"}, groups={"a": {}}).init(PARAMS), jda.TreeError, r"^params\['b'\]: its label belongs to no group: got 'z', expected 'a'\. Add 'z' to groups"),
    ("a group without a label", lambda: make_tx(param_labels={"w": "body", "b": "head"}, groups={"body": {}, "head": {}, "frozn": dict(frozen=True)}).init(PARAMS), jda.TreeError, r"^groups\['frozn'\]: no leaf has this label: got the labels 'body', 'head', expected 'frozn' among them\. Fix its spelling"),
    ("labels of another tree", lambda: make_tx(param_labels=lambda params: {"q": "a"}, groups={"a": {}}).init(PARAMS), jda.TreeError, r"^param_labels: structure differs from params: got PyTreeDef\(\{'q': \*\}\)"),
    ("numbers as labels", lambda: make_tx(param_labels={"w": 1, "b": 2}, groups={1: {}, 2: {}}).init(PARAMS), jda.DtypeError, r"^param_labels\['b'\]: not a str: got 2, expected a label"),
    ("an unknown setting of a group", lambda: labelled(lr=1.0), jda.HyperparameterError, r"^groups\['a'\]: unknown setting lr: got \{'lr': 1\.0\}, expected a dict with some of learning_rate, lr_scale, weight_decay"),
    ("a misspelt setting of a group", lambda: labelled(weightdecay=0.1), jda.HyperparameterError, r"^groups\['a'\]: unknown setting weightdecay: got .* Pass weight_decay, or remove it\.$"),
    ("two learning rates of a group", lambda: labelled(learning_rate=1e-3, lr_scale=2.0), jda.HyperparameterError, r"^groups\['a'\]: two settings of one learning rate: got learning_rate and lr_scale, expected one"),
    ("a group's learning rate in a string", lambda: labelled(learning_rate="x"), jda.HyperparameterError, r"^groups\['a'\], learning_rate: out of range: got 'x'"),
    ("a group that is a number", lambda: make_tx(param_labels="a", groups={"a": 0.1}), jda.HyperparameterError, r"^groups\['a'\]: unknown setting 0\.1: got 0\.1, expected a dict"),
    ("a group's rate in a string", lambda: labelled(lr_scale="x"), jda.HyperparameterError, r"^groups\['a'\], lr_scale: out of range: got 'x', expected a finite number or a schedule\. Change lr_scale"),
    ("a group's b1 above 1", lambda: labelled(b1=2.0), jda.HyperparameterError, r"^groups\['a'\], b1: out of range: got 2\.0, expected a number in \[0, 1\)"),
    ("a group's b2 at which bfloat16 cannot decay", lambda: make_tx(groups={"a": dict(b2=0.999)}, param_labels="a", nu_dtype=BF16, b2=0.9), jda.PolicyError, r"cannot follow the gradients at this b2"),
    ("frozen as a word", lambda: labelled(frozen="no"), jda.HyperparameterError, r"^groups\['a'\]\['frozen'\]: not a bool: got 'no', expected True or False"),
    ("all groups frozen", lambda: labelled(frozen=True), jda.HyperparameterError, r"^groups: all are frozen: nothing is left to train: got \{'a': \{'frozen': True\}\}, expected a group that is not"),
    ("an axis as param_specs", lambda: make_tx(mesh=mesh24(), param_specs="model").init(PARAMS), jda.DtypeError, r"^param_specs: not a PartitionSpec: got 'model', expected a PartitionSpec over tensor axes"),
    ("param_specs over an unknown axis", lambda: make_tx(mesh=mesh24(), param_specs={"w": P("modl"), "b": P()}).init(PARAMS), jda.MeshError, r"^params\['w'\]: param_specs names axis 'modl': got P.*\('modl',\), expected axes of a model, or of shard_axis: \('model', 'data'\)"),
    ("param_specs over an axis of data", lambda: make_tx(mesh=mesh24(), param_specs={"w": P("data"), "b": P()}).init(PARAMS), jda.MeshError, r"^params\['w'\]: param_specs names axis 'data', which carries data, .* got model axis 'model' beside it, .*\. Leave sharding over data axes to sharding_strategy"),
    ("param_specs that do not divide", lambda: make_tx(mesh=mesh24(), param_specs={"w": P(None, "model"), "b": P()}).init(PARAMS), jda.ShapeError, r"^params\['w'\]: cannot be split as param_specs says: got shape \(4, 3\), .*, expected dimensions that divide by \(1, 4\)"),
    ("param_specs of a number", lambda: make_tx(mesh=mesh24(), param_specs={"w": P(), "b": P(), "s": P("model")}).init(PARAMS | {"s": np.float32(1)}), jda.ShapeError, r"^params\['s'\]: cannot be split as param_specs says: got shape \(\)"),
    ("param_specs of another tree", lambda: make_tx(mesh=mesh24(), param_specs={"w": P("model")}).init(PARAMS), jda.TreeError, r"^param_specs: structure differs from params: got PyTreeDef\(\{'w': \*\}\)"),
    # -- TrainState
    ("create(tx, params)", lambda: jda.TrainState.create(tx(), PARAMS), jda.PolicyError, NOT_DISTRIBUTED.format("dict")),
    ("create with optax's optimizer", lambda: jda.TrainState.create(PARAMS, optax.adamw(1e-2)), jda.PolicyError, NOT_DISTRIBUTED.format("GradientTransformationExtraArgs")),
    ("a state with an integer parameter", lambda: create(PARAMS | {"n": np.ones(3, np.int32)}), jda.DtypeError, r"^params\['n'\]: dtype cannot be used: got int32, expected float32 or bfloat16 or float16\. Cast the leaf, or keep"),
    ("a state with a complex parameter", lambda: create({"w": np.ones(3, np.complex64)}), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got complex64, expected float32 or bfloat16 or float16\."),
    ("a state with numpy's default dtype", lambda: create({"w": np.ones(3)}), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got float64, expected float32"),
    ("a state with a Python number", lambda: create({"w": 1.0}), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got float, expected float32"),
    ("a state with a string", lambda: create({"w": "x"}), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got str, expected float32"),
    ("a state with an activation function", lambda: create({"w": PARAMS["w"], "act": jnp.sin}), jda.DtypeError, r"^params\['act'\]: dtype cannot be used: got .*, expected float32"),
    ("all variables of a Flax model", lambda: create({"params": PARAMS, "batch_stats": {"m": np.zeros(3)}}), jda.TreeError, r"^params: all variables of a Flax model: .*: got params, batch_stats, expected variables\[\"params\"\]\. Pass these as params, and the rest, such as 'batch_stats'"),
    ("a state of shapes", lambda: create(jax.eval_shape(lambda: PARAMS)), jda.TreeError, r"^params\['b'\]: a shape, not an array: got ShapeDtypeStruct\(.*\), expected a jax or numpy array\."),
    ("init of shapes", lambda: tx().init(jax.eval_shape(lambda: PARAMS)), jda.TreeError, r"^params\['b'\]: a shape, not an array: got ShapeDtypeStruct\(.*\. Pass arrays; for shapes alone use jax\.eval_shape"),
    ("init of a string", lambda: tx().init({"w": "x"}), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got str"),
    ("param_dtypes of whole numbers", lambda: create(param_dtypes=jnp.int32), jda.PolicyError, NOT_A_DTYPE.format("param_dtypes", r"<class 'jax\.numpy\.int32'>")),
    ("param_dtypes by an unknown name", lambda: create(param_dtypes="bf16"), jda.PolicyError, NOT_A_DTYPE.format("param_dtypes", "'bf16'")),
    ("param_dtypes of a part", lambda: create(param_dtypes={"w": BF16}), jda.TreeError, r"^param_dtypes\['b'\]: missing, params has it: got 1 leaves"),
    ("a model state with a string", lambda: create(model_state={"m": "x"}), jda.DtypeError, r"^model_state\['m'\]: not an array of numbers: got 'x', expected a jax or numpy array"),
    ("a model state of shapes", lambda: create(model_state={"m": jax.ShapeDtypeStruct((2,), jnp.float32)}), jda.TreeError, r"^model_state\['m'\]: a shape, not an array"),
    ("a seed as rng", lambda: create(rng=0), jda.DtypeError, r"^rng: not a random key: got 0, expected one key, as jax\.random\.key\(0\) returns\. Pass rng=jax\.random\.key\(seed\)"),
    ("numpy's generator as rng", lambda: create(rng=np.random.default_rng(0)), jda.DtypeError, r"^rng: not a random key: got Generator\(PCG64\)"),
    ("floats as rng", lambda: create(rng=np.zeros(2, np.float32)), jda.DtypeError, r"^rng: not a random key: got float32"),
    ("several keys as rng", lambda: create(rng=jax.random.split(jax.random.key(0), 3)), jda.DtypeError, r"^rng: not a random key: got .*, expected one key"),
    ("a key of the wrong length", lambda: create(rng=np.zeros(5, np.uint32)), jda.DtypeError, r"^rng: not a random key: got .*, expected one key"),
    ("replace(params=...) without tx", lambda: state().replace(params=GRADS), jda.TreeError, r"^params: the optimizer would continue from its own main parameters, and these would be lost: got new params and no tx, expected state\.replace\(params=\.\.\., tx=tx\)"),
    ("replace with another optimizer", lambda: state().replace(params=GRADS, tx=fused()), jda.PolicyError, NOT_DISTRIBUTED.format("FusedTransformation")),
    ("shapes(tx, params)", lambda: jda.TrainState.shapes(tx(), PARAMS), jda.PolicyError, NOT_DISTRIBUTED.format("dict")),
    ("shapes of integers", lambda: jda.TrainState.shapes({"w": jax.ShapeDtypeStruct((3,), jnp.int32)}, tx()), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got int32"),
    ("shapes of Python numbers", lambda: jda.TrainState.shapes({"w": 1.0}, tx()), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got float"),
    # -- reload_main_params, full_params
    ("reload_main_params(tx, state)", lambda: jda.reload_main_params(tx(), state()), jda.PolicyError, NOT_DISTRIBUTED.format("TrainState")),
    ("reload_main_params(params, tx)", lambda: jda.reload_main_params(PARAMS, tx()), jda.TreeError, NOT_A_TRAIN_STATE.format(r"builtins\.dict")),
    ("reloaded params of another shape", lambda: jda.reload_main_params(dataclasses.replace(state(), params=PARAMS | {"w": GRADS["w"].T}), tx()), jda.LayoutError, r"^params: do not fit the state: got leaf \['w'\]: shape \[3, 4\] instead of \[4, 3\], expected the paths, shapes and dtypes"),
    ("reloaded params of another tree", lambda: jda.reload_main_params(dataclasses.replace(state(), params={"q": GRADS["w"]}), tx()), jda.LayoutError, r"^params: do not fit the state: got leaf \['q'\] is not expected; leaf \['b'\] is missing"),
    ("reloaded params in whole numbers", lambda: jda.reload_main_params(dataclasses.replace(state(), params=cast(PARAMS, np.int32)), tx()), jda.DtypeError, r"^params\['b'\]: dtype cannot be used: got int32"),
    ("full_params(params, tx)", lambda: jda.full_params(PARAMS, tx()), jda.TreeError, NOT_A_TRAIN_STATE.format(r"builtins\.dict")),
    ("full_params(tx, state)", lambda: jda.full_params(tx(), state()), jda.PolicyError, NOT_DISTRIBUTED.format("TrainState")),
    ("ema_params without an average", lambda: jda.ema_params(state(), tx()), jda.PolicyError, r"^ema_params: this optimizer keeps no average: got ema_decay=None, expected a number\. Make it with distributed\("),
    ("ema_params of another state", lambda: jda.ema_params(state(), tx(ema_decay=0.9)), jda.TreeError, r"^opt_state\.ema: does not fit ema_decay: got NoneType, expected an array\. Convert it: params, adam, extra = to_optax_state\(state, old_tx\), .* begin anew with"),
    ("full_params of a donated state", lambda: jda.full_params(donated(), tx()), jda.MeshError, DONATED),
    # -- from_optax_state, to_optax_state, main_params
    ("full_params of shapes", lambda: jda.full_params(jda.TrainState.shapes(PARAMS, tx()), tx()), jda.TreeError, r"^state: shapes, not arrays: got what TrainState\.shapes or jax\.eval_shape returned, expected a state with values\. Restore it: jda\.restore"),
    ("reload_main_params of shapes", lambda: jda.reload_main_params(jda.TrainState.shapes(PARAMS, tx()), tx()), jda.TreeError, r"^state: shapes, not arrays"),
    ("a step of shapes", lambda: train(state=jda.TrainState.shapes(PARAMS, make_tx())), jda.TreeError, r"^state: shapes, not arrays"),
    ("from_optax_state(opt_state, params, tx)", lambda: jda.from_optax_state(optax_state(), PARAMS, tx()), jda.TreeError, A_STATE.format("main_params", "ScaleByAdamState", "from_optax_state")),
    ("from_optax_state(tx, params, opt_state)", lambda: jda.from_optax_state(tx(), PARAMS, optax_state()), jda.PolicyError, NOT_DISTRIBUTED.format("tuple")),
    ("from_optax_state to optax's optimizer", lambda: jda.from_optax_state(PARAMS, optax_state(), optax.adamw(1e-2)), jda.PolicyError, NOT_DISTRIBUTED.format("GradientTransformationExtraArgs")),
    ("from_optax_state of a train state", lambda: from_optax(optax_state(), params=state()), jda.TreeError, A_STATE.format("main_params", "TrainState", "from_optax_state")),
    ("from_optax_state of sgd", lambda: from_optax(optax.sgd(1e-2).init(PARAMS)), jda.TreeError, r"^opt_state: not the state of optax's optimizer with these hyperparameters: got PyTreeDef\(.*EmptyState.*\), expected PyTreeDef\(.*ScaleByAdamState.*\. Use the same schedules and mask"),
    ("from_optax_state of a distributed state", lambda: from_optax(state().opt_state), jda.TreeError, r"^opt_state: not the state of optax's optimizer .*: got jdistadam\.distributed\.state\.DistributedState, expected tuple"),
    ("from_optax_state of nothing", lambda: from_optax(None), jda.TreeError, r"^opt_state: not the state of optax's optimizer .*: got NoneType, expected tuple"),
    ("from_optax_state of other params", lambda: from_optax(optax.adamw(1e-2).init({"w": np.ones(2, np.float32), "b": np.ones(2, np.float32)})), jda.ShapeError, r"^opt_state\[0\]\.mu\['b'\]: shape differs from params: got \(2,\), expected \(3,\)"),
    ("from_optax_state of strings", lambda: from_optax(jax.tree.map(lambda x: "x", optax_state())), jda.DtypeError, r"^opt_state\[0\]\.count: not an array of numbers: got 'x', expected a jax or numpy array"),
    ("from_optax_state of shapes", lambda: from_optax(jax.eval_shape(lambda: optax_state())), jda.TreeError, r"^opt_state\[0\]\.count: a shape, not an array: got ShapeDtypeStruct"),
    ("from_optax_state of complex moments", lambda: from_optax(optax_state(mu=cast(GRADS, np.complex64))), jda.DtypeError, r"^opt_state\[0\]\.mu\['b'\]: dtype cannot be used: got complex64, expected float32 .*\. Use the real moments"),
    ("from_optax_state of rounded moments", lambda: from_optax(optax_state(nu=cast(GRADS, np.int32))), jda.DtypeError, r"^opt_state\[0\]\.nu\['b'\]: dtype cannot be used: got int32"),
    ("from_optax_state with several counts", lambda: from_optax(optax_state(count=np.ones(3, np.int32))), jda.ShapeError, r"^opt_state\[0\]\.count: not a number of steps: got int32, shape \(3,\), expected int32, shape \(\)"),
    ("from_optax_state with a count in float", lambda: from_optax(optax_state(count=np.float32(3))), jda.DtypeError, r"^opt_state\[0\]\.count: not a number of steps: got float32"),
    ("from_optax_state into no dtype", lambda: from_optax(optax_state(), param_dtypes="x"), jda.PolicyError, NOT_A_DTYPE.format("param_dtypes", "'x'")),
    ("from_optax_state(*to_optax_state(state, tx), tx)", lambda: jda.from_optax_state(*jda.to_optax_state(state(), tx()), tx()), jda.PolicyError, NOT_DISTRIBUTED.format("ExtraState")),
    ("from_optax_state of an extra state", lambda: from_optax(optax_state(), params=extra_state()), jda.TreeError, A_STATE.format("main_params", "ExtraState", "from_optax_state")),
    ("an extra state as opt_state", lambda: from_optax(extra_state()), jda.TreeError, r"^opt_state: not the state of optax's optimizer .*: got jdistadam\.training\.extra_state\.ExtraState, expected tuple"),
    ("an extra state without types", lambda: from_optax(optax_state(), extra_state=extra_state()._asdict()), jda.TreeError, r"^extra_state: not an ExtraState: got dict, expected the third value .*restore a checkpoint into what"),
    ("a train state as extra state", lambda: from_optax(optax_state(), extra_state=state()), jda.TreeError, r"^extra_state: not an ExtraState: got TrainState"),
    ("an extra state of shapes", lambda: with_extra(model_state={"a": jax.ShapeDtypeStruct((2,), np.int32)}), jda.TreeError, r"^extra_state\.model_state\['a'\]: a shape, not an array"),
    ("an extra state with strings", lambda: with_extra(model_state=["x"]), jda.DtypeError, r"^extra_state\.model_state\[0\]: not an array of numbers: got 'x'"),
    ("an extra state of another step", lambda: with_extra(step=np.int32(3)), jda.TreeError, r"^extra_state\.step: differs from the count of opt_state: .*: got 3, expected 0"),
    ("an extra state of half a step", lambda: with_extra(step=np.float32(0.5)), jda.DtypeError, r"^extra_state\.step: not a number of steps: got float32"),
    ("an extra state without a step", lambda: with_extra(step=None), jda.TreeError, r"^extra_state\.step: missing: got None, expected"),
    ("an extra state with several norms", lambda: with_extra(grad_norm=np.ones(2)), jda.ShapeError, r"^extra_state\.grad_norm: not a scalar: got \(2,\)"),
    ("an extra state with words as rng", lambda: with_extra(rng=np.ones(3, np.uint32)), jda.DtypeError, r"^extra_state\.rng: not a random key: got uint32, shape \(3,\)"),
    ("an extra state with a number as scaling", lambda: from_optax(optax_state(), extra_state=extra_state()._replace(scaling=2.0)), jda.TreeError, r"^extra_state\.scaling: not the state of a loss scale: got float"),
    ("an extra state with a number as guard", lambda: from_optax(optax_state(), extra_state=extra_state()._replace(guard=1.0)), jda.TreeError, r"^extra_state\.guard: not the state of a guard: got float, expected None or NormGuardState"),
    ("an extra state with one count", lambda: with_extra(scaling=dict(growth_count=None)), jda.TreeError, r"^extra_state\.scaling: not the state of a loss scale: .* with both counts or none"),
    ("an extra state with a scale of NaN", lambda: with_extra(scaling=dict(loss_scale=np.float32(np.nan))), jda.HyperparameterError, r"^extra_state\.scaling\.loss_scale: out of range: got nan"),
    ("an extra state with scales", lambda: with_extra(scaling=dict(loss_scale=np.ones(2))), jda.ShapeError, r"^extra_state\.scaling\.loss_scale: not a scalar"),
    ("an extra state without skipped steps", lambda: with_extra(scaling=dict(skipped=None)), jda.TreeError, r"^extra_state\.scaling\.skipped: missing"),
    ("an extra state with a count in float", lambda: with_extra(scaling=dict(growth_count=np.float32(1))), jda.DtypeError, r"^extra_state\.scaling\.growth_count: not a number of steps"),
    ("to_optax_state(tx, state)", lambda: jda.to_optax_state(tx(), state()), jda.PolicyError, NOT_DISTRIBUTED.format("TrainState")),
    ("to_optax_state of the opt_state", lambda: jda.to_optax_state(state().opt_state, tx()), jda.TreeError, NOT_A_TRAIN_STATE.format(r"jdistadam\.distributed\.state\.DistributedState")),
    ("to_optax_state with optax's optimizer", lambda: jda.to_optax_state(state(), optax.adamw(1e-2)), jda.PolicyError, NOT_DISTRIBUTED.format("GradientTransformationExtraArgs")),
    ("to_optax_state of a donated state", lambda: jda.to_optax_state(donated(), tx()), jda.MeshError, DONATED),
    ("main_params of a distributed state without tx", lambda: jda.main_params(state().params, state().opt_state), jda.TreeError, r"^tx: needed to find the main parameters of a distributed state: got None, expected the distributed optimizer\. Call main_params"),
    ("main_params with another optimizer", lambda: jda.main_params(state().params, state().opt_state, fused()), jda.PolicyError, NOT_DISTRIBUTED.format("FusedTransformation")),
    ("main_params(opt_state, params, tx)", lambda: jda.main_params(state().opt_state, state().params, tx()), jda.TreeError, A_STATE.format("params", "DistributedState", "main_params")),
    ("main_params(opt_state, params)", lambda: jda.main_params(fused().init(PARAMS), PARAMS), jda.TreeError, A_STATE.format("params", "ScaleByAdamState", "main_params")),
    ("main_params(state, tx)", lambda: jda.main_params(state(), tx()), jda.TreeError, A_STATE.format("params", "TrainState", "main_params")),
    ("main_params without a state", lambda: jda.main_params(PARAMS, None), jda.TreeError, r"^opt_state: missing, but it contains the main parameters: got None, expected what init, update or step returned"),
    ("main_params(params, tx)", lambda: jda.main_params(PARAMS, fused()), jda.DtypeError, r"^opt_state\.init: not an array of numbers: got <function"),
    ("main_params of another tree", lambda: mains({"z": jnp.ones(3)}), jda.TreeError, r"^opt_state\.main_params: tree structure differs from params: got PyTreeDef\(\{'w': \*\}\), expected PyTreeDef\(\{'z': \*\}\)"),
    ("main_params of another shape", lambda: mains({"w": jnp.ones(5)}), jda.DtypeError, r"^opt_state\.main_params\['w'\]: does not fit its parameter: got \(\(3,\), dtype\('float32'\)\), expected \(\(5,\), 'float32'\)"),
    ("main_params with remainders of another shape", lambda: mains({"w": jnp.ones(5, BF16)}, "remainder16"), jda.DtypeError, r"^opt_state\.main_params\['w'\]: does not fit its parameter: got \(\(3,\), dtype\('uint16'\)\), expected \(\(5,\), 'uint16'\)"),
    # -- train_step: how it is made and called
    ("optax's optimizer in train_step", lambda: jda.train_step(loss_fn, optax.adamw(1e-2)), jda.PolicyError, NOT_DISTRIBUTED.format("GradientTransformationExtraArgs")),
    ("fused_adamw in train_step", lambda: jda.train_step(loss_fn, fused()), jda.PolicyError, NOT_DISTRIBUTED.format("FusedTransformation")),
    ("train_step(tx, loss_fn)", lambda: jda.train_step(tx(), loss_fn), jda.PolicyError, NOT_DISTRIBUTED.format("function")),
    ("no loss function", lambda: jda.train_step(None, tx()), jda.TreeError, r"^loss_fn: not a function: got NoneType, expected loss_fn\(params, batch\)\. Call train_step\(loss_fn, tx\)"),
    ("a loss in place of its function", lambda: jda.train_step(1.0, tx()), jda.TreeError, r"^loss_fn: not a function: got float, expected"),
    ("no micro-batches", lambda: train(accumulate_steps=0), jda.HyperparameterError, r"^accumulate_steps: out of range: got 0, expected a whole number of at least 1\. Change accumulate_steps"),
    ("micro-batches in float", lambda: train(accumulate_steps=2.0), jda.HyperparameterError, r"^accumulate_steps: out of range: got 2\.0, expected"),
    ("micro-batches in a string", lambda: train(accumulate_steps="2"), jda.HyperparameterError, r"^accumulate_steps: out of range: got '2', expected"),
    ("has_aux as a word", lambda: train(has_aux="yes"), jda.HyperparameterError, NOT_A_BOOL.format("has_aux", "'yes'")),
    ("weighted as a word", lambda: train(weighted="yes"), jda.HyperparameterError, NOT_A_BOOL.format("weighted", "'yes'")),
    ("compiler options in a string", lambda: train(compiler_options="--xla_foo"), jda.HyperparameterError, r"^compiler_options: .*got '--xla_foo', expected a dict"),
    ("step(batch, state)", lambda: jda.train_step(loss_fn, tx())(BATCH, state()), jda.TreeError, NOT_A_TRAIN_STATE.format(r"numpy\.ndarray")),
    ("step(params, batch)", lambda: jda.train_step(loss_fn, tx())(PARAMS, BATCH), jda.TreeError, NOT_A_TRAIN_STATE.format(r"builtins\.dict")),
    ("step(opt_state, batch)", lambda: jda.train_step(loss_fn, tx())(state().opt_state, BATCH), jda.TreeError, NOT_A_TRAIN_STATE.format(r"jdistadam\.distributed\.state\.DistributedState")),
    ("step of what a step returned, not unpacked", lambda: jda.train_step(loss_fn, tx())((state(), {}), BATCH), jda.TreeError, NOT_A_TRAIN_STATE.format(r"builtins\.tuple")),
    ("a state without opt_state", lambda: jda.train_step(loss_fn, tx())(jda.TrainState(PARAMS, None), BATCH), jda.TreeError, NO_DISTRIBUTED_STATE.format("NoneType")),
    ("a state with optax's state", lambda: jda.train_step(loss_fn, tx())(jda.TrainState(PARAMS, optax_state()), BATCH), jda.TreeError, NO_DISTRIBUTED_STATE.format("tuple")),
    ("a donated state", lambda: train(state=donated()), jda.MeshError, DONATED),
    ("a state of another mesh", lambda: train(state=state(), tx=make_tx(mesh=mesh(4))), jda.MeshError, r"^opt_state\.mu: sharded over another mesh, or in another order: got .* on \{'data': 2\}, expected .* on \{'data': 4\}\. Convert it: params, adam, extra = to_optax_state"),
    ("a state of the same devices in another order", lambda: train(state=state(), tx=make_tx(mesh=jax.sharding.Mesh(mesh().devices[::-1], "data"))), jda.MeshError, r"^opt_state\.mu: sharded over another mesh, .*: got P\w*\('data',\) on \{'data': 2\} with \S*0\S* at place 0, expected \S* on \{'data': 2\} with \S*1\S* at place 0\. Convert"),
    ("a state without a loss scale", lambda: train(state=state(), tx=make_tx(loss_scale=2.0)), jda.TreeError, r"^opt_state\.scaling: does not fit loss_scale: got NoneType, expected LossScaleState"),
    ("a state with a loss scale", lambda: train(state=state(loss_scale=2.0), tx=make_tx()), jda.TreeError, r"^opt_state\.scaling: does not fit loss_scale: got LossScaleState, expected None"),
    ("a state without a guard", lambda: train(state=state(), tx=tx(norm_guard=jda.NormGuard(1.0))), jda.TreeError, r"^opt_state\.guard: does not fit norm_guard: got NoneType, expected NormGuardState"),
    ("a state without an average", lambda: train(state=state(), tx=tx(ema_decay=0.9)), jda.TreeError, r"^opt_state\.ema: does not fit ema_decay: got NoneType, expected an array\. Convert it: "),
    ("a state with an average", lambda: train(state=state(ema_decay=0.9), tx=make_tx()), jda.TreeError, r"^opt_state\.ema: does not fit ema_decay: got ArrayImpl, expected None\. Convert it: "),
    ("a state of another loss scale", lambda: train(state=state(loss_scale=4.0), tx=tx(loss_scale=2.0)), jda.HyperparameterError, r"^opt_state\.scaling\.loss_scale: of another loss_scale than that of the optimizer: got 4\.0, expected 2\.0\. Convert it: "),
    ("a state below the least loss scale", lambda: train(state=state(loss_scale=1.0), tx=tx(loss_scale=jda.DynamicLossScale(min_scale=4.0))), jda.HyperparameterError, r"^opt_state\.scaling\.loss_scale: .*: got 1\.0, expected 4\.0 or more\. Convert it: "),
    ("a state of other buckets", lambda: train(state=state(), tx=make_tx(bucket_bytes=16)), jda.LayoutError, r"^opt_state\.layout_digest: the state of another layout: got bucket of \['b'\]: leaves .*, expected the layout of this optimizer for these params\. Convert it: to_optax_state"),
    ("a state of other params", lambda: train(state=jda.TrainState(PARAMS, create(PARAMS | {"w": np.ones((8, 3), np.float32)}).opt_state)), jda.LayoutError, r"^opt_state\.layout_digest: the state of another layout: got .*shape \[8, 3\] instead of \[4, 3\]"),
    ("a state with a second moment in bfloat16", lambda: train(state=dataclasses.replace(state(), opt_state=state().opt_state._replace(nu=state().opt_state.nu.astype(BF16)))), jda.DtypeError, r"^opt_state\.nu: dtype differs from the optimizer's: got bfloat16, expected float32\. Cast it, or set nu_dtype"),
    ("a state with scales in bfloat16", lambda: train(lambda p, b: jnp.sum(p["w"]), state=coded_state(BF16), tx=coded_tx()), jda.DtypeError, r"^opt_state\.mu\.scales: .* expected float32\. Make the state with init\(params\)"),
    ("a state of other main parameters", lambda: train(state=jda.TrainState.create(cast(PARAMS, BF16), tx()), tx=make_tx(policy=policy(main_params_dtype="remainder16"))), jda.LayoutError, r"^opt_state\.layout_digest: the state of another layout: got .*main float32 instead of remainder16"),
    ("params put into a state", lambda: train(state=dataclasses.replace(create(), params=GRADS)), jda.LayoutError, r"^params\['b'\].*: differ from the main parameters, which the optimizer updates: they would be lost: .*\. Call reload_main_params"),
    ("a state without a loss scale, in a program", lambda: train_in_jit(state(), make_tx(loss_scale=2.0)), jda.TreeError, r"^opt_state\.scaling: does not fit loss_scale: got NoneType, expected LossScaleState"),
    ("a state of a chain, in a program", lambda: train_in_jit(jda.TrainState.create(PARAMS, jda.chain(optax.scale(0.5), make_tx())), make_tx()), jda.TreeError, r"^opt_state: not the state of this optimizer: got tuple, expected DistributedState"),
    ("lower(params, batch)", lambda: jda.train_step(loss_fn, tx()).lower(PARAMS, BATCH), jda.TreeError, NOT_A_TRAIN_STATE.format(r"builtins\.dict")),
    # -- batches
    ("a batch that does not divide", lambda: train(batch=BATCH[:3]), jda.ShapeError, r"^batch: leading dimension is not divisible by the number of devices: got \(3, 4\), expected a multiple of 2\. Change the batch size"),
    ("a batch that shard_batch cannot divide", lambda: jda.shard_batch({"x": BATCH[:3]}, tx()), jda.ShapeError, r"^batch\['x'\]: leading dimension .*got \(3, 4\), expected a multiple of 2"),
    ("a batch that does not divide into micro-batches", lambda: train(batch=np.ones((6, 4), np.float32), accumulate_steps=2), jda.ShapeError, r"^batch: a device's part does not divide into micro-batches: got \(3, 4\), expected a leading dimension that is a multiple of 2"),
    ("a number in a batch", lambda: train(batch={"x": BATCH, "s": np.float32(1)}), jda.ShapeError, r"^batch\['s'\]: a leaf without dimensions cannot be split .*: got shape \(\), expected one row for each example\. Pass a number of this step as np\.full\("),
    ("a number beside a batch_spec", lambda: train(batch={"x": BATCH, "s": 1.0}, batch_spec=P("data")), jda.ShapeError, r"^batch\['s'\]: a leaf without dimensions cannot be split"),
    ("an empty batch", lambda: train(batch=BATCH[:0]), jda.ShapeError, r"^batch: holds no examples: .*: got \(0, 4\), expected a leading dimension above 0\. Leave empty"),
    ("an empty batch beside a batch_spec", lambda: train(batch=BATCH[:0], batch_spec=P("data")), jda.ShapeError, "^batch: holds no examples"),
    ("an empty batch in a program", lambda: jax.jit(jda.train_step(loss_fn, tx()))(state(), BATCH[:0]), jda.ShapeError, "^batch: holds no examples"),
    ("an empty batch on the mesh", lambda: train(batch=jax.device_put(BATCH[:0], NamedSharding(mesh(), P("data")))), jda.ShapeError, "^batch: holds no examples"),
    ("a string in a batch", lambda: train(batch={"x": BATCH, "s": "id"}), jda.DtypeError, r"^batch\['s'\]: not an array of numbers: got <U2, expected a jax or numpy array\. Keep what the loss does not read"),
    ("an object in a batch", lambda: jda.shard_batch({"x": object()}, tx()), jda.DtypeError, r"^batch\['x'\]: not an array of numbers: got object"),
    ("a shape as batch", lambda: jda.shard_batch(jax.ShapeDtypeStruct((4, 4), jnp.float32), tx()), jda.DtypeError, r"^batch: not an array of numbers: got ShapeDtypeStruct"),
    ("parts of a batch of unlike length", lambda: train(batch={"x": BATCH, "y": BATCH[:2]}), jda.ShapeError, r"^batch\['y'\]: leading dimension differs from that of batch\['x'\]: got 2, expected 4\. Give every leaf one row"),
    ("shard_batch(batch, mesh)", lambda: jda.shard_batch(BATCH, mesh()), jda.PolicyError, NOT_DISTRIBUTED.format("Mesh")),
    ("shard_batch(tx, batch)", lambda: jda.shard_batch(tx(), BATCH), jda.PolicyError, NOT_DISTRIBUTED.format("ndarray")),
    ("a batch over an unknown axis", lambda: jda.shard_batch(BATCH, tx(), P("modl")), jda.MeshError, BATCH_SPEC.format(r"P.*\('modl',\)")),
    ("an axis as batch_spec", lambda: jda.shard_batch(BATCH, tx(), "data"), jda.MeshError, BATCH_SPEC.format("'data'")),
    ("a tuple as batch_spec", lambda: train(batch_spec=("data",)), jda.MeshError, BATCH_SPEC.format(r"\('data',\)")),
    ("a tree as batch_spec", lambda: train(batch_spec={"x": P("data")}), jda.MeshError, BATCH_SPEC.format(r"\{'x': P.*\('data',\)\}")),
    ("a sharding as batch_spec", lambda: jda.shard_batch(BATCH, tx(), NamedSharding(mesh(), P("data"))), jda.MeshError, BATCH_SPEC.format(r"NamedSharding\(.*\)")),
    ("an axis twice in batch_spec", lambda: jda.shard_batch(BATCH, tx(), P("data", "data")), jda.MeshError, BATCH_SPEC.format(r"P.*\('data', 'data'\)")),
    ("a batch_spec with too many dimensions", lambda: jda.shard_batch(BATCH, tx(), P("data", None, None)), jda.ShapeError, r"^batch: cannot be split as batch_spec says: got shape \(4, 4\) and P.*, expected dimensions that divide by \(2, 1, 1\)"),
    ("a batch that does not divide as batch_spec says", lambda: train(batch=BATCH[:3], batch_spec=P("data")), jda.ShapeError, r"^batch: cannot be split as batch_spec says: got shape \(3, 4\) and P.*, expected dimensions that divide by \(2,\)"),
    ("a batch_spec of a number, with aux", lambda: jda.train_step(loss_fn, tx(), batch_spec=5, has_aux=True), jda.MeshError, BATCH_SPEC.format("5")),
    # -- what a loss returns, and how it is called
    ("a loss of None", lambda: train(lambda p, b: None), jda.DtypeError, r"^loss_fn's loss: not a real number: got NoneType, expected a floating-point scalar\. Return or pass loss_fn's loss as one number"),
    ("a loss of each example", lambda: train(lambda p, b: jnp.mean(b @ p["w"], axis=-1)), jda.ShapeError, r"^loss_fn's loss: not a scalar: got \(2,\), expected \(\)\. Take the mean, or the sum, first"),
    ("a loss of shape (1,)", lambda: train(lambda p, b: loss_fn(p, b)[None]), jda.ShapeError, r"^loss_fn's loss: not a scalar: got \(1,\), expected \(\)"),
    ("a loss in whole numbers", lambda: train(lambda p, b: jnp.int32(1)), jda.DtypeError, r"^loss_fn's loss: cannot be differentiated: got int32, expected a floating-point scalar\. Compute the loss in floating point"),
    ("a complex loss", lambda: train(lambda p, b: loss_fn(p, b) + 0j), jda.DtypeError, r"^loss_fn's loss: not a real number: got complex64"),
    ("a loss in a dict", lambda: train(lambda p, b: {"loss": loss_fn(p, b)}), jda.DtypeError, r"^loss_fn's loss: not a real number: got dict"),
    ("a loss in a list", lambda: train(lambda p, b: [loss_fn(p, b), 1.0]), jda.DtypeError, r"^loss_fn's loss: not a real number: got list"),
    ("a loss in a string", lambda: train(lambda p, b: "x"), jda.DtypeError, r"^loss_fn's loss: not a real number: got str"),
    ("a loss and metrics without has_aux", lambda: train(lambda p, b: (loss_fn(p, b), {"acc": 1.0})), jda.TreeError, RETURNED.format("2 values", "loss")),
    ("a loss and a number without has_aux", lambda: train(lambda p, b: (loss_fn(p, b), jnp.mean(b))), jda.TreeError, RETURNED.format("2 values", "loss")),
    ("value_and_grad as loss", lambda: train(jax.value_and_grad(loss_fn)), jda.TreeError, RETURNED.format("2 values", "loss")),
    ("a gradient as loss", lambda: train(jax.grad(loss_fn)), jda.DtypeError, r"^loss_fn's loss: not a real number: got dict"),
    ("has_aux without aux", lambda: train(has_aux=True), jda.TreeError, RETURNED.format(".*Tracer", r"a tuple \(loss, aux\)")),
    ("aux that is a string", lambda: train(lambda p, b: (loss_fn(p, b), "x"), has_aux=True), jda.DtypeError, r"^loss_fn's aux: cannot leave a jitted program: got 'x', expected an array or a number"),
    ("aux that is numpy's string", lambda: train(lambda p, b: (loss_fn(p, b), np.array("x")), has_aux=True), jda.DtypeError, r"^loss_fn's aux: cannot leave a jitted program: got array\('x'"),
    ("aux that is an object", lambda: train(lambda p, b: (loss_fn(p, b), {"a": object()}), has_aux=True), jda.DtypeError, r"^loss_fn's aux\['a'\]: cannot leave a jitted program: got <object"),
    ("weighted without a weight", lambda: train(weighted=True), jda.TreeError, RETURNED.format("the loss alone", r"\(loss, weight\)")),
    ("a weight of None", lambda: train(lambda p, b: (loss_fn(p, b), None), weighted=True), jda.DtypeError, r"^loss_fn's weight: not a real number: got NoneType"),
    ("weights of each example", lambda: train(lambda p, b: (loss_fn(p, b), jnp.ones(3)), weighted=True), jda.ShapeError, r"^loss_fn's weight: not a scalar: got \(3,\), expected \(\)"),
    ("a complex weight", lambda: train(lambda p, b: (loss_fn(p, b), 1j), weighted=True), jda.DtypeError, r"^loss_fn's weight: not a real number: got complex"),
    ("a loss summed over the devices", lambda: train(lambda p, b: jax.lax.psum(loss_fn(p, b), "data")), jda.PolicyError, r"^loss_fn's loss: already summed over the devices, .*: got a psum over axis 'data', expected the loss of this device's part of the batch\. Return the local loss"),
    ("a loss function without arguments", lambda: train(lambda: 1.0), jda.TreeError, CALLED.format("too many positional arguments", r"\(\)", "params, batch")),
    ("a loss function of params alone", lambda: train(lambda p: 1.0), jda.TreeError, CALLED.format("too many positional arguments", r"\(p\)", "params, batch")),
    ("a loss function of three arguments", lambda: train(lambda p, x, y: 1.0), jda.TreeError, CALLED.format("missing a required argument: 'y'", r"\(p, x, y\)", "params, batch")),
    ("a loss function without rng", lambda: train_with(loss_fn, rng=jax.random.key(0)), jda.TreeError, CALLED.format("got an unexpected keyword argument 'rng'", r"\(params, batch\)", "params, batch, rng=rng")),
    ("a loss function without model_state", lambda: train_with(loss_fn, model_state={"m": np.zeros(2)}), jda.TreeError, CALLED.format("got an unexpected keyword argument 'model_state'", r"\(params, batch\)", "params, batch, model_state=model_state")),
    ("a loss function with the model state by position", lambda: train_with(lambda p, b, m: 1.0, model_state={"m": np.zeros(2)}), jda.TreeError, CALLED.format("missing a required argument: 'm'", r"\(p, b, m\)", "params, batch, model_state=model_state")),
    ("a model state that was not given", lambda: train(lambda p, b, model_state: (loss_fn(p, b), model_state)), jda.TreeError, CALLED.format("missing a required argument: 'model_state'", r"\(p, b, model_state\)", "params, batch")),
    ("a model state that is not returned", lambda: train_with(lambda p, b, model_state: loss_fn(p, b), model_state={"m": np.zeros(2)}), jda.TreeError, RETURNED.format(".*Tracer", r"a tuple \(loss, model_state\)")),
    ("a model state that is lost", lambda: with_model_state(None), jda.TreeError, r"^loss_fn's model_state\['m'\]: missing, the state's model_state has it: got 0 leaves"),
    ("a model state under another key", lambda: with_model_state({"z": jnp.zeros(2)}), jda.TreeError, r"^loss_fn's model_state\['m'\]: missing, the state's model_state has it: got 1 leaves, among them \['z'\], expected the 1 leaves of the state's model_state"),
    ("a model state of another shape", lambda: with_model_state({"m": jnp.zeros(3)}), jda.ShapeError, r"^loss_fn's model_state\['m'\]: shape differs from the state's model_state: got \(3,\), expected \(2,\)"),
    ("a model state of another kind", lambda: with_model_state({"m": jnp.zeros(2, jnp.complex64)}), jda.DtypeError, r"^loss_fn's model_state\['m'\]: would lose a part of its values: got complex64, expected float32, as in the state\. Cast it"),
    ("a counter that becomes a fraction", lambda: train_with(lambda p, b, model_state: (loss_fn(p, b), model_state + 0.5), model_state=np.int32(0)), jda.DtypeError, r"^loss_fn's model_state: would lose a part of its values: got float32, expected int32, as in the state"),
    ("a model state that becomes a string", lambda: train_with(lambda p, b, model_state: (loss_fn(p, b), "x"), model_state=np.float32(0)), jda.DtypeError, r"^loss_fn's model_state: not an array of numbers: got 'x'"),
    ("aux before the model state", lambda: train(lambda p, b, model_state: (loss_fn(p, b), 1.0, model_state), state=create(model_state={"m": np.zeros(2)}), has_aux=True), jda.TreeError, r"^loss_fn's model_state\['m'\]: missing"),
    # -- custom training loops
    ("step outside of shard_map", lambda: tx().step(GRADS, state().opt_state, PARAMS), jda.MeshError, NOT_INSIDE.format("step")),
    ("an unwrapped update outside of shard_map", lambda: tx().unwrapped().update(GRADS, state().opt_state, PARAMS), jda.MeshError, NOT_INSIDE.format("step")),
    ("an unwrapped update without params", lambda: tx().unwrapped().update(GRADS, state().opt_state), ValueError, NO_PARAMS),
    ("a step without params", lambda: inside(lambda p, s: tx().step(p, s, None)), ValueError, NO_PARAMS),
    ("a step without gradients", lambda: inside(lambda p, s: tx().step(None, s, p)), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 0 leaves"),
    ("step(grads, params, opt_state)", lambda: inside(lambda p, s: tx().step(p, p, s)), jda.TreeError, NO_DISTRIBUTED_STATE.format("dict")),
    ("step(opt_state, grads, params)", lambda: inside(lambda p, s: tx().step(s, p, p)), jda.TreeError, NO_DISTRIBUTED_STATE.format("dict")),
    ("step with a train state", lambda: inside(lambda p, s: tx().step(p, jda.TrainState(p, s), p)), jda.TreeError, r"^opt_state: not the state of this optimizer: got TrainState"),
    ("complex gradients in a distributed step", lambda: inside(lambda p, s: tx().step(jax.tree.map(lambda x: x + 0j, p), s, p)), jda.DtypeError, r"^grads\['b'\]: dtype cannot be used: got complex64, .*\. Cast the gradients"),
    ("whole numbers as gradients in a distributed step", lambda: inside(lambda p, s: tx().step(jax.tree.map(jnp.int32, p), s, p)), jda.DtypeError, r"^grads\['b'\]: dtype cannot be used: got int32, .*\. Cast the gradients"),
    ("gradients of another tree in a distributed step", lambda: inside(lambda p, s: tx().step({"w": p["w"], "v": p["b"]}, s, p)), jda.TreeError, r"^grads\['b'\]: missing, params has it"),
    ("a transposed gradient in a distributed step", lambda: inside(lambda p, s: tx().step(p | {"w": p["w"].T}, s, p)), jda.ShapeError, r"^grads\['w'\]: shape differs from params: got \(3, 4\), expected \(4, 3\)"),
    ("init_grads outside of shard_map", lambda: tx().init_grads(PARAMS), jda.MeshError, NOT_INSIDE.format("init_grads")),
    ("init_grads of whole numbers", lambda: inside(lambda p, s: tx().init_grads({"n": jnp.ones(3, jnp.int32)})), jda.DtypeError, r"^params\['n'\]: dtype cannot be used: got int32"),
    ("bind to whole numbers", lambda: tx().bind({"n": jnp.ones(3, jnp.int32)}), jda.DtypeError, r"^params\['n'\]: dtype cannot be used: got int32"),
    ("a step with other params than those of bind", lambda: inside(lambda p, s: tx().bind({"w": PARAMS["w"]}).step(p, s, p)), jda.TreeError, r"^params\['b'\]: unexpected, the params of bind does not have it"),
    ("a step with params of another shape than those of bind", lambda: inside(lambda p, s: tx().bind(PARAMS | {"w": jnp.ones((4, 5))}).step(p, s, p)), jda.MeshError, r"^params\['w'\]: shape differs from bind's: got \(4, 3\), expected \(4, 5\) on each device"),
    ("a step with params of another dtype than those of bind", lambda: inside(lambda p, s: tx().bind(jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)).step(p, s, p)), jda.DtypeError, r"^params\['b'\]: dtype differs from bind's: got float32, expected bfloat16"),
    ("bind of an optimizer whose functions were replaced", lambda: tx()._replace(init=lambda p: None).bind(PARAMS), jda.PolicyError, r"^bind: functions of this optimizer were replaced.*Bind first"),
    ("init of other params than those of bind", lambda: tx().bind(PARAMS).init({"w": PARAMS["w"]}), jda.TreeError, r"^params\['b'\]: missing, the params of bind has it"),
    ("accumulate outside of shard_map", lambda: tx().accumulate(None, GRADS), jda.MeshError, NOT_INSIDE.format("accumulate")),
    ("accumulate onto gradients", lambda: inside(lambda p, s: tx().accumulate(p, p)), jda.TreeError, r"^acc: not a sum of gradients: got dict, expected what init_grads or accumulate returned\. Begin with tx\.init_grads"),
    ("accumulate onto nothing", lambda: inside(lambda p, s: tx().accumulate(None, p)), jda.TreeError, r"^acc: not a sum of gradients: got NoneType"),
    ("accumulate(grads, acc)", lambda: inside(lambda p, s: tx().accumulate(p, tx().init_grads(p))), jda.TreeError, r"^acc: not a sum of gradients: got dict"),
    ("accumulate a part of the gradients", lambda: inside(lambda p, s: tx().accumulate(tx().init_grads(p), {"w": p["w"]})), jda.TreeError, r"^grads\['b'\]: missing, accumulated grads has it: got 1 leaves"),
    ("a vector of weights", lambda: inside(lambda p, s: tx().accumulate(tx().init_grads(p), p, jnp.ones(3))), jda.ShapeError, r"^weight: not a scalar: got \(3,\), expected \(\)"),
    ("a weight in a string", lambda: inside(lambda p, s: tx().accumulate(tx().init_grads(p), p, "x")), jda.DtypeError, r"^weight: not a real number: got str"),
    ("a sum of other gradients in a step", lambda: inside(lambda p, s: tx().step(tx().init_grads({"z": p["w"]}), s, p)), jda.TreeError, r"^grads\['b'\]: missing, params has it: got 1 leaves, among them \['z'\]"),
    ("grad_norm outside of shard_map", lambda: tx().grad_norm(GRADS), jda.MeshError, NOT_INSIDE.format("grad_norm")),
    ("grad_norm without the state, under a loss scale", lambda: inside(lambda p, s: tx(loss_scale=8.0).grad_norm(p), tx(loss_scale=8.0)), jda.TreeError, r"^grad_norm: needs the state, because the gradients were multiplied by its loss scale: got None, expected tx\.grad_norm\(grads, opt_state\)\. Pass the state"),
    ("grad_norm with a state without a loss scale", lambda: inside(lambda p, s: tx(loss_scale=8.0).grad_norm(p, s), tx()), jda.TreeError, r"^opt_state\.scaling: does not fit loss_scale: got NoneType, expected LossScaleState"),
    ("grad_norm(grads, params)", lambda: inside(lambda p, s: tx(loss_scale=8.0).grad_norm(p, p)), jda.TreeError, NO_DISTRIBUTED_STATE.format("dict")),
    ("grad_norm(opt_state, grads)", lambda: inside(lambda p, s: tx().grad_norm(s, p)), jda.DtypeError, r"^grads\.count: dtype cannot be used: got int32"),
    ("grad_norm of a chain without its state", lambda: inside(lambda p, s: jda.chain(optax.scale(1.0), tx()).grad_norm(p)), jda.TreeError, CHAIN_STATE.format("NoneType")),
    ("check_state(params, opt_state)", lambda: tx().check_state(PARAMS, state().opt_state), jda.TreeError, NO_DISTRIBUTED_STATE.format("dict")),
    ("check_state of a donated state", lambda: tx().check_state(donated().opt_state, PARAMS), jda.MeshError, DONATED),
    ("param_specs of a string", lambda: tx(sharding_strategy="optim_grads_params").param_specs({"w": "x"}), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got str"),
    ("local_params outside of shard_map", lambda: jda.local_params(PARAMS, tx()), jda.MeshError, NOT_INSIDE.format("local_params")),
    ("local_params(tx, params)", lambda: jda.local_params(tx(), PARAMS), jda.PolicyError, NOT_DISTRIBUTED.format("dict")),
    ("gather_params outside of shard_map", lambda: jda.gather_params(PARAMS, tx()), jda.MeshError, NOT_INSIDE.format("gather_params")),
    ("gather_params(tx, params)", lambda: jda.gather_params(tx(), PARAMS), jda.PolicyError, NOT_DISTRIBUTED.format("dict")),
    *((f"{name} of shards without bind", lambda call=call: inside(lambda p, s: call(make_tx(sharding_strategy="optim_grads_params"), p, s)), jda.MeshError, rf"^{name}: called inside of jax\.shard_map, where it cannot know which params are shards: got an optimizer that was not bound .*, expected opt = tx\.bind\(params\)")
      for name, call in {"local_params": lambda tx, p, s: jda.local_params(p, tx), "init": lambda tx, p, s: tx.init(p), "step": lambda tx, p, s: tx.step(p, s, p), "init_grads": lambda tx, p, s: tx.init_grads(p), "grad_norm": lambda tx, p, s: tx.grad_norm(p, s)}.items()),
    ("scale_loss without a distributed state", lambda: jda.scale_loss(jnp.float32(1), optax_state()), jda.TreeError, NO_DISTRIBUTED_STATE.format("tuple")),
    ("scale_loss(loss, tx)", lambda: jda.scale_loss(jnp.float32(1), tx()), jda.TreeError, NO_DISTRIBUTED_STATE.format("DistributedTransformation")),
    ("scale_loss(opt_state, loss)", lambda: jda.scale_loss(state().opt_state, jnp.float32(1)), jda.TreeError, NO_DISTRIBUTED_STATE.format("ArrayImpl")),
    ("scale_loss of a loss and aux", lambda: jda.scale_loss((jnp.float32(1), {}), state().opt_state), jda.DtypeError, r"^loss: not a real number: got tuple, expected a floating-point scalar"),
    ("scale_loss of each example", lambda: jda.scale_loss(jnp.ones(3), state().opt_state), jda.ShapeError, r"^loss: not a scalar: got \(3,\), expected \(\)"),
    # -- looking: nonfinite, plan, audit
    ("count_nonfinite outside of shard_map", lambda: jda.count_nonfinite(GRADS, tx()), jda.MeshError, NOT_INSIDE.format("count_nonfinite")),
    ("count_nonfinite with optax's optimizer", lambda: jda.count_nonfinite(GRADS, optax.adamw(1e-2)), jda.PolicyError, NOT_DISTRIBUTED.format("GradientTransformationExtraArgs")),
    ("count_nonfinite of a string", lambda: inside(lambda p, s: jda.count_nonfinite({"w": "x"}, tx())), jda.DtypeError, r"^grads\['w'\]: not an array of numbers: got 'x'"),
    ("nonfinite_paths of all metrics", lambda: jda.nonfinite_paths({"loss": 1.0}, PARAMS), jda.ShapeError, r"^counts: not one number for each leaf of params: got dict, expected \(2,\)\. Pass metrics\[\"nonfinite\"\] of train_step\(\.\.\., report_nonfinite=True\)"),
    ("nonfinite_paths(params, counts)", lambda: jda.nonfinite_paths(PARAMS, np.array([0, 1])), jda.ShapeError, r"^counts: not one number for each leaf of params: got dict, expected \(1,\)"),
    ("nonfinite_paths of another model", lambda: jda.nonfinite_paths(np.array([1]), PARAMS), jda.ShapeError, r"^counts: not one number for each leaf of params: got \(1,\), expected \(2,\)"),
    ("nonfinite_paths of strings", lambda: jda.nonfinite_paths(np.array(["a", "b"]), PARAMS), jda.DtypeError, r"^counts: not numbers that can be read: got <U1, expected an array of whole numbers, outside of jit"),
    ("nonfinite_paths of lists", lambda: jda.nonfinite_paths([[1], [1, 2]], PARAMS), jda.DtypeError, r"^counts: not numbers that can be read: got list"),
    ("nonfinite_paths inside of jit", lambda: jax.eval_shape(lambda c: jda.nonfinite_paths(c, PARAMS) and None, jnp.ones(2, jnp.int32)), jda.DtypeError, r"^counts: not numbers that can be read: got int32, expected an array of whole numbers, outside of jit\. Return metrics"),
    ("plan(tx, params)", lambda: jda.plan(tx(), PARAMS), jda.PolicyError, NOT_DISTRIBUTED.format("dict")),
    ("a plan for optax.adamw", lambda: jda.plan(PARAMS, optax.adamw(1e-3)), jda.PolicyError, NOT_DISTRIBUTED.format("GradientTransformationExtraArgs")),
    ("a plan of numbers", lambda: jda.plan({"w": 1}, tx()), jda.DtypeError, r"^params\['w'\]: dtype cannot be used: got int, expected float32"),
    ("a plan of a train state", lambda: jda.plan(state(), tx()), jda.TreeError, A_TRAIN_STATE.format("params")),
    ("a state made of a train state", lambda: jda.TrainState.create(state(), tx()), jda.TreeError, A_TRAIN_STATE.format("params")),
    ("init of a train state", lambda: tx().init(state()), jda.TreeError, A_TRAIN_STATE.format("params")),
    ("fused_adamw's init of a train state", lambda: fused().init(state()), jda.TreeError, A_TRAIN_STATE.format("params")),
    ("restore(template, folder, tx)", lambda: jda.restore(state(), tempfile.mkdtemp(), tx()), jda.CheckpointError, NOT_A_FOLDER.format("TrainState")),
    ("save(state, folder, tx)", lambda: jda.save(state(), tempfile.mkdtemp(), tx()), jda.CheckpointError, NOT_A_FOLDER.format("TrainState")),
    ("Checkpointer(tx, folder)", lambda: jda.Checkpointer(tx(), tempfile.mkdtemp()), jda.CheckpointError, NOT_A_FOLDER.format("DistributedTransformation")),
    ("a plan of no micro-batches", lambda: jda.plan(PARAMS, tx(), accumulate_steps=0), jda.HyperparameterError, r"^accumulate_steps: out of range: got 0"),
    ("a plan of micro-batches in float", lambda: jda.plan(PARAMS, tx(), accumulate_steps=2.5), jda.HyperparameterError, r"^accumulate_steps: out of range: got 2\.5"),
    ("an audit of a loss", lambda: jda.audit(loss_fn, state(), BATCH), jda.TreeError, r"^step: not a training step of this package: got function, expected what train_step returned\. Call audit\(train_step"),
    ("an audit of params", lambda: jda.audit(jda.train_step(loss_fn, tx()), PARAMS, BATCH), jda.TreeError, NOT_A_TRAIN_STATE.format(r"builtins\.dict")),
    ("audit(step, batch, state)", lambda: jda.audit(jda.train_step(loss_fn, tx()), BATCH, state()), jda.TreeError, NOT_A_TRAIN_STATE.format(r"numpy\.ndarray")),
    ("an audit of a state without a loss scale", lambda: jda.audit(jda.train_step(loss_fn, tx(loss_scale=8.0)), state(), BATCH), jda.TreeError, r"^opt_state\.scaling: does not fit loss_scale: got NoneType, expected LossScaleState"),
    ("an audit with a batch that does not divide", lambda: jda.audit(jda.train_step(loss_fn, tx()), state(), BATCH[:3]), jda.ShapeError, r"^batch: leading dimension is not divisible by the number of devices"),
]

# Calls that do not fit a signature: Python's words name the function and the argument, and a note
# says what to write for some names of other libraries.
CALLS = [
    ("a setting by another name", lambda: fused(weightdecay=0.1), r"fused_adamw\(\) got an unexpected keyword argument 'weightdecay'"),
    ("torch's name of the learning rate", lambda: jda.fused_adamw(lr=1e-3), r"(?s)fused_adamw\(\) got an unexpected keyword argument 'lr'.*\nWrite learning_rate in place of lr\.$"),
    ("torch's betas", lambda: fused(betas=(0.9, 0.99)), r"(?s)fused_adamw\(\) got an unexpected keyword argument 'betas'.*\nWrite b1 and b2 in place of betas\.$"),
    ("torch's amsgrad and maximize", lambda: jda.fused_adam(1e-3, amsgrad=True, maximize=True), r"(?s)argument 'amsgrad'.*Leave out amsgrad: .*Leave out maximize, and negate the loss\."),
    ("torch's name of a largest norm", lambda: jda.distributed(fused(), mesh=mesh(), max_norm=1.0), r"(?s)distributed\(\) got an unexpected keyword argument 'max_norm'.*\nWrite max_grad_norm in"),
    ("another name of accumulation", lambda: jda.MultiSteps(fused(), accumulation_steps=2), r"(?s)got an unexpected keyword argument 'accumulation_steps'.*\nWrite every_k_schedule in"),
    ("weight decay of Adam", lambda: jda.fused_adam(1e-3, weight_decay=0.1), r"fused_adam\(\) got an unexpected keyword argument 'weight_decay'\nFor the weight_decay of torch's Adam write l2; for AdamW's use fused_adamw\.$"),
    ("a dtype of the optimizer in the policy", lambda: jda.MixedPrecisionPolicy(mu_dtype=BF16), r"unexpected keyword argument 'mu_dtype'"),
    ("an optimizer without a mesh", lambda: jda.distributed(jda.fused_adamw(1e-3)), r"distributed\(\) missing 1 required keyword-only argument: 'mesh'"),
    ("an unknown dtype of a policy", lambda: policy(params_dtype=jnp.float32), r"__init__\(\) got an unexpected keyword argument 'params_dtype'"),
    ("an unknown number of a loss scale", lambda: jda.DynamicLossScale(growth=2), r"__init__\(\) got an unexpected keyword argument 'growth'"),
    ("a state without an optimizer", lambda: jda.TrainState.create(PARAMS), r"create\(\) missing 1 required positional argument: 'tx'"),
    ("an opt_state given to create", lambda: jda.TrainState.create(PARAMS, tx(), tx), r"create\(\) takes 3 positional arguments but 4 were given"),
    ("an unknown field of a state", lambda: state().replace(parms=PARAMS), r"__init__\(\) got an unexpected keyword argument 'parms'"),
    ("an unknown argument of train_step", lambda: jda.train_step(loss_fn, tx(), acumulate_steps=2), r"train_step\(\) got an unexpected keyword argument 'acumulate_steps'"),
    ("a step without a batch", lambda: jda.train_step(loss_fn, tx())(state()), r"__call__\(\) missing 1 required positional argument: 'batch'"),
    ("from_optax_state without tx", lambda: jda.from_optax_state(PARAMS, optax_state()), r"from_optax_state\(\) missing 1 required positional argument: 'tx'"),
    ("to_optax_state without tx", lambda: jda.to_optax_state(state()), r"to_optax_state\(\) missing 1 required positional argument: 'tx'"),
    ("reload_main_params without tx", lambda: jda.reload_main_params(state()), r"reload_main_params\(\) missing 1 required positional argument: 'tx'"),
    ("full_params without tx", lambda: jda.full_params(state()), r"full_params\(\) missing 1 required positional argument: 'tx'"),
    ("count_nonfinite without tx", lambda: jda.count_nonfinite(GRADS), r"count_nonfinite\(\) missing 1 required positional argument: 'tx'"),
    ("an audit without a batch", lambda: jda.audit(jda.train_step(loss_fn, tx()), state()), r"audit\(\) missing 1 required positional argument: 'batch'"),
    ("a policy of jax.checkpoint that was called", lambda: jda.remat_policy(), r"remat_policy\(\) missing 1 required positional argument: 'primitive'"),
    ("an unknown injected number", lambda: jda.inject_hyperparams(jda.fused_adamw)(1e-3, wd=0.1), r"got an unexpected keyword argument 'wd'"),
    ("injection without a learning rate", lambda: jda.inject_hyperparams(jda.fused_adamw)(), r"missing a required argument: 'learning_rate'"),
]

# What may look wrong and is taken: why, and what comes of it.
ACCEPTED = [
    ("a Python number as parameter", "optax takes it", lambda: step_of(1.0, weight_decay=0.0)[0]["w"], 0.99),
    ("numpy params and gradients", "JAX takes them", lambda: fused_step(fused(weight_decay=0.0))[0]["b"], np.full(3, 0.01)),
    ("params that are one array", "it is a tree", lambda: fused_step(fused(weight_decay=0.0), jnp.ones(3), jnp.ones(3))[0], np.full(3, 0.99)),
    ("no params at all", "an empty tree is a tree", lambda: len(fused_step(fused(), {}, {})[0]), 0),
    ("None in both trees", "an absent leaf, as in optax", lambda: fused_step(fused(weight_decay=0.0), {"w": jnp.ones(3), "n": None}, {"w": jnp.ones(3), "n": None})[0]["w"], np.full(3, 0.99)),
    ("a complex parameter", "optax's own arithmetic takes it", lambda: step_of(jnp.ones(3, jnp.complex64), weight_decay=0.0)[0]["w"], np.full(3, 0.99 + 0j)),
    ("a real gradient of a complex parameter", "no part of it is lost", lambda: fused_step(fused(weight_decay=0.0), {"w": jnp.ones(3)}, {"w": jnp.ones(3, jnp.complex64)})[0]["w"], np.full(3, 0.99 + 0j)),
    ("gradients in float16", "the kernel reads each dtype", lambda: fused_step(fused(weight_decay=0.0), grads=cast(GRADS, np.float16))[0]["b"], np.full(3, 0.01)),
    ("gradients and params swapped", "their shapes are equal: nobody can tell", lambda: fused().step(PARAMS, fused(weight_decay=0.0).init(PARAMS), GRADS)[0]["b"], np.full(3, -0.5 + 0.5e-6)),
    ("gradients of nan", "without a loss scale nothing looks at them, as in optax", lambda: np.isnan(fused_step(grads=jax.tree.map(lambda x: x * np.nan, GRADS))[0]["b"]), np.ones(3, bool)),
    ("no gradients before the optimizer of optax", "None is a tree of no leaves", lambda: len(jax.tree.leaves(fused().init(None)[0].mu)), 0),
    ("an integer parameter", "optax's own arithmetic takes it, and truncates 5 - 0.01", lambda: step_of(jnp.full(3, 5, jnp.int32), weight_decay=0.0)[0]["w"], np.full(3, 4)),
    ("a count that is a Python number", "its value is exact", lambda: fused_step(state=adam_state(count=3))[1][0].count, 4),
    ("the state of optax.adam in fused_adamw", "its moments and count are all that is read", lambda: fused_step(state=optax.adam(1e-2).init(PARAMS))[1][0].count, 1),
    ("eps of 0", "no gradient here is 0, and optax takes it", lambda: fused_step(fused(eps=0.0, weight_decay=0.0))[0]["b"], np.full(3, 0.01)),
    ("a schedule that returns Python numbers", "it is one number", lambda: fused_step(fused(lambda count: 0.01, weight_decay=0.0))[0]["b"], np.full(3, 0.01)),
    ("a learning rate of nan on a device", "looking at it would wait for the device", lambda: np.isnan(fused_step(fused(jnp.float32(np.nan)))[0]["b"]), np.ones(3, bool)),
    ("a schedule for an injected eps", "optax evaluates each", lambda: jda.inject_hyperparams(jda.fused_adamw)(1e-2, eps=lambda count: 1e-8).init(PARAMS).hyperparams["eps"], 1e-8),
    ("1 for nesterov", "it is True", lambda: fused_step(fused(nesterov=1))[0]["b"], fused_step(fused(nesterov=True))[0]["b"]),
    ("remainders of float32 params", "they need none and are updated themselves", lambda: fused_step(fused(main_params_dtype="remainder16", weight_decay=0.0))[0]["b"], np.full(3, 0.01)),
    ("fused_adam's update without params", "nothing in its formula reads them", lambda: jda.fused_adam(1e-2).update(GRADS, jda.fused_adam(1e-2).init(PARAMS))[0]["b"], np.full(3, 0.01)),
    ("main_params where none are kept", "the params are what is updated", lambda: jda.main_params(PARAMS, fused().init(PARAMS))["w"], PARAMS["w"]),
    ("an axis in a list", "there is no doubt what is meant", lambda: make_tx(shard_axis=["data"]).config.parallel.shard_axes == ("data",), True),
    ("bucket_bytes in float", "it is a limit", lambda: make_tx(bucket_bytes=1e6).config.bucket_bytes, 1e6),
    ("params sent in float16", "main parameters keep the rest", lambda: trained(tx=make_tx(policy=policy(param_comm_dtype=jnp.float16)))["loss"], 9.0),
    ("a batch of None", "a loss may read no data", lambda: trained(lambda p, b: jnp.sum(p["w"]), batch=None)["loss"], 12.0),
    ("a constant loss", "its gradient is 0", lambda: trained(lambda p, b: 1.0)["grad_norm"], 0.0),
    ("a loss in bfloat16", "it is a float", lambda: trained(lambda p, b: loss_fn(p, b).astype(BF16))["loss"], 9.0),
    ("a pmean of the loss", "the mean of a mean is the mean", lambda: trained(lambda p, b: jax.lax.pmean(loss_fn(p, b), "data"))["loss"], 9.0),
    ("micro-batches in numpy's int", "it is a whole number", lambda: trained(accumulate_steps=np.int64(2))["loss"], 9.0),
    ("a batch that is not cut", "every device may see all of it", lambda: trained(batch=BATCH[:3], batch_spec=P())["loss"], 9.0),
    ("a legacy key", "jax.random takes it", lambda: trained(lambda p, b, rng: loss_fn(p, b) + 0 * jax.random.uniform(rng), state=create(rng=jax.random.PRNGKey(0)))["loss"], 9.0),
    ("a model state in Python numbers", "create makes arrays of them", lambda: trained(lambda p, b, model_state: (loss_fn(p, b), model_state), state=create(model_state={"m": 1.0}))["loss"], 9.0),
    ("whole numbers for a float model state", "a float32 holds them", lambda: with_model_state({"m": jnp.ones(2, jnp.int32)}, trained)["loss"], 9.0),
    ("a step inside of jit", "it is one program then", lambda: jax.jit(lambda s: jda.train_step(loss_fn, tx())(s, BATCH)[1]["loss"])(state()), 9.0),
    ("a state made inside of jit", "it is one program then", lambda: jax.jit(lambda p: create(p).params["w"])(PARAMS), PARAMS["w"]),
    ("scale_loss with a train state", "the state of the optimizer is in it", lambda: jda.scale_loss(jnp.float32(2), state(loss_scale=8.0)), 16.0),
    ("scale_loss of a Python number", "it is one number", lambda: jda.scale_loss(2.0, state(loss_scale=8.0).opt_state), 16.0),
    ("check_state of a train state", "the state of the optimizer is in it", lambda: tx().check_state(state(), PARAMS) is None, True),
    ("a plan of nothing", "an empty tree is a tree", lambda: jda.plan({}, tx()).held["params"], 0),
    ("a count of optax in Python's int", "its value is exact", lambda: from_optax(optax_state(count=3)).opt_state.count, 3),
]
# fmt: on


def as_params(cases):
    """Gives each case its name as id, so that a failing one shows it."""
    return [x if hasattr(x, "marks") else pytest.param(*x[1:], id=x[0]) for x in cases]


def test_there_are_enough_cases_and_each_has_its_own_name():
    names = [case.id for case in as_params(ERRORS + CALLS + ACCEPTED)]
    assert len(names) == len(set(names)) >= 300


@few(7)
@pytest.mark.parametrize(("call", "kind", "message"), as_params(ERRORS))
def test_bad_input_raises_the_expected_message(call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert caught.type is kind
    if message != NO_PARAMS:
        assert issubclass(kind, jda.JDistAdamError)
        assert re.fullmatch(r"(?s)\S.*?: .+: got .+, expected .+\. .+[.?)]", str(caught.value))


@pytest.mark.parametrize(("call", "message"), as_params(CALLS))
def test_a_call_that_does_not_fit_raises_in_python(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@few(4)
@pytest.mark.parametrize(("why", "call", "expected"), as_params(ACCEPTED))
def test_unusual_input_is_accepted(why, call, expected):
    assert why
    np.testing.assert_allclose(call(), expected, rtol=1e-5)


def test_a_negative_learning_rate_warns():
    with pytest.warns(
        UserWarning, match=r"^learning_rate: below zero, as optax allows: got -0\.01"
    ):
        fused(-1e-2)


def test_xla_says_which_compiler_option_it_does_not_know():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_foo'"):
        train(compiler_options={"xla_foo": 1})


HINTS = {
    "no_shard": ["ddp", "DDP", "NO_SHARD", "zero0", 0],
    "optim": ["zero1", "ZeRO-1", "zero_1", "OPTIM", "stage1", "ZeRO stage 1", 1],
    "optim_grads": ["optim_grad", "zero2", "ZeRO-2", "SHARD_GRAD_OP", "stage_2", 2],
    "optim_grads_params": ["zero3", "ZeRO-3", "FULL_SHARD", "fsdp", "FSDP2", "hsdp", "3", 3],
}


@pytest.mark.parametrize(("meant", "given"), [(k, v) for k, names in HINTS.items() for v in names])
def test_the_hint_is_the_strategy_that_is_meant(meant, given):
    hint = rf"^sharding_strategy: unknown: got {given!r}, .*\. Pass sharding_strategy='{meant}'\?$"
    with pytest.raises(jda.PolicyError, match=hint):
        make_tx(sharding_strategy=given)


@pytest.mark.parametrize(("given", "meant"), [("fsdp", "optim"), ("ddp", "no_shard")])
def test_the_hint_for_the_outer_strategy_is_one_that_there_is(given, meant):
    with pytest.raises(jda.PolicyError, match=rf"Pass outer_sharding_strategy='{meant}'\?$"):
        make_tx(outer_sharding_strategy=given)


ALL_ERRORS = [
    x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, jda.JDistAdamError)
]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_survive_pickle_and_copy(kind):
    """As they must to cross from one process to another, e.g. out of a pool of workers."""
    message = "grads['w']: wrong: got (3,), expected (2, 3). Fix it."
    error = kind(message)
    error.add_note("in the first step")
    copies = [pickle.loads(pickle.dumps(error, i)) for i in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for same in [*copies, copy.copy(error), copy.deepcopy(error)]:
        assert type(same) is kind and same.args == (message,) and str(same) == message
        assert same.__notes__ == error.__notes__
    assert kind.__name__ in jda.__all__


def test_an_error_that_was_raised_survives_pickle():
    with pytest.raises(jda.LayoutError) as caught:
        train(state=state(), tx=make_tx(bucket_bytes=16))
    same = pickle.loads(pickle.dumps(caught.value))
    assert type(same) is jda.LayoutError and str(same) == str(caught.value)
