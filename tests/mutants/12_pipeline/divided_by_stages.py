"""The gradient is divided by the number of stages.

task: Stage
says: divided by the number of stages
"""

import torch


class Stage(Stage):
    def backward(self, micro, scale):
        inputs, edge, result = self.kept.pop(micro)
        if result is not None:
            gradient = torch.full_like(result, scale / self.group.size)
        else:
            gradient = torch.empty_like(self.like)
            self.group.recv(gradient, self.group.rank + 1)
        torch.autograd.backward(edge, gradient)
        if self.group.rank > 0:
            self.send(inputs.grad, self.group.rank - 1)
