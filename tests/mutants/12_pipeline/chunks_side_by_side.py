"""A rank's chunks lie side by side, as one stage would.

task: interleaved
says: side by side: chunk c is stage c * ranks + rank
"""


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Op]:
    groups = range(0, micro_batches, ranks)
    passes = [(c, k) for g in groups for c in range(chunks) for k in range(g, g + ranks)]
    forwards = [("F", rank * chunks + c, k) for c, k in passes]
    backwards = [("B", rank * chunks + chunks - 1 - c, k) for c, k in passes]
    ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], backward]
    return [op for op in order if op[2] < micro_batches]
