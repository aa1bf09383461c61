"""The end of this rank's rows counts as its own.

task: vocab_embedding
says: the last of this one's is first + v - 1
"""


def vocab_embedding(ids, part, first, group):
    here = (ids >= first) & (ids <= first + len(part))
    rows = part[(ids - first).clamp(0, len(part) - 1)]
    return leave(rows * here.unsqueeze(-1), group)
