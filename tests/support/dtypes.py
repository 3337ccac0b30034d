"""Arguments of a distributed AdamW from one dict of dtypes."""

import jdistadam as jda

MOMENTS = ("mu_dtype", "nu_dtype", "rounding", "seed", "float32_moments")


def dtypes(**given):
    """The policy, and the formats of moments, which are arguments of the optimizer."""
    moments = {name: given.pop(name) for name in MOMENTS if name in given}
    return dict(policy=jda.MixedPrecisionPolicy(**given), **moments)
