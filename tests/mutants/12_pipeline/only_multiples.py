"""The last group is taken for a whole one.

task: interleaved
says: the micro-batches are 0 to
"""


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Op]:
    groups = range(0, micro_batches, ranks)
    passes = [(c, k) for g in groups for c in range(chunks) for k in range(g, g + ranks)]
    forwards = [("F", c * ranks + rank, k) for c, k in passes]
    backwards = [("B", (chunks - 1 - c) * ranks + rank, k) for c, k in passes]
    ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], backward]
    return order
