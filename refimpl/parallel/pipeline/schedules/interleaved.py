"""Interleaved 1F1B: each rank holds v chunks that lie apart, so the pipeline fills by pieces that are v times shorter.

    interleaved(3, 3)
    rank 0  F0a F1a F2a F0b F1b F2b ... ... ... ... B0b B0b ... B1b B1b ... B2b B2b B0a B0a B1a B1a B2a B2a
    rank 1  ... F0a F1a F2a F0b F1b F2b ... B0b B0b ... B1b B1b ... B2b B2b B0a B0a B1a B1a B2a B2a ... ...
    rank 2  ... ... F0a F1a F2a F0b B0b B0b F1b B1b B1b F2b B2b B2b B0a B0a B1a B1a B2a B2a ... ... ... ...

Chunk c of rank r is stage c p + r. Micro-batches go by groups of p: a group passes all chunks before the next group.
Bubble (p-1)(f+b) in a chunk's seconds, which are 1/v of a rank's, when m is a multiple of p; for other m the table of
the next multiple, less what is too many, and no formula: `clock.bubble` plays it. Alive: (v-1)p + 2(p-1-r) + 1 chunks
on rank r, each 1/v of the rank's activations. Messages: v times as many.
Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2 (m a multiple of p there).
"""

from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table, check, first, take_turns


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """`chunks` stages a rank."""
    check("interleaved", ranks, micro_batches, chunks)
    groups = range(0, micro_batches, ranks)
    passes = [(c, k) for g in groups for c in range(chunks) for k in range(g, g + ranks)]
    ahead = [(chunks - 1) * ranks + 2 * (ranks - 1 - r) for r in range(ranks)]
    orders = [
        take_turns(
            [Op("F", c * ranks + r, k) for c, k in passes],
            [Op("B", (chunks - 1 - c) * ranks + r, k) for c, k in passes],
            ahead[r],
        )
        for r in range(ranks)
    ]

    def bubble(cost: Cost) -> float | None:
        return (ranks - 1) * (cost.forward + cost.input + cost.weight) if micro_batches % ranks == 0 else None

    return Table(
        "interleaved",
        orders=tuple(first(order, micro_batches) for order in orders),
        paths=(tuple(range(ranks)) * chunks,),
        micro_batches=micro_batches,
        alive=tuple(min(n + 1, chunks * micro_batches) for n in ahead),
        bubble=bubble,
    )
