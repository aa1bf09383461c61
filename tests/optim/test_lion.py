"""Lion against the paper's algorithm in fp64, and the same bits however the parameters are cut."""

from typing import Any

import pytest
import torch

from refimpl.optim.lion import Lion

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def gradients(size: int, steps: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def train(cuts: list[int], steps: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Parameters [sum of cuts] after Lion's steps, kept as one tensor a cut."""
    start = torch.linspace(-1, 1, sum(cuts), dtype=dtype)
    shards = [torch.nn.Parameter(part.clone()) for part in start.split(cuts)]
    optimizer = Lion(shards, **OPTIONS)
    for grad in steps:
        for shard, part in zip(shards, grad.to(dtype).split(cuts), strict=True):
            shard.grad = part.clone()
        optimizer.step()
    return torch.cat([shard.detach() for shard in shards])


@pytest.mark.parametrize("cuts", [[1, 1000], [500, 501], [7, 64, 930], [1] * 1001, [1001]])
def test_any_cut_gives_the_same_bits(cuts: list[int]) -> None:
    steps = gradients(1001)
    assert torch.equal(train(cuts, steps), train([1001], steps))


def test_the_papers_algorithm() -> None:
    steps = gradients(50)
    expected, momentum = torch.linspace(-1, 1, 50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for grad in steps:
        direction = torch.sign(0.9 * momentum + 0.1 * grad.double())
        expected = expected - 1e-2 * (direction + 0.1 * expected)
        momentum = 0.99 * momentum + 0.01 * grad.double()
    torch.testing.assert_close(train([50], steps, torch.float64), expected, rtol=1e-12, atol=1e-12)


def test_the_stages_may_shard_it() -> None:
    assert Lion.elementwise


def test_one_state_of_the_parameters_size() -> None:
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = Lion([weight])
    weight.grad = torch.ones(10)
    optimizer.step()
    assert {name: tensor.shape for name, tensor in optimizer.state[weight].items()} == {"exp_avg": weight.shape}


def test_resuming_changes_nothing() -> None:
    steps = gradients(20)
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 20))
    optimizer = Lion([weight], **OPTIONS)
    for i, grad in enumerate(steps):
        if i == 3:
            state = optimizer.state_dict()
            optimizer = Lion([weight], **OPTIONS)
            optimizer.load_state_dict(state)
        weight.grad = grad.clone()
        optimizer.step()
    assert torch.equal(weight.detach(), train([20], steps))


def test_no_gradient_no_step_and_a_closure_is_called() -> None:
    moved, still = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([moved, still], lr=0.5)

    def closure() -> float:
        loss = moved.sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert torch.equal(moved.detach(), torch.full((3,), 0.5))
    assert torch.equal(still.detach(), torch.ones(3))


@pytest.mark.parametrize(
    "bad",
    [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"betas": (0.9, 0.9, 0.9)}, {"weight_decay": -0.1}],
)
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Lion needs"):
        Lion([torch.nn.Parameter(torch.ones(1))], **bad)
