"""Parameters trained later, one of a layer at a time: under ZeRO-3 a unit is then trained in part."""

import copy

import pytest
import torch
from pairs import pairwise
from torch import Tensor, nn
from training import STAGES, differing
from worlds import run

from refimpl.comm.group import Group
from refimpl.zero.config import ZeroConfig
from refimpl.zero.stage import Stage

LAYER = ("1.weight", "1.bias")


def grow(how: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The second layer's bias wants a gradient from the first step on, its weight from the third."""
    named = dict(model.named_parameters())
    later = [named[name].requires_grad_() for at, name in ((0, "1.bias"), (2, "1.weight")) if at == step]
    if how == "added" and later and step == 0:
        optimizer.add_param_group({"params": later, "lr": 0.05, "weight_decay": 0.0})


def trained(stage_name: str, how: str, dtype: torch.dtype, cast: torch.dtype | None = None) -> dict[str, Tensor]:
    """The weights and moments after four steps. `thawed`: the layer is in two groups, `added`: the weight in none.

    cast: what the stage makes of the model.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)).to(dtype)
    named = dict(model.named_parameters())
    given = [p for name, p in named.items() if name not in LAYER or (how == "thawed" and name == "1.weight")]
    groups = [{"params": given}, {"params": [named["1.bias"]], "weight_decay": 0.0}]
    if how == "one group":
        groups = [{"params": list(named.values())}]
    optimizer = torch.optim.AdamW(groups[: 2 if how == "thawed" else 1], lr=0.1, weight_decay=0.1)
    model[1].requires_grad_(False)
    stage = STAGES[stage_name](model, optimizer, Group.world(), ZeroConfig(dtype=cast))  # type: ignore[call-arg]
    for step in range(4):
        grow(how, model, optimizer, step)
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + stage.group.rank)).to(cast or dtype)
        stage.backward(model(x).float().square().sum())
        stage.step()
        model.zero_grad()
    moments = {f"exp_avg {name}": moment(stage, name) for name in named}
    return {name: stage.full_parameter(name) for name in named} | moments


def moment(stage: Stage, name: str) -> Tensor:
    found = stage.full_state(name, "exp_avg")
    return torch.zeros(()) if found is None else found


WAYS = pairwise(["one group", "thawed", "added"], [torch.float32, torch.bfloat16], [2, 3])


@pytest.mark.parametrize(("how", "dtype", "ranks"), WAYS)
def test_half_a_layer_is_trained_as_in_ddp(how: str, dtype: torch.dtype, ranks: int) -> None:
    base, zero3 = (run(trained, stage, how, dtype, ranks=ranks) for stage in ("ddp", "zero3"))
    for mine, theirs in zip(zero3, base, strict=True):
        assert not differing(mine, theirs)


def test_what_is_thawed_begins_with_the_weight_that_computed() -> None:
    """ZeRO-3 kept what rounding had taken off what is frozen: 4 bytes an element, and no longer true behind a load."""
    base, zero3 = (run(trained, stage, "one group", torch.float32, torch.bfloat16) for stage in ("ddp", "zero3"))
    assert not differing(zero3[0], base[0])


def loaded_into_what_was_thawed(stage_name: str) -> None:
    """A run, and one that thaws its layer and then takes the first one's state, are the same from there on."""
    ends, state = [], None
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model[0].requires_grad_(False)
        stage = STAGES[stage_name](model, optimizer, Group.world())  # type: ignore[call-arg]
        model.requires_grad_(True)
        steps = 1 if state else 2
        if state:
            stage.load_state_dict(state)
        for left in reversed(range(steps)):
            stage.backward(model(torch.full((2, 5), 1.0 + left)).square().sum())
            stage.step()
            if left:
                state = copy.deepcopy(stage.state_dict())
        ends.append({name: stage.full_parameter(name) for name in stage.names.values()})
        ends[-1] |= {f"{name}'s": stage.full_state(name, "exp_avg") for name in stage.names.values()}
    assert not differing(*ends)


@pytest.mark.parametrize("stage", list(STAGES))
def test_what_was_thawed_before_a_load_takes_its_state_too(stage: str) -> None:
    run(loaded_into_what_was_thawed, stage)


def added_one_by_one() -> int:
    """How many groups there are when a unit would be of two."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7))
    optimizer = torch.optim.AdamW(model[0].parameters())
    STAGES["zero3"](model, optimizer, Group.world())  # type: ignore[call-arg]
    optimizer.add_param_group({"params": [model[1].bias]})
    with pytest.raises(
        ValueError, match=r"updates 1\.weight together with 1\.bias, which is trained in group 1, not 2"
    ):
        optimizer.add_param_group({"params": [model[1].weight]})
    return len(optimizer.param_groups)


def test_a_unit_of_two_groups_is_refused_before_anything_changes() -> None:
    assert run(added_one_by_one, ranks=2) == [2, 2]
