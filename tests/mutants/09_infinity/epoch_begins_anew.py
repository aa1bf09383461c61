"""Remembers the epoch and not the place in it.

task: ResumableSampler
says: the epoch begins anew: the position was not loaded
"""


class ResumableSampler(ResumableSampler):
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = self.taken = 0

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], 0
        if self.taken == self.size:
            self.epoch, self.taken = self.epoch + 1, 0
