"""What was sent is kept, and not what came.

task: Zero3
says: elements, and a shard
"""


class Zero3(Zero3):
    def on_gradient(self, module, p):
        own = list(module.parameters(recurse=False))
        if any(q.grad is None for q in own):
            return
        unit = self.units[module]
        flat = torch.zeros(len(unit.mine) * self.group.size, dtype=unit.mine.dtype)
        torch.cat([q.grad.reshape(-1) for q in own], out=flat[: sum(q.numel() for q in own)])
        for q in own:
            q.grad = None
        self.group.reduce_scatter(torch.empty_like(unit.mine), flat, "mean")
        self.grads[module] = self.grads[module] + flat if module in self.grads else flat
        unit.free()
