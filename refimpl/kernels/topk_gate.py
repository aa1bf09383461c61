"""A router's choice in one pass: softmax over the experts, the k most probable, their weights; logits are read once.

For T tokens and E experts, logits of b bytes:
    forward     reads T E b, writes 12 T k: weights in fp32, experts in int64
    backward    reads T E b (not where only the chosen are normalised) and 16 T k, writes T E b
torch's operators make softmax (4 T E written and read again), top-k, and a sum and a quotient of [T, k]: four kernels.
5 T E FLOPs and k reductions over E, less than the memory takes while k is below about 16.

k times the greatest that is left: of equal probabilities the lowest expert first, so the same logits give the same
experts on every run and every rank (torch.topk promises no order among equals; their values are the same). What is
compared is the logit, which no rounding of the exponential makes equal to another.
Shazeer et al. 2017 (arXiv:1701.06538), section 2.1; Mixtral (arXiv:2401.04088), equation for G(x), is `normalise`.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import floating, whole
from refimpl.kernels.language import INTERPRETED, on, once_differentiable, takes, tl, triton
from refimpl.kernels.tiles import next_power_of_2

ELEMENTS = 2048  # logits of a program
WIDEST = 8192  # experts


def topk_gate(logits: Tensor, k: int, *, normalise: bool = False) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] fp32, experts [T, k] int64, the most probable first.

    weights: the softmax over all E experts, in fp32 (fp64 for fp64); `normalise`: over the k chosen, so that they sum
    to 1. Of equal logits the lower expert comes first. A logit of -inf is chosen last, nan first.
    ValueError for k that is not 1 to E, or more than 8192 experts.
    """
    floating("topk_gate", logits=logits)
    whole("topk_gate", k=k)
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1] <= WIDEST:
        raise ValueError(
            f"topk_gate: k = {k} of logits {list(logits.shape)}; they must be [tokens, k to {WIDEST} experts]"
        )
    if logits.numel() == 0 or not takes(logits):
        return reference(logits, k, normalise)
    with on(logits):
        weights, experts = Gate.apply(logits, k, normalise)  # type: ignore[no-untyped-call]
    return weights, experts


def reference(logits: Tensor, k: int, normalise: bool = False) -> tuple[Tensor, Tensor]:
    """The same by torch's operators; a stable sort keeps the lower of equal experts first."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = logits.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    if normalise:
        return wide.gather(1, experts).softmax(1), experts
    return wide.softmax(1).gather(1, experts), experts


@triton.jit
def gate_kernel(
    logits, weights, experts, tokens, number, stride: tl.int64,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    slot = tl.arange(0, BLOCK_K)
    inside = token < tokens
    real = (col < number)[None, :]
    x = tl.load(logits + token[:, None] * stride + col[None, :], inside[:, None] & real, 0.0).to(tl.float32)
    x = tl.where(real, x, float("-inf"))
    top = tl.max(x, 1)
    norm = tl.sum(tl.exp(x - top[:, None]), 1)
    best = tl.full([ROWS, BLOCK_K], float("-inf"), tl.float32)  # logits of the chosen
    which = tl.zeros([ROWS, BLOCK_K], tl.int32)
    left = real & (token >= 0)[:, None]  # [R, BLOCK] experts not chosen yet
    x = tl.where(x != x, float("inf"), x)  # as torch.topk has it; the weights are nan all the same
    for j in range(K):
        value = tl.max(tl.where(left, x, float("-inf")), 1)
        # The lowest of those that have this logit; an expert at -inf counts as long as it is left.
        expert = tl.min(tl.where(left & (x == value[:, None]), col[None, :], BLOCK), 1)
        left = left & (col[None, :] != expert[:, None])
        best = tl.where((slot == j)[None, :], value[:, None], best)
        which = tl.where((slot == j)[None, :], expert[:, None], which)
    weight = tl.exp(best - top[:, None])
    if NORMALISE:
        norm = tl.sum(weight, 1) + 0 * norm  # nan, for all of the chosen, where a logit is
    weight = weight / norm[:, None]
    place = token.to(tl.int64)[:, None] * K + slot[None, :]
    mask = inside[:, None] & (slot < K)[None, :]
    tl.store(weights + place, weight, mask)
    tl.store(experts + place, which.to(tl.int64), mask)


@triton.jit
def gate_backward_kernel(
    logits, weights, experts, grad, dlogits, tokens, number, stride: tl.int64,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """With s = sum of w g over the chosen: dlogit = p (g - s); p over all experts, or over the chosen (NORMALISE)."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = token < tokens
    mask = inside[:, None] & (col < number)[None, :]
    wide = tl.zeros([ROWS, BLOCK], tl.float32)  # g, at the experts chosen
    chosen = tl.zeros([ROWS, BLOCK], tl.float32)  # w, likewise
    s = tl.zeros([ROWS], tl.float32)
    for j in range(K):
        at = token.to(tl.int64) * K + j
        g = tl.load(grad + at, inside, 0.0)
        w = tl.load(weights + at, inside, 0.0)
        here = col[None, :] == tl.load(experts + at, inside, -1)[:, None]
        wide = tl.where(here, g[:, None], wide)
        chosen = tl.where(here, w[:, None], chosen)
        s += w * g
    if NORMALISE:
        p = chosen
    else:
        x = tl.load(logits + token[:, None] * stride + col[None, :], mask, 0.0).to(tl.float32)
        x = tl.where((col < number)[None, :], x, float("-inf"))
        p = tl.exp(x - tl.max(x, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
    d = p * (wide - s[:, None])
    tl.store(dlogits + token.to(tl.int64)[:, None] * number + col[None, :], d.to(dlogits.dtype.element_ty), mask)


class Gate(torch.autograd.Function):
    """The kernels as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        tokens, number = logits.shape
        weights = logits.new_empty(tokens, k, dtype=torch.float32)
        experts = logits.new_empty(tokens, k, dtype=torch.int64)
        block, rows, warps = cut(number)
        gate_kernel[(triton.cdiv(tokens, rows),)](
            logits, weights, experts, tokens, number, logits.stride(0),
            K=k, BLOCK_K=next_power_of_2(k), ROWS=rows, BLOCK=block, NORMALISE=normalise, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(logits, weights, experts)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, weights, experts = ctx.saved_tensors
        tokens, number = logits.shape
        dlogits = logits.new_empty(tokens, number)
        block, rows, warps = cut(number)
        gate_backward_kernel[(triton.cdiv(tokens, rows),)](
            logits, weights, experts, grad.contiguous(), dlogits, tokens, number, logits.stride(0),
            K=weights.shape[1], ROWS=rows, BLOCK=block, NORMALISE=ctx.normalise, num_warps=warps,
        )  # fmt: skip
        return dlogits, None, None


def cut(number: int) -> tuple[int, int, int]:
    """-> padded experts, tokens a program, warps: 16 logits a thread."""
    block = next_power_of_2(number)
    rows = max(1, ELEMENTS * (16 if INTERPRETED else 1) // block)
    return block, rows, min(max(rows * block // 512, 4), 16)


def _case(dtype: torch.dtype, tokens: int, number: int, k: int, normalise: bool) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        return torch.randn(tokens, number, device=device, dtype=dtype, requires_grad=True), k

    def call(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return topk_gate(logits, k, normalise=normalise)

    def oracle(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return reference(logits, k, normalise)

    e = dtype.itemsize
    moved = tokens * number * e + 12 * tokens * k
    return Case(
        f"topk_gate {short(dtype)} {tokens}x{number} k={k}", call, oracle, inputs, moved,
        moved_backward=(1 if normalise else 2) * tokens * number * e + 16 * tokens * k,
    )  # fmt: skip


CASES = (
    _case(torch.float32, 65536, 8, 2, True),
    _case(torch.float32, 65536, 128, 8, False),
)
SMALL = (_case(torch.float32, 8192, 64, 4, True),)
