"""A product with one-hot rows, in which zero times Inf is NaN.

task: vocab_embedding
says: 0 times Inf is one
"""

import torch.nn.functional as F


def vocab_embedding(ids, part, first, group):
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.one_hot((ids - first).masked_fill(elsewhere, 0), len(part)).to(part.dtype) @ part
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)
