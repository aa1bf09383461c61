"""Every rank gathers all logits.

task: vocab_cross_entropy
says: forward uses all_gather, expected only all_reduce
"""

import torch
import torch.nn.functional as F


def vocab_cross_entropy(logits, targets, first, group, ignore_index=-100):
    mine = logits.float()
    out = mine.new_empty(group.size, *mine.shape)
    group.all_gather(out, mine.detach().contiguous())
    z = torch.cat([mine if r == group.rank else out[r] for r in range(group.size)], 1)
    loss = F.cross_entropy(z, targets, ignore_index=ignore_index, reduction="sum")
    return loss / (targets != ignore_index).sum().clamp(min=1)
