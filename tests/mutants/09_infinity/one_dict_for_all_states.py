"""The state that was handed out goes on changing.

task: ResumableSampler
says: a state changes after it was handed out
"""

import torch


class ResumableSampler:
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = (size, ranks, rank, seed)
        self.epoch = 0
        self.taken = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken = min(self.taken + self.ranks, self.size)
            yield index
        self.epoch, self.taken = (self.epoch + 1, 0)

    def state_dict(self):
        self.state = getattr(self, "state", {})
        self.state.update(epoch=self.epoch, taken=self.taken)
        return self.state

    def load_state_dict(self, state):
        self.epoch, self.taken = (state["epoch"], state["taken"])
        if self.taken == self.size:
            self.epoch, self.taken = (self.epoch + 1, 0)
