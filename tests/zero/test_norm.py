"""What the sum of squares of a gradient takes beside it; a norm in a file."""

from functools import partial
from pathlib import Path

import pytest
import torch

from refimpl.optim.lamb import squared
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
