"""A mean over tokens, not over ranks: ranks of one sequence rarely have equally many tokens that count.

Data-parallel training takes the mean over ranks of the gradients. If each rank's loss is the mean over its own tokens,
a rank with 10 of them weighs as much as one with 1000: with a long prompt that is masked, the first ranks have almost
none. What each rank has to call backward on is (sum of its losses) N / (tokens of all ranks): its mean over N ranks is
the mean over tokens, and so are the gradients. One all-reduce of one number a step, before backward.

The engine takes this mean by itself where ranks share sequences: none of them has a loss of its own. It is of what all
replicas, dp x cp, have of a micro-batch: as in one process that has all these sequences in one. Ranks with sequences to
themselves each have a loss, and there the engine averages what it is given, as DeepSpeed's does: call `token_mean` with
the engine's group. Micro-batches differ too: `tokens` is then a rank's mean over those of the step.

    tokens = sum(int((y != -100).sum()) for _, y in micro_batches) / len(micro_batches)
    for x, y in micro_batches:
        total = F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), reduction="sum")
        engine.backward(refimpl.token_mean(total, tokens, engine.group))
        engine.step()
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.comm.streams import told

IGNORED = -100  # a target that does not count, as in torch


def token_mean(total: Tensor, tokens: Tensor | float, group: Group) -> Tensor:
    """total []: the sum of this rank's losses; tokens: how many they are, on the mean over a step's micro-batches.

    -> [] what to call backward on, 0 where no rank has a token: its mean over ranks and micro-batches is the mean over
    tokens. A collective.
    """
    known = tokens if isinstance(tokens, Tensor) else told(tokens, torch.float64, group.device)
    count = known.to(group.device, torch.float64, copy=True).reshape(1)
    group.all_reduce(count, tag="counts")
    return total * (group.size / count.masked_fill(count == 0, 1)).squeeze(0).to(total.dtype)


def cross_entropy(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """logits [B, T/N, V], targets [B, T/N] int64 with IGNORED -> the loss to call backward on, fp32.

    Its mean over ranks is torch's cross entropy of the whole sequence.
    """
    total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return token_mean(total, (targets != IGNORED).sum(), group)


class TokenMean(nn.Module):
    """A loss (logits, targets) that is a mean over a rank's tokens -> what to call backward on over all ranks'."""

    def __init__(self, loss: nn.Module, group: Group) -> None:
        super().__init__()
        self.loss, self.group = loss, group

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [B, T/N, V], targets [B, T/N] with IGNORED -> an fp32 scalar; 0 where no rank has a token."""
        counts = targets != IGNORED
        tokens = counts.sum()
        # A mean over no tokens is 0/0: one of them then counts, and is multiplied by 0.
        first = torch.zeros_like(counts).flatten()
        first[0] = tokens == 0
        mean: Tensor = self.loss(logits, targets.masked_fill(first.view_as(counts), 0))
        return token_mean(mean * tokens, tokens, self.group)
