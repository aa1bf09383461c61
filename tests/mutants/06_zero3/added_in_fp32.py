"""Adds the second micro-batch's gradients in fp32, where the shard of bf16 grows to twice its bytes.

task: Zero3
says: self.grads of
says: further backwards add up in the gradients' dtype
"""


class Zero3(Zero3):
    def on_gradient(self, module, p):
        before = self.grads.pop(module, None)
        super().on_gradient(module, p)
        if before is not None:
            self.grads[module] = before.float() + self.grads[module].float() if module in self.grads else before
