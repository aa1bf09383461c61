"""DualPipe: two pipelines in opposite directions through the same ranks, each of which holds two stages of the model.

    dualpipe(4, 8)
    rank 0  F0a F2a F4a F1b I1b W1b F3b F6a B3b B3b F5b B0a B0a B5b B5b F7b ... B2a B2a B7b B7b I4a W4a I6a W6a
    rank 1  ... F0a F1b F2a F3b F4a B1b B1b F5b B0a B0a F6a B3b B3b F7b B2a B2a B5b B5b B4a B4a I7b I6a W7b W6a
    rank 2  ... F1a F0b F3a F2b F5a B0b B0b F4b B1a B1a F7a B2b B2b F6b B3a B3a B4b B4b B5a B5a I6b I7a W6b W7a
    rank 3  F1a F3a F5a F0b I0b W0b F2b F7a B2b B2b F4b B1a B1a B4b B4b F6b ... B3a B3a B6b B6b I5a W5a I7a W7a

Even micro-batches go down (stage s on rank s), odd ones up (stage s on rank p-1-s). So every rank always has work of
the other direction while it waits for one, and a forward can be paired with a backward of the other direction, whose
messages and whose computation overlap on a GPU. Here the two of a pair run one after the other.

Bubble (p/2-1)(f+i-w) when f = i = w and m is even and at least 2p; for other m the pattern of more micro-batches, less
what is too many, and no formula: `clock.bubble` plays it. The paper's formula, (p/2-1)(F&B + B - 3W), is that of pairs
run as one operation whose results come at its end, `clock.bubble(table, cost, pairs=True)`, where no input half is
shorter than a forward.
Memory: two copies of every parameter. Alive: p+1 at most, on every rank.
Gradients of the two copies are summed at the end, as those of two data-parallel replicas.
DeepSeek-V3, arXiv:2412.19437, section 3.2.1. Folded in the middle it needs no second copy: `dualpipe_v.py`.
"""

from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table, check, count_off, first


def dualpipe(ranks: int, micro_batches: int) -> Table:
    """Two stages a rank, one a direction. ValueError for an odd number of ranks."""
    check("dualpipe", ranks, micro_batches)
    if ranks % 2:
        raise ValueError(f"dualpipe: {ranks} ranks: the two directions meet in the middle, so they must be even")
    drawn = max(-(-micro_batches // 2), ranks)  # micro-batches a direction

    def order(rank: int) -> list[Op]:
        r, up = min(rank, ranks - 1 - rank), int(rank >= ranks // 2)  # the other half is the mirror image
        counted = count_off(words(r, ranks // 2, drawn), (0, 1))
        stages = (r, ranks - 1 - r)  # of direction 0 and 1, as seen from this half
        return [Op(op.kind, stages[op.stage], 2 * op.micro + (op.stage ^ up)) for op in counted]

    def bubble(cost: Cost) -> float | None:
        if micro_batches < 2 * ranks or micro_batches % 2 or not cost.forward == cost.input == cost.weight:
            return None
        return (ranks // 2 - 1) * (cost.forward + cost.input - cost.weight)

    down = tuple(range(ranks))
    return Table(
        "dualpipe",
        orders=tuple(first(order(r), micro_batches) for r in range(ranks)),
        paths=(down, down[::-1]),
        micro_batches=micro_batches,
        alive=(min(ranks + 1, micro_batches),) * ranks,
        bubble=bubble,
    )


def words(r: int, half: int, drawn: int) -> list[str]:
    """Rank r of the first `half`: its own direction is 0, the other 1. DualPipe's eight steps."""
    rest = half - 1 - r
    order = ["F0"] * (2 * rest) + ["F0", "F1"] * (r + 1) + ["I1", "W1", "F1"] * rest
    order += ["F0", "B1", "F1", "B0"] * (drawn - 2 * half + r + 1)  # steady: pairs
    order += ["B1", "F1", "B0"] * rest
    # The end: from the middle on backwards are split, and their weight halves follow as there is room.
    whole = 2 * ((r + 1) // 2) + (r + 1) % 2
    end = (["B1", "B0"] * (r + 1))[:whole] + (["I1", "I0"] * (r + 1))[whole:]
    waiting = [word.replace("I", "W") for word in end if word[0] == "I"]
    for _ in range(rest):
        end += [*waiting[:1], "I0"]
        waiting = [*waiting[1:], "W0"]
    return order + end + waiting
