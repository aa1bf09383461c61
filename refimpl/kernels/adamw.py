"""AdamW over a flat shard in one pass: update, write-back in 16 bits, and a step left out after an overflow.

Reads the fp32 weights, both moments and the gradient, writes weights and moments: 28 bytes an element with an fp32
gradient, 26 with a 16-bit one; 2 more for the 16-bit copy of the weights that the model computes with, which separate
passes would write after reading 4 again. About 15 FLOPs: the memory is the limit. The gradient's divisor (loss scale
and clipping in one) and the overflow flag are tensors that the kernel reads, so that the host waits for nothing.
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g**2
    p -= lr weight_decay p;  p -= lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)
Step t = infinity is Adam without bias correction (optim/adam.py). Without `adam_w` the decay goes into the gradient.
Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2. DeepSpeed's file: csrc/adam/multi_tensor_adam.cu.
"""

import math
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import floating, number, one_device, present, same_shape, tensors
from refimpl.kernels.language import INTERPRETED, on, takes, tl, triton

BLOCK = 1 << 14 if INTERPRETED else 1024


def adamw(
    weights: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    adam_w: bool = True,
    low: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step in place. weights, first and second moment: fp32 [P], contiguous; grad [P] fp32, bf16 or fp16.

    `step`: fp32 scalar, the number of this step, from 1 on. `low` [P] bf16 or fp16 gets a copy of the new weights. The
    gradient is divided by `grad_scale`; where `found_inf` is not 0 nothing at all is changed. Both are fp32 scalars on
    the weights' device, as torch's fused optimizers take them. Raises TypeError or ValueError for what does not fit.
    """
    check(weights, grad, first, second, step, low, grad_scale, found_inf)
    number("adamw", 0, eps=eps, weight_decay=weight_decay)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"adamw: betas are {betas!r}; they must be two numbers")
    number("adamw", 0, math.nextafter(1, 0), **{f"betas[{i}]": beta for i, beta in enumerate(betas)})
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"adamw: lr is {list(lr.shape)}; it must be one number")
        if lr.is_cpu and not weights.is_cpu:
            lr = float(lr)  # as torch's fused optimizers take it: the host has it already
        else:
            one_device("adamw", weights=weights, lr=lr)
    if not isinstance(lr, Tensor):
        number("adamw", 0, lr=lr)
    options = (lr, betas, eps, weight_decay, adam_w, low, grad_scale, found_inf)
    if weights.numel() == 0:
        return
    if not takes(weights, grad):
        reference(weights, grad, first, second, step, *options)
        return
    with on(weights), torch.no_grad():
        kernel[(triton.cdiv(weights.numel(), BLOCK),)](
            weights, grad, first, second, step, lr, low, grad_scale, found_inf, weights.numel(),
            *(math.log2(beta) if beta else -math.inf for beta in betas), betas[1], *(1 - beta for beta in betas), eps,
            weight_decay,
            BLOCK=BLOCK, ADAM_W=adam_w, LOW=low is not None, SCALE=grad_scale is not None,
            FOUND=found_inf is not None, LR=isinstance(lr, Tensor), num_warps=4,
        )  # fmt: skip


def check(weights: Tensor, grad: Tensor, first: Tensor, second: Tensor, *others: Tensor | None) -> None:
    step, low, grad_scale, found_inf = others
    floating("adamw", grad=grad, **present(low=low))
    needed = {"weights": weights, "first": first, "second": second, "step": step}
    tensors("adamw", **needed)
    one_device("adamw", **needed, grad=grad, low=low, grad_scale=grad_scale, found_inf=found_inf)
    same_shape("adamw", weights=weights, grad=grad, first=first, second=second, low=weights if low is None else low)
    for name, tensor in {"weights": weights, "first": first, "second": second}.items():
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise TypeError(f"adamw: {name} must be contiguous float32, not {tensor.dtype}, strides {tensor.stride()}")
    for name, scalar in {"step": step, "grad_scale": grad_scale, "found_inf": found_inf}.items():
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise TypeError(f"adamw: {name} must be one float32, not {list(scalar.shape)} {scalar.dtype}")
    for name, flat in {"grad": grad, "low": low}.items():
        if flat is not None and not flat.is_contiguous():
            raise ValueError(f"adamw: {name} must be contiguous, but its strides are {flat.stride()}")


def reference(
    weights: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: float | Tensor,
    betas: tuple[float, float], eps: float, weight_decay: float, adam_w: bool = True, low: Tensor | None = None,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """The same by torch's fused kernel, and a copy."""
    update = torch._fused_adamw_ if adam_w else torch._fused_adam_
    wide = grad.clone() if grad_scale is not None and grad.dtype == weights.dtype else grad.to(weights.dtype)
    with torch.no_grad():
        update(
            [weights], [wide], [first], [second], [], [step], lr=lr, beta1=betas[0], beta2=betas[1], eps=eps,
            weight_decay=weight_decay, amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
        if low is not None and (found_inf is None or not found_inf.item()):
            low.copy_(weights)


@triton.jit
def kernel(
    weights, grad, first, second, step, lr, low, grad_scale, found_inf, size: tl.int64,
    log_beta1, log_beta2, beta2, rest1, rest2, eps, weight_decay,  # rest: 1 - beta, which fp32 would spoil
    BLOCK: tl.constexpr, ADAM_W: tl.constexpr, LOW: tl.constexpr, SCALE: tl.constexpr, FOUND: tl.constexpr,
    LR: tl.constexpr,
):  # fmt: skip
    go = True
    if FOUND:
        go = tl.load(found_inf) == 0
    if go:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = at < size
        p = tl.load(weights + at, there, 0.0)
        m = tl.load(first + at, there, 0.0)
        v = tl.load(second + at, there, 0.0)
        g = tl.load(grad + at, there, 0.0).to(tl.float32)
        rate = lr
        if LR:
            rate = tl.load(lr).to(tl.float32)
        if SCALE:
            g /= tl.load(grad_scale)
        t = tl.load(step).to(tl.float64)  # fp32 would lose 1 - beta**t: 0.001 at first
        correction1 = (1 - tl.exp2(t * log_beta1)).to(tl.float32)
        correction2 = (1 - tl.exp2(t * log_beta2)).to(tl.float32)
        if ADAM_W:
            p -= rate * weight_decay * p
        else:
            g += weight_decay * p
        m += rest1 * (g - m)
        v = beta2 * v + rest2 * g * g
        p -= rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
        tl.store(weights + at, p, there)
        tl.store(first + at, m, there)
        tl.store(second + at, v, there)
        if LOW:
            tl.store(low + at, p.to(low.dtype.element_ty), there)


def _case(size: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        weights, first, second = (torch.randn(size, device=device) for _ in range(3))
        low, grad = (torch.randn(size, device=device).bfloat16() for _ in range(2))
        one = torch.ones((), device=device)
        return weights, grad, first, second.abs(), one.clone(), low, one.clone(), one * 0

    def call(update: Any) -> Any:
        def run(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, low: Tensor, *rest: Tensor) -> list[Tensor]:
            scale, found = rest
            update(w, g, m, v, step, 1e-3, (0.9, 0.95), 1e-8, 0.1, low=low, grad_scale=scale, found_inf=found)
            return [w, m, v, low]

        return run

    return Case(f"adamw bf16 gradient and copy {size}", call(adamw), call(_in_any_dtype), inputs, 28 * size)


def _in_any_dtype(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, *options: Any, **named: Any) -> None:
    """The reference on float64 shards too: its scalars stay in fp32."""
    scalars = {name: t if name == "low" else t.float() for name, t in named.items()}
    reference(w, g, m, v, step.float(), *options, **scalars)


CASES = (_case(1 << 27),)
SMALL = (_case(1 << 22),)
