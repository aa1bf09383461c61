"""The model itself is left out, though it may have parameters of its own.

task: Zero3
says: leaves out the model itself
"""

from functools import partial

import torch


class ShardedParams:
    def __init__(self, params, group):
        self.params, self.group = (list(params), group)
        shard = -(-sum(p.numel() for p in self.params) // group.size)
        self.full, at = (torch.zeros(shard * group.size, dtype=self.params[0].dtype), 0)
        for p in self.params:
            piece = self.full[at : at + p.numel()].view(p.shape)
            piece.copy_(p.detach())
            p.data = piece
            at += p.numel()
        group.broadcast(self.full)
        self.mine = self.full.view(group.size, shard)[group.rank].clone()
        self.free()

    def gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
            self.group.all_gather(self.full, self.mine)

    def free(self):
        self.full.untyped_storage().resize_(0)


class Zero3:
    def __init__(self, model, group):
        self.group = group
        own = {m: list(m.parameters(recurse=False)) for m in list(model.modules())[1:]}
        self.units = {m: ShardedParams(params, group) for m, params in own.items() if params}
        self.grads = {}
        for module, unit in self.units.items():
            module.register_forward_pre_hook(self.before_forward)
            module.register_forward_hook(self.after_forward)
            for p in unit.params:
                p.register_post_accumulate_grad_hook(partial(self.on_gradient, module))

    def before_forward(self, module, args):
        self.units[module].gather()

    def after_forward(self, module, args, output):
        self.units[module].free()
        if output.requires_grad:
            output.register_hook(lambda _: self.units[module].gather())

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
        self.grads[module] = self.grads[module] + mine if module in self.grads else mine
