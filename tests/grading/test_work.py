"""What an answer multiplies is counted whichever operation of torch it takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from refimpl.grading.work import Work

A, B = torch.ones(2, 3, 5), torch.ones(2, 5, 7)
ALL = 2 * 2 * 3 * 5 * 7  # of the two products of 3 x 5 by 5 x 7

WAYS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "bmm": (lambda: torch.bmm(A, B), ALL),
    "matmul": (lambda: A @ B, ALL),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", A, B), ALL),
    "addbmm, which adds the products up": (lambda: torch.addbmm(torch.zeros(3, 7), A, B), ALL),
    "baddbmm": (lambda: torch.baddbmm(torch.zeros(2, 3, 7), A, B), ALL),
    "mm": (lambda: A[0] @ B[0], ALL // 2),
    "addmm": (lambda: torch.addmm(torch.zeros(7), A[0], B[0]), ALL // 2),
    "linear": (lambda: torch.nn.functional.linear(A, B[0].t().contiguous()), ALL),
    "mv": (lambda: A[0] @ B[0, :, 0], 2 * 3 * 5),
    "dot": (lambda: A[0, 0] @ B[0, :, 0], 2 * 5),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_product_is_counted(way: str) -> None:
    call, flops = WAYS[way]
    with Work() as work:
        call()
    assert work.flops == flops


def test_attention_counts_its_two_products_and_not_its_backward() -> None:
    q, k, v = (torch.ones(1, 2, n, d, requires_grad=True) for n, d in ((3, 4), (5, 4), (5, 4)))
    with Work() as work:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    assert work.flops == 2 * 2 * 3 * 5 * (4 + 4)
