"""What an answer in plain torch multiplies, and the largest tensor that it makes.

A result can be right and the work a multiple of what was asked: masked dense attention equals sparse attention. The
mode sees every operation below autograd, so it does not matter how the answer spells a product.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refimpl.grading.compare import require

# The first factor's place.
PRODUCTS = dict.fromkeys(("mm", "bmm", "mv", "dot"), 0) | dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), 1)


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it: `flops` of matrix products, `calls` of torch, and `largest`, the bytes of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.largest, self.calls = 0, 0, 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        name = func.overloadpacket.__name__.strip("_")
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.layout == torch.strided]
        if (place := PRODUCTS.get(name)) is not None:
            a, b = args[place : place + 2]
            self.flops += 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)
        elif "scaled_dot_product" in name and "backward" not in name:
            q, k, v = args[:3]
            self.flops += 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        for x in made:
            if (size := x.untyped_storage().nbytes()) > self.largest:
                self.largest, self.shape = size, tuple(x.shape)
        return out

    def judge(self, flops: int, size: int, advice: str) -> None:
        """Raise Wrong if more was multiplied than `flops`, or a tensor made of more than `size` bytes."""
        require(
            self.largest <= size,
            f"a tensor {self.shape} of {self.largest:,} bytes is made, none may have more than {size:,}: {advice}",
        )
        require(self.flops <= flops, f"{self.flops:,} FLOPs are multiplied, {flops:,} are enough: {advice}")


def poisoned(x: Tensor, block: int, absent: Tensor) -> Tensor:
    """A copy of x [T, D] with NaN in the blocks that `absent` [n] says."""
    return torch.where(absent.repeat_interleave(block)[:, None], torch.nan, x)
