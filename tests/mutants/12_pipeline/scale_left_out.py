"""The last stage begins its backward with one.

task: Stage
says: `scale` was left out
"""

import torch


class Stage(Stage):
    def backward(self, micro: int, scale: float) -> None:
        inputs, edge, result = self.kept.pop(micro)
        if result is not None:
            gradient = torch.ones_like(result)
        else:
            gradient = torch.empty_like(self.like)
            self.group.recv(gradient, self.group.rank + 1)
        torch.autograd.backward(edge, gradient)
        if self.group.rank > 0:
            self.send(inputs.grad, self.group.rank - 1)
