"""Random numbers that are drawn aside: nobody else's are others afterwards, a GPU's neither."""

import pytest
import torch

from refimpl.activation.state import aside
from refimpl.parallel.auto.rehearsal import seeded


def test_what_is_drawn_aside_is_drawn_again() -> None:
    torch.manual_seed(5)
    with aside(torch.device("cpu")):
        once = torch.rand(3)
    with aside(torch.device("cpu"), seed=7):
        other = torch.rand(3)
    assert torch.equal(torch.rand(3), once)
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(7)), other)


def test_a_trial_on_the_cpu_seeds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of the ranks of a split model, and of all its replicas, would begin with seed 0 there."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with seeded(None), aside(torch.device("cpu"), seed=0):
        torch.rand(1)
    assert seeds == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_its_numbers_are_drawn_again_too() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with aside(device):
        expected = torch.rand(3, device=device)
    with aside(device, seed=0), aside(torch.device("cpu"), seed=0):
        torch.rand(3, device=device)
    assert torch.equal(torch.rand(3, device=device), expected)
