"""Every operation, of tensors without elements: a result of the right shape, and gradients that are zeros."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from refimpl.kernels.block_sparse_attention import block_sparse_attention
from refimpl.kernels.dropout import dropout
from refimpl.kernels.flash_attention import flash_attention, flash_attention_varlen
from refimpl.kernels.glu import geglu, swiglu
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.int8_matmul import int8_matmul
from refimpl.kernels.layer_norm import layer_norm
from refimpl.kernels.linear_cross_entropy import linear_cross_entropy
from refimpl.kernels.multi_norm import multi_norm
from refimpl.kernels.paged_attention import paged_attention
from refimpl.kernels.permute import permute, sort_by_expert, unpermute
from refimpl.kernels.quantize import dequantize, quantize
from refimpl.kernels.rotary import rotary
from refimpl.kernels.softmax import softmax
from refimpl.kernels.topk_gate import topk_gate

Shape = tuple[int, ...]


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    layout = torch.ones(q.shape[2] // 16, k.shape[2] // 16)
    return block_sparse_attention(q, k, v, layout, 16, causal=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = (torch.tensor([0, 0, len(x)], dtype=torch.int32, device=x.device) for x in (q, k))
    return flash_attention_varlen(q, k, v, *starts)


def routed(x: Tensor, k: int) -> Tensor:
    order = sort_by_expert(whole(len(x), k).to(x.device), 3)
    return unpermute(permute(x, order), order, torch.ones(len(x), k, device=x.device))


def paged(q: Tensor, keys: Tensor) -> Tensor:
    table, lengths = whole(len(q), 2).to(q.device), whole(len(q)).to(q.device)
    return paged_attention(q.detach(), keys.detach(), keys.detach(), table, lengths)


CALLS: dict[str, tuple[Callable[..., Tensor], list[Shape], Shape]] = {
    "swiglu of no row": (swiglu, [(0, 5), (0, 5)], (0, 5)),
    "swiglu of no column": (swiglu, [(4, 0), (4, 0)], (4, 0)),
    "geglu of no row": (geglu, [(0, 5), (0, 5)], (0, 5)),
    "geglu of no column": (geglu, [(4, 0), (4, 0)], (4, 0)),
    "dropout of no column": (lambda x: dropout(x, 0.5, 1), [(4, 0)], (4, 0)),
    "layer_norm with all": (layer_norm, [(0, 5), (5,), (5,)], (0, 5)),
    "softmax of a dimension beside none": (lambda x: softmax(x, 0), [(4, 0)], (4, 0)),
    "linear_cross_entropy of no width": (
        lambda x, w: linear_cross_entropy(x, w, whole(3).to(x.device)), [(3, 0), (5, 0)], (),
    ),
    "rotary of no sequence": (rotary, [(0, 2, 3, 8), (3, 4), (3, 4)], (0, 2, 3, 8)),
    "rotary of no token": (rotary, [(2, 2, 0, 8), (0, 4), (0, 4)], (2, 2, 0, 8)),
    "rotary of no angle": (rotary, [(2, 2, 3, 8), (3, 0), (3, 0)], (2, 2, 3, 8)),
    "flash_attention of no sequence": (flash_attention, [(0, 2, 3, 8)] * 3, (0, 2, 3, 8)),
    "flash_attention_varlen of no query": (packed, [(0, 2, 8), (5, 2, 8), (5, 2, 8)], (0, 2, 8)),
    "flash_attention_varlen of no key": (packed, [(5, 2, 8), (0, 2, 8), (0, 2, 8)], (5, 2, 8)),
    "block_sparse_attention of no query": (by_blocks, [(1, 2, 0, 8), (1, 2, 32, 8), (1, 2, 32, 8)], (1, 2, 0, 8)),
    "block_sparse_attention of no key": (by_blocks, [(1, 2, 32, 8), (1, 2, 0, 8), (1, 2, 0, 8)], (1, 2, 32, 8)),
    "block_sparse_attention of no sequence": (by_blocks, [(0, 2, 32, 8)] * 3, (0, 2, 32, 8)),
    "paged_attention of empty pages": (paged, [(2, 2, 8), (3, 0, 1, 8)], (2, 2, 8)),
    "paged_attention of no page": (paged, [(2, 2, 8), (0, 4, 1, 8)], (2, 2, 8)),
    "permute to no expert": (lambda x: routed(x, 0), [(4, 5)], (4, 5)),
    "grouped_matmul of no group": (
        lambda x, w: grouped_matmul(x, w, whole(0).to(x.device)), [(4, 5), (0, 5, 6)], (4, 6),
    ),
    "grouped_matmul of no depth": (
        lambda x, w: grouped_matmul(x, w, whole(2).to(x.device) + 2), [(4, 0), (2, 0, 6)], (4, 6),
    ),
    "grouped_matmul of no width": (
        lambda x, w: grouped_matmul(x, w, whole(2).to(x.device) + 2), [(4, 5), (2, 5, 0)], (4, 0),
    ),
    "topk_gate of no token": (lambda x: topk_gate(x, 2)[0], [(0, 5)], (0, 2)),
    "quantize of no column": (lambda x: dequantize(*quantize(x, 16), 16), [(4, 0)], (4, 0)),
    "int8_matmul of no depth": (lambda a, b: int8_matmul(a.char(), b.char()).float(), [(4, 0), (3, 0)], (4, 3)),
    "multi_norm of nothing": (lambda *x: multi_norm(x), [(0, 5), (4, 0)], ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_nothing_gives_nothing(device: torch.device, name: str) -> None:
    call, shapes, shape = CALLS[name]
    inputs = [torch.randn(s, device=device).requires_grad_() for s in shapes]
    y = call(*inputs)
    assert y.shape == shape
    assert not y.isnan().any()
    if y.requires_grad and "angle" not in name:
        for x, grad in zip(inputs, torch.autograd.grad(y.sum(), inputs, allow_unused=True), strict=True):
            assert grad is None or (grad.shape == x.shape and grad.count_nonzero() == 0)


def test_a_page_without_tokens_holds_none(device: torch.device) -> None:
    """Not even one of a sequence that says it has some."""
    q, keys = torch.ones(1, 2, 8, device=device), torch.ones(3, 0, 1, 8, device=device)
    if q.is_cpu:
        with pytest.raises(ValueError, match=r"lengths \[1\]; the table has 2 pages of 0"):
            paged_attention(q, keys, keys, whole(1, 2), whole(1) + 1)
