"""A stage that nobody has any more is gone, with its memory, its files and its place in the group: sweeps make many."""

import weakref

import pytest
import torch
from test_plain_loop import batch, every_stage, small
from test_shared import files, settle
from training import STAGES
from worlds import NEAR, run

from refimpl.comm.group import Group


@every_stage
@pytest.mark.parametrize("stays", [False, True], ids=["its own group", "a group that stays"])
def test_a_stage_that_nobody_has_is_gone(stage: str, stays: bool) -> None:
    def check() -> None:
        settle()  # what the last test left
        group, before = Group.world() if stays else None, files()

        def train() -> list[weakref.ref[object]]:
            model = small()
            optimizer = torch.optim.AdamW(model.parameters())
            held = STAGES[stage](model, optimizer, group)
            for step in range(2):
                model(batch(step, held.group.rank)).square().mean().backward()
                optimizer.step()
            return [weakref.ref(one) for one in (model, optimizer, held, held.gradients, next(model.parameters()))]

        kept = train()
        shares = len(files()) > len(before)
        assert shares is (NEAR == "shared")
        settle()
        assert [one() for one in kept] == [None] * len(kept)
        assert (files() == before) is not (stays and shares)

    run(check, ranks=2)


class Keeping(torch.nn.Module):
    """Keeps a tensor of its forward, and with it the graph, as a mixture of experts keeps its auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(7, 5), torch.nn.Linear(5, 7)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.up(x).sin()
        out: torch.Tensor = self.down(self.kept).square().mean()
        return out


@every_stage
@pytest.mark.parametrize("through", [True, False], ids=["behind backward", "before backward"])
def test_a_stage_whose_model_keeps_a_graph_is_gone(stage: str, through: bool) -> None:
    def check() -> None:
        settle()
        before = files()

        def train() -> weakref.ref[object]:
            model = Keeping()
            optimizer = torch.optim.AdamW(model.parameters())
            held = STAGES[stage](model, optimizer)
            model(torch.ones(3, 7)).backward()
            optimizer.step()
            if not through:
                model.last = model(torch.ones(3, 7))
            return weakref.ref(held)

        kept = train()
        settle()
        assert kept() is None
        assert files() == before

    run(check, ranks=2)


class Exponential(torch.nn.Module):
    """Of whose output autograd saves that itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).exp()


@every_stage
def test_a_forward_that_no_backward_follows_leaves_nothing(stage: str) -> None:
    """As an evaluation without `torch.no_grad()`: each would leave its activations."""

    def check() -> None:
        model = Exponential()
        held = STAGES[stage](model, torch.optim.AdamW(model.parameters()))  # which goes on
        output = weakref.ref(model(torch.ones(3, 7)))
        settle()
        assert output() is None
        assert model.scale.stage is held

    run(check, ranks=2)


@every_stage
def test_a_graph_that_outlives_its_stage_goes_on_or_says_what_is_gone(stage: str) -> None:
    def check() -> torch.Tensor | str | None:
        torch.manual_seed(0)
        x = torch.ones(3, 7, requires_grad=True)

        def forward() -> torch.Tensor:
            model = Keeping()
            STAGES[stage](model, torch.optim.AdamW(model.parameters()))
            loss: torch.Tensor = model(x)
            return loss

        loss = forward()
        settle()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        return x.grad

    torch.manual_seed(0)
    x, model = torch.ones(3, 7, requires_grad=True), Keeping()
    model(x).backward()
    for got in run(check, ranks=2):
        if stage == "zero3":
            assert isinstance(got, str)
            assert "the weights of down, and their stage is gone" in got
        else:
            assert isinstance(got, torch.Tensor)
            assert x.grad is not None
            assert torch.equal(got, x.grad)
