"""The ids become places, in place.

task: vocab_embedding
says: ids was changed
"""

import torch.nn.functional as F


def vocab_embedding(ids, part, first, group):
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.embedding(ids.sub_(first).masked_fill_(elsewhere, 0), part)
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)
