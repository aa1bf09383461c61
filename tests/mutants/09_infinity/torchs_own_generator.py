"""Draws the order from the generator that dropout draws from.

task: ResumableSampler
says: torch's own generator has moved
"""

import torch


class ResumableSampler(ResumableSampler):
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = self.taken = 0

    def __iter__(self):
        torch.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size).tolist()
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken = min(self.taken + self.ranks, self.size)
            yield index
        self.epoch, self.taken = self.epoch + 1, 0
