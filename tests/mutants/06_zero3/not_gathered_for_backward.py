"""Freed after forward, and nobody gathers it for backward.

task: Zero3
says: a parameter is used while it has no memory
says: the backward of module 8
"""


class Zero3(Zero3):
    def after_forward(self, module, args, output):
        self.units[module].free()
