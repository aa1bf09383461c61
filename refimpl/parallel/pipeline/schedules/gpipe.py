"""GPipe: all forwards, then all backwards. The simplest order, and it keeps every micro-batch's activations.

    gpipe(4, 4)
    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    rank 1  .. F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3 .. ..
    rank 2  .. .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3 .. .. .. ..
    rank 3  .. .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. .. .. .. .. ..

Bubble (p-1)(f+b): filling takes p-1 forwards, draining p-1 backwards. Alive: m on every rank.
(Backwards run in the order of the micro-batches, so that gradients are added in the order of one process; the paper
draws them in reverse, which takes as long.)
Huang et al. 2018, arXiv:1811.06965, section 2.3.
"""

from refimpl.parallel.pipeline.schedules.table import Op, Table, check


def gpipe(ranks: int, micro_batches: int) -> Table:
    """One stage a rank."""
    check("gpipe", ranks, micro_batches)
    every = range(micro_batches)
    orders = [[Op("F", r, k) for k in every] + [Op("B", r, k) for k in every] for r in range(ranks)]
    return Table(
        "gpipe",
        orders=tuple(map(tuple, orders)),
        paths=(tuple(range(ranks)),),
        micro_batches=micro_batches,
        alive=(micro_batches,) * ranks,
        bubble=lambda cost: (ranks - 1) * (cost.forward + cost.input + cost.weight),
    )
