"""Whatever is asked for, the masters are updated by an AdamW with its usual rate.

task: MasterWeights
says: self.optimizer has lr 0.001, and make_optimizer gives it 0.0002
"""

from torch import nn, optim


class MasterWeights(MasterWeights):
    def __init__(self, params, make_optimizer):
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        make_optimizer(self.masters)
        self.optimizer = optim.AdamW(self.masters)
