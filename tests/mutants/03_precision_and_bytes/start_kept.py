"""The parameters' first values are kept in fp32 too.

task: MasterWeights
says: 12 bytes a parameter
"""

from torch import nn


class MasterWeights(MasterWeights):
    def __init__(self, params, make_optimizer):
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.start = [m.detach().clone() for m in self.masters]
        self.optimizer = make_optimizer(self.masters)
