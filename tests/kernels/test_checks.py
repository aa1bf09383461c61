"""What is no tensor or no number, has another dtype or lies on another device is named at once, by every operation."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from refimpl.kernels.adamw import adamw
from refimpl.kernels.block_sparse_attention import block_sparse_attention
from refimpl.kernels.cross_entropy import cross_entropy
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
from refimpl.kernels.rms_norm import rms_norm
from refimpl.kernels.rotary import rotary
from refimpl.kernels.softmax import softmax
from refimpl.kernels.topk_gate import topk_gate

X, Q, AIMS = torch.ones(2, 4), torch.ones(1, 2, 3, 8), torch.tensor([0, 3])
CODES, MOMENTS = torch.ones(2, 4, dtype=torch.int8), [torch.zeros(4) for _ in range(4)]
STARTS = torch.tensor([0, 3], dtype=torch.int32)
S, ORDER = torch.ones(1, 2, 16, 8), sort_by_expert(torch.tensor([[0], [1]]), 2)
PAGED = (torch.ones(1, 2, 8), torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8), torch.tensor([[0, 1]]), torch.tensor([5]))


def away(*inputs: Any, which: int = -1) -> tuple[Any, ...]:
    """One of them on another device."""
    moved = list(inputs)
    moved[which] = moved[which].to("meta")
    return tuple(moved)


WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (rms_norm, ([1.0, 2.0],), {}, "rms_norm: x is a list; it must be a tensor"),
    (rms_norm, (None, X), {}, "rms_norm: x is a NoneType; it must be a tensor"),
    (rms_norm, (X.to_sparse(),), {}, r"x is torch.sparse_coo; it must be dense: pass x.to_dense\(\)"),
    (rms_norm, (X,), {"eps": "1e-5"}, "eps is '1e-5'; it must be a number"),
    (layer_norm, (X,), {"eps": -1.0}, "eps is -1.0; it must be a number, 0 or more"),
    (softmax, (X,), {"dim": 1.0}, "dim is 1.0; it must be a whole number"),
    (cross_entropy, (X, [0, 3]), {}, "targets is a list"),
    (cross_entropy, (X, None), {}, "targets is a NoneType"),
    (cross_entropy, (X, AIMS), {"ignore_index": None}, "ignore_index is None"),
    (cross_entropy, (X, AIMS), {"z_loss": math.nan}, "z_loss is nan"),
    (cross_entropy, (X, AIMS), {"label_smoothing": 2}, "label_smoothing is 2; it must be between 0 and 1"),
    (linear_cross_entropy, (X, X, AIMS, -100), {}, "bias is a int"),
    (linear_cross_entropy, (X, X, AIMS % 2, torch.ones(2).half()), {}, "x, weight and bias must have one dtype"),
    (dropout, (X, 0.5, 1.5), {}, "seed is 1.5; it must be a whole number"),
    (dropout, (X, math.nan, 1), {}, "p is nan; it must be between 0 and 1"),
    (rotary, (Q, Q[0, 0, :, :4], None), {}, "rotary: sin is a NoneType"),
    (topk_gate, (X, 2.0), {}, "k is 2.0"),
    (permute, (X, (AIMS, AIMS)), {}, "permute: order is a tuple; it must be an Order, of sort_by_expert"),
    (multi_norm, ([X, None],), {"order": "inf"}, "order is 'inf'; it must be a number"),
    (quantize, (X,), {"block": torch.tensor([16, 32])}, "must be a whole number"),
    (dequantize, ([1, 2], X), {}, "codes is a list"),
    (int8_matmul, (CODES, None), {}, "b is a NoneType"),
    (sort_by_expert, (AIMS[:, None], 4.0), {}, "number is 4.0"),
    (grouped_matmul, (X, torch.ones(2, 4, 1), [1, 1]), {}, "counts is a list"),
    (int8_matmul, (CODES, CODES, 0.5), {}, "a_scale is a float"),
    (flash_attention, ("q", Q, Q), {}, "q is a str"),
    (flash_attention, (Q, Q, Q), {"window": 3}, "window is 3"),
    (flash_attention, (Q, Q, Q), {"window": (2.5, 0)}, "left is 2.5"),
    (flash_attention, (Q, Q, Q), {"scale": "1"}, "scale is '1'"),
    (flash_attention_varlen, (*[Q[0].transpose(0, 1)] * 3, [0, 3], STARTS), {}, "starts_q is a list"),
    (block_sparse_attention, (*[torch.ones(1, 2, 16, 8)] * 3, [[1]], 16), {}, "layout is a list; it must be a tensor"),
    (adamw, (*MOMENTS, None, 0.1), {}, "step is a NoneType"),
    (adamw, (*MOMENTS, torch.ones(()), None), {}, "lr is None"),
    (adamw, (*MOMENTS, torch.ones(()), -0.1), {}, "lr is -0.1; it must be a number, 0 or more"),
    (adamw, (*MOMENTS, torch.ones(()), 0.1), {"betas": (0.9,)}, r"betas are \(0.9,\); they must be two numbers"),
    (adamw, (*MOMENTS, torch.ones(()), torch.ones(2)), {}, r"lr is \[2\]; it must be one number"),
    (adamw, (*MOMENTS, torch.ones(()), 0.1), {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
    (softmax, (X.long(),), {}, "softmax: x is torch.int64"),
    (swiglu, (X, X.long()), {}, "swiglu: up is torch.int64"),
    (geglu, (X.bool(), X), {}, "geglu: gate is torch.bool"),
    (dropout, (X.long(), 0.5, 1), {}, "dropout: x is torch.int64"),
    (rotary, (Q, Q[0, 0, :, :4], Q[0, 0, :, :4].long()), {}, "rotary: sin is torch.int64"),
    (topk_gate, (X.long(), 1), {}, "topk_gate: logits is torch.int64"),
    (block_sparse_attention, (S, S, S.long(), torch.ones(1, 1), 16), {}, "block_sparse_attention: v is torch.int64"),
    (block_sparse_attention, (S, S, S.half(), torch.ones(1, 1), 16), {}, "v torch.float16: one dtype is needed"),
    (paged_attention, (PAGED[0].long(), *PAGED[1:]), {}, "paged_attention: q is torch.int64"),
    (paged_attention, (*PAGED[:3], PAGED[3].float(), PAGED[4]), {}, "paged_attention: table is torch.float32"),
    (paged_attention, (PAGED[0].half(), *PAGED[1:]), {}, "q is torch.float16, keys torch.float32"),
    (permute, (X.long(), ORDER), {}, "permute: x is torch.int64"),
    (unpermute, (X, ORDER, X.long()), {}, "unpermute: weights is torch.int64"),
    (quantize, (X.long(),), {}, "quantize: x is torch.int64"),
    (dequantize, (CODES.long(), X[0]), {}, "codes cannot be torch.int64"),
    (linear_cross_entropy, (X, X.long(), AIMS), {}, "linear_cross_entropy: weight is torch.int64"),
    (adamw, (*MOMENTS, torch.ones(()), 0.1), {"low": CODES[0]}, "adamw: low is torch.int8"),
    (swiglu, away(X, X), {}, "swiglu: all tensors must be on one device, but gate on cpu, up on meta"),
    (layer_norm, away(X, X[0], X[0]), {}, "layer_norm: .* bias on meta"),
    (cross_entropy, away(X, AIMS), {}, "cross_entropy: .* targets on meta"),
    (linear_cross_entropy, away(X, X, AIMS), {}, "linear_cross_entropy: .* targets on meta"),
    (rotary, away(Q, Q[0, 0, :, :4], Q[0, 0, :, :4]), {}, "rotary: .* sin on meta"),
    (block_sparse_attention, away(S, S, S, torch.ones(1, 1), 16, which=2), {}, "block_sparse_attention: .* v on meta"),
    (flash_attention_varlen, away(*[Q[0].transpose(0, 1)] * 3, STARTS, STARTS), {}, "starts_k must be int32 on cpu"),
    (paged_attention, away(*PAGED), {}, "paged_attention: .* lengths on meta"),
    (unpermute, away(X, ORDER, X[:, :1], which=2), {}, "unpermute: .* weights on meta"),
    (grouped_matmul, away(X, torch.ones(1, 4, 3), torch.tensor([2])), {}, "grouped_matmul: .* counts on meta"),
    (int8_matmul, away(CODES, CODES), {}, "int8_matmul: .* b on meta"),
    (dequantize, away(CODES, X[0, :1]), {}, "dequantize: .* scales on meta"),
    (multi_norm, (away(X, X),), {}, r"the tensors are on \['cpu', 'meta'\]; one is needed"),
    (adamw, away(*MOMENTS, torch.ones(()), 0.1, which=3), {}, "adamw: .* second on meta"),
    (adamw, (*MOMENTS, torch.ones(()), torch.ones((), device="meta")), {}, "adamw: .* lr on meta"),
]


@pytest.mark.parametrize(("call", "inputs", "options", "says"), WRONG, ids=[w[3][:24] for w in WRONG])
def test_wrong_arguments_are_named(
    call: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call(*inputs, **options)
