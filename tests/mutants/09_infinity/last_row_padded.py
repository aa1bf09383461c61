"""Fills the last row up with samples from the beginning, as torch's does.

task: ResumableSampler
says: twice: nothing is padded
"""

import torch


class ResumableSampler(ResumableSampler):
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = self.taken = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        order += order[: -(self.size - self.taken) % self.ranks]
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken = min(self.taken + self.ranks, self.size)
            yield index
        self.epoch, self.taken = self.epoch + 1, 0
