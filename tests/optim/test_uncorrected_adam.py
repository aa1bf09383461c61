"""Adam without bias correction: against torch's Adam with the correction taken out, and the same bits on any cut."""

from typing import Any

import pytest
import torch

from refimpl.optim.uncorrected_adam import UncorrectedAdam

STEPS = [torch.randn(1001, generator=torch.Generator().manual_seed(step)) for step in range(6)]


def train(make: Any, cuts: list[int], dtype: torch.dtype, rates: list[float], **options: Any) -> torch.Tensor:
    """Parameters [1001] after one step a rate, kept as one tensor a cut."""
    shards = [torch.nn.Parameter(part.clone()) for part in torch.linspace(-1, 1, 1001, dtype=dtype).split(cuts)]
    optimizer = make(shards, **options)
    for step, rate in enumerate(rates):
        for shard, part in zip(shards, STEPS[step].to(dtype).split(cuts), strict=True):
            shard.grad = part.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return torch.cat([shard.detach() for shard in shards])


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_torchs_adam_at_the_rate_that_undoes_its_correction(adam_w_mode: bool) -> None:
    """Without eps and decay, torch's step t is ours times sqrt(1 - beta2**t) / (1 - beta1**t)."""
    rates = [0.01] * 6
    undone = [0.01 * (1 - 0.9**t) / (1 - 0.999**t) ** 0.5 for t in range(1, 7)]
    ours = train(UncorrectedAdam, [1001], torch.float64, rates, eps=0.0, adam_w_mode=adam_w_mode)
    torchs = train(torch.optim.Adam, [1001], torch.float64, undone, eps=0.0)
    torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(ours, train(torch.optim.Adam, [1001], torch.float64, rates, eps=0.0))


def test_decay_of_the_weights_or_in_the_gradient() -> None:
    """In the first step m = 0.1 g and v = 0.001 g**2; with eps = 1, both decays can be written down."""
    grad, start = STEPS[0].double(), torch.linspace(-1, 1, 1001, dtype=torch.float64)
    for adam_w_mode in (True, False):
        g = grad if adam_w_mode else grad + 0.3 * start
        update = 0.1 * g / ((0.001 * g * g).sqrt() + 1) + (0.3 * start if adam_w_mode else 0)
        found = train(UncorrectedAdam, [1001], torch.float64, [0.5], eps=1.0, weight_decay=0.3, adam_w_mode=adam_w_mode)
        torch.testing.assert_close(found, start - 0.5 * update)


@pytest.mark.parametrize("cuts", [[1, 1000], [500, 501], [7, 64, 930], [1] * 1001])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_any_cut_gives_the_same_bits(cuts: list[int], adam_w_mode: bool) -> None:
    options = {"weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    cut, whole = (train(UncorrectedAdam, c, torch.float32, [0.01] * 6, **options) for c in (cuts, [1001]))
    assert torch.equal(cut, whole)
    assert UncorrectedAdam.elementwise  # so that the stages take it
