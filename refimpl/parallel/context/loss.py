"""A mean over tokens, not over ranks: ranks of one sequence rarely have equally many tokens that count.

Data-parallel training takes the mean over ranks of the gradients. If each rank's loss is the mean over its own tokens,
a rank with 10 of them weighs as much as one with 1000: with a long prompt that is masked, the first ranks have almost
none. What each rank has to call backward on is (sum of its losses) N / (tokens of all ranks): its mean over N ranks is
the mean over tokens, and so are the gradients. One all-reduce of one number a step, before backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.comm.group import Group

IGNORED = -100  # a target that does not count, as in torch


def token_mean(total: Tensor, tokens: Tensor | int, group: Group) -> Tensor:
    """total: the sum of this rank's losses; tokens: how many they are. -> what to call backward on; 0 without any."""
    count = torch.as_tensor(tokens, dtype=torch.float64, device=group.device).reshape(1).clone()
    group.all_reduce(count, tag="tokens")
    return total * (group.size / count.clamp(min=1).to(total.dtype)).squeeze(0)


def cross_entropy(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """logits [B, T/N, V], targets [B, T/N] int64 with IGNORED -> the loss to call backward on, fp32.

    Its mean over ranks is torch's cross entropy of the whole sequence.
    """
    total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return token_mean(total, (targets != IGNORED).sum(), group)
