"""Rows sorted by expert, and back: `permute` copies each token to its experts' rows, `unpermute` adds what came back.

For T tokens of C elements of b bytes and k experts each (R = T k rows):
    permute      reads T C b, writes R C b; backward reads R C b, writes T C b
    unpermute    reads R C b, writes T C b; backward reads (R + T) C b, writes R C b
and 4 R of places; of weights 4 R more, which backward writes too. No FLOPs to speak of: memory is the limit. A token is
read once and written k times, which is why a program owns tokens and scatters; programs that own rows would read each
token k times. Every row has one writer and sums go in the order of a token's experts, so the result is the same bits
each time, without atomics.

The order is a stable sort by expert (`sort_by_expert`), 8 R bytes a pass: a hundredth of the rows' for C = 4096.
Megatron-Core: transformer/moe/moe_utils.py (permute, unpermute). MegaBlocks: arXiv:2211.15841, section 5.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import floating, integer, one_device, whole
from refimpl.kernels.language import on, once_differentiable, processors, takes, tl, triton
from refimpl.kernels.tiles import tile

LONGEST = 4096  # elements of a token that a program handles; longer ones are shared by several


@dataclass(frozen=True)
class Order:
    """Where each copy of a token goes. Rows of expert 0 come first; rows of dropped copies, last, hold zeros."""

    place: Tensor  # [T, k] int32 row of each copy; -1: dropped
    counts: Tensor  # [E] int32 rows of each expert

    @property
    def kept(self) -> Tensor:
        """int32 scalar: rows that hold a token."""
        return self.counts.sum(dtype=torch.int32)


def sort_by_expert(experts: Tensor, number: int) -> Order:
    """experts [T, k] int: those each token goes to, of `number`; -1: nowhere. An expert's rows keep the tokens' order.

    ValueError on a CPU for an expert that there is not; on a GPU looking would wait for the device.
    """
    integer("sort_by_expert", experts=experts)
    whole("sort_by_expert", number=number)
    if experts.ndim != 2 or number < 1:
        raise ValueError(
            f"sort_by_expert: experts {list(experts.shape)} must be [tokens, k], of at least 1, not {number}"
        )
    if experts.is_cpu and experts.numel() and not -1 <= int(experts.min()) <= int(experts.max()) < number:
        raise ValueError(
            f"sort_by_expert: experts go from {experts.min()} to {experts.max()}; there are 0 to {number - 1}"
        )
    flat = experts.flatten()
    wanted = torch.where(flat < 0, number, flat)
    ordered, source = wanted.sort(stable=True)
    place = torch.empty_like(flat, dtype=torch.int32)
    place[source] = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    ends = torch.searchsorted(ordered, torch.arange(number + 1, device=flat.device, dtype=ordered.dtype))
    return Order(torch.where(flat < 0, -1, place).view(experts.shape), ends.diff().int())


def permute(x: Tensor, order: Order) -> Tensor:
    """x [T, C] -> [T k, C]: each token in the rows of its experts. Rows after the kept ones are zeros."""
    check("permute", x, order)
    if x.numel() == 0 or order.place.numel() == 0 or not takes(x):
        return permute_reference(x, order)
    with on(x):
        rows: Tensor = Permute.apply(x, order)  # type: ignore[no-untyped-call]
    return rows


def unpermute(rows: Tensor, order: Order, weights: Tensor | None = None) -> Tensor:
    """rows [T k, C] -> [T, C] in rows' dtype: each token's sum over its experts, in fp32; times weights [T, k]."""
    check("unpermute", rows, order)
    if weights is not None:
        floating("unpermute", weights=weights)
        one_device("unpermute", rows=rows, weights=weights)
        if weights.shape != order.place.shape:
            raise ValueError(f"unpermute: weights {list(weights.shape)} for {list(order.place.shape)} copies")
    if rows.numel() == 0 or not takes(rows, weights):
        return unpermute_reference(rows, order, weights)
    with on(rows):
        y: Tensor = Unpermute.apply(rows, order, weights)  # type: ignore[no-untyped-call]
    return y


def check(operation: str, x: Tensor, order: Order) -> None:
    floating(operation, x=x)
    if not isinstance(order, Order):
        raise TypeError(f"{operation}: order is a {type(order).__name__}; it must be an Order, of sort_by_expert")
    rows = len(order.place) if operation == "permute" else order.place.numel()
    one_device(operation, x=x, place=order.place, counts=order.counts)
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(
            f"{operation}: {list(x.shape)} given, [{rows}, width] needed by the order of {order.place.shape}"
        )


def permute_reference(x: Tensor, order: Order) -> Tensor:
    """The same by torch's operators."""
    kept = order.place.flatten() >= 0
    token = torch.arange(len(x), device=x.device).repeat_interleave(order.place.shape[1])
    rows = x.new_zeros(order.place.numel(), x.shape[1])
    return torch.index_copy(rows, 0, order.place.flatten()[kept].long(), x[token[kept]])


def unpermute_reference(rows: Tensor, order: Order, weights: Tensor | None = None) -> Tensor:
    """The same by torch's operators."""
    copies = rows[order.place.clamp(min=0).long()]  # [T, k, C]
    copies = copies.to(torch.promote_types(rows.dtype, torch.float32))
    copies = torch.where(order.place[:, :, None] < 0, 0, copies)
    if weights is not None:
        copies = copies * weights[:, :, None]
    return copies.sum(1).to(rows.dtype)


@triton.jit
def scatter_kernel(
    x, place, weights, rows, partner, dweights, tokens, size, stride: tl.int64, rows_stride: tl.int64,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """rows[place[t, j]] = x[t] (times weights[t, j]; then dweights [parts, T, k] gets x[t] . partner[place[t, j]])."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    mask = inside[:, None] & (col < size)[None, :]
    h = tl.load(x + token[:, None] * stride + col[None, :], mask, 0.0)
    for j in range(K):
        to = tl.load(place + token * K + j, inside, -1).to(tl.int64)
        there = mask & (to >= 0)[:, None]
        if WEIGHTS:
            f = h.to(tl.float32)
            w = tl.load(weights + token * K + j, inside, 0.0).to(tl.float32)
            tl.store(rows + to[:, None] * size + col[None, :], (f * w[:, None]).to(rows.dtype.element_ty), there)
            other = tl.load(partner + to[:, None] * rows_stride + col[None, :], there, 0.0).to(tl.float32)
            part = tl.program_id(1).to(tl.int64) * tokens * K
            tl.store(dweights + part + token * K + j, tl.sum(f * other, 1), inside)
        else:
            tl.store(rows + to[:, None] * size + col[None, :], h, there)


@triton.jit
def gather_kernel(
    rows, place, weights, y, tokens, size, stride: tl.int64,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over j of rows[place[t, j]] (times weights[t, j]), in fp32, j upward."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    mask = inside[:, None] & (col < size)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in range(K):
        at = tl.load(place + token * K + j, inside, -1).to(tl.int64)
        there = mask & (at >= 0)[:, None]
        h = tl.load(rows + at[:, None] * stride + col[None, :], there, 0.0).to(tl.float32)
        if WEIGHTS:
            h *= tl.load(weights + token * K + j, inside, 0.0).to(tl.float32)[:, None]
        total += h
    tl.store(y + token.to(tl.int64)[:, None] * size + col[None, :], total.to(y.dtype.element_ty), mask)


@triton.jit
def clear_kernel(rows, kept, count, size, BLOCK: tl.constexpr):
    """Zeros into the rows from `kept` on."""
    for row in range(tl.load(kept) + tl.program_id(0), count, tl.num_programs(0)):
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            tl.store(rows + tl.cast(row, tl.int64) * size + col, tl.zeros([BLOCK], rows.dtype.element_ty), col < size)


def scatter(
    x: Tensor, order: Order, weights: Tensor | None = None, partner: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """-> rows [T k, C] (times weights), and `x[t] . partner[its row]` [T, k] fp32 where there are weights."""
    (tokens, k), size = order.place.shape, x.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    t = tile(size, LONGEST)
    parts = triton.cdiv(size, t.block)
    rows = x.new_empty(tokens * k, size)
    dweights = None if weights is None else x.new_empty(parts, tokens, k, dtype=torch.float32)
    scatter_kernel[(triton.cdiv(tokens, t.rows), parts)](
        x, order.place.contiguous(), weights, rows, partner, dweights, tokens, size, x.stride(0),
        0 if partner is None else partner.stride(0),
        K=k, ROWS=t.rows, BLOCK=t.block, WEIGHTS=weights is not None, num_warps=t.warps,
    )  # fmt: skip
    clear_kernel[(processors(x.device),)](rows, order.kept, len(rows), size, BLOCK=min(t.block, 4096), num_warps=4)
    return rows, None if dweights is None else dweights.sum(0)


def gather(rows: Tensor, order: Order, weights: Tensor | None) -> Tensor:
    """-> [T, C] in rows' dtype."""
    (tokens, k), size = order.place.shape, rows.shape[1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    t = tile(size, LONGEST)
    y = rows.new_empty(tokens, size)
    gather_kernel[(triton.cdiv(tokens, t.rows), triton.cdiv(size, t.block))](
        rows, order.place.contiguous(), weights, y, tokens, size, rows.stride(0),
        K=k, ROWS=t.rows, BLOCK=t.block, WEIGHTS=weights is not None, num_warps=t.warps,
    )  # fmt: skip
    return y


class Permute(torch.autograd.Function):
    """Its gradient is `unpermute` without weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return scatter(x, order)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return gather(g, ctx.order, None), None


class Unpermute(torch.autograd.Function):
    """Its gradient for the rows is `permute`, times the weights; for the weights, products of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order, weights: Tensor | None) -> Tensor:
        weights = None if weights is None else weights.contiguous()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        ctx.save_for_backward(None if weights is None else rows, weights)
        ctx.order = order
        return gather(rows, order, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor | None]:
        rows, weights = ctx.saved_tensors
        drows, dweights = scatter(g, ctx.order, weights, rows)
        return drows, None, None if dweights is None else dweights.to(weights.dtype)


def _case(operation: str, dtype: torch.dtype, tokens: int, size: int, k: int, experts: int) -> Case:
    """Every token to k experts, drawn evenly."""
    weighted, copies, e = operation == "unpermute", tokens * k, dtype.itemsize

    def inputs(device: torch.device) -> tuple[Any, ...]:
        chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(k).indices
        order = sort_by_expert(chosen, experts)
        order = Order(order.place.to(device), order.counts.to(device))
        x = torch.randn(copies if weighted else tokens, size, device=device, dtype=dtype, requires_grad=True)
        weights = (torch.rand(tokens, k, device=device, requires_grad=True),) if weighted else ()
        return x, order, *weights

    call, reference = (unpermute, unpermute_reference) if weighted else (permute, permute_reference)
    moved = (tokens + copies) * size * e + (8 if weighted else 4) * copies
    backward = moved + (copies * size * e + 4 * copies if weighted else 0)
    return Case(
        f"{operation} {short(dtype)} {tokens}x{size} k={k} of {experts}",
        call,
        reference,
        inputs,
        moved,
        moved_backward=backward,
    )


CASES = (
    _case("permute", torch.bfloat16, 16384, 4096, 2, 8),
    _case("unpermute", torch.bfloat16, 16384, 4096, 2, 8),
    _case("unpermute", torch.bfloat16, 16384, 2048, 8, 128),
)
SMALL = tuple(_case(operation, torch.float32, 1024, 512, 2, 8) for operation in ("permute", "unpermute"))
