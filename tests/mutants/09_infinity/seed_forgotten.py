"""Loading a position sets the seed to 0.

task: ResumableSampler
says: the epoch that was cut and gone on with takes samples
"""


class ResumableSampler(ResumableSampler):
    def load_state_dict(self, state):
        self.seed, self.epoch, self.taken = (0, state["epoch"], state["taken"])
        if self.taken == self.size:
            self.epoch, self.taken = (self.epoch + 1, 0)
