"""What the sum of squares of a gradient takes beside it; a norm in a file, and one that is asked before the step."""

from functools import partial
from pathlib import Path

import pytest
import torch
import worlds
from training import STAGES, Net, tokens

from refimpl.optim.lamb import squared
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.norm import GradNorm
from refimpl.zero.update import sum_of_squares


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_widened_in_the_kernel(dtype: torch.dtype) -> None:
    """A copy in fp64 would be as large as a gradient and its moments: the peak of a step."""
    x = torch.ones(1 << 24, dtype=dtype, device="cuda")
    for squares in (partial(sum_of_squares, exact=True), squared):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert squares(x).item() == x.numel()
        assert torch.cuda.max_memory_allocated() - before < x.nbytes / 8


def test_what_a_script_saves_of_it_is_loaded_as_weights_are(tmp_path: Path) -> None:
    torch.save({"grad_norm": GradNorm(0.1)}, tmp_path / "logged.pt")
    assert torch.load(tmp_path / "logged.pt", weights_only=True)["grad_norm"].item() == 0.1


def asked_before(stage: str) -> list[tuple[float, float, float]]:
    """LMOps' trainers log `optimizer.scaled_global_norm() / optimizer.cur_scale` between backward and step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ZeroConfig(dtype=torch.float16, gradient_clipping=1e-3)
    layer = STAGES[stage](model, optimizer, config=config, scaler=LossScaler(1024.0))
    seen = []
    for step in range(2):
        for micro in range(2):
            layer.backward(model(tokens(step, 2 * micro + layer.group.rank)) / 2)
        asked = optimizer.scaled_global_norm()  # type: ignore[attr-defined]
        assert layer.step()
        seen.append((float(asked), 1024 * (layer.grad_norm or 0.0), optimizer.scaled_global_norm()))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="norm_type=inf: it is the L2 norm"):
        optimizer.scaled_global_norm(float("inf"))  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_may_be_asked_before_the_step(stage: str) -> None:
    for seen in worlds.run(asked_before, stage, ranks=2):
        for before, of_the_step, used_up in seen:
            assert before == pytest.approx(of_the_step, rel=1e-5)
            assert (before > 1, used_up) == (True, 0)
