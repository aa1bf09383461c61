"""Gradients are zeroed when micro-batch 0 goes back, which may be the last.

task: Stage
says: after the step: wrong values
"""

import torch


class Stage(Stage):
    def backward(self, micro, scale):
        inputs, edge, result = self.kept.pop(micro)
        if result is not None:
            gradient = torch.full_like(result, scale)
        else:
            gradient = torch.empty_like(self.like)
            self.group.recv(gradient, self.group.rank + 1)
        self.module.zero_grad() if micro == 0 else None
        torch.autograd.backward(edge, gradient)
        if self.group.rank > 0:
            self.send(inputs.grad, self.group.rank - 1)
