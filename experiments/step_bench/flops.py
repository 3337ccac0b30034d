"""Model FLOPs of a step, and their share of what the GPUs could do."""

import jax

from step_bench import model

PEAKS = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H200": 989.4e12}
"""Dense bfloat16 FLOPs per second of the SXM modules, by NVIDIA's data sheets; others have less."""

FORMULA = (
    "model_flops_utilization = tokens_per_second * flops_per_token / (GPUs * peak); "
    "flops_per_token = 6 * N + 6 * layers * width * length. N: parameters that are multiplied by "
    "activations, so all but positions and an embedding without a product. The second term is "
    "causal attention: a token attends to length / 2 others on average. Rematerialized operations "
    "do not count."
)


def per_token(size):
    """FLOPs of the forward and backward pass by FORMULA."""
    tree = model.shapes(size, is_scanned=True)
    looked_up = {"positions", "embed"} if size.is_llama else {"positions"}
    used = {name: x for name, x in tree.items() if name not in looked_up}
    parameters = sum(x.size for x in jax.tree.leaves(used))
    return 6 * parameters + 6 * size.layers * size.width * size.length


def peak_of(device_kind):
    """FLOPs per second of a GPU such as "NVIDIA H100 80GB HBM3", None if it is not known."""
    return PEAKS.get(device_kind)


def describe(size, device_kind):
    """The record's entry: formula, peak and FLOPs per token."""
    return {
        "formula": FORMULA,
        "peak_per_second": peak_of(device_kind),
        "peak_of": f"{device_kind}, dense bfloat16, by NVIDIA's data sheet",
        "per_token": per_token(size),
    }


def utilization(tokens_per_second, flops, devices):
    """The share of the peak; None if there is no peak. ``flops``: a result of ``describe``."""
    if not flops["peak_per_second"] or tokens_per_second is None:
        return None
    return tokens_per_second * flops["per_token"] / (devices * flops["peak_per_second"])
