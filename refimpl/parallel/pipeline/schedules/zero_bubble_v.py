"""ZB-V: two chunks a rank, laid down and up again as a V, and backwards split: no bubble at all, in 1F1B's memory.

    zero_bubble_v(2, 4)
    rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a ...
    rank 1  ... F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a

Rank r holds stages r and 2p-1-r, so the first rank has the last stage: a micro-batch's backward begins where it began.
Bubble 0 when f = i = w and m >= 2p-1; with fewer micro-batches (f+i)(2p-1-m). A rank does not idle between its first
operation and its last; that rank r begins r ticks late stays, and takes no time when each rank starts its next
step as it comes (the paper checks the optimizer's norm afterwards).
Alive: 2p half-sized chunks on every rank, what 1F1B's first rank holds.
Qi et al. 2024, arXiv:2401.10241, section 6; as one of a family by its building block, arXiv:2405.15362. The order is
torch's, ScheduleZBVZeroBubble.
"""

from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table, check, count_off, first


def zero_bubble_v(ranks: int, micro_batches: int) -> Table:
    """Two stages a rank."""
    check("zb-v", ranks, micro_batches)
    last, drawn = 2 * ranks - 1, max(micro_batches, 2 * ranks - 1)

    def order(r: int) -> list[Op]:
        words = ["F0"] * (2 * (ranks - r) - 1) + ["F1", "F0"] * r + ["F1", "I1", "W1"] * (ranks - r)
        words += ["F0", "I0", "W0", "F1", "I1", "W1"] * (drawn - last + r)  # steady
        words += ["I0", "W0", "F1", "I1", "W1"] * (ranks - 1 - r)  # chunk 0 has no forwards left
        words += ["I0", "I1"] * r + ["I0", "W0"] * (ranks - r) + ["W1"] * r + ["W0"] * r
        return count_off(words, (r, last - r))

    def bubble(cost: Cost) -> float | None:
        if not cost.forward == cost.input == cost.weight:
            return None
        return (cost.forward + cost.input) * max(0, last - micro_batches)

    down = tuple(range(ranks))
    return Table(
        "zb-v",
        orders=tuple(first(order(r), micro_batches) for r in range(ranks)),
        paths=(down + down[::-1],),
        micro_batches=micro_batches,
        alive=(2 * min(ranks, micro_batches),) * ranks,
        bubble=bubble,
    )
