"""All micro-batches pass a chunk before the next chunk begins.

task: interleaved
says: micro-batches are between forward and backward
"""


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Op]:
    groups = range(1)
    passes = [(c, k) for g in groups for c in range(chunks) for k in range(g, micro_batches)]
    forwards = [("F", c * ranks + rank, k) for c, k in passes]
    backwards = [("B", (chunks - 1 - c) * ranks + rank, k) for c, k in passes]
    ahead = (chunks - 1) * micro_batches + 2 * (ranks - 1 - rank)
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], backward]
    return [op for op in order if op[2] < micro_batches]
