"""The knobs of chapter 11: what one layer weighs and sends on each rank when its matrices are split.

Theory only, in units of one tensor of B T w elements for what autograd keeps (t ranks, fused attention, no dropout):

    what                                    tensor        sequence      sequence, gathered again
    inputs of the two norms                 2             2 / t         2 / t
    inputs of qkv and of the MLP            2             2             2 / t
    q, k, v, attention out, GELU's two      12 / t        12 / t        12 / t

A column layer's weight gradient needs all tokens of its input. "Gathered again" keeps this rank's, and pays one more
all-gather a column layer: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from refimpl.model.gpt import GPTConfig
from refimpl.notebook import show
from refimpl.notebook.widgets import Knobs
from refimpl.plan.formulas import Layout, memory_bytes
from refimpl.plan.transformer import tensor_parallel_sent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Way = Literal["tensor", "sequence", "sequence, gathered again"]
WAYS: tuple[Way, ...] = ("tensor", "sequence", "sequence, gathered again")
COLOURS = {"state": "#4c72b0", "kept inside": "#dd8452", "kept between": "#8172b3"}
HEAD = 128  # features of a head


def layer_parameters(width: int, ranks: int) -> int:
    """Parameters of one layer on a rank: matrices and column biases are split, norms and row biases are whole."""
    return (12 * width**2 + 7 * width) // ranks + 6 * width


def kept_bytes(config: GPTConfig, batch: int, ranks: int, way: Way = "tensor", itemsize: int = 2) -> dict[str, int]:
    """Bytes that autograd keeps of one layer on a rank, inside the split layers and between them."""
    tokens, own = batch * config.context, batch * config.context // ranks
    unit, part = tokens * config.width * itemsize, own * config.width * itemsize
    scores = tokens * config.heads // ranks * 4  # one number a token and head, for fused attention's backward
    norms = 2 * (own if way != "tensor" else tokens) * (config.width * itemsize + 2 * 4)  # two statistics a token
    entering = 2 * (part if way == "sequence, gathered again" else unit)
    return {"kept inside": 12 * unit // ranks + scores, "kept between": norms + entering}


def sent_bytes(config: GPTConfig, batch: int, ranks: int, way: Way = "tensor", itemsize: int = 2) -> int:
    """Bytes that a rank sends for one layer, forward and backward."""
    sent = tensor_parallel_sent(config, batch, ranks, itemsize)
    gather = batch * config.context * config.width * itemsize * (ranks - 1) // ranks
    return sent + (2 * gather if way == "sequence, gathered again" else 0)


def layer_bytes(width: int, tokens: int, ranks: int, way: Way) -> dict[str, int]:
    """One layer in bf16 with AdamW and fp32 masters, for one sequence, on a rank: by class, and what is sent."""
    config = GPTConfig(vocab=1, context=tokens, width=width, layers=1, heads=width // HEAD)
    state = memory_bytes("ddp", 1, 2, Layout(layer_parameters(width, ranks), 0, 0))
    return {
        "state": sum(state.values()),
        **kept_bytes(config, 1, ranks, way),
        "sent": sent_bytes(config, 1, ranks, way),
    }


def bars(hidden: int, tokens: int, ranks: int, way: Way) -> "Figure":
    """What the layer weighs without splitting, and on one of `ranks`; sent bytes in the title."""
    figure, axis = show.figure(2.4)
    alone, split = layer_bytes(hidden, tokens, 1, "tensor"), layer_bytes(hidden, tokens, ranks, way)
    rows = {"1 rank": alone, f"{ranks} ranks": split}
    left = [0.0] * len(rows)
    for name, colour in COLOURS.items():
        sizes = [row[name] / 1e9 for row in rows.values()]
        axis.barh(list(rows), sizes, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, total in enumerate(left):
        axis.text(total, i, f" {total:.2f}", va="center")
    title = f"sent: {split['sent'] / 1e9:.2f} GB"
    axis.set(xlabel="GB a rank, one layer, one sequence", xlim=(0, 1.2 * max(left)), title=title)
    axis.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def table(widths: Sequence[int], tokens: Sequence[int], ranks: Sequence[int]) -> "pd.DataFrame":
    """The same numbers as text, in GB, for the first width and length."""
    import pandas as pd

    rows = [
        {"hidden": widths[0], "tokens": tokens[0], "ranks": n, "way": way}
        | {name: f"{size / 1e9:.2f}" for name, size in layer_bytes(widths[0], tokens[0], n, way).items()}
        for n in ranks
        for way in (WAYS if n > 1 else WAYS[:1])
    ]
    return pd.DataFrame(rows)


def layer_knobs(
    hidden: Sequence[int] = (8192, 4096, 12288),
    tokens: Sequence[int] = (4096, 2048, 32768),
    ranks: Sequence[int] = (4, 1, 2, 8, 16),
) -> Knobs:
    """Bars for one layer; turn hidden size, tokens, ranks and the way. The first value of each is the start."""
    return Knobs(bars, table(hidden, tokens, sorted(ranks)), hidden=hidden, tokens=tokens, ranks=ranks, way=WAYS)
