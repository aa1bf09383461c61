"""A block of attention by torch's own kernel: what `blocks.py` does tile by tile in Python, two to three times faster.

The kernel gives a block's exact attention and its lse. Two blocks of keys, a and b, are joined by what each has of the
sum of exponentials:

    lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

and its backward, given the lse of all keys and not of its block alone, computes the right probabilities of its block.
Memory: the block's output and its gradients, no tile of scores. A head of keys that several queries share is not
copied: their dimension has a stride of 0.

Only on CPUs, in fp32 and fp64. Elsewhere a block's output would be rounded to 16 bits before it is joined.
torch: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, which `F.scaled_dot_product_attention` runs there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.parallel.context.blocks import grouped

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def can_fuse(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)


@dataclass
class FusedRunning:
    """As `blocks.Running`: the attention so far of queries [B, K, G, Q, D]."""

    out: Tensor  # [B, K, G, Q, D]
    lse: Tensor  # [B, K, G, Q, 1]

    @classmethod
    def of(cls, q: Tensor) -> "FusedRunning":
        """Nothing seen yet."""
        return cls(torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf))

    def see(self, q: Tensor, k: Tensor, v: Tensor, scale: float, here: slice, diagonal: bool) -> None:
        """As `Running.see`; a diagonal is a square's."""
        out, lse = _FORWARD(*as_heads(q, k, v), 0.0, diagonal, scale=scale)
        out, lse = out.view_as(q), lse.reshape(q.shape[:-1]).unsqueeze(-1)
        mine, before = self.out[..., here, :], self.lse[..., here, :]
        both = torch.logaddexp(before, lse)
        mine.mul_((before - both).exp_()).add_(out.mul_((lse - both).exp_()))
        before.copy_(both)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """-> attention's output [B, H, Q, D], and lse [B, K, G, Q, 1]."""
        return self.out.to(dtype).flatten(1, 2), self.lse


@dataclass
class FusedBack:
    """As `blocks.Back`."""

    out: Tensor  # [B, K, G, Q, D]
    out_grad: Tensor  # [B, K, G, Q, D]
    lse: Tensor  # [B, K, G, Q, 1]
    dq: Tensor  # [B, K, G, Q, D]

    @classmethod
    def of(cls, q: Tensor, out: Tensor, out_grad: Tensor, lse: Tensor) -> "FusedBack":
        """q [B, K, G, Q, D]; out, out_grad [B, H, Q, D]."""
        return cls(grouped(out, q.shape[1]), grouped(out_grad, q.shape[1]), lse, torch.zeros_like(q))

    def see(
        self, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, scale: float, here: slice, diagonal: bool
    ) -> None:
        """As `Back.see`."""
        out_grad, out, lse = (x[..., here, :] for x in (self.out_grad, self.out, self.lse))
        heads = as_heads(q, k, v)
        lse = lse.contiguous().view(heads[0].shape[:-1])
        flat = (x.contiguous().view_as(heads[0]) for x in (out_grad, out))
        grads = _BACKWARD(next(flat), *heads, next(flat), lse, 0.0, diagonal, scale=scale)
        self.dq[..., here, :] += grads[0].view_as(q)
        dk += grads[1].sum(1).view_as(dk)
        dv += grads[2].sum(1).view_as(dv)


def as_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, K, G, Q, D], k, v [B, K, S, D] -> [BK, G, Q, D], [BK, G, S, D] twice: a sequence for each head of keys."""
    k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, q.shape[2], -1, -1) for x in (k, v))
    return q.flatten(0, 1), k, v
