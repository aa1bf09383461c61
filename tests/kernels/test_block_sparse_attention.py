"""Block-sparse attention beside masked dense attention in float64, and that absent blocks are never read."""

import pytest
import torch
from agreement import BOUND, assert_agrees
from torch import Tensor

from refimpl.kernels.block_lists import BlockLists
from refimpl.kernels.block_sparse_attention import block_sparse_attention, dense, reference
from refimpl.kernels.count import counted
from refimpl.kernels.language import INTERPRETED


def drawn(heads: int, rows: int, columns: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(seed)) < density


def assert_equals_dense(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, block: int, causal: bool) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, layout, block, causal=causal, scale=0.3)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q, k, v, layout, block, causal=causal, scale=0.3)

    # The interpreter cuts bf16 off where a GPU rounds, and dq is made of out.
    assert_agrees(ours, theirs, (q, k, v), BOUND[q.dtype] * (2 if q.dtype == torch.bfloat16 else 1))


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "width", "block", "causal", "own"),
    [
        (torch.float32, 96, 96, 40, 32, True, True),
        (torch.bfloat16, 128, 256, 64, 128, True, False),  # blocks in parts; the last queries of a longer sequence
        (torch.float16, 64, 64, 17, 16, False, True),
        (torch.bfloat16, 128, 64, 33, 64, True, False),  # the first block of queries sees nothing
    ],
    ids=str,
)
def test_equals_float64(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, width: int, block: int, causal: bool, own: bool
) -> None:
    q = torch.randn(1, 2, queries, width, device=device).to(dtype).requires_grad_()
    k, v = (torch.randn(1, keys, 1, width, device=device).to(dtype).transpose(1, 2).requires_grad_() for _ in "kv")
    layout = drawn(2 if own else 1, queries // block, keys // block, 0.6)
    assert_equals_dense(q, k, v, layout.to(device), block, causal)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_no_block_and_all_blocks(device: torch.device, density: float) -> None:
    q, k, v = (torch.randn(2, 1, 64, 16, device=device, requires_grad=True) for _ in "qkv")
    assert_equals_dense(q, k, v, drawn(1, 4, 4, density).to(device), 16, causal=True)


def test_lists_are_the_layout() -> None:
    layout = drawn(3, 5, 7, 0.4)
    assert torch.equal(dense(BlockLists.of(layout)), layout)
    lists = BlockLists.of(layout, causal=True)
    assert torch.equal(dense(lists), layout.tril(2))
    counts = lists.by_queries.starts.diff().view(3, 5)
    in_order = counts.gather(1, lists.by_queries.order.view(3, 5).long())
    assert torch.equal(in_order, counts.sort(dim=1, descending=True).values)


@pytest.mark.skipif(not INTERPRETED, reason="counted under the interpreter")
def test_absent_blocks_are_not_read(device: torch.device) -> None:
    """Bytes and FLOPs are those of the blocks present; nan in keys that no block names reaches nobody."""
    heads, block, width = 1, 32, 16
    layout = drawn(heads, 6, 6, 0.3)
    layout[:, :, 2] = False
    q, k, v = (torch.randn(1, heads, 6 * block, width, device=device) for _ in "qkv")
    k[:, :, 2 * block : 3 * block] = v[:, :, 2 * block : 3 * block] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with counted(trace=True) as c:
        out = block_sparse_attention(*inputs, layout, block)
    present = int(layout.sum())
    assert c.loaded_from["k"] == c.loaded_from["v"] == present * block * width * 4
    assert c.loaded_from["q"] == q.nbytes
    assert c.flops == 4 * present * block * block * width
    assert not c.races()
    with counted(trace=True) as c:
        grads = torch.autograd.grad(out.sum(), inputs)
    assert c.flops == 14 * present * block * block * width
    assert c.loaded_from["q"] == present * block * width * 4 + q.nbytes
    assert not c.races()
    assert not c.outside
    assert all(x.isfinite().all() for x in (out, *grads))


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    x = torch.ones(1, 2, 64, 16, device=device)
    layout = torch.ones(2, 4, 4, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=r"block is 8: it must be one of 16, 32, 64, 128"):
        block_sparse_attention(x, x, x, layout, 8)
    with pytest.raises(ValueError, match=r"63 queries are not a multiple of the block size 16: pad them"):
        block_sparse_attention(x[:, :, 1:], x, x, layout, 16)
    with pytest.raises(ValueError, match=r"the layout is \[2, 4, 4\]: \[2 \(or 1\), 2, 2\] is needed"):
        block_sparse_attention(x, x, x, layout, 32)
    with pytest.raises(ValueError, match=r"made for causal=True, the call says causal=False"):
        block_sparse_attention(x, x, x, BlockLists.of(layout, causal=True), 16)
