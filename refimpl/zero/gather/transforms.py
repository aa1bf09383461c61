"""torch.func beside ZeRO-3: a module that would have to be gathered inside a transform is refused, by name.

Inside `grad`, `vjp`, `jacrev`, `jvp` and `hessian` every operation's result is wrapped, and torch allows no look at
what autograd saves: a gather would fill wrappers, and a backward later would meet freed memory. `vmap` does neither.
"""

import sys

import torch
from torch._C._functorch import TransformType

WRAPS = (TransformType.Grad, TransformType.Jvp)
WAYS = (
    "Take torch.autograd.grad(..., create_graph=True), or keep these parameters whole on every rank: "
    "ZeroConfig.param_persistence_threshold (stage3_param_persistence_threshold)"
)


def refuse_transformed(name: str) -> None:
    """RuntimeError if `name`, which is in shards, is needed inside such a transform."""
    levels = torch._C._functorch.get_interpreter_stack()
    if levels and any(level.key() in WRAPS for level in levels):
        raise RuntimeError(
            f"{name} is needed inside torch.func.grad, vjp, jacrev, jvp or hessian, where ZeRO-3 cannot gather it. "
            f"{WAYS}"
        )


def explain(name: str) -> None:
    """If the forward of `name` ends in torch's refusal to transform where saved tensors are looked at: who looks."""
    error = sys.exception()
    if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(f"ZeRO-3 has such hooks around {name}, which has parameters of its own in shards. {WAYS}")
