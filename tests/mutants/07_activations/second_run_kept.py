"""What the second run has computed stays on ctx.

task: checkpoint
says: bytes stay alive after backward
"""

import torch
from torch import Tensor


def checkpoint(fn, *args):

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.is_tensor = [isinstance(a, Tensor) for a in args]
            ctx.others = [None if isinstance(a, Tensor) else a for a in args]
            ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
            ctx.random = torch.get_rng_state()
            ctx.again = None
            return fn(*args)

        @staticmethod
        def backward(ctx, *grads):
            if ctx.again is None:
                saved, inputs = (iter(ctx.saved_tensors), list(ctx.others))
                for place, needs in enumerate(ctx.needs_input_grad):
                    if ctx.is_tensor[place]:
                        inputs[place] = next(saved).detach().requires_grad_(needs)
                with torch.random.fork_rng(devices=[]):
                    torch.set_rng_state(ctx.random)
                    with torch.enable_grad():
                        outputs = fn(*inputs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                ctx.again = (inputs, outputs)
            inputs, outputs = ctx.again
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if o.requires_grad]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=True)
            return tuple(x.grad if isinstance(x, Tensor) else None for x in inputs)

    return Recompute.apply(*args)
