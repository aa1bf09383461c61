"""Ctrl-C in a notebook: torch tells no hook of a forward that ends in it. The cell that is executed again works."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import STAGES

from refimpl.zero.backward import in_backward

PLACES = ["forward", "hook", "recompute"]


class Layer(nn.Linear):
    """`stops` says where the next Ctrl-C comes."""

    stops = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.stops == ("recompute" if in_backward() else "forward"):
            raise KeyboardInterrupt
        return super().forward(x)

    def hook(self, *_: Any) -> None:
        if self.stops == "hook":
            raise KeyboardInterrupt


class Model(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.reentrant = nn.Linear(4, 4), Layer(4, 4), nn.Linear(4, 4), reentrant
        self.layer.register_forward_pre_hook(self.layer.hook, prepend=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant))
        return out


def losses(stage: str, place: str, reentrant: bool) -> list[float]:
    torch.manual_seed(0)
    model = Model(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    made = STAGES[stage](model, optimizer)  # type: ignore[call-arg]
    found = []
    for attempt in range(5):
        model.layer.stops = place if attempt in (1, 2) else ""
        try:
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
        except KeyboardInterrupt:
            continue  # and the cell is executed again
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not made.tensors().get("gathered")
    return found


def interrupted(stage: str) -> None:
    warnings.filterwarnings("ignore", message=".*the backward before this forward raised")
    for place, reentrant in itertools.product(PLACES, [False, True]):
        assert losses(stage, place, reentrant) == losses(stage, "", reentrant)[:3], (place, reentrant)


@pytest.mark.parametrize("stage", ["ddp", "zero2", "zero3"])
def test_a_step_broken_off_by_ctrl_c_is_taken_again(stage: str) -> None:
    worlds.run(interrupted, stage, ranks=2)
