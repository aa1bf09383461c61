"""Native sparse attention: three parts, of the past alone, read by block; the selection follows the coarse scores."""

import math

import pytest
import torch

from refimpl.model.native_sparse import coarse, compress, native_sparse_attention, selected
from refimpl.model.patterns.parts import window

BLOCK, N = 4, 6


def made(batch: int = 2, heads: int = 4, shared: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, h, N * BLOCK, 8, dtype=torch.float64) for h in (heads, shared, shared)]


def test_coarse_attention_is_attention_to_means_of_blocks_that_ended() -> None:
    q, k, _ = made()
    p = coarse(q, k, BLOCK)
    for token in range(N * BLOCK):
        over = token // BLOCK
        means = (
            torch.stack([k[1, 1, c * BLOCK : c * BLOCK + BLOCK].mean(0) for c in range(over)]) if over else k[1, 1, :0]
        )
        right = torch.softmax(q[1, 3, token] @ means.T / math.sqrt(8), -1)
        torch.testing.assert_close(p[1, 3, token, :over], right)
        assert not bool(p[1, 3, token, over:].any())


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_a_row_reads_its_own_block_and_the_best_of_the_past(count: int) -> None:
    q, k, _ = made()
    p = coarse(q, k, BLOCK)
    layout = selected(p, BLOCK, count, shared=2)
    assert torch.equal(layout[:, 0], layout[:, 1])  # they share a head of keys
    assert not bool(layout.triu(1).any())
    wish = p.view(2, 2, 2, N, BLOCK, N).sum((2, 4))
    for row in range(N):
        assert bool(layout[:, :, row, row].all())
        read = set(layout[1, 2, row, :row].nonzero().flatten().tolist())
        assert read == set(wish[1, 1, row, :row].argsort(descending=True)[:count].tolist())


def test_the_whole_is_its_three_parts_mixed_by_the_gates() -> None:
    q, k, v = (x.requires_grad_() for x in made())
    gates = torch.rand(2, 4, N * BLOCK, 3, dtype=torch.float64)
    p = coarse(q, k, BLOCK)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]

    def over(layout: torch.Tensor) -> torch.Tensor:
        mask = layout.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2).tril()
        scores = (q @ wide[0].transpose(2, 3) / math.sqrt(8)).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ wide[1]

    parts = [p @ compress(wide[1], BLOCK), over(selected(p, BLOCK, 2, 2)), over(window(N, 3, ahead=False))]
    right = sum(gates[..., i : i + 1] * part for i, part in enumerate(parts))
    mixed = native_sparse_attention(q, k, v, gates, BLOCK, count=2, near=2)
    torch.testing.assert_close(mixed, right)
    for mine, theirs in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (mixed, right)), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match="24 queries and 24 keys: both must be one multiple of the block size 5"):
        native_sparse_attention(q, k, v, gates, 5)


def test_nothing_of_the_future_comes_in() -> None:
    q, k, v = (x.requires_grad_() for x in made(1, 2, 1))
    gates = torch.ones(1, 2, N * BLOCK, 3, dtype=torch.float64)
    out = native_sparse_attention(q, k, v, gates, BLOCK)
    for token in (0, 3, 9, 22):
        for grad in torch.autograd.grad(out[:, :, token].sum(), (k, v), retain_graph=True):
            assert not bool(grad[:, :, token + 1 :].any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_16_bits(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in made())
    gates = torch.rand(2, 4, N * BLOCK, 3, dtype=dtype)
    wide = [x.detach().double() for x in (q, k, v, gates)]
    out = native_sparse_attention(q, k, v, gates, BLOCK, count=9)  # all of the past, so that no rounding chooses
    out.sum().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), native_sparse_attention(*wide, BLOCK, count=9), rtol=0, atol=32 * torch.finfo(dtype).eps
    )
    assert q.grad is not None
    assert q.grad.isfinite().all()
