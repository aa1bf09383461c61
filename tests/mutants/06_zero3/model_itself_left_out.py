"""The model itself is left out, though it may have parameters of its own.

task: Zero3
says: leaves out the model itself
"""

from functools import partial


class Zero3(Zero3):
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
