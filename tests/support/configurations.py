"""Random optimizer configurations that combine features, for differential.py."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.core.hyperparameters import FLAGS, Hyperparameters

MESHES = {
    "1": dict(shape=(1,), names=("data",)),
    "2": dict(shape=(2,), names=("data",)),
    "3": dict(shape=(3,), names=("data",)),
    "8": dict(shape=(8,), names=("data",)),
    "replicas": dict(shape=(2, 2), names=("replica", "data"), replica_axis="replica"),
    "replicas last": dict(shape=(2, 3), names=("data", "replica"), replica_axis="replica"),
    "two axes": dict(shape=(2, 4), names=("a", "b"), shard_axis=("b", "a")),
    "model": dict(shape=(2, 2), names=("data", "model")),
    "model first": dict(shape=(2, 4), names=("model", "data")),
    "model alone": dict(shape=(1, 2), names=("data", "model")),
    "experts": dict(shape=(2, 4), names=("data", "expert"), shard_axis=("data", "expert")),
    "replicas, model": dict(shape=(2, 2, 2), names=("replica", "data", "model"), replica_axis="replica"),
}  # fmt: skip
COPYING = ("2", "3", "8", "replicas", "replicas last")  # meshes of which devices may copy
SHAPES = {
    "block": (64, 64),  # coded and packed
    "empty": (0, 4),
    "layers": {"bias": (4, 24), "scale": (4, 1100), "w": (4, 64, 256)},  # scale: no whole blocks
    "matrix": (72, 256),  # sharded under "optim_grads_params"
    "odd": (4099,),  # coded, with an incomplete last block
    "row": (40,),
    "scalar": (),
}  # fmt: skip
SPECS = {  # by path; others are whole
    "rows": {"['block']": P("model"), "['layers']['w']": P(None, "model"), "['matrix']": P("model")},
    "columns": {"['layers']['w']": P(None, None, "model"), "['matrix']": P(None, "model")},
    "small": {"['row']": P("model"), "['layers']['bias']": P(None, "model")},
    "empty": {"['empty']": P(None, "model"), "['matrix']": P("model")},
}  # fmt: skip
GROUPS = {"body": {}, "head": dict(lr_scale=0.25, weight_decay=0.5, b1=0.5), "ice": dict(frozen=True)}  # fmt: skip
LABELS = {"block": "head", "odd": "ice", "row": "head"}  # others: "body"
LARGE = 9500  # masks and labels by size: half a leaf is smaller
SCALES = {"none": None, "constant": 4.0, "dynamic": jda.DynamicLossScale(init_scale=8.0, growth_interval=2)}  # fmt: skip
STEPS = (3, 2)  # in the first and in the second place
SPIKES = (2, 4)  # steps whose gradients are large, if a guard is there
SPIKE = 16.0

PLACE = {
    "mesh": tuple(x for x in MESHES if x != "experts"),  # so that seeds keep their configurations
    "axes": ("explicit", "auto"),
    "specs": tuple(SPECS),  # on a mesh with a model axis
    "strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer": ("no_shard", "optim"),
    "reshard": (True, False),
    "bucket_bytes": (1, 20_000, 32 << 20),
    "stacked": (False, True),
    "communication": (*("auto",) * 9, "peer"),
    "state_memory": ("device", "device", "pinned_host", "moments", "nu"),
    "early_updates": (*(None,) * 6, False, True),
    "gathered_in_model": (False, True),
    "rests_whole": (False, True),  # the largest leaf, if others are sharded between steps
}
CONFIG = {
    "dtypes": ("float32", "bfloat16", "float16", "mixed"),
    "adam": ("adamw", "nesterov", "l2"),
    "schedule": (False, True),
    "mask": ("none", "tree", "dims", "size"),
    "groups": ("none", "tree", "size"),
    "chain": ("none", "scale", "schedule", "masked", "params"),
    "main": ("float32", "remainder16", None),
    "main_grads": ("float32", "bfloat16"),
    "grad_comm": (None, "bfloat16", "float16"),
    "grad_reduce": (None, "float32"),
    "param_comm": (None, "bfloat16", "float8_e4m3fn"),
    "mu": ("float32", "bfloat16", "float16", "block8", "block16"),
    "nu": ("float32", "bfloat16", "block8", "block16"),
    "rounding": ("nearest", "stochastic"),
    "float32_moments": (False, True),
    "micro": (1, 2, 3),
    "loss_scale": tuple(SCALES),
    "clip": (None, 0.25, 1e6),
    "average": (True, False),
    "data": ("exact", "any"),
    "ema_decay": (None, 0.75),  # a product with 1/4 is exact, so all compilers round it equally
    "norm_guard": (None, "norm", "ratio"),
    "norms": (None, "total", "leaves", "groups"),
    "weighted": (False, True),
    "skip": (0, 1, 2, 3, 4),
    "move": ("none", "saved", "converted", "from drop-in", "to drop-in"),
}


MEMORY = {
    "moments": {"mu": "pinned_host", "nu": "pinned_host"},
    "nu": {"nu": "pinned_host"},
}  # others: for everything


def is_gathered_in_model(path):
    """Leaves that the model gathers itself: large ones, and one that is too small to be sharded."""
    return any(name in path for name in ("matrix", "row", "layers"))


def layers_of(place):
    """The argument ``layers`` of a place."""

    def kind(path):
        if place.stacked and "layers" in path:
            return "scan"
        return "block" if place.gathered_in_model and is_gathered_in_model(path) else None

    return kind


def group_of_norms(path):
    """A function as the argument ``norms``: None counts in the totals alone."""
    return {"matrix": "large", "w": "large", "row": None}.get(path.split("'")[-2], "small")


_Place = dataclasses.make_dataclass("_Place", PLACE, frozen=True)
_Choices = dataclasses.make_dataclass("_Choices", CONFIG, frozen=True)


class Place(_Place):
    """The placement of a state: a mesh, and arguments that change no bit."""

    @property
    def devices(self):
        """The number of devices with different data."""
        return math.prod(self.data_axes.values())

    @property
    def data_axes(self):
        """Names and sizes of the axes that carry data, in the order of the mesh."""
        given = MESHES[self.mesh]
        both = zip(given["names"], given["shape"], strict=True)
        return {name: size for name, size in both if name != "model"}

    @property
    def summed_axes(self):
        """The axes over which gradients are summed, outermost first: of shards, and of replicas."""
        given = MESHES[self.mesh]
        replicas = (given["replica_axis"],) if "replica_axis" in given else ()
        return tuple(given.get("shard_axis", ("data",))), replicas

    @property
    def state_axes(self):
        """The axes over which state is sharded, outermost first."""
        shards, replicas = self.summed_axes
        if self.strategy == "no_shard":
            return ()
        return shards + (replicas if self.outer == "optim" else ())

    @property
    def has_model_axis(self):
        return "model" in MESHES[self.mesh]["names"]

    @property
    def has_experts(self):
        """Whether leaves differ along an axis of data."""
        return self.mesh == "experts"

    @property
    def specs_of_leaves(self):
        """The PartitionSpecs of leaves that are cut, by path."""
        if not self.has_experts:
            return SPECS[self.specs] if self.has_model_axis else {}
        named = lambda spec: P(*(axis and "expert" for axis in spec))  # noqa: E731
        return {path: named(spec) for path, spec in SPECS[self.specs].items()}

    @property
    def shards_grads(self):
        is_kept = self.strategy == "optim_grads_params" and self.reshard
        return self.strategy == "optim_grads" or is_kept


@dataclasses.dataclass(frozen=True)
class Config(_Choices):
    """A configuration: a value for each name in CONFIG, and its places; None is drop-in."""

    seed: int
    names: tuple[str, ...]
    places: tuple[Place | None, ...]

    @property
    def hyper(self):
        """Non-default hyperparameters with which moments rounded to nearest follow gradients."""
        # The schedule is exact, so all compilers round it equally.
        rate = optax.linear_schedule(2**-8, 2**-10, 4) if self.schedule else 3e-3
        is_low = self.rounding == "nearest" and {self.mu, self.nu} != {"float32"}
        b1, b2 = (0.81, 0.88) if is_low else (0.87, 0.93 if self.seed % 2 else 0.9973)
        hyper = dict(learning_rate=rate, b1=b1, b2=b2, eps=1e-7, eps_root=1e-12)
        if self.adam == "l2":
            return hyper | dict(l2=0.11)
        flags = dict(nesterov=self.adam == "nesterov", cautious_weight_decay=self.seed % 3 == 0)
        return hyper | dict(weight_decay=0.13) | flags

    @property
    def flags(self):
        """The enabled flags of the formula."""
        return frozenset(name for name in FLAGS if self.hyper.get(name, False))

    def dtype_of(self, path):
        mixed = "bfloat16" if "matrix" in path or "'w'" in path or "block" in path else "float32"
        return np.dtype(jnp.dtype(mixed if self.dtypes == "mixed" else self.dtypes))

    def decays(self, path, shape):
        by = {"dims": len(shape) > 1, "size": np.prod(shape) > LARGE, "tree": "matrix" not in path}
        return bool(by.get(self.mask, True)) and (self.adam != "l2" or self.mask == "none")

    @property
    def scale(self):
        return SCALES[self.loss_scale]

    @property
    def guard(self):
        """Limits above the norms of most batches, and below those of spikes."""
        if self.norm_guard == "ratio":  # a product with 1 or 1/2 is exact
            return jda.NormGuard(max_ratio=SPIKE / 4, window=2, warmup_steps=1)
        of_data = 1 if self.data == "exact" else 500
        limit = jda.NormGuard(max_norm=(3.5 if self.average else 16) * of_data)
        return None if self.norm_guard is None else limit

    @property
    def reports(self):
        """Whether steps report non-finite gradients and keep a model state.

        It has no value of its own in CONFIG, so that seeds keep their configurations.
        """
        return self.schedule

    @property
    def arrays(self):
        """The names of what a state has for each element."""
        names = ("main_params", "mu", "nu")
        return names if self.ema_decay is None else (*names, "ema")

    def hyper_of(self, label):
        """The hyperparameters of a group."""
        hyper, changed = self.hyper, dict(GROUPS[label])
        if "lr_scale" in changed:
            scale, rate = changed.pop("lr_scale"), hyper["learning_rate"]
            scaled = (lambda count: rate(count) * scale) if callable(rate) else rate * scale
            changed["learning_rate"] = scaled
        return Hyperparameters(**(hyper | changed))

    def label(self, path, shape):
        if self.groups == "none":
            return "body"
        if self.groups == "size":
            return "head" if np.prod(shape) > LARGE else "body"
        return next((label for name, label in LABELS.items() if name in path), "body")


def each_leaf(function, tree):
    """A tree of a function's results for each leaf's path and shape."""
    return jax.tree_util.tree_map_with_path(lambda p, x: function(jax.tree_util.keystr(p), x.shape), tree)  # fmt: skip


def draw(seed):
    """Returns the configuration of a seed: random choices, most of which are compatible.

    One in twenty incompatible choices is kept, and the package has to reject it.
    """
    rng = np.random.default_rng(seed)
    odds = lambda p: rng.random() < p  # noqa: E731
    pick = lambda table: {name: x[rng.integers(len(x))] for name, x in table.items()}  # noqa: E731
    config = pick(CONFIG) | {name: value for name, value in USUAL.items() if odds(0.5)}
    places = [pick(PLACE), pick(PLACE)]
    names = {"matrix", *(name for name in SHAPES if odds(0.4))}
    return fitted(seed, config, places, names, lambda: odds(0.95))


USUAL = dict(
    chain="none", float32_moments=False, param_comm=None, main_grads="float32", clip=None,
    groups="none", grad_comm=None, average=True, main="float32", move="saved", norm_guard=None,
)  # fmt: skip


def fitted(seed, config, places, names, is_changed=lambda: True):
    """Returns a configuration of these choices, with incompatible ones changed.

    ``is_changed`` is asked for each incompatible choice.
    """

    def fit(choices, condition, **changed):
        if condition and is_changed():
            choices |= changed

    if config["move"].endswith("drop-in"):
        config |= dict(clip=None, param_comm=None)
        places[config["move"] == "to drop-in"] = None
    elif config["move"] == "none":
        del places[1]
    meshes = [place for place in places if place is not None]
    is_coded = {"block8", "block16"} & {config["mu"], config["nu"]}
    is_low = is_coded or config["mu"] != "float32" or config["nu"] != "float32"
    has_16_bits = config["main"] is None and config["dtypes"] != "float32"
    fit(config, config["main"] != "float32", param_comm=None)
    fit(config, config["main"] == "remainder16" and config["dtypes"] != "mixed", dtypes="bfloat16")
    fit(config, config["grad_comm"] is not None, main_grads="float32")
    fit(config, not (is_low or has_16_bits), rounding="nearest")
    fit(config, not is_coded, float32_moments=False)
    is_finer = config["mu"].startswith("block") and config["nu"] not in ("block8", config["mu"])
    fit(config, is_finer and config["rounding"] == "stochastic", nu=config["mu"])
    for place in meshes:
        mesh, is_stochastic = MESHES[place["mesh"]], config["rounding"] == "stochastic"
        is_sent = config["param_comm"] is not None
        fit(place, is_sent and place["strategy"] == "no_shard", strategy="optim")
        if place["mesh"] == "experts":
            fit(place, place["strategy"] == "no_shard", strategy="optim")
            is_tree = (
                config["dtypes"] == config["grad_reduce"] == "float32" and config["micro"] == 1
            )
            is_tree = is_tree and config["grad_comm"] is None and not config["weighted"]
            fit(config, not is_tree, data="exact")
            fit(config, config["chain"] == "params", chain="none")  # it would see parts
            has_blocks = is_coded or config["rounding"] == "stochastic"
            fit(place, has_blocks and place["specs"] in ("columns", "small"), specs="rows")
        shards = place["strategy"] != "no_shard"
        fit(place, "replica_axis" not in mesh or not shards, outer="no_shard")
        fit(place, place["strategy"] != "optim_grads_params", reshard=True, rests_whole=False)
        fit(place, place["specs"] == "small" and is_stochastic, specs="rows")
        if place["communication"] == "peer":
            fit(place, place["mesh"] not in COPYING, mesh="2")
            fit(place, place["strategy"] == "no_shard", strategy="optim")
            fit(config, True, grad_reduce="float32")
            fit(place, True, early_updates=False)
        fit(place, place["early_updates"] and "model" in mesh["names"], early_updates=None)
        fit(config, place["early_updates"], clip=None, loss_scale="none", norm_guard=None)
        sees_sums = config["chain"] != "none" and place["strategy"].startswith("optim_grads")
        fit(config, sees_sums, micro=1, weighted=False)
        # "w" is large: where a model axis cuts it, there is still a shard to gather in the model.
        needs_layers = place["stacked"] or place["gathered_in_model"]
        names |= {"layers"} if needs_layers else set()
        names |= {"matrix"} if place["rests_whole"] else set()
    if config["adam"] == "l2":
        config["mask"] = "none"
    if config["clip"] is not None or config["grad_reduce"] is None:
        config["data"] = "exact"
    names |= {"block", "odd"} if config["groups"] == "tree" or config["float32_moments"] else set()
    names |= {"row"} if config["groups"] == "size" else set()
    places = tuple(place and Place(**place) for place in places)
    return Config(**config, seed=seed, names=tuple(sorted(names)), places=places)


def features(config):
    """Names of all values that a configuration has."""
    found = {f"{name}={getattr(config, name)}" for name in CONFIG}
    for place in config.places:
        if place is not None:
            found |= {f"{name}={getattr(place, name)}" for name in PLACE if name != "specs"}
            found |= {f"specs={place.specs}"} if place.specs_of_leaves else set()
    return found
