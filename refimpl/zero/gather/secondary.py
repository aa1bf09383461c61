"""A second shard inside the node (hpZ of ZeRO++): forward gathers over all ranks, what comes after it near by.

    the weights             gathered from                          sent between nodes     afterwards the second shard is
    have been updated       the shards [S] of all N ranks          Psi b (n-1)/n a rank   fresh: 1/H of what came
    are as they were        the second shards [P/H] of H ranks     0                      fresh

So backward's gather, and all gathers of later micro-batches and of evaluation until the next update, stay among H
neighbours. It costs b/H bytes a parameter, all the time: with H = 8 and bf16, 0.25 beside the 2/N of ZeRO-3. What is
kept is what forward computed with, so backward sees the same weights; without quantised gathers it is ZeRO-3 bit for
bit. Frozen weights are never updated: after the first forward they do not cross nodes again.
Wang et al. 2023, arXiv:2306.10209, section 3.2. DeepSpeed: deepspeed/runtime/zero/partition_parameters.py,
`_partition_param_sec`, which frees it after each step and makes it anew.
"""

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.work import Steps, Work
from refimpl.zero.gather.ways import Flat, Way


class Secondary(Way):
    """One unit's second shard on the ranks `block`; `first` gathers when it is stale."""

    def __init__(self, block: Group, first: Way, padded: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block, self.first = block, first
        self.again = Flat(block, "parameters near")
        self.is_exact = first.is_exact
        self.mine = block.empty(padded // block.size, dtype, device)  # [P/H]
        self.is_fresh = False

    def gather(self, full: Tensor, mine: Tensor) -> Work:
        return self.again.gather(full, self.mine) if self.is_fresh else Work(self._steps(full, mine))

    def _steps(self, full: Tensor, mine: Tensor) -> Steps:
        yield lambda: [self.first.gather(full, mine)]
        self.mine.copy_(full.view(self.block.size, -1)[self.block.rank])
        self.is_fresh = True

    def stale(self) -> None:
        self.is_fresh = False

    def tensors(self) -> list[Tensor]:
        return [self.mine]
