"""The knobs of chapters 4 to 6: bytes a rank keeps under each strategy, for any number of ranks and bucket size.

Theory only, from `refimpl.plan.formulas`, for a layout made by the real code on torch's `meta` device, which has
shapes and no memory: so a model of billions of parameters is laid out in a second.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from refimpl.model.gpt import GPT, GPTConfig
from refimpl.notebook import show
from refimpl.notebook.widgets import Knobs
from refimpl.plan.formulas import STRATEGIES, Layout, Strategy, memory_bytes
from refimpl.zero.flat import ALIGN, cut_into_buckets, round_up
from refimpl.zero.gather.owners import owners

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LABELS: dict[Strategy, str] = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
COLOURS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer": "#55a868",
    "master weights": "#8172b3",
    "gathered, at most": "#9db4d6",
    "buckets, at most": "#cccccc",
}
RECEIVING, FILLING = 2, 3  # buffers for one bucket that may exist at a time


@cache
def bucket_sizes(strategy: Strategy, ranks: int, bucket_size: int, config: GPTConfig) -> tuple[tuple[int, int], ...]:
    """(elements, padded elements) of each bucket, or of each ZeRO-3 unit with a Block to a unit."""
    with torch.device("meta"):
        model = GPT(config)
    if strategy == "zero3":
        units: dict[str, int] = {}
        for p, path in owners(model, {f"blocks.{i}" for i in range(config.layers)}).items():
            units[path] = units.get(path, 0) + p.numel()
        return tuple((n, round_up(n, ranks * ALIGN)) for n in units.values())
    params = list(model.parameters())
    buckets = cut_into_buckets(params, dict.fromkeys(params, 0), bucket_size)
    sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
    return tuple((n, round_up(n, ranks * ALIGN)) for n in sizes)


def rank_bytes(
    strategy: Strategy, ranks: int, bucket_size: int, config: GPTConfig, itemsize: int = 2
) -> dict[str, int]:
    """Bytes on each rank by class, then upper bounds for what comes and goes.

    buckets: two receive buffers are kept, for what N-1 others send, and from ZeRO-2 on three that fill, travel and
    wait; all for the largest bucket. (DDP and ZeRO-1 fill memory that stays: it counts as gradients.) gathered: in
    ZeRO-3 the unit in use, the model's own (the tied embedding, in use throughout), and `bucket_size` elements of
    prefetch, or one unit if that is larger.
    """
    sizes = bucket_sizes(strategy, ranks, bucket_size, config)
    numel, whole = sum(n for n, _ in sizes), sum(p for _, p in sizes)
    largest = max(p for _, p in sizes)
    sharded = strategy in ("zero2", "zero3")
    receiving = min(RECEIVING, len(sizes)) * largest * (ranks - 1) // ranks
    filling = min(FILLING, len(sizes)) * largest if sharded else 0
    embedding = round_up(config.vocab * config.width, ranks * ALIGN)
    gathered = min(whole, embedding + largest + max(largest, bucket_size)) if strategy == "zero3" else 0
    return {
        **memory_bytes(strategy, ranks, itemsize, Layout(numel, whole - numel, len(sizes))),
        "gathered, at most": gathered * itemsize,
        "buckets, at most": (receiving + filling) * itemsize,
    }


def bars(config: GPTConfig, strategies: Sequence[Strategy], ranks: int, bucket_size: int) -> "Figure":
    """One bar a strategy: bytes per parameter on each rank, in bf16 with AdamW."""
    figure, axis = show.figure(1.7 + 0.5 * len(strategies))
    rows = [rank_bytes(s, ranks, bucket_size, config) for s in strategies]
    left = [0.0] * len(rows)
    for name, colour in COLOURS.items():
        width = [row[name] / config.parameters for row in rows]
        axis.barh([LABELS[s] for s in strategies], width, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for i, total in enumerate(left):
        axis.text(total, i, f" {total:.2f}", va="center")
    axis.invert_yaxis()
    axis.set(xlabel="bytes per parameter on each rank", xlim=(0, max(20.0, 1.15 * max(left))))
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def table(
    config: GPTConfig, strategies: Sequence[Strategy], ranks: Sequence[int], bucket_sizes: Sequence[int]
) -> "pd.DataFrame":
    """The same numbers as text: bytes per parameter, a row for each setting of the knobs."""
    import pandas as pd

    rows = [
        {"ranks": n, "bucket size": size, "strategy": LABELS[s]}
        | {name: f"{b / config.parameters:.2f}" for name, b in rank_bytes(s, n, size, config).items()}
        for n in ranks
        for size in bucket_sizes
        for s in strategies
    ]
    return pd.DataFrame(rows)


def memory_knobs(
    config: GPTConfig,
    ranks: Sequence[int] = (4, 2, 1, 8, 16, 64),
    bucket_size: Sequence[int] = (500_000,),
    strategies: Sequence[Strategy] = STRATEGIES,
) -> Knobs:
    """Bars for a GPT in bf16; turn the number of ranks and the bucket size. The first value of each is the start."""
    text = table(config, strategies, ranks[:1], bucket_size)
    return Knobs(partial(bars, config, strategies), text, ranks=ranks, bucket_size=bucket_size)
