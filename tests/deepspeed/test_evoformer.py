"""DS4Sci_EvoformerAttention: the formula in float64 a residue at a time, gradients, low precision, what is refused."""

import pytest
import torch
from torch import Tensor

from refimpl.deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

B, N, L, H, D = 2, 3, 5, 2, 4


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Q, K, V, a mask and a bias of pairs."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(B, N, L, H, D)] * 3 + [(B, N, 1, 1, L), (B, 1, H, L, L)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("given", [(), (0,), (1,), (0, 1)])
def test_a_residue_at_a_time(given: tuple[int, ...]) -> None:
    q, k, v, *biases = inputs(torch.float64)
    chosen = [biases[i] if i in given else None for i in range(max(given, default=-1) + 1)]
    out = DS4Sci_EvoformerAttention(q, k, v, chosen)
    for b, n, i, h in torch.cartesian_prod(*map(torch.arange, (B, N, L, H))).tolist():
        scores = k[b, n, :, h] @ q[b, n, i, h] / D**0.5
        scores = scores + (biases[0][b, n, 0, 0] if 0 in given else 0) + (biases[1][b, 0, h, i] if 1 in given else 0)
        torch.testing.assert_close(out[b, n, i, h], scores.softmax(0) @ v[b, n, :, h])


def test_gradients_of_the_biases_too() -> None:
    assert torch.autograd.gradcheck(
        lambda q, k, v, *biases: DS4Sci_EvoformerAttention(q, k, v, biases), inputs(torch.float64)
    )


def test_bf16_scores_are_kept_in_fp32() -> None:
    q, k, v, mask, pair = inputs(torch.bfloat16)
    out = DS4Sci_EvoformerAttention(q, k, v, [mask, pair])
    exact = DS4Sci_EvoformerAttention(q.double(), k.double(), v.double(), [mask.double(), pair.double()])
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * v.abs().max()


def test_shapes_that_it_does_not_take() -> None:
    q, k, v, mask, pair = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"shape \[2, 1, 2, 5, 5\], expected \[2, 3, 1, 1, 5\]"):
        DS4Sci_EvoformerAttention(q, k, v, [pair, mask])
    with pytest.raises(ValueError, match="3 biases"):
        DS4Sci_EvoformerAttention(q, k, v, [mask, pair, pair])
