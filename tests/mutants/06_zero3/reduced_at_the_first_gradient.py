"""Reduces when one gradient of the module is there, not all.

task: Zero3
says: a module is freed inside its backward
says: wait for the last gradient of each module
"""

import torch


class Zero3(Zero3):
    def on_gradient(self, module, p):
        unit = self.units[module]
        grads = [q.grad for q in unit.params if q.grad is not None]
        flat, mine = (torch.zeros_like(unit.mine).repeat(self.group.size), torch.empty_like(unit.mine))
        flat[: sum(g.numel() for g in grads)] = torch.cat([g.reshape(-1) for g in grads])
        for q in unit.params:
            q.grad = None
        unit.free()
        self.group.reduce_scatter(mine, flat, "mean")
        self.grads[module] = self.grads[module] + mine if module in self.grads else mine
