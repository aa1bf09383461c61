"""Block-sparse attention: masked dense attention's values and gradients, and the blocks of the layout alone."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from refimpl.model import tiles
from refimpl.model.blocked import Problem
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.sliding import BigBirdSparsityConfig, BSLongformerSparsityConfig
from refimpl.model.sparse import SparseAttention, block_sparse_attention
from refimpl.model.tiles import Plan


def tokens(layout: Tensor, block: int) -> Tensor:
    """Of blocks -> of tokens."""
    return layout.bool().repeat_interleave(block, -1).repeat_interleave(block, -2)


def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, biases: Sequence[Tensor] = ()
) -> Tensor:
    """Dense attention that forbids where `mask` is false; a row that may read nothing gives zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    for bias in biases:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0) @ v


def qkv(
    batch: int, heads: int, shared: int, length: int, width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    made = [torch.randn(batch, h, length, width, dtype=dtype) for h in (heads, shared, shared)]
    return [x.requires_grad_() for x in made]


CASES = [  # batch, heads, heads of keys, blocks, block, width, causal, layout's dimensions before the blocks
    (1, 1, 1, 4, 4, 8, False, ()),
    (2, 4, 2, 6, 4, 8, True, (4,)),
    (3, 4, 1, 5, 16, 12, False, (1,)),
    (2, 3, 3, 7, 3, 5, True, (2, 3)),
    (2, 6, 2, 9, 1, 3, True, (6,)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_masked_dense_attention_and_its_gradients(
    case: tuple[Any, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, heads, shared, n, block, width, causal, before = case
    monkeypatch.setattr(tiles, "CHUNK", 7 * block * block)  # several chunks, of several tiles or of a part of a row's
    torch.manual_seed(n)
    inputs, length = qkv(batch, heads, shared, n * block, width), n * block
    layout = torch.rand(*before, n, n) < 0.4
    layout[..., 1, :] = False  # a row that reads nothing
    biases = (
        [torch.randn(*s, length, length, dtype=torch.float64) for s in ((), (heads,), (batch, 1))] if biased else []
    )
    biases = [bias.requires_grad_() for bias in biases]
    key_bias = torch.zeros(batch, length, dtype=torch.float64)
    key_bias[torch.rand(batch, length) < 0.3] = -torch.inf
    mask = tokens(layout, block)
    mask = mask if mask.dim() < 4 else mask.view(batch, heads, length, length)
    mask = mask & torch.ones(length, length, dtype=torch.bool).tril() if causal else mask
    ours = block_sparse_attention(
        *inputs, layout, block, causal=causal, key_bias=key_bias if biased else None, biases=biases, scale=0.3
    )
    oracle = masked(*inputs, mask, 0.3, [*biases, key_bias[:, None, None]] if biased else [])
    torch.testing.assert_close(ours, oracle, rtol=0, atol=1e-13)
    assert not bool(ours[:, :, block : 2 * block].any())
    grads = [torch.autograd.grad(out, [*inputs, *biases], torch.cos(oracle.detach())) for out in (ours, oracle)]
    for mine, right in zip(*grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_made_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach().to(dtype) for x in qkv(1, 2, 2, 64, 16))
    layout = FixedSparsityConfig(2, 8).make_layout(64)
    ours = block_sparse_attention(q, k, v, layout, 8)
    assert ours.dtype == dtype
    right = masked(q.double(), k.double(), v.double(), tokens(layout, 8))
    assert (ours.double() - right).abs().max() < (2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


def test_blocks_that_are_not_in_the_layout_are_not_read() -> None:
    """NaN in one block of keys and values comes out of the rows that read it, and of no others."""
    torch.manual_seed(1)
    q, k, v = qkv(1, 3, 3, 40, 4)
    layout = torch.rand(3, 10, 10) < 0.5
    for col in range(10):
        with torch.no_grad():
            poisoned = [x.clone() for x in (k, v)]
            for x in poisoned:
                x[:, :, col * 4 : col * 4 + 4] = torch.nan
            out = block_sparse_attention(q, *poisoned, layout, 4)
        assert torch.equal(out.isnan().view(3, 10, -1).any(-1), layout[:, :, col])


@pytest.mark.parametrize("causal", [False, True])
def test_work_is_density_times_dense(causal: bool) -> None:
    """torch's own count of FLOPs: 4 b^2 D a block read in forward, 10 b^2 D in backward, over all heads."""
    block, width, heads = 16, 8, 2
    q, k, v = qkv(2, heads, heads, 512, width, torch.float32)
    layout = BigBirdSparsityConfig(heads, block, different_layout_per_head=True, seed=2).make_layout(512)
    read = int((layout.tril() if causal else layout).sum()) * q.shape[0]
    plan = Plan(layout, causal)
    assert plan.blocks * q.shape[0] == read
    with FlopCounterMode(display=False) as forward:
        out = block_sparse_attention(q, k, v, plan, block)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 4 * read * block**2 * width
    assert backward.get_total_flops() == 10 * read * block**2 * width


def test_scores_of_a_few_tiles_are_all_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    take = Problem.scratch

    def noted(self: Problem, name: str, *shape: int) -> Tensor:
        sizes.append(math.prod(shape))
        return take(self, name, *shape)

    monkeypatch.setattr(Problem, "scratch", noted)
    q, k, v = qkv(1, 2, 2, 4096, 4, torch.float32)
    block_sparse_attention(q, k, v, BSLongformerSparsityConfig(2, 32).make_layout(4096), 32).sum().backward()
    assert len(sizes) > 20
    some = tiles.CHUNK * torch.get_num_threads()  # of 2 x 16 M
    assert max(sizes) <= max(some, tiles.TALL * 4096)  # one row of blocks reads everything


def test_chunks_end_where_rows_do_not_go_on_evenly() -> None:
    """As at a head's end, unless less than half of a chunk would be there."""

    def cut(firsts: list[int], most: int) -> list[tuple[int, int]]:
        return [(here.start, here.stop) for here in tiles.cuts(firsts, most)]

    assert cut([1, 2, 3, 4, 11, 12, 13, 14], 6) == [(0, 4), (4, 8)]
    assert cut([1, 2, 9, 10, 11], 6) == [(0, 5)]
    assert cut([0, 2, 4, 6, 8], 2) == [(0, 2), (2, 4), (4, 5)]
    assert cut([3, 1, 7], 1) == [(0, 1), (1, 2), (2, 3)]
    assert cut([], 3) == []


def test_a_plan_is_made_once_and_takes_any_batch() -> None:
    plan = Plan(torch.eye(4), causal=True)
    for batch, heads in ((1, 1), (3, 2), (0, 2)):
        q, k, v = qkv(batch, heads, heads, 16, 4)
        mask = tokens(torch.eye(4), 4).tril()
        torch.testing.assert_close(block_sparse_attention(q, k, v, plan, 4), masked(q, k, v, mask))
    assert len(plan.kept) == 3
    assert plan.density == pytest.approx(4 / 10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", [torch.ones(2, 4), torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])])
def test_the_last_query_and_the_last_key_are_one_token(layout: Tensor, causal: bool) -> None:
    q, k, v = qkv(2, 4, 2, 16, 4)
    mask = tokens(layout, 4) & torch.ones(8, 16, dtype=torch.bool).tril(8 if causal else 16)
    ours = block_sparse_attention(q[:, :, 8:], k, v, layout, 4, causal=causal)
    torch.testing.assert_close(ours, masked(q[:, :, 8:], k, v, mask))


def test_a_full_layout_is_plain_attention() -> None:
    q, k, v = qkv(1, 4, 2, 16, 4)
    for causal in (False, True):
        mask = torch.ones(16, 16, dtype=torch.bool)
        ours = block_sparse_attention(q, k, v, torch.ones(4, 4), 4, causal=causal)
        torch.testing.assert_close(ours, masked(q, k, v, mask.tril() if causal else mask))
    nothing = block_sparse_attention(q, k, v, torch.zeros(4, 4), 4)
    assert not bool(nothing.any())
    assert [x.abs().sum().item() for x in torch.autograd.grad(nothing.sum(), (q, k, v))] == [0, 0, 0]


def test_strides_do_not_matter() -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 3, 3, 32, 8))
    layout = torch.eye(4) + torch.eye(4).roll(1, 0)
    mine = block_sparse_attention(q, k, v, layout, 8)
    torch.testing.assert_close(mine, masked(q, k, v, tokens(layout, 8)))


def test_rows_may_read_backwards() -> None:
    """The first row the last block: blocks at even distances, but at strides that torch does not know."""
    q, k, v = qkv(1, 1, 1, 32, 8)
    layout = torch.eye(4).flip(0)
    mine, right = block_sparse_attention(q, k, v, layout, 8), masked(q, k, v, tokens(layout, 8))
    for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (mine, right)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 30}, "30 queries are not a multiple of the block size 8: pad them"),
        ({"layout": torch.ones(3, 3)}, "32 queries are 4 blocks of 8, the layout has 3"),
        ({"layout": torch.ones(3, 4, 4)}, "a layout of 3 heads for 2 heads of queries"),
        ({"layout": torch.ones(5, 2, 4, 4)}, "of 5 sequences for 1"),
        ({"layout": torch.ones(4)}, "give \\[rows, columns\\]"),
        ({"block": 0}, "block size 0"),
        ({"dtype": torch.int64}, "floating-point"),
        ({"biases": [torch.ones(3, 32, 32)]}, "bias \\(3, 32, 32\\) does not fit"),
        ({"key_bias": torch.ones(32)}, "not \\[batch, keys\\]"),
        ({"shared": 3}, "do not share 3 heads"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    given = {"length": 32, "layout": torch.eye(4), "block": 8, "dtype": torch.float32, "shared": 2} | change
    q = torch.ones(1, 2, given.pop("length"), 4, dtype=given["dtype"])
    k = torch.ones(1, given.pop("shared"), *q.shape[2:], dtype=given.pop("dtype"))
    with pytest.raises(ValueError, match=says):
        block_sparse_attention(q, k, k, **given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("t_q", "t_k"), [(19, 19), (16, 16), (1, 19), (6, 19), (19, 24)])
def test_a_model_may_have_any_length_and_keys_from_before(causal: bool, t_q: int, t_k: int) -> None:
    """The queries are the last tokens: a cache's step is a row of the attention over all of them."""
    torch.manual_seed(2)
    q, k, v = (x.detach() for x in qkv(2, 4, 2, t_k, 8))
    pattern = FixedSparsityConfig(4, 4, num_local_blocks=2)
    attend = SparseAttention(pattern, 64, causal)
    mask = tokens(pattern.make_layout(64), 4)[:, :t_k, :t_k]
    mask = mask.tril() if causal else mask
    seen = torch.rand(2, t_k) < 0.7
    right = masked(q, k, v, mask[None] & seen[:, None, None])[:, :, -t_q:]
    torch.testing.assert_close(attend(q[:, :, -t_q:], k, v, key_mask=seen), right)
    torch.testing.assert_close(attend(q[:, :, -t_q:], k, v), masked(q, k, v, mask[None])[:, :, -t_q:])
    with pytest.raises(ValueError, match="at most 64 tokens"):
        attend(*qkv(1, 4, 4, 65, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_the_kernel_says_what_the_blocked_path_says(causal: bool) -> None:
    torch.manual_seed(0)
    made = [x.detach().cuda().requires_grad_() for x in qkv(2, 4, 2, 256, 64, torch.float32)]
    plan = Plan(BigBirdSparsityConfig(4, 32, seed=1).make_layout(256), causal)
    kernel = block_sparse_attention(*made, plan, 32)
    blocked = block_sparse_attention(*made, plan, 32, biases=[torch.zeros(256, 256, device="cuda")])
    torch.testing.assert_close(kernel, blocked, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(*(torch.autograd.grad(out.sum(), made) for out in (kernel, blocked)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
