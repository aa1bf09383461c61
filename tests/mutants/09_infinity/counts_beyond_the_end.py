"""The position goes beyond the epoch's size where the last row is short.

task: ResumableSampler
says: begin the next when such a state is loaded
"""

import torch


class ResumableSampler(ResumableSampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken += self.ranks
            yield index
        self.epoch, self.taken = (self.epoch + 1, 0)
