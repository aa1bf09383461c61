"""Bytes that a rank sends for a mixture of experts whose experts are dealt out to ep ranks.

    tokens         2 all-to-alls forward, 2 backward: a row of M elements to its expert, its answer back, and the
                   gradients of both. A rank sends what it has for others twice, and what it had of others twice
    even loads     each all-to-all k T M (ep-1)/ep elements: about k T M, whatever the number of experts or ranks
    padded         each E C M (ep-1)/ep, full slots or empty ones, with C = factor k T / E: factor times as much
    counts         8 E (ep-1) bytes: how many rows each rank has for each expert
    hierarchical   (L-1)/L of the rows inside a node of L ranks, and (n-1)/n over the network between n nodes, as flat

A dense layer's gradients are 2 n (N-1)/N bytes an all-reduce for n on N ranks; an expert's are summed over the N / ep
that have it alone. GShard: arXiv:2006.16668, section 3; DeepSpeed-MoE: arXiv:2201.05596, section 5.

    loads[s][e]    rows that rank s of the expert group has for expert e
"""

from collections.abc import Sequence

COUNT = 8  # bytes of an int64


def sent(loads: Sequence[Sequence[int]], rank: int, width: int, itemsize: int, forwards: int = 1) -> dict[str, int]:
    """Bytes of one rank, forward and backward, by the ledger's tags. forwards: 2 if recomputed."""
    ep, each = len(loads), len(loads[0]) // len(loads)
    to_others = sum(loads[rank]) - sum(loads[rank][rank * each : (rank + 1) * each])
    of_others = sum(sum(load[rank * each : (rank + 1) * each]) for s, load in enumerate(loads) if s != rank)
    tokens = (1 + forwards) * (to_others + of_others) * width * itemsize
    return {"tokens": tokens, "tokens per expert": forwards * COUNT * len(loads[0]) * (ep - 1)}


def even_sent(tokens: int, k: int, width: int, ep: int, itemsize: int, forwards: int = 1) -> float:
    """Of a rank's T tokens, if every expert gets as many."""
    return 2 * (1 + forwards) * tokens * k * width * itemsize * (ep - 1) / ep


def padded_sent(experts: int, capacity: int, width: int, ep: int, itemsize: int, forwards: int = 1) -> dict[str, int]:
    """With `capacity` slots for each rank at each expert; the capacity is the largest of all ranks'."""
    tokens = 2 * (1 + forwards) * experts * capacity * width * itemsize * (ep - 1) // ep
    return {"tokens": tokens, "capacity": forwards * COUNT * (ep - 1)}


def hierarchical_sent(
    loads: Sequence[Sequence[int]], rank: int, node: int, width: int, itemsize: int, forwards: int = 1
) -> tuple[int, int]:
    """(inside the node, between nodes of `node` ranks): bytes of one rank's tokens, forward and backward."""
    ep, each = len(loads), len(loads[0]) // len(loads)
    rows = [[sum(load[to * each : (to + 1) * each]) for to in range(ep)] for load in loads]
    back = [list(column) for column in zip(*rows, strict=True)]
    here, place = divmod(rank, node)
    ranks = range(here * node, (here + 1) * node)
    inside, across = 0, 0
    for table in (rows, back):
        inside += sum(n for to, n in enumerate(table[rank]) if to % node != place)
        across += sum(table[s][to] for s in ranks for to in range(place, ep, node) if to // node != here)
    return (1 + forwards) * inside * width * itemsize, (1 + forwards) * across * width * itemsize
