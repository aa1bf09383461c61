"""Gradients of all scores.

task: sparse_backward
says: a block that no row reads is read
"""

import torch
from torch import Tensor


def sparse_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, out_grad: Tensor, layout: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b = len(q) // len(layout)
    mask = layout.repeat_interleave(b, 0).repeat_interleave(b, 1)
    mask = mask.tril() if causal else mask
    p = torch.where(mask, (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp(), 0)
    ds = torch.where(mask, p * (out_grad @ v.T - (out_grad * out).sum(-1, keepdim=True)), 0) / q.shape[1] ** 0.5
    return ds @ k, ds.T @ q, p.T @ out_grad
