"""The compared variants, each an object with four methods.

``lower()`` does not compile and needs no device, ``start(params)`` makes its state from float32
parameters, ``step(state, batch)`` returns the next state and the loss, ``main_params(state)`` the
float32 parameters. ``place(tokens)`` places a batch as the step expects it.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from step_bench import model as models
from step_bench.rows import BY_BLOCK, WHOLE

CHECKED_STEPS = 2
MAX_NORM = 0.1  # below any gradient's, so it clips
# With eps far above the gradients an update is nearly linear in them, which the check needs. With
# it the model hardly moves: all timed rounds have random weights.
HYPER = dict(b1=0.87, b2=0.9973, eps=0.25, weight_decay=0.13)
CHECKED_LEARNING_RATE = 0.02
LEARNING_RATE = optax.piecewise_constant_schedule(CHECKED_LEARNING_RATE, {CHECKED_STEPS: 1e-5})


def bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def copies(tree, shardings, dtype=None):
    """Copies with these shardings of one mesh; device_put sends shards through host memory."""
    leaves, treedef = jax.tree.flatten(shardings)
    return _copying(treedef, tuple(leaves), dtype)(tree)


@functools.cache  # one program per tree
def _copying(treedef, shardings, dtype):
    def make(tree):
        return jax.tree.map(lambda x: jnp.copy(x) if dtype is None else x.astype(dtype), tree)

    return jax.jit(make, out_shardings=jax.tree.unflatten(treedef, shardings))


def placed(tree, shardings, dtype=None):
    """Shapes with shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=s), tree, shardings
    )


def no_arguments(params):
    """Params whose vectors are behind a barrier, as in ``train_step``.

    XLA for GPUs would multiply by vectors that are arguments once for each matrix product.
    """
    barrier = jax.lax.optimization_barrier
    return jax.tree.map(lambda x: barrier(x) if x.ndim < 2 else x, params)


class Setting:
    """The common values of a group's variants."""

    def __init__(self, size, workload, mesh, attention):
        self.size, self.workload, self.mesh, self.attention = size, workload, mesh, attention
        self.shapes = models.shapes(size, workload.is_scanned)
        self.replicated, self.by_device = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    @property
    def rows(self):
        """Sequences of a step, over all devices."""
        w = self.workload
        return self.mesh.size * w.accumulate_steps * w.sequences

    def loss(self, **kwargs):
        return models.make_loss(self.size, self.workload, self.attention, **kwargs)

    def batch_shape(self):
        """The shape of a batch in our order: devices, micro-batches, sequences."""
        shape = (self.rows, self.size.length + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.by_device)

    def place(self, tokens):
        return jax.device_put(tokens.reshape(self.rows, -1), self.by_device)

    def draw(self):
        """Float32 parameters, sharded: whole ones of a large model would fill a device."""
        specs = shard_specs(self.shapes, self.mesh.size)
        return models.draw(
            self.shapes, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        )


class Floor:
    """Forward and backward pass with each device's own gradients, and nothing else."""

    def __init__(self, setting, options):
        self.setting, self.place = setting, setting.place
        self.replicated = jax.tree.map(lambda _: setting.replicated, setting.shapes)
        local = jax.shard_map(
            self._local, mesh=setting.mesh, in_specs=(P(), P("data")), out_specs=P("data"),
            check_vma=False,
        )  # fmt: skip
        self._jitted = jax.jit(local, compiler_options=options or None)
        self.program = None  # the compiled one

    def _local(self, params, tokens):
        micro, params = self.setting.workload.accumulate_steps, no_arguments(params)
        value_and_grad = jax.value_and_grad(self.setting.loss())
        if micro == 1:
            loss, grads = value_and_grad(params, tokens)
        else:

            def add(sums, part):
                return jax.tree.map(jnp.add, sums, value_and_grad(params, part)), None

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
            parts = tokens.reshape(micro, -1, tokens.shape[-1])
            sums, _ = jax.lax.scan(add, (jnp.zeros(()), zeros), parts)
            loss, grads = jax.tree.map(lambda x: x / micro, sums)
        return jax.tree.map(lambda x: x[None], (loss, grads))

    def lower(self):
        params = placed(self.setting.shapes, self.replicated, jnp.bfloat16)
        return self._jitted.lower(params, self.setting.batch_shape())

    def start(self, params):
        return copies(params, self.replicated, jnp.bfloat16)

    def loss_and_grads(self, params, batch):
        """Both with a leading dimension of devices."""
        return self.program(params, batch)

    def step(self, params, batch):
        return params, self.program(params, batch)[0]


def shard_specs(shapes, num_shards, is_first=False):
    """The largest or first dimension of each leaf that divides, apart from that of layers."""

    def spec(path, x):
        first = int(models.layers_of(jax.tree_util.keystr(path)) == "scan")
        dims = [i for i in range(first, len(x.shape)) if x.shape[i] % num_shards == 0]
        if not dims:
            return P()
        dim = dims[0] if is_first else max(dims, key=lambda i: x.shape[i])
        return P(*[None] * dim, "data")

    return jax.tree_util.tree_map_with_path(spec, shapes)


class AnnotatedUpdate:
    """optax.adamw on float32 parameters and moments, sharded by annotations."""

    def __init__(self, shapes, mesh, is_fsdp, clips, cuts_first_dim=False, is_cut=None):
        self.clip = optax.clip_by_global_norm(MAX_NORM) if clips else optax.identity()
        self.tx = optax.adamw(LEARNING_RATE, **HYPER)
        specs = shard_specs(shapes, mesh.size, cuts_first_dim)
        self.sharded = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        replicated = jax.tree.map(lambda _: NamedSharding(mesh, P()), self.sharded)
        self.of_params = self.sharded if is_fsdp else replicated
        if is_cut:  # of its bfloat16 parameters, only these rest as shards
            self.of_params = jax.tree_util.tree_map_with_path(
                lambda path, cut, whole: cut if is_cut(jax.tree_util.keystr(path)) else whole,
                self.of_params,
                replicated,
            )
        state = jax.eval_shape(self.tx.init, shapes)
        self.of_state = optax.tree.map_params(
            self.tx, lambda _, s: s, state, self.sharded,
            transform_non_params=lambda _: NamedSharding(mesh, P()),
        )  # fmt: skip
        self._init = jax.jit(self.tx.init, out_shardings=self.of_state)
        self.shapes = (
            placed(shapes, self.of_params, jnp.bfloat16),
            placed(shapes, self.sharded),
            placed(state, self.of_state),
        )

    def start(self, params):
        """Makes (bfloat16 params, float32 params, optax's state) from float32 params."""
        main = copies(params, self.sharded)
        state = self._init(main)
        return copies(params, self.of_params, jnp.bfloat16), main, state

    def shard(self, grads):
        return jax.lax.with_sharding_constraint(grads, self.sharded)

    def __call__(self, grads, main, state, params=None):
        """Returns new (params, main, state); the old params are not needed."""
        del params
        with jax.named_scope("clip"):
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), self.shard(grads))
            grads, _ = self.clip.update(grads, self.clip.init(main))
        with jax.named_scope("optimizer"):
            updates, state = self.tx.update(grads, state, main)
            main = self.shard(optax.apply_updates(main, updates))
            state = jax.lax.with_sharding_constraint(state, self.of_state)
            params = self.shard(bfloat16(main))  # rounded before it is gathered
        return jax.lax.with_sharding_constraint(params, self.of_params), main, state


class FusedUpdate(AnnotatedUpdate):
    """fused_adamw with main parameters; ``jda.state_shardings`` shards its state."""

    def __init__(self, shapes, mesh, modifiers):
        clip = optax.clip_by_global_norm(MAX_NORM) if "clip" in modifiers else optax.identity()
        kept = dict(main_params_dtype=main_params_of(modifiers), **moments_of(modifiers))
        self.tx = jda.chain(clip, jda.fused_adamw(LEARNING_RATE, **HYPER, **kept))
        replicated = NamedSharding(mesh, P())
        self.of_params = jax.tree.map(lambda _: replicated, shapes)
        params = placed(shapes, self.of_params, jnp.bfloat16)
        state = jax.eval_shape(self.tx.init, params)
        self.of_state = jda.state_shardings(state, params, mesh)
        # What float32 parameters keep beyond bfloat16 is lost where remainders are kept.
        is_whole = main_params_of(modifiers) == jnp.float32
        self.sharded = self.of_state[1].main_params if is_whole else None
        self._init = jax.jit(self.tx.init, out_shardings=self.of_state)
        self.shapes = (params, (), placed(state, self.of_state))

    def start(self, params):
        """Makes (bfloat16 params, nothing, state) from float32 params."""
        narrow = copies(params, self.of_params, jnp.bfloat16)
        state = self._init(narrow)
        if self.sharded is not None:
            main = copies(params, self.sharded)
            state = (state[0], state[1]._replace(main_params=main))
        return narrow, (), state

    def __call__(self, grads, main, state, params):
        """Returns new (params, nothing, state)."""
        params, state = self.tx.step(grads, state, params)
        return params, main, state


class Annotated:
    """One program for all devices, sharded by annotations, as a user of JAX writes it."""

    def __init__(self, setting, is_fsdp, modifiers, options):
        self.setting, self.gathers_once = setting, "gathered_once" in modifiers
        clips = "clip" in modifiers
        if "fused" in modifiers:
            self.update = FusedUpdate(setting.shapes, setting.mesh, modifiers)
        else:
            cuts_first_dim = "first_dim" in modifiers
            self.update = AnnotatedUpdate(
                setting.shapes, setting.mesh, is_fsdp, clips, cuts_first_dim, cut_of(modifiers)
            )
        # Otherwise XLA shards activations like parameters, and sends those.
        extra = {"place": self._by_sequence} if is_fsdp else {}
        if "products_kept" in modifiers:
            extra["remat_policy"] = jda.remat_policy
        self._loss = setting.loss(**extra)
        self._jitted = jax.jit(self._step, donate_argnums=0, compiler_options=options or None)
        self.program = None
        self.start = self.update.start

    def _by_sequence(self, x):
        return jax.lax.with_sharding_constraint(x, self.setting.by_device)

    def _step(self, train_state, batch):
        params, main, state = train_state
        if self.gathers_once:  # XLA runs the first products beside the gathers of later ones
            params = jax.lax.with_sharding_constraint(params, self.setting.replicated)
        params = no_arguments(params)
        value_and_grad = jax.value_and_grad(self._loss)
        micro = self.setting.workload.accumulate_steps
        if micro == 1:
            loss, grads = value_and_grad(params, batch[0])
        else:

            def add(sums, part):
                loss, grads = value_and_grad(params, part)
                grads = self.update.shard(grads)
                return jax.tree.map(jnp.add, sums, (loss, grads)), None

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
            sums, _ = jax.lax.scan(add, (jnp.zeros(()), self.update.shard(zeros)), batch)
            loss, grads = jax.tree.map(lambda x: x / micro, sums)
        return self.update(grads, main, state, params), loss

    def _batch_sharding(self):
        return NamedSharding(self.setting.mesh, P(None, "data"))

    def lower(self):
        micro, rows = self.setting.workload.accumulate_steps, self.setting.rows
        shape = (micro, rows // micro, self.setting.size.length + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._batch_sharding())
        return self._jitted.lower(self.update.shapes, batch)

    def place(self, tokens):
        """Micro-batches first, each over all devices."""
        micro = tokens.shape[1]
        batch = tokens.swapaxes(0, 1).reshape(micro, self.setting.rows // micro, -1)
        return jax.device_put(batch, self._batch_sharding())

    def step(self, state, batch):
        return self.program(state, batch)

    def main_params(self, state):
        params, main, state = state
        return main or jda.main_params(params, state, self.update.tx)


def policy_of(modifiers):
    """Main parameters are float32 by default."""
    return jda.MixedPrecisionPolicy(
        grad_comm_dtype=None if "sent_wide" in modifiers else jnp.bfloat16,
        grad_reduce_dtype=jnp.float32 if "float32sum" in modifiers else None,
        main_params_dtype=main_params_of(modifiers),
    )


def main_params_of(modifiers):
    if "no_main" in modifiers:
        return None
    return "remainder16" if "remainder16" in modifiers else jnp.float32


def moments_of(modifiers):
    """Arguments of the algorithm: 8-bit moments and stochastic rounding, or its defaults."""
    if "block8" not in modifiers:
        return {}
    return dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=0)


def memory_of(modifiers):
    """The memory of the state, or of some of its arrays."""
    if "host_moments" in modifiers:
        return {"mu": "pinned_host", "nu": "pinned_host"}
    if "host_ema" in modifiers:
        return {"ema": "pinned_host"}
    return "pinned_host" if "host" in modifiers else "device"


def cut_of(modifiers):
    """Which parameters are cut between steps, by their paths; None: all."""
    return models.cut_after(*(WHOLE[x] for x in WHOLE.keys() & modifiers))


def norms_of(modifiers):
    if "norms_of_leaves" in modifiers:
        return "leaves"
    return "total" if "norms" in modifiers else None


def make_tx(mesh, strategy, modifiers, *, is_scanned=False, **kwargs):
    return jda.distributed(
        jda.fused_adamw(LEARNING_RATE, **HYPER, **moments_of(modifiers)),
        mesh=mesh,
        state_memory=memory_of(modifiers),
        early_updates=True if "early" in modifiers else None,
        sharding_strategy=strategy,
        policy=policy_of(modifiers),
        max_grad_norm=MAX_NORM if "clip" in modifiers else None,
        communication="xla" if "over_xla" in modifiers else "auto",
        reshard_after_forward="gathered_once" not in modifiers,
        reshard_after_backward=cut_of(modifiers),
        layers=models.layers_of if is_scanned or BY_BLOCK & modifiers else None,
        ema_decay=0.999 if "ema" in modifiers else None,
        norms=norms_of(modifiers),
        norm_guard=jda.NormGuard(max_norm=1e9, max_ratio=1e9) if "guard" in modifiers else None,
        **kwargs,
    )  # fmt: skip


class Ours:
    """``jda.train_step``, called as users call it."""

    def __init__(self, setting, strategy, modifiers, options):
        self.setting, self.place = setting, setting.place
        is_scanned = setting.workload.is_scanned
        self.tx = make_tx(setting.mesh, strategy, modifiers, is_scanned=is_scanned)
        extra = {}
        if BY_BLOCK & modifiers or (is_scanned and strategy == "optim_grads_params"):
            gather = functools.partial(jda.gather_params, tx=self.tx)
            if "at_any_time" in modifiers:
                gather = lambda layer, after: jda.gather_params(layer, self.tx)  # noqa: E731
            extra = dict(gather=gather, remat_policy=jda.remat_policy)
        self._step = jda.train_step(
            setting.loss(**extra),
            self.tx,
            accumulate_steps=setting.workload.accumulate_steps,
            compiler_options=options or None,
        )
        self.program = None

    def lower(self):
        state = jda.TrainState.shapes(self.setting.shapes, self.tx, param_dtypes=jnp.bfloat16)
        return self._step.lower(state, self.setting.batch_shape())

    def start(self, params):
        return jda.TrainState.create(params, self.tx, param_dtypes=jnp.bfloat16)

    def step(self, state, batch):
        state, metrics = self._step(state, batch)
        return state, metrics["loss"]

    def main_params(self, state):
        return jda.main_params(state.params, state.opt_state, self.tx)


def make(row, setting, on_gpu):
    """The variant of a row that trains a model."""
    options = row.options if on_gpu else {}
    if row.variant == "floor":
        return Floor(setting, options)
    if row.variant.startswith("annotated"):
        is_fsdp = row.variant == "annotated_fsdp"
        return Annotated(setting, is_fsdp, row.modifiers, options)
    return Ours(setting, row.variant, row.modifiers, options)
