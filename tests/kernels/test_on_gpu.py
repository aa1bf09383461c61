"""On a GPU: every case, at its real size, beside float64. Skipped where there is none."""

import pytest
import torch
from agreement import assert_agrees

from refimpl.kernels.case import Case, cases


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_equals_float64_at_its_real_size(case: Case) -> None:
    torch.manual_seed(0)
    assert_agrees(case.call, case.reference, case.inputs(torch.device("cuda")), case.bound)
