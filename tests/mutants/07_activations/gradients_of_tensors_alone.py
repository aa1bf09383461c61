"""Backward returns a gradient for each tensor, where one for each argument is wanted.

task: checkpoint
says: backward through what checkpoint has made raises RuntimeError
"""

import torch


def checkpoint(fn: Callable[..., Any], *args: Any) -> Any:

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.is_tensor = [isinstance(a, Tensor) for a in args]
            ctx.others = [None if isinstance(a, Tensor) else a for a in args]
            ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
            ctx.random = torch.get_rng_state()
            return fn(*args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            saved, inputs = iter(ctx.saved_tensors), list(ctx.others)
            for place, needs in enumerate(ctx.needs_input_grad):
                if ctx.is_tensor[place]:
                    inputs[place] = next(saved).detach().requires_grad_(needs)
            now = torch.get_rng_state()
            torch.set_rng_state(ctx.random)
            with torch.enable_grad():
                outputs = fn(*inputs)
            torch.set_rng_state(now)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            return tuple(x.grad for x in inputs if isinstance(x, Tensor))

    return Recompute.apply(*args)
