"""Behind a whole epoch it goes on with nothing.

task: ResumableSampler
says: behind a whole epoch comes an empty one
"""


class ResumableSampler(ResumableSampler):
    def __init__(self, size, ranks, rank, seed=0):
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = self.taken = 0

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], state["taken"]
