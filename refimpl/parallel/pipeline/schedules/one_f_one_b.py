"""1F1B: a backward as soon as there is one, so that few activations are alive. GPipe's bubble, a p-th of its memory.

    one_f_one_b(4, 6)
    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 F4 B1 B1 F5 B2 B2 .. B3 B3 .. B4 B4 .. B5 B5
    rank 1  .. F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 .. B4 B4 .. B5 B5 .. ..
    rank 2  .. .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 .. B5 B5 .. .. .. ..
    rank 3  .. .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 .. .. .. .. .. ..

Rank r runs p-1-r forwards ahead, then one forward and one backward by turns.
Bubble (p-1)(f+b). Alive: p-r on rank r, m if there are fewer.
Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush); DeepSpeed's TrainSchedule, which holds
max(2, min(p-r, m)) buffers.
"""

from refimpl.parallel.pipeline.schedules.table import Op, Table, check, take_turns


def one_f_one_b(ranks: int, micro_batches: int) -> Table:
    """One stage a rank."""
    check("1f1b", ranks, micro_batches)
    every = range(micro_batches)
    orders = [
        take_turns([Op("F", r, k) for k in every], [Op("B", r, k) for k in every], ahead=ranks - 1 - r)
        for r in range(ranks)
    ]
    return Table(
        "1f1b",
        orders=tuple(map(tuple, orders)),
        paths=(tuple(range(ranks)),),
        micro_batches=micro_batches,
        alive=tuple(min(ranks - r, micro_batches) for r in range(ranks)),
        bubble=lambda cost: (ranks - 1) * (cost.forward + cost.input + cost.weight),
    )
