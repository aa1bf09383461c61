"""The first stage makes the caller's inputs require gradients.

task: Stage
says: the caller's `inputs` require a gradient now
"""

import torch
from torch.autograd.graph import get_gradient_edge


class Stage(Stage):
    def forward(self, micro, inputs=None, target=None):
        group, is_last = (self.group, self.group.rank == self.group.size - 1)
        if group.rank > 0:
            inputs = torch.empty_like(self.like)
            group.recv(inputs, group.rank - 1)
            inputs.requires_grad_()
        if group.rank == 0 and inputs is not None and inputs.is_floating_point():
            inputs.requires_grad_()
        out = self.module(inputs)
        if is_last:
            out = self.loss(out, target)
        result = out.detach() if is_last else None
        self.kept[micro] = (inputs, get_gradient_edge(out), result)
        if not is_last:
            self.send(out.detach(), group.rank + 1)
        return result
