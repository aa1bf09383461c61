"""The second micro-batch overwrites the first.

task: Zero3
says: step 0, micro-batch 2
says: only the last micro-batch is there
"""

import torch


class Zero3(Zero3):
    def on_gradient(self, module, p):
        unit = self.units[module]
        grads = [q.grad for q in unit.params if q.grad is not None]
        if len(grads) < len(unit.params):
            return
        flat, mine = (torch.zeros_like(unit.mine).repeat(self.group.size), torch.empty_like(unit.mine))
        flat[: sum(g.numel() for g in grads)] = torch.cat([g.reshape(-1) for g in grads])
        for q in unit.params:
            q.grad = None
        unit.free()
        self.group.reduce_scatter(mine, flat, "mean")
        self.grads[module] = mine
