"""What the docstrings say a kernel must move is what its programs ask for, counted under the interpreter."""

import pytest
import torch

from refimpl.kernels import (
    adamw,
    cross_entropy,
    dropout,
    glu,
    int8_matmul,
    layer_norm,
    multi_norm,
    permute,
    quantize,
    rms_norm,
    rotary,
    softmax,
    topk_gate,
)
from refimpl.kernels.case import Case, forward_and_backward
from refimpl.kernels.count import counted
from refimpl.kernels.language import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for a GPU here")

F32 = torch.float32
CASES = [  # and how often the bytes of the formula are asked for; the caches answer what is beyond 1
    (rms_norm._case("fp32", F32, 512, 192), 1.0),
    (layer_norm._case("fp32", F32, 512, 192), 1.0),
    (softmax._case("fp32", F32, 64, 300), 1.0),
    (glu._case("swiglu", 64, 192, F32), 1.0),
    (glu._case("geglu", 64, 192, F32), 1.0),
    (rotary._case(2, 4, 8, 64, False, F32), 1.0),
    (dropout._case(9000, F32), 1.0),
    (adamw._case(20000), 1.0),
    (multi_norm._case([20000, 7, 300], "fp32", F32), 1.0),
    (quantize._case("int8", torch.int8, 1 << 14, False), 1.0),
    (quantize._case("int8", torch.int8, 1 << 14, True), 1.0),
    (permute._case("permute", F32, 64, 48, 2, 4), 1.0),
    (permute._case("unpermute", F32, 64, 128, 4, 8), 1.0),
    (topk_gate._case(F32, 64, 16, 2, True), 1.0),
    (topk_gate._case(F32, 64, 16, 8, False), 1.0),
    (cross_entropy._case("fp32", F32, 8, 500), 1.25),  # forward 1.5: each row is walked along twice; backward 1
]


@pytest.mark.parametrize(("case", "times"), CASES, ids=lambda value: value.name if isinstance(value, Case) else "")
def test_the_formulas_bytes_are_what_is_asked_for(case: Case, times: float) -> None:
    with counted() as found:
        forward_and_backward(case.call, case.inputs(torch.device("cpu")))
    ratio = (found.loaded + found.stored) / (case.moved + case.moved_backward)
    assert times * 0.999 < ratio < times * 1.05, f"{ratio:.3f} times the formula's bytes"
    assert not found.outside or case.operation == "multi_norm"  # which reads by addresses from a table


def test_a_products_operations_are_counted_in_full_tiles() -> None:
    case = int8_matmul._case(128, 256, 256)
    with counted() as found:
        forward_and_backward(case.call, case.inputs(torch.device("cpu")))
    assert found.flops == case.flops
    assert found.loaded_from["a"] == 128 * 256
    assert found.loaded_from["b"] == 256 * 256
