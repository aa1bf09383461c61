"""Every rank is taken to have as many rows as this one.

task: vocab_embedding
says: v is not the same on all ranks
"""

import torch.nn.functional as F


def vocab_embedding(ids, part, first, group):
    first = group.rank * len(part)
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), part)
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)
