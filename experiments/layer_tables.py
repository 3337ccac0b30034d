"""Tables of models that gather their layers, for update_readme.py."""

from lm import markdown
from records import results_of

LAYERS = {  # row: model, its gathers in the forward and in the backward pass, their size
    "scanned, layer by layer": (
        "scanned, `layers`, with `jax.checkpoint`",
        "layer by layer",
        "layer by layer",
        "two or three layers",
    ),
    "unrolled, block by block": (
        "unrolled, `layers`, with `jax.checkpoint` and `after`",
        "block by block",
        "block by block",
        "one or two blocks",
    ),
    "unrolled, block by block, remat_policy": (
        "the same, with `policy=jda.remat_policy`",
        "block by block",
        "block by block",
        "one or two blocks",
    ),
    "unrolled, block by block, nothing recomputed": (
        "unrolled, `layers`, without `jax.checkpoint`",
        "block by block",
        "nothing: parameters stay gathered",
        "all blocks, at the end of the forward pass",
    ),
    "unrolled, gathered first": (
        "no `layers`, with `jax.checkpoint`",
        "all before the forward pass",
        "nothing: parameters stay gathered",
        "all parameters",
    ),
    "unrolled, unsharded parameters": (
        '`"optim_grads"`, with `jax.checkpoint`',
        "nothing",
        "nothing; new parameters at the end of the step",
        "all parameters, always",
    ),
}


def gathered_when() -> str:
    """One line for each way to gather layers: when, and its cost with and without an axis."""
    records = [
        {row["name"]: row for row in results_of(f"scanned_memory/h200/{record}")["rows"]}
        for record in ("unrolled", "model_axes")
    ]
    columns = (
        "model",
        "gathered in the forward pass",
        "gathered in the backward pass",
        "unsharded at the same time",
        "temporary memory, 8 devices",
        "temporary memory, 4 x 2",
        "sent along the model axis, 4 x 2",
    )
    table = []
    for name, cells in LAYERS.items():
        rows = [record[name] for record in records]
        temporary = (f"{row['temporary'] / 1e9:,.2f} GB" for row in rows)
        table.append((*cells, *temporary, along_model_axis(rows[-1])))
    return markdown.table(columns, table)


def along_model_axis(row):
    found = [c for c in row["collectives"] if c["axes"] == "model"]
    return ", ".join(
        f"{c['instructions']} {c['op']}s, {c['elements'] / 1e9:.2f}e9 elements" for c in found
    )
