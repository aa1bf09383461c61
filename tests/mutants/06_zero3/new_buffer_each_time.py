"""A fresh buffer for each gather; autograd's views still see the old one.

task: ShardedParams
says: self.full is another tensor now: autograd has kept views of the first one
"""

import torch


class ShardedParams(ShardedParams):
    def gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            self.full, at = (torch.empty(self.full.numel()), 0)
            self.group.all_gather(self.full, self.mine)
            for p in self.params:
                p.data = self.full[at : at + p.numel()].view(p.shape)
                at += p.numel()
