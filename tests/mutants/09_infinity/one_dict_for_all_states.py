"""The state that was handed out goes on changing.

task: ResumableSampler
says: a state changes after it was handed out
"""


class ResumableSampler(ResumableSampler):
    def state_dict(self):
        self.state = getattr(self, "state", {})
        self.state.update(epoch=self.epoch, taken=self.taken)
        return self.state
