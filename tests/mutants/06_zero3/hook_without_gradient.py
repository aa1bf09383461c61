"""Asks for the output's gradient also when there is none.

task: Zero3
says: an evaluation under torch.no_grad()
says: cannot register a hook on a tensor that doesn't require gradient
"""


class Zero3(Zero3):
    def after_forward(self, module, args, output):
        self.units[module].free()
        output.register_hook(lambda _: self.units[module].gather())
