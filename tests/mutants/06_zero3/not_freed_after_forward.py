"""A module stays whole from its forward to its backward.

task: Zero3
says: bytes of parameters are whole at once in forward: free each module after its forward
"""


class Zero3(Zero3):
    def after_forward(self, module, args, output):
        if output.requires_grad:
            output.register_hook(lambda _: self.units[module].gather())
