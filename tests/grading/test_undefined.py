"""What an answer must not live on: the integer that a CPU makes of NaN."""

import pytest
import torch

from refimpl.grading.undefined import ODD, NoInteger

VALUES = torch.tensor([[1.6, float("nan")], [-3.0, 2.0]])


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.uint8])
def test_nan_becomes_an_odd_integer(kind: torch.dtype) -> None:
    with NoInteger():
        cast = VALUES.abs().to(kind)
        filled = torch.zeros(2, 2, 2, dtype=kind)
        filled[:] = VALUES.abs()  # spread over the first dimension
    assert cast.tolist() == [[1, ODD], [3, 2]]
    assert filled.tolist() == [cast.tolist()] * 2


def test_other_casts_are_left_alone() -> None:
    with NoInteger():
        assert VALUES.half().isnan().sum() == 1
        assert VALUES.bool().all()
        assert torch.arange(3).to(torch.int8).tolist() == [0, 1, 2]
