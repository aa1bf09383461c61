"""The position is taken out of the caller's dict.

task: ResumableSampler
says: the caller's dict `state` was changed
"""


class ResumableSampler(ResumableSampler):
    def load_state_dict(self, state):
        self.epoch, self.taken = (state.pop("epoch"), state.pop("taken"))
        if self.taken == self.size:
            self.epoch, self.taken = (self.epoch + 1, 0)
