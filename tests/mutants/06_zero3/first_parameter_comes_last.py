"""Takes the first parameter's gradient for the last that comes.

task: Zero3
says: Zero3 raised
"""

import torch


class Zero3(Zero3):
    def on_gradient(self, module, p):
        unit = self.units[module]
        if p is not unit.params[0]:
            return
        grads = [q.grad for q in unit.params]
        flat, mine = (torch.zeros_like(unit.mine).repeat(self.group.size), torch.empty_like(unit.mine))
        flat[: sum(g.numel() for g in grads)] = torch.cat([g.reshape(-1) for g in grads])
        for q in unit.params:
            q.grad = None
        unit.free()
        self.group.reduce_scatter(mine, flat, "mean")
        self.grads[module] = self.grads[module] + mine if module in self.grads else mine
