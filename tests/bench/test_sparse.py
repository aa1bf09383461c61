"""The race of attentions: every contestant in every heat, and FlexAttention's result is ours."""

import pytest
import torch
import torch.nn.functional as F

from refimpl.bench import sparse
from refimpl.model.patterns.named import pattern_named
from refimpl.model.patterns.sliding import BigBirdSparsityConfig
from refimpl.model.sparse import block_sparse_attention


def test_a_heat_has_its_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse.shutil, "which", lambda name: None)  # compiling takes half a minute
    heats = list(sparse.measure([128], ["local", "dense"], [32], heads=2, width=8, turns=1))
    assert [[row.contestant for row in heat] for heat in heats] == [["dense, fused", "dense, eager", "ours"]] * 2
    assert heats[0][0].density == 10 / 16
    assert heats[1][0].density == 1
    assert heats[1][0].forward_of_fused == heats[1][1].backward_of_eager == 1, "each is its own bound"
    assert all(row.forward_ms > 0 and row.backward_ms is not None for heat in heats for row in heat)


def test_eager_attention_is_the_fused_one() -> None:
    q, k, v = (torch.randn(1, 3, 20, 8) for _ in range(3))
    torch.testing.assert_close(sparse.eager(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("block", "pattern", "blocks"), [(64, "local", 9), (64, "bigbird", 8), (128, "local", 5)])
def test_published_widths(block: int, pattern: str, blocks: int) -> None:
    """A row reads 256 tokens on either side and its own block; in BigBird two global blocks, three and three random."""
    layout = pattern_named(pattern, 1, sparse.options_of(pattern, block, published=True)).make_layout(8192)
    rows = layout[0, 8:-8].sum(-1)
    assert rows.max() == blocks
    assert rows.float().mean() > blocks - 1  # random ones may fall on the window


@pytest.mark.filterwarnings("ignore")  # that it is not compiled
def test_flex_attention_has_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout = BigBirdSparsityConfig(2, 32, different_layout_per_head=True, seed=1).make_layout(256)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    flex = sparse.flex(layout, 32, 256, "cpu")
    torch.testing.assert_close(flex(q, k, v), block_sparse_attention(q, k, v, layout, 32), rtol=1e-4, atol=1e-5)
