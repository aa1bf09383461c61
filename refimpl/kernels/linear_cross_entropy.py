"""Cross-entropy of a linear layer's logits, which are never all there: some rows at a time, loss and gradients at once.

N rows of D inputs and V classes have N V logits: 8192 x 128k in bf16 are 2.1 GB, and as much again for their gradient.
Here a chunk of C rows makes its C V logits, turns them into their gradient in place (cross_entropy.py), and multiplies
that with the weight, for dx, and with x, for dweight; then the next chunk takes the same memory. C is such that the
chunk weighs about what x does: C V = N D, at least 128 rows, so that the matrix products stay large.
6 N D V FLOPs, the forward pass's 2 and the backward pass's 4, all in forward: nothing is computed again. So arithmetic
is the limit. Memory: C V + N D + V D for the gradients (dweight in fp32, as several chunks are added).
Hsu et al. 2024, arXiv:2410.10989, section 3.2; Wijmans et al. 2024, arXiv:2411.09009, which goes further.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import autocast, floating, one_device, present, rows
from refimpl.kernels.cross_entropy import check, check_range, loss_and_gradient
from refimpl.kernels.cross_entropy import reference as of_logits
from refimpl.kernels.language import on, once_differentiable, takes

LEAST = 128  # rows of a chunk


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """x [..., D], weight [V, D], targets [...] int64, bias [V] -> the mean or sum of the losses, an fp32 scalar.

    What `cross_entropy(F.linear(x, weight, bias), targets, ...)` gives, under autocast too, and on a CPU too without
    all logits at once.
    Raises TypeError and ValueError for what does not fit, IndexError as cross_entropy does.
    """
    floating("linear_cross_entropy", x=x, weight=weight, **present(bias=bias))
    one_device("linear_cross_entropy", x=x, weight=weight, targets=targets, bias=bias)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear_cross_entropy: x {list(x.shape)} does not fit weight [V, D] {list(weight.shape)}")
    x, weight, bias = autocast(x, weight, bias)
    if x.dtype != weight.dtype or (bias is not None and (bias.dtype, bias.shape) != (x.dtype, weight.shape[:1])):
        raise ValueError("linear_cross_entropy: x, weight and bias must have one dtype, and bias one entry a class")
    if reduction == "none":
        raise ValueError(
            'linear_cross_entropy: reduction "none" would need each row\'s gradient apart; "sum" or "mean"'
        )
    check("linear_cross_entropy", x, targets, ignore_index, reduction, label_smoothing, z_loss)
    arguments = x, weight, targets, bias, ignore_index, reduction, label_smoothing, z_loss
    with on(x), torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
        loss: Tensor = LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
        return loss


def reference(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *options: Any, **named: Any
) -> Tensor:
    """The same with all logits at once."""
    return of_logits(F.linear(x, weight, bias), targets, *options, **named)


def chunk_rows(n: int, d: int, v: int) -> int:
    """Rows at a time: their logits weigh about what x does. Whole multiples of LEAST keep every chunk aligned."""
    return min(n, max(1, n * d // max(v, 1) // LEAST) * LEAST)


def chunk_loss(logits: Tensor, targets: Tensor, count: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """logits [C, V] -> the chunk's share of the loss, and its gradient [C, V]: by a kernel in the logits' place."""
    if takes(logits) and logits.numel():
        return loss_and_gradient(logits, targets, count, logits, *options).sum(), logits
    ignore_index, smoothing, z_loss = options
    loss = of_logits(logits, targets, ignore_index, "sum", smoothing, z_loss)
    weight = (targets != ignore_index).to(loss.dtype)[:, None]
    if count is not None:
        loss, weight = loss / count, weight / count.clamp(min=1)  # of no row a loss of NaN, and no gradient
    wide = logits.to(loss.dtype)
    slope = weight * (1 + 2 * z_loss * wide.logsumexp(1, keepdim=True)) if z_loss else weight
    grad = wide.softmax(1) * slope - weight * (smoothing / wide.shape[1])
    aims = targets.long().clamp(0, wide.shape[1] - 1)[:, None]  # what is ignored is no class
    return loss, grad.scatter_add(1, aims, -(1 - smoothing) * weight).to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients chunk by chunk, in forward; backward hands the gradients out."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
        smoothing: float, z_loss: float,
    ) -> Tensor:  # fmt: skip
        flat, aims = rows(x), targets.reshape(-1).contiguous()  # [N, D], [N]
        check_range("linear_cross_entropy", targets, ignore_index, len(weight))
        count = (aims != ignore_index).sum() if reduction == "mean" else None
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        wants_x, wants_weight, _, wants_bias = ctx.needs_input_grad[:4]
        dx = torch.empty_like(flat) if wants_x else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=x.device) if wants_weight else None
        dbias = torch.zeros(len(weight), dtype=wide, device=x.device) if wants_bias else None
        total = torch.zeros((), dtype=wide, device=x.device)
        size = chunk_rows(len(flat), flat.shape[1], len(weight))
        for start in range(0, len(flat), max(size, 1)):
            part = slice(start, start + size)
            logits = F.linear(flat[part], weight, bias)  # [C, V]
            loss, grad = chunk_loss(logits, aims[part], count, ignore_index, smoothing, z_loss)
            total += loss
            if dx is not None:
                torch.mm(grad, weight, out=dx[part])
            if dweight is not None:
                dweight += grad.t() @ flat[part]
            if dbias is not None:
                dbias += grad.sum(0)
        ctx.save_for_backward(
            None if dx is None else dx.view(x.shape),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
        )
        return total if count is None else total + 0.0 / count  # 0 / 0 is NaN: the mean of no row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = (g if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors)
        return dx, dweight, None, dbias, None, None, None, None


def _case(n: int, d: int, v: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(n, d, device=device, dtype=dtype).requires_grad_()
        weight = (torch.randn(v, d, device=device, dtype=dtype) * 0.02).requires_grad_()
        return x, weight, torch.randint(v, (n,), device=device)

    name, moved = f"linear_cross_entropy {short(dtype)} {n}x{d}x{v}", 2 * dtype.itemsize * (n * d + v * d)
    return Case(name, linear_cross_entropy, reference, inputs, moved, flops=6 * n * d * v, bound=4e-2)


CASES = (_case(8192, 4096, 128256),)
SMALL = (_case(512, 256, 32000, torch.float32),)
