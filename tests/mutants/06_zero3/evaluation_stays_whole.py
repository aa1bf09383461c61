"""Freed in training mode only: an evaluation leaves the whole model behind.

task: Zero3
says: are still whole after an evaluation
"""


class Zero3(Zero3):
    def after_forward(self, module, args, output):
        if module.training:
            self.units[module].free()
        if output.requires_grad:
            output.register_hook(lambda _: self.units[module].gather())
