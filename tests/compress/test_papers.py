"""What the papers state, with these operators."""

import pytest
import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.powersgd import LowRank, PowerSGD
from refimpl.compress.sign import Sign


def resnet18() -> list[torch.Size]:
    """Of CIFAR10: 11.2 million numbers in convolutions, the scales and shifts of their norms, and the last layer."""
    convolutions = [(64, 3, 3, 3)]
    for width, before in ((64, 64), (128, 64), (256, 128), (512, 256)):
        shortcut = [(width, before, 1, 1)] if width != before else []
        convolutions += [(width, before, 3, 3), *[(width, width, 3, 3)] * 3, *shortcut]
    shapes = [shape for c in convolutions for shape in (c, c[:1], c[:1])]
    return [torch.Size(shape) for shape in [*shapes, (10, 512), (10,)]]


@pytest.mark.parametrize(("rank", "times"), [(1, 243), (2, 136), (4, 72)])
def test_powersgd_sends_what_its_table_says(rank: int, times: int) -> None:
    """Vogels et al. 2019, arXiv:1905.13727, table 3: how many times fewer bytes than SGD."""
    shapes = resnet18()
    n = sum(shape.numel() for shape in shapes)
    exchange = LowRank(Group(None), PowerSGD(rank), n, shapes)
    values = sum(end - start for start, end in exchange.vectors)
    values += sum(exchange.power.rank_of(rows, columns) * (rows + columns) for _, rows, columns in exchange.matrices)
    assert round(n / values) == times


def descend(feedback: bool, epsilon: float = 0.5, steps: int = 3000) -> tuple[Tensor, Tensor]:
    """min epsilon |x1 + x2| + |x1 - x2| from (1, 1), by subgradients of which the sign and mean magnitude travel."""
    x, state, rates = torch.ones(2), ErrorFeedback(Sign(), 2), [0.05 / (1 + step) ** 0.5 for step in range(steps)]
    for rate in rates:
        g = epsilon * torch.sign(x.sum()) * torch.ones(2) + (1.0 if x[0] >= x[1] else -1.0) * torch.tensor([1.0, -1.0])
        wire = state.compress(rate * g) if feedback else Sign().compress(rate * g)
        state.accept()
        x = x - Sign().decompress(wire, 2)
    return x.sum(), (x[0] - x[1]).abs()


def test_signs_need_the_feedback_to_converge() -> None:
    """Karimireddy et al. 2019, arXiv:1901.09847, counterexample 2: by signs alone x1 + x2 never changes."""
    total, _ = descend(feedback=False)
    assert float(total) == pytest.approx(2.0, abs=1e-4)
    total, apart = descend(feedback=True)
    assert abs(float(total)) < 0.02
    assert float(apart) < 0.02
