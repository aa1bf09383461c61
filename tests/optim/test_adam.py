"""Adam without bias correction against its formula in fp64; with it, torch's; the same bits on any aligned cut."""

from typing import Any

import pytest
import torch

from refimpl import launch
from refimpl.optim.adam import Adam
from refimpl.zero.zero1 import Zero1

SIZE = 1024
STEPS = [torch.randn(SIZE, generator=torch.Generator().manual_seed(step)) for step in range(6)]


def start(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1, 1, SIZE, dtype=dtype)


def train(make: Any, cuts: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """Parameters [SIZE] after six steps, kept as one tensor a cut."""
    shards = [torch.nn.Parameter(part.clone()) for part in start(dtype).split(cuts)]
    optimizer = make(shards, lr=0.01, weight_decay=0.1, **options)
    for grad in STEPS:
        for shard, part in zip(shards, grad.to(dtype).split(cuts), strict=True):
            shard.grad = part.clone()
        optimizer.step()
    return torch.cat([shard.detach() for shard in shards])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_formula_without_correction(adam_w_mode: bool, fused: bool) -> None:
    p, m, v = start(torch.float64), torch.zeros(SIZE).double(), torch.zeros(SIZE).double()
    for grad in STEPS:
        g = grad.double() if adam_w_mode else grad.double() + 0.1 * p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - 0.01 * (m / (v.sqrt() + 1e-8) + (0.1 * p if adam_w_mode else 0))
    options = {"adam_w_mode": adam_w_mode, "fused": fused}
    found = train(Adam, [SIZE], torch.float64, bias_correction=False, **options)
    torch.testing.assert_close(found, p, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(found, train(Adam, [SIZE], torch.float64, **options))


@pytest.mark.parametrize(("adam_w_mode", "torchs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_with_correction_it_is_torchs(adam_w_mode: bool, torchs: Any) -> None:
    assert torch.equal(train(Adam, [SIZE], adam_w_mode=adam_w_mode), train(torchs, [SIZE], fused=True))


@pytest.mark.parametrize("cuts", [[64, 960], [512, 512], [64] * 16])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_any_aligned_cut_gives_the_same_bits(cuts: list[int], adam_w_mode: bool) -> None:
    options = {"adam_w_mode": adam_w_mode, "bias_correction": False}
    assert torch.equal(train(Adam, cuts, **options), train(Adam, [SIZE], **options))


def test_each_group_has_its_own() -> None:
    corrected, not_corrected = (torch.nn.Parameter(torch.zeros(64)) for _ in range(2))
    optimizer = Adam([{"params": [corrected]}, {"params": [not_corrected], "bias_correction": False}], lr=0.1)
    corrected.grad = not_corrected.grad = torch.ones(64)
    optimizer.step()
    torch.testing.assert_close(corrected.detach(), torch.full((64,), -0.1))
    torch.testing.assert_close(not_corrected.detach(), torch.full((64,), -0.1 * 0.1 / 0.001**0.5))


def test_resuming_changes_nothing() -> None:
    """A state that was saved without correction goes on without it, as it goes on with the betas it was saved with."""
    weight = torch.nn.Parameter(start(torch.float32))
    optimizer = Adam([weight], lr=0.01, weight_decay=0.1, bias_correction=False)
    for number, grad in enumerate(STEPS):
        if number == 3:
            state = optimizer.state_dict()
            optimizer = Adam([weight], lr=0.5)
            optimizer.load_state_dict(state)
        weight.grad = grad.clone()
        optimizer.step()
    assert torch.equal(weight.detach(), train(Adam, [SIZE], bias_correction=False))


def sharded() -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 16)
    stage = Zero1(model, Adam(model.parameters(), lr=0.01, bias_correction=False))
    for step in range(3):
        stage.backward(model(STEPS[step][:64]).square().sum())
        stage.step()
    return model.weight.detach().clone()


def test_the_stages_may_shard_it() -> None:
    (alone,) = launch.run(sharded, ranks=1)
    for weight in launch.run(sharded, ranks=3):
        torch.testing.assert_close(weight, alone, rtol=1e-6, atol=1e-7)


class OfAGPU(torch.nn.Parameter):
    is_cuda = True


@pytest.mark.parametrize("fused", [True, False])
def test_on_a_gpu_only_the_fused_one_takes_our_kernel(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has its step number on the host, where no kernel can read it."""
    asked: list[bool] = []
    monkeypatch.setattr(Adam, "update", lambda *_: asked.append(True))
    p = OfAGPU(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = Adam([p], fused=fused)
    optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(6)))
    assert asked == [True] * fused
