"""The formulas: bytes a rank keeps and bytes it sends, for each strategy and any number of ranks.

With Psi parameters of b bytes, N ranks, A micro-batches a step and AdamW (two fp32 numbers a parameter; below fp32 a
third, the master weight):

               parameters   gradients   optimizer + master   sent per step, in units of Psi b (N-1)/N
    DDP        Psi b        Psi b       Psi (8 or 12)        2          all-reduce
    ZeRO-1     Psi b        Psi b       Psi (8 or 12) / N    1 + 1      reduce-scatter + all-gather
    ZeRO-2     Psi b        Psi b / N   Psi (8 or 12) / N    A + 1      reduce-scatter + all-gather
    ZeRO-3     Psi b / N    Psi b / N   Psi (8 or 12) / N    A + 2A     reduce-scatter + all-gather

Rajbhandari et al. 2020, arXiv:1910.02054, sections 3, 5 and 7. Two things come on top and are named, not ignored:
padding (Psi is rounded up, a bucket at a time, to a multiple of 64 N) and small control messages.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from refimpl.zero.built import Built

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Layout:
    """How a model was laid out: what the formulas need beyond Psi."""

    numel: int  # Psi, parameters that are trained
    padding: int  # elements added to fill the buckets up
    buckets: int  # buckets (ZeRO-3: units) with gradients
    parameters: int = 0  # how many tensors those elements are

    @property
    def padded(self) -> int:
        return self.numel + self.padding


def layout_of(stage: "Built") -> Layout:
    """The layout that a stage has chosen."""
    numel, padded = (sum(getattr(b, size) for b in stage.buckets) for size in ("numel", "padded"))
    parameters = sum(len(b.params) for b in stage.buckets)
    return Layout(numel, padded - numel, len(stage.buckets), parameters)


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends per step with one collective for one purpose (the ledger's `tag`)."""

    collective: str
    tag: str
    bytes: int


def memory_bytes(strategy: Strategy, ranks: int, itemsize: int, layout: Layout) -> dict[str, int]:
    """Bytes on each rank between backward and step, by class, with AdamW and nothing gathered.

    `itemsize`: bytes of the model's dtype, 4 for fp32, 2 for bf16 and fp16. AdamW's step count is 4 bytes a bucket.
    """
    whole, shard = layout.padded, layout.padded // ranks
    owned = whole if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else whole),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else whole),
        "optimizer": 8 * owned + 4 * layout.buckets,
        "master weights": 0 if itemsize == 4 else 4 * owned,
    }


def traffic(strategy: Strategy, ranks: int, itemsize: int, layout: Layout, micro_batches: int = 1) -> list[Sent]:
    """What rank 0 sends per step, by collective and purpose. `itemsize`: bytes of an element on the wire."""
    once = layout.padded * itemsize * (ranks - 1) // ranks
    words = layout.parameters + 3  # fp64: of each parameter, whether any rank used it; squares; 2 of the settings
    rank_0s = -(-words // ranks)  # those that rank 0 adds up and returns; it sends the others
    norm = Sent("all_reduce", "norm", 8 * (words - rank_0s + rank_0s * (ranks - 1)))
    if strategy == "ddp":
        return [Sent("all_reduce", "gradients", 2 * once), norm]
    if strategy in ("zero1", "zero2"):
        times = micro_batches if strategy == "zero2" else 1
        return [Sent("reduce_scatter", "gradients", times * once), Sent("all_gather", "parameters", once), norm]
    return [
        Sent("reduce_scatter", "gradients", micro_batches * once),
        Sent("all_gather", "parameters", 2 * micro_batches * once),
        norm,
    ]


def by_collective(rows: list[Sent]) -> dict[str, int]:
    """Bytes summed over purposes."""
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.collective] = sums.get(row.collective, 0) + row.bytes
    return sums
