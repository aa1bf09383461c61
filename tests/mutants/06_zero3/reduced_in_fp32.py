"""bf16 gradients travel in fp32, with twice the bytes.

task: Zero3
says: each reduce_scatter carries 2x the bytes
"""

import torch


class Zero3(Zero3):
    def on_gradient(self, module, p):
        unit = self.units[module]
        grads = [q.grad for q in unit.params if q.grad is not None]
        if len(grads) < len(unit.params):
            return
        flat, mine = (torch.zeros(len(unit.mine) * self.group.size), torch.empty(len(unit.mine)))
        flat[: sum(g.numel() for g in grads)] = torch.cat([g.reshape(-1) for g in grads])
        for q in unit.params:
            q.grad = None
        unit.free()
        self.group.reduce_scatter(mine, flat, "mean")
        mine = mine.to(unit.mine.dtype)
        self.grads[module] = self.grads[module] + mine if module in self.grads else mine
