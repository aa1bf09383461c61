"""A call of a kernel at a size that occurs, and all such calls: what is compiled, compared and timed.

Each kernel's file declares `CASES`, and `SMALL` for the bench on a CPU. The compile test rehearses them on "meta"
tensors, the GPU test compares them with the reference in float64, `refimpl bench kernels` times them.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`inputs(device)` makes the arguments of both functions; tensors among them that require grad get gradients."""

    name: str  # operation, dtype and sizes: "rms_norm bf16 8192x4096"
    call: Callable[..., Any]  # the public function: a tensor, or a tuple of tensors
    reference: Callable[..., Any]  # torch's operators on the same arguments
    inputs: Callable[[torch.device], tuple[Any, ...]]
    moved: int  # bytes that the forward pass must move
    moved_backward: int = 0  # 0: no gradient
    flops: int = 0  # where arithmetic is the limit; 0: the bytes are
    flops_backward: int = 0
    bound: float = 2e-2  # greatest error allowed, beside the greatest entry of the float64 result
    peers: dict[str, Callable[..., Any]] | None = None  # other people's ways to the same result, by name

    @property
    def operation(self) -> str:
        return self.name.partition(" ")[0]


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def cases(small: bool = False) -> Iterator[Case]:
    """Those of every file in this folder, by file name; `small`: those for a CPU, which a file calls SMALL."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if "\nCASES = " in file.read_text():  # others may import what is not everywhere, as numpy
            module = importlib.import_module(f"{__package__}.{file.stem}")
            yield from getattr(module, "SMALL" if small else "CASES", ())


def outputs(result: Any) -> list[Tensor]:
    """The tensors of what a call returned."""
    return [t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, Tensor)]


def forward_and_backward(call: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the gradients of those inputs that require one, for `wave` as the gradient of each result."""
    found = outputs(call(*inputs))
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    with_grad = [y for y in found if y.requires_grad]
    if not leaves or not with_grad:
        return found, []
    return found, list(torch.autograd.grad(with_grad, leaves, [wave(y) for y in with_grad]))


def wave(y: Tensor) -> Tensor:
    """A gradient for y: values of a sine that bf16, and so every format, holds exactly."""
    return torch.arange(y.numel(), device=y.device).mul(0.7).sin().bfloat16().to(y.dtype).view(y.shape)
