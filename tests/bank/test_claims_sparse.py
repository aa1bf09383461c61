"""What the cards on sparse attention say, in a few lines of torch each."""

import torch

from refimpl.bank.card import Numeric
from refimpl.bank.load import load
from refimpl.deepspeed.ops.sparse_attention import LocalSlidingWindowSparsityConfig, SparseSelfAttention
from refimpl.model.native_sparse import selected
from refimpl.model.patterns.base import density
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.parts import window
from refimpl.model.sparse import block_sparse_attention

CARDS = load()


def drawn(name: str, seed: int) -> dict[str, float]:
    card = CARDS[name]
    assert isinstance(card, Numeric)
    return card.names(seed)


def test_a_stretch_of_sqrt_n_reads_least() -> None:
    n = 64
    read = {}
    for local in (1, 2, 4, 8, 16, 32):
        layout = FixedSparsityConfig(1, 1, num_local_blocks=local).make_layout(n)[0]
        read[local] = set(layout.sum(1).tolist())
    assert read[8] == {2 * 8 - 1}
    assert min(read, key=lambda local: max(read[local])) == 8
    layout = FixedSparsityConfig(1, 1, num_local_blocks=8).make_layout(n)[0]
    assert bool((layout @ layout > 0).all())  # two layers from anything to anything


def test_a_unidirectional_layout_alone_leaks_the_rest_of_the_block() -> None:
    torch.manual_seed(0)
    layer = SparseSelfAttention(LocalSlidingWindowSparsityConfig(1, 16), max_seq_length=64)
    x = torch.randn(1, 1, 64, 8, requires_grad=True)
    causal = torch.ones(64, 64).tril()
    for token, mask, leaks in ((16, None, 15), (31, None, 0), (16, causal, 0)):
        (grad,) = torch.autograd.grad(layer(x, x, x, attn_mask=mask)[:, :, token].sum(), x)
        assert int((grad[0, 0, token + 1 :] != 0).any(1).sum()) == leaks


def test_a_causal_window_is_the_cards_share_of_full_attention() -> None:
    for seed in range(6):
        names = drawn("sparse-window-flops", seed)
        n, before = int(names["T"] / names["b"]), int(names["w"] / names["b"])
        layout = window(n, 2 * before + 1, ahead=False)
        assert int(layout[-1].sum()) == before + 1
        share = density(layout, causal=True)
        left_out = before * (before + 1) / 2 / (n * (n + 1) / 2)  # what the first rows do not have
        assert abs(names["answer"] * n / (n + 1) - left_out - share) < 1e-6


def test_windows_of_several_layers_reach_the_sum_of_their_widths() -> None:
    length, width, layers = 24, 3, 4
    near, x = window(length, 2 * width + 1, ahead=False), torch.randn(1, 1, length, 8, requires_grad=True)
    y = x
    for _ in range(layers):
        y = block_sparse_attention(y, y, y, near, 1)
    (grad,) = torch.autograd.grad(y[:, :, -1].sum(), x)
    assert grad[0, 0].any(1).nonzero().min() == length - 1 - layers * width


def test_a_group_that_shares_its_selection_reads_the_cards_bytes() -> None:
    for seed in range(4):
        H, K, D, c = (int(drawn("sparse-group-selection", seed)[key]) for key in "HKDc")
        wish = torch.rand(1, H, 2 * c * 64, 2 * c, generator=torch.Generator().manual_seed(seed))
        read = {}
        for shared in (H // K, 1):
            layout = selected(wish, 64, c - 1, shared)[0, :, -1]  # the last row: its own block and c - 1 others
            blocks = int(layout.view(K, H // K, 2 * c).any(1).sum())
            read[shared] = 2 * 2 * 64 * D * blocks  # k and v, 16 bits
        assert read[H // K] == drawn("sparse-group-selection", seed)["answer"]
        assert 1.5 * read[H // K] < read[1] <= H // K * read[H // K]
