"""Takes ids to be [B, T].

task: vocab_embedding
says: not enough values to unpack
"""

import torch.nn.functional as F


def vocab_embedding(ids, part, first, group):
    B, T = ids.shape
    places = ids.reshape(B * T) - first
    elsewhere = (places < 0) | (places >= len(part))
    rows = F.embedding(places.masked_fill(elsewhere, 0), part).masked_fill(elsewhere.unsqueeze(-1), 0)
    return leave(rows.view(B, T, -1), group)
