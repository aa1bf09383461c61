"""torch.func in a model under ZeRO-3: vmap works, and where nothing can be gathered that is said by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from training import differing
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.zero3 import Zero3

Way = Callable[[nn.Module, Tensor], Tensor]
WAYS: dict[str, Way] = {
    "over samples": lambda module, x: vmap(module)(x),
    "of the input": lambda module, x: grad(lambda row: module(row).square().sum())(x),
    "of the parameters": lambda module, x: grad(lambda p: functional_call(module, p, (x,)).sum())(
        {name: p * 1 for name, p in module.named_parameters()}
    )["weight"],
}


class Net(nn.Module):
    def __init__(self, way: str, scaled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.energy, self.way = nn.Linear(4, 4), nn.Linear(4, 4), WAYS[way]
        self.scale = nn.Parameter(torch.ones(4)) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.way(self.energy, self.first(x)) * self.scale).square().mean()


def trained(stage: type[DDP] | type[Zero3], way: str, scaled: bool, whole: int) -> dict[str, Tensor] | None:
    """Runs on every rank."""
    model, group = Net(way, scaled), Group.world()
    config = ZeroConfig(param_persistence_threshold=whole)
    built = stage(model, torch.optim.SGD(model.parameters(), lr=0.1), group, config)
    for step in range(2):
        built.backward(model(torch.full((3, 4), 1.0 + step + group.rank)))
        built.step()
    return built.full_state_dict()


@pytest.mark.parametrize(
    ("way", "scaled", "whole"),
    [("over samples", True, 0), ("of the input", True, 16), ("of the parameters", False, 16)],
)
def test_a_transform_of_what_is_whole_has_the_same_bits(way: str, scaled: bool, whole: int) -> None:
    ddp, zero3 = (run(trained, stage, way, scaled, whole)[0] for stage in (DDP, Zero3))
    assert ddp is not None
    assert differing(zero3, ddp) == []


@pytest.mark.parametrize(
    ("way", "scaled", "who"),
    [
        ("of the input", False, "energy is needed"),
        ("of the input", True, "hooks around the model, which has parameters"),
    ],
)
def test_a_transform_of_what_is_in_shards_is_refused_by_name(way: str, scaled: bool, who: str) -> None:
    """It ended inside of the transport, in "Cannot access data pointer of Tensor that doesn't have storage"."""
    with pytest.raises(RankError, match=rf"(?s){who}.*create_graph=True.*param_persistence_threshold"):
        run(trained, Zero3, way, scaled, 0)
