"""ZB-H1: 1F1B with its backwards split. The stage before waits for input halves alone; weight halves fill the gaps.

    zero_bubble(4, 6)
    rank 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

Rank r runs the weight half r micro-batches after the input half. So early ranks send their gradients on without delay
and late ones, which would idle in the end, have work left.
Bubble (p-1)(f+i-w), for m >= p and w <= f: a third of 1F1B's when f, i and w are equal. With fewer micro-batches than
ranks less can be filled: (p-1)(f+i) - (m-1)w. Alive: min(p, m) on every rank, 1F1B's most.
Qi et al. 2024, arXiv:2401.10241, section 2 (ZB-H1).
"""

from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table, check, take_turns


def zero_bubble(ranks: int, micro_batches: int) -> Table:
    """One stage a rank."""
    check("zb-h1", ranks, micro_batches)
    every = range(micro_batches)

    def order(r: int) -> tuple[Op, ...]:
        plain = take_turns([Op("F", r, k) for k in every], [Op("I", r, k) for k in every], ahead=ranks - 1 - r)
        halves = [[op, Op("W", r, op.micro - r)] if op.kind == "I" and op.micro >= r else [op] for op in plain]
        late = [Op("W", r, k) for k in range(max(0, micro_batches - r), micro_batches)]
        return (*(op for ops in halves for op in ops), *late)

    def bubble(cost: Cost) -> float | None:
        if cost.weight > cost.forward:
            return None
        return (ranks - 1) * (cost.forward + cost.input) - (min(micro_batches, ranks) - 1) * cost.weight

    return Table(
        "zb-h1",
        orders=tuple(order(r) for r in range(ranks)),
        paths=(tuple(range(ranks)),),
        micro_batches=micro_batches,
        alive=(min(ranks, micro_batches),) * ranks,
        bubble=bubble,
    )
