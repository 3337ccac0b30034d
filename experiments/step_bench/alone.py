"""The optimizer step without a model, on gradients that differ per device, called once per step."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plan_against_compiler import step_alone

import jdistadam as jda
from jdistadam.tools import bench
from step_bench import model as models
from step_bench.variants import AnnotatedUpdate, make_tx

# train_step's compiler options on GPUs; a step in a user's jax.shard_map has to request them.
TRAIN_STEP_OPTIONS = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 256 << 20,
    "xla_gpu_all_gather_combine_threshold_bytes": 256 << 20,
}


class Setting:
    """Shapes of a tree, and what to step on."""

    def __init__(self, tree, mesh):
        shapes = bench.TREES[tree]
        self.mesh = mesh
        self.shapes = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
        self.replicated, self.by_device = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def draw(self):
        return models.draw(self.shapes, self.replicated)

    def grads(self):
        """bfloat16 gradients with a leading dimension of devices."""
        wide = models.draw(self.grad_shapes(), self.by_device, scale=0.01)
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)

    def grad_shapes(self):
        def stack(x):
            shape = (self.mesh.size, *x.shape)
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=self.by_device)

        return jax.tree.map(stack, self.shapes)


class AnnotatedAlone:
    """Annotations: the mean over devices is one operation on an array sharded over them."""

    def __init__(self, setting, modifiers, options):
        self.setting = setting
        self.update = AnnotatedUpdate(
            setting.shapes, setting.mesh, False, "clip" in modifiers, "first_dim" in modifiers
        )
        self._jitted = jax.jit(self._step, donate_argnums=0, compiler_options=options or None)
        self.program = None
        self.start = self.update.start

    def _step(self, state, grads):
        _, main, moments = state
        return self.update(jax.tree.map(lambda g: jnp.mean(g, axis=0), grads), main, moments)

    def lower(self):
        return self._jitted.lower(self.update.shapes, self.setting.grad_shapes())

    def step(self, state, grads):
        return self.program(state, grads), None

    def main_params(self, state):
        return state[1]


class OursAlone:
    """``tx.step`` in a ``jax.shard_map``."""

    def __init__(self, setting, strategy, modifiers, options):
        self.setting, self.options = setting, options
        self.tx = make_tx(setting.mesh, strategy, modifiers)
        self.program = None

    def lower(self):
        state = jda.TrainState.shapes(self.setting.shapes, self.tx, param_dtypes=jnp.bfloat16)
        step, *shapes = step_alone(self.tx, state, compiler_options=self.options or None)
        return step.lower(*shapes)

    def start(self, params):
        state = jda.TrainState.create(params, self.tx, param_dtypes=jnp.bfloat16)
        return state.params, state.opt_state

    def step(self, state, grads):
        return self.program(*state, grads), None

    def main_params(self, state):
        return jda.main_params(*state, self.tx)


def make(row, setting, on_gpu):
    """The variant of a row that steps alone."""
    if row.variant == "annotated_zero1":
        return AnnotatedAlone(setting, row.modifiers, row.options if on_gpu else {})
    options = TRAIN_STEP_OPTIONS | row.options if on_gpu else {}
    return OursAlone(setting, row.variant, row.modifiers, options)
