"""A sequence in tiles: the values and gradients of one piece, in every stage, with no more kept than the input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Job, Net, differing, train
from worlds import run

from refimpl.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)


class Mlp(nn.Module):
    """With tiles of a sequence that they do not divide."""

    shards = 3

    def __init__(self, width: int, wide: int = 17) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def whole(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return TiledMLP.apply(Mlp.whole, self, x, self.shards, list(self.parameters()))


class Tiled(Net):
    """Its second half, and its loss, in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(13)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), y, reduction="sum")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.mlp(self.blocks[0](self.embed(tokens))))
        summed = TiledFusedLogitsLoss.apply(Tiled.loss, self, x, tokens.roll(-1, 1), None, 3, None, "sum")
        return summed / tokens.numel()


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_to_the_bits_of_ddp(ranks: int) -> None:
    of = {stage: run(train, stage, Job(make=Tiled, steps=3), ranks=ranks)[0] for stage in ("ddp", "zero2", "zero3")}
    for stage in ("zero2", "zero3"):
        assert differing(of[stage].weights, of["ddp"].weights) == []
        assert of[stage].losses == of["ddp"].losses


def loss(x: Tensor, y: Tensor, mask: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    each = (x.tanh() - y).square().sum(-1)
    return (each if mask is None else each * mask).sum()


def by_keywords(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    tiled = {"x": x, "y": y, "mask": mask}
    return sequence_tiled_compute(loss, x.shape[1], 3, tiled, {"weight": None}, "x", None, 0, "sum")


def fused(x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    return TiledFusedLogitsLoss.apply(lambda _, *tile: loss(*tile), None, x, y, mask, 3, None, "sum")


@pytest.mark.parametrize("tiled", [by_keywords, fused])
def test_a_sum_is_that_of_the_whole(tiled: Callable[..., Tensor]) -> None:
    x, y = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(0)).double().unbind()
    x.requires_grad_()
    mask = torch.arange(14).view(2, 7) % 3 > 0
    given, wanted = tiled(x, y, mask), loss(x, y, mask)
    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(out, x)[0] for out in (given, wanted)))


def test_the_whole_layer_from_its_tiles() -> None:
    mlp = Mlp(4).double()
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    inputs = (x, *mlp.parameters())
    rows = sequence_tiled_compute(lambda x: mlp.whole(x), 7, 3, {"x": x}, {}, output_reduction=None)
    wanted = torch.autograd.grad(mlp.whole(x).square().sum(), inputs)
    for out in (mlp(x), rows):
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), wanted)


def kept(compute: Callable[[], Any]) -> int:
    """Elements that forward keeps for backward, each memory once."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = compute()
    assert result.requires_grad
    return sum(storages.values())


def test_keeps_no_more_than_its_input() -> None:
    mlp, x = Mlp(4, wide=50), torch.randn(1, 60, 4)
    of_weights = sum(p.numel() for p in mlp.parameters())
    assert kept(lambda: mlp.whole(x)) >= 60 * 50
    assert kept(lambda: mlp(x)) <= x.numel() + of_weights


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 7, 5)
    with pytest.raises(ValueError, match=r"output_reduction='none': must be one of 'mean', 'sum'"):
        TiledFusedLogitsLoss.apply(loss, None, x, x, None, 3, None, "none")
    with pytest.raises(ValueError, match=r"the same \[B, T\], not \[\[2, 7, 5\], \[2, 7, 5\], \[2, 6\]\]"):
        fused(x, x, torch.ones(2, 6))
