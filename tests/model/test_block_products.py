"""Products with block-sparse matrices, and their softmax, against dense ones with zeros: values and gradients."""

import pytest
import torch
from torch import Tensor

from refimpl.deepspeed.ops.sparse_attention.matmul import MatMul
from refimpl.deepspeed.ops.sparse_attention.softmax import Softmax
from refimpl.model.block_products import Mode, multiply, softmax

Z, H, BLOCK = 2, 3, 4


def layout_of(rows: int, columns: int) -> Tensor:
    torch.manual_seed(0)
    layout = (torch.rand(H, rows, columns) < 0.5).long()
    layout[0, 1] = 0  # a row of blocks with none
    return layout


def dense(blocks: Tensor, layout: Tensor, empty: float = 0.0) -> Tensor:
    """[Z, blocks, BLOCK, BLOCK] -> [Z, H, M, N]."""
    out = blocks.new_full((Z, *layout.shape, BLOCK, BLOCK), empty)
    h, i, j = layout.nonzero(as_tuple=True)
    return out.index_put((torch.arange(Z)[:, None], h, i, j), blocks).transpose(3, 4).flatten(4, 5).flatten(2, 3)


def sparse(x: Tensor, layout: Tensor) -> Tensor:
    h, i, j = layout.nonzero(as_tuple=True)
    return x.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))[:, h, i, :, j].transpose(0, 1)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_products(mode: Mode, trans_a: bool, trans_b: bool) -> None:
    m, k, n = 3, 5, 2  # blocks
    shape_a, shape_b = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))
    layout = layout_of(*{"sdd": (m, n), "dsd": shape_a, "dds": shape_b}[mode])
    blocks = int(layout.sum())
    made = {
        "a": torch.randn(Z, H, *(s * BLOCK for s in shape_a), dtype=torch.float64),
        "b": torch.randn(Z, H, *(s * BLOCK for s in shape_b), dtype=torch.float64),
    }
    if mode != "sdd":
        made["a" if mode == "dsd" else "b"] = torch.randn(Z, blocks, BLOCK, BLOCK, dtype=torch.float64)
    a, b = (t.requires_grad_() for t in made.values())
    found = MatMul(layout, BLOCK, mode, trans_a, trans_b)(a, b)
    whole_a, whole_b = (dense(a, layout) if mode == "dsd" else a), (dense(b, layout) if mode == "dds" else b)
    expected = (whole_a.mT if trans_a else whole_a) @ (whole_b.mT if trans_b else whole_b)
    expected = sparse(expected, layout) if mode == "sdd" else expected
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (a, b), grad), torch.autograd.grad(expected, (a, b), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_sums_of_16_bits_are_in_fp32() -> None:
    """300 blocks of a row, each 1: in bf16 256 + 1 is 256."""
    layout = torch.ones(1, 1, 300, dtype=torch.int64)
    ones = torch.ones(1, 300, 1, 1, dtype=torch.bfloat16)
    assert multiply(ones, ones.view(1, 1, 300, 1), layout, 1, "dsd").item() == 300


def test_softmax_with_masks() -> None:
    layout = layout_of(3, 3)
    layout[:, :, 0] = 1
    layout[0, 1] = 0
    x = torch.randn(Z, int(layout.sum()), BLOCK, BLOCK, dtype=torch.float64, requires_grad=True)
    rpe = torch.randn_like(x).requires_grad_()
    padding = torch.zeros(Z, 3 * BLOCK, dtype=torch.float64)
    padding[1, 2:] = -torch.inf
    mask = (torch.rand(3 * BLOCK, 3 * BLOCK) < 0.7).double()
    mask[:, 0] = 1
    mask[5] = 0  # a row that sees nothing
    given = x.clone()  # as of a product: what is written over is no leaf
    found = Softmax(layout, BLOCK)(given, 0.3, rpe, padding, mask, "add", "mul")
    assert found is given  # as DeepSpeed's documentation has it
    scores = dense(0.3 * x + rpe, layout, -torch.inf) + padding[:, None, None, :]
    scores = scores.masked_fill(mask == 0, -torch.inf)
    expected = sparse(torch.softmax(scores, -1).nan_to_num(), layout)
    torch.testing.assert_close(found, expected)
    some = (scores > -torch.inf).any(-1)  # elsewhere torch's gradient is NaN
    grad = sparse((torch.randn_like(scores) * some[..., None]), layout)
    safe = torch.where(some[..., None], scores, 0.0).softmax(-1)
    theirs = torch.autograd.grad(sparse(safe, layout), (x, rpe), grad)
    for ours, other in zip(torch.autograd.grad(found, (x, rpe), grad), theirs, strict=True):
        torch.testing.assert_close(ours, other.nan_to_num())


def test_what_is_refused() -> None:
    layout = torch.ones(H, 2, 3)
    a, b = torch.randn(Z, H, 8, 5), torch.randn(Z, H, 5, 12)
    assert multiply(a, b, layout, BLOCK, "sdd").shape == (Z, H * 6, BLOCK, BLOCK)
    with pytest.raises(ValueError, match=r"needs 3 heads of 8 rows, not \[3, 4\]"):
        multiply(a[:, :, :4], b, layout, BLOCK, "sdd")
    with pytest.raises(ValueError, match=r"needs 3 heads of 12 rows, not \[3, 8\]"):
        multiply(torch.randn(Z, 18, BLOCK, BLOCK), a, layout, BLOCK, "dsd")
    with pytest.raises(ValueError, match=r"a layout of 18 blocks of 4: the matrix is \[2, 17, 4, 4\]"):
        multiply(torch.randn(Z, 17, BLOCK, BLOCK), b, layout, BLOCK, "dsd")
    with pytest.raises(NotImplementedError, match="Supported modes"):
        MatMul(layout, BLOCK, "ddd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same dtype"):
        MatMul(layout, BLOCK, "sdd")(a, b.half())
    with pytest.raises(ValueError, match=r"attn_mask must be torch.float32, not torch.bool"):
        Softmax(layout, BLOCK)(torch.randn(Z, 18, BLOCK, BLOCK), attn_mask=torch.ones(8, 12).bool())
    with pytest.raises(ValueError, match="mode is 'sub'"):
        Softmax(layout, BLOCK)(torch.randn(Z, 18, 4, 4), attn_mask=torch.ones(8, 12), attn_mask_mode="sub")
    assert softmax(torch.randn(Z, 18, 4, 4), layout, BLOCK).shape == (Z, 18, 4, 4)
