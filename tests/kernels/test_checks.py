"""What is no tensor or no number is named at once, by every operation."""

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
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.int8_matmul import int8_matmul
from refimpl.kernels.layer_norm import layer_norm
from refimpl.kernels.linear_cross_entropy import linear_cross_entropy
from refimpl.kernels.multi_norm import multi_norm
from refimpl.kernels.permute import permute, sort_by_expert
from refimpl.kernels.quantize import dequantize, quantize
from refimpl.kernels.rms_norm import rms_norm
from refimpl.kernels.rotary import rotary
from refimpl.kernels.softmax import softmax
from refimpl.kernels.topk_gate import topk_gate

X, Q, AIMS = torch.ones(2, 4), torch.ones(1, 2, 3, 8), torch.tensor([0, 3])
CODES, MOMENTS = torch.ones(2, 4, dtype=torch.int8), [torch.zeros(4) for _ in range(4)]
STARTS = torch.tensor([0, 3], dtype=torch.int32)
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
]


@pytest.mark.parametrize(("call", "inputs", "options", "says"), WRONG, ids=[w[3][:24] for w in WRONG])
def test_wrong_arguments_are_named(
    call: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call(*inputs, **options)
