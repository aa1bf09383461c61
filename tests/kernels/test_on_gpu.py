"""On a GPU: every case, at its real size, beside float64. Skipped where there is none."""

import pytest
import torch
from agreement import assert_agrees

from refimpl.kernels.case import Case, cases

MEMORY = 125e9  # bytes, in which every case fits: the scores of 16384 tokens are 34 GB in float64, at worst 3.4 times


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_equals_float64_at_its_real_size(case: Case) -> None:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()  # others may have the rest
    try:
        assert_agrees(case.call, case.reference, case.inputs(torch.device("cuda")), case.bound)
    except torch.OutOfMemoryError as error:
        if free > MEMORY:
            raise
        pytest.skip(f"float64 does not fit into {free / 1e9:.0f} GB that are free: {error}".splitlines()[0])
