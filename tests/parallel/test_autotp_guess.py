"""Models of which nobody gave an example: what they are called with is guessed, and the cut is as exact as with one."""

import logging

import autotp_models as models
import pytest
import torch
from autotp_same import kinds, made, same_numbers
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.parallel.auto.guess import guessed, words
from refimpl.parallel.autotp import autotp, called


class Classifier(nn.Module):
    """Two required inputs, numbers and classes, of which the first as often as not has no sequences."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(width, 24), nn.Linear(24, width), nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return nn.functional.cross_entropy(self.head(x), y, weight)


class Pixels(nn.Sequential):
    """Begins with no layer that says what it wants."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 8))


class Many(Classifier):
    def forward(self, x: Tensor, y: Tensor, z: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y, weight) + z.sum()


def test_the_first_call_that_works_is_taken_and_none_where_none_does() -> None:
    found = {
        "x float32 [2, 12], y int64 [2]": Classifier(),
        "ids int64 [2, 8]": models.Stranger(),
        "input_ids int64 [2, 8]": models.Masked(tokens=True),
    }
    for expected, model in found.items():
        before = torch.random.get_rng_state()
        guess = guessed(model, called)
        assert guess is not None
        assert words(guess) == expected
        assert torch.equal(before, torch.random.get_rng_state())
    assert guessed(Pixels(), called) is None
    assert guessed(Many(), called) is None


def cut() -> list[str]:
    """Warnings of this rank."""
    group, said = Group.world(), list[str]()
    logger, handler = logging.getLogger("refimpl"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        torch.manual_seed(group.rank)
        model = Classifier()
        torch.manual_seed(0)
        whole = Classifier()
        report = autotp(model, group)
        assert {name: report.kinds[name] for name in ("up", "down")} == {"up": "columns", "down": "rows"}
        draw = torch.Generator().manual_seed(3)
        batch = {"x": torch.randn(7, 12, generator=draw), "y": torch.randint(5, (7,), generator=draw)}
        same_numbers(model, whole, batch, group)
        model, example = made("stranger")
        report = autotp(model, group)
        assert kinds(report)["stack.*.a.sum_up"] == "rows"
        same_numbers(model, made("stranger", rank=0)[0], example, group)
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_is_cut_by_a_guess_and_says_so_once(ranks: int) -> None:
    first, *others = run(cut, ranks=ranks)
    assert [words.split(" has no example")[0] for words in first] == ["autotp: Classifier", "autotp: Stranger"]
    assert "rehearsed with x float32 [2, 12], y int64 [2], a guess" in first[0]
    assert others == [[]] * (ranks - 1)
