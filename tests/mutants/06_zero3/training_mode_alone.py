"""Who is not in training mode is taken to need no backward.

task: Zero3
says: in evaluation mode
"""


class Zero3(Zero3):
    def after_forward(self, module, args, output):
        self.units[module].free()
        if module.training and output.requires_grad:
            output.register_hook(lambda _: self.units[module].gather())
