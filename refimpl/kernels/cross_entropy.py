"""Cross-entropy with its gradient made in the forward pass: the gradient is kept, backward reads no logits.

For M rows of V logits of b bytes forward must move 2 M V b: the logits are read, the gradient (softmax minus one-hot)
is written. (Maximum and sum are found in a first walk along the row, its gradient in a second. That one finds the row
in the second-level cache where all rows under way fit: on an H100 792 are, 6 programs a multiprocessor. Of 32k bf16
logits they are 51 MB, as large as the cache; of 128k 203 MB, and forward moves 3 M V b.) Backward multiplies by the
loss's own gradient: 2 M V b more. torch's own passes move 6 M V b: log-softmax 2, the gradient of the loss, which is
mostly zeros, 1, log-softmax's 3. With l = log(sum(exp(x))), smoothing s over V classes and z the weight of l**2:
    loss = l - (1 - s) x[target] - s mean(x) + z l**2;    dx = softmax(x) (1 + 2 z l) - (1 - s) onehot - s / V
6 M V FLOPs and 2 M V exponentials: the memory is the limit.
Milakov and Gimelshein 2018, arXiv:1805.02867; z: Chowdhery et al. 2022, arXiv:2204.02311, section 5.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import floating, has_values, integer, number, one_device, rows, whole
from refimpl.kernels.language import INTERPRETED, on, once_differentiable, takes, tl, triton
from refimpl.kernels.tiles import next_power_of_2

BLOCK = 1 << 15 if INTERPRETED else 4096


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """logits [..., V], targets [...] int64 -> a scalar, or [...] with reduction "none"; fp32, in nats.

    The classes are the last dimension. Rows whose target is `ignore_index` count nothing; a mean of none is NaN, as
    torch's. Raises TypeError and ValueError for what does not fit, IndexError for a target outside of [0, V) on a CPU;
    on a GPU, where looking would wait for it, such a row's loss is NaN.
    """
    check("cross_entropy", logits, targets, ignore_index, reduction, label_smoothing, z_loss)
    check_range("cross_entropy", targets, ignore_index, logits.shape[-1])
    options = ignore_index, reduction, label_smoothing, z_loss
    if not takes(logits) or logits.numel() == 0:
        return reference(logits, targets, *options)
    with on(logits):
        losses: Tensor = CrossEntropy.apply(logits, targets, *options)  # type: ignore[no-untyped-call]
        return losses


def check(
    operation: str, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, smoothing: float, z_loss: float
) -> None:
    floating(operation, logits=logits)
    integer(operation, targets=targets)
    one_device(operation, logits=logits, targets=targets)
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        expected = f"logits {list(logits.shape)} take targets {list(logits.shape[:-1])}"
        raise ValueError(f"{operation}: {expected}, not {list(targets.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{operation}: reduction is {reduction!r}; it must be "mean", "sum" or "none"')
    whole(operation, ignore_index=ignore_index)
    number(operation, 0, 1, label_smoothing=smoothing)
    number(operation, 0, z_loss=z_loss)


def check_range(operation: str, targets: Tensor, ignore_index: int, classes: int) -> None:
    """On a CPU, IndexError for a target that is no class."""
    if has_values(targets):
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= classes))
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            raise IndexError(
                f"{operation}: target {int(targets[tuple(first)])} at {first} is none of the {classes} classes (0 to "
                f"{classes - 1}, or ignore_index {ignore_index})"
            )


def reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The same by torch's operators."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat, aims = wide.flatten(0, -2) if wide.dim() > 1 else wide[None], targets.flatten().long()  # [M, V], [M]
    loss = F.cross_entropy(flat, aims, None, None, ignore_index, None, reduction, label_smoothing)
    if z_loss:
        squares = torch.where(aims == ignore_index, 0.0, z_loss * flat.logsumexp(-1).square())
        mean = squares.sum() / (aims != ignore_index).sum().clamp(min=1)
        loss = loss + {"none": squares, "sum": squares.sum(), "mean": mean}[reduction]
    return loss.view(targets.shape) if reduction == "none" else loss


@triton.jit
def forward_kernel(
    logits, targets, losses, grad, count, size, stride: tl.int64, stride_grad: tl.int64,
    ignore_index, smoothing, z_loss, BLOCK: tl.constexpr, MEAN: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """A program a row. `count`: how many rows count, for their mean. grad may be logits itself."""
    row = tl.program_id(0)
    at, at_grad = logits + row * stride, grad + row * stride_grad
    target = tl.load(targets + row)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if GRAD:
            for start in range(0, size, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(at_grad + col, tl.zeros([BLOCK], grad.dtype.element_ty), col < size)
    else:
        # Before the sums, for which the warps wait for each other: later one may have the gradient there already.
        known = (target >= 0) & (target < size)
        aim = tl.load(at + target, known, float("nan")).to(tl.float32)
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        plain = tl.zeros([], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = tl.load(at + col, col < size, float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
            total = total * tl.exp(top - finite) + tl.sum(tl.exp(x - finite), 0)
            plain += tl.sum(tl.where(col < size, x, 0.0), 0)
            top = higher
        log = top + tl.log(total)
        weight = 1.0
        if MEAN:
            weight /= tl.load(count).to(tl.float32)
        loss = log - (1 - smoothing) * aim + z_loss * log * log
        if smoothing > 0:
            loss -= smoothing * plain / size
        tl.store(losses + row, loss * weight)
        if GRAD:
            slope = (1 + 2 * z_loss * log) * weight
            for start in range(0, size, BLOCK):
                col = start + tl.arange(0, BLOCK)
                x = tl.load(at + col, col < size, float("-inf")).to(tl.float32)
                d = tl.exp(x - log) * slope - smoothing / size * weight
                d = tl.where(col == target, d - (1 - smoothing) * weight, d)
                tl.store(at_grad + col, d.to(grad.dtype.element_ty), col < size)


@triton.jit
def scale_kernel(x, factor, y, rows, size, stride_factor, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = x * factor, a factor a row (stride_factor 1) or one for all (0)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < size)[None, :]
    by = tl.load(factor + row * stride_factor, row < rows, 0.0)
    value = tl.load(x + row[:, None] * size + col[None, :], mask, 0.0).to(tl.float32) * by[:, None]
    tl.store(y + row[:, None] * size + col[None, :], value.to(y.dtype.element_ty), mask)


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    count: Tensor | None,
    grad: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z: float,
) -> Tensor:
    """logits [M, V], targets [M] -> each row's share of the loss [M] fp32; its gradient goes to `grad` [M, V]."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, next_power_of_2(logits.shape[1]))
    forward_kernel[(len(logits),)](
        logits, targets, losses, logits if grad is None else grad, losses if count is None else count,
        logits.shape[1], logits.stride(0), logits.stride(0) if grad is None else grad.stride(0),
        ignore_index, float(smoothing), float(z),
        BLOCK=block, MEAN=count is not None, GRAD=grad is not None, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return losses


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """grad [M, V] * factor, [M] or a scalar, read where it is: the host does not wait for it."""
    y = torch.empty_like(grad)
    block = min(1024, next_power_of_2(grad.shape[1]))
    grid = (triton.cdiv(len(grad), 4096 // block), triton.cdiv(grad.shape[1], block))
    factor = factor.float().contiguous()
    scale_kernel[grid](
        grad, factor, y, *grad.shape, int(factor.dim() > 0), ROWS=4096 // block, BLOCK=block, num_warps=8
    )
    return y


class CrossEntropy(torch.autograd.Function):
    """The kernel as one operation of autograd; the gradient is what it keeps, in the logits' place."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, smoothing: float, z_loss: float
    ) -> Tensor:
        flat, aims = rows(logits), targets.reshape(-1).contiguous()  # [M, V], [M]
        count = (aims != ignore_index).sum() if reduction == "mean" else None
        grad = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device) if ctx.needs_input_grad[0] else None
        losses = loss_and_gradient(flat, aims, count, grad, ignore_index, smoothing, z_loss)
        ctx.save_for_backward(grad)
        ctx.shape = logits.shape
        if count is not None:
            return losses.sum() + 0.0 / count  # 0 / 0 is NaN: the mean of no row
        return losses.sum() if reduction == "sum" else losses.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        factor = grad_loss if grad_loss.dim() == 0 else grad_loss.reshape(-1)
        return scaled(grad, factor).view(ctx.shape), None, None, None, None, None


def _case(name: str, dtype: torch.dtype, m: int, v: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        logits = torch.randn(m, v, device=device, dtype=dtype).requires_grad_()
        return logits, torch.randint(v, (m,), device=device)

    moved = 2 * m * v * dtype.itemsize
    return Case(f"cross_entropy {name} {m}x{v}", cross_entropy, reference, inputs, moved, moved)


CASES = (_case("bf16", torch.bfloat16, 8192, 32000), _case("bf16", torch.bfloat16, 4096, 128256))
SMALL = (_case("fp32", torch.float32, 256, 32000),)
