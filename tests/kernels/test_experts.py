"""Kernels of mixture of experts beside float64: sorting rows by expert and back, the gate, grouped matmul."""

import pytest
import torch
from agreement import BOUND, assert_agrees

from refimpl.kernels.count import counted
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.grouped_matmul import reference as matmul_reference
from refimpl.kernels.language import INTERPRETED
from refimpl.kernels.permute import (
    LONGEST,
    Order,
    permute,
    permute_reference,
    sort_by_expert,
    unpermute,
    unpermute_reference,
)
from refimpl.kernels.topk_gate import reference as gate_reference
from refimpl.kernels.topk_gate import topk_gate

interpreted = pytest.mark.skipif(not INTERPRETED, reason="counted under the interpreter")


def test_the_order_is_by_expert_then_by_token() -> None:
    order = sort_by_expert(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4)
    assert order.counts.tolist() == [2, 0, 3, 0]
    assert order.place.tolist() == [[2, 0], [-1, 3], [1, 4]]
    assert int(order.kept) == 5


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "size"), [(13, 2, 4, 33), (50, 3, 5, 200), (2, 1, 1, LONGEST + 5)])
def test_rows_equal_float64(
    device: torch.device, dtype: torch.dtype, tokens: int, k: int, experts: int, size: int
) -> None:
    chosen = torch.randint(-1, experts, (tokens, k), generator=torch.Generator().manual_seed(0))  # some dropped
    order = sort_by_expert(chosen.to(device), experts)
    x = torch.randn(tokens, size, device=device).to(dtype).requires_grad_()
    assert torch.equal(permute(x, order), permute_reference(x, order))
    assert_agrees(lambda x: permute(x, order), lambda x: permute_reference(x, order), (x,))
    rows = torch.randn(size, tokens * k, device=device).to(dtype).T.requires_grad_()  # not contiguous
    weights = torch.rand(tokens, k, device=device, requires_grad=True)
    assert_agrees(lambda r: unpermute(r, order), lambda r: unpermute_reference(r, order), (rows,))
    assert_agrees(
        lambda r, w: unpermute(r, order, w),
        lambda r, w: unpermute_reference(r, order, w),
        (rows, weights),
        BOUND[dtype],
    )


def test_there_and_back_is_every_token_k_times(device: torch.device) -> None:
    x = torch.arange(21.0, device=device).view(7, 3)
    chosen = torch.rand(7, 4, device=device).topk(2).indices
    assert torch.equal(unpermute(permute(x, (order := sort_by_expert(chosen, 4))), order), 2 * x)


@interpreted
def test_rows_move_once(device: torch.device) -> None:
    tokens, k, size = 40, 3, 50
    order = sort_by_expert(torch.randint(0, 4, (tokens, k)), 4)
    x = torch.randn(tokens, size, requires_grad=True)
    with counted(trace=True) as c:
        rows = permute(x, order)
    assert c.loaded_from["x"] == tokens * size * 4  # a token once, not once an expert
    assert c.stored_to["rows"] == tokens * k * size * 4
    assert not c.races()
    weights = torch.rand(tokens, k, requires_grad=True)
    with counted() as c:
        y = unpermute(rows, order, weights)
    assert c.loaded_from["rows"] == tokens * k * size * 4
    assert c.stored_to == {"y": tokens * size * 4}
    with counted(trace=True) as c:
        y.backward(torch.randn_like(y))
    assert c.loaded_from["x"] == tokens * size * 4
    assert (
        c.loaded_from["partner"] == c.loaded_from["rows"] == tokens * k * size * 4
    )  # the second is permute's backward
    assert not c.races()
    assert not c.outside


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(5, 8, 2), (30, 60, 4), (3, 3, 3), (1, 1, 1)])
def test_the_gate_equals_float64(
    device: torch.device, dtype: torch.dtype, normalise: bool, tokens: int, experts: int, k: int
) -> None:
    logits = torch.randn(experts, tokens, device=device).to(dtype).T.requires_grad_()
    assert_agrees(
        lambda x: topk_gate(x, k, normalise=normalise),
        lambda x: gate_reference(x, k, normalise),
        (logits,),
        BOUND[dtype],
    )


def test_ties_go_to_the_lowest_expert(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]], device=device)
    logits[1, 0] = -torch.inf
    weights, experts = topk_gate(logits, 4)
    assert experts.tolist() == [[1, 2, 4, 0], [1, 2, 3, 4]]
    assert torch.equal(weights, logits.softmax(1).topk(4).values)
    assert topk_gate(logits, 5)[1].tolist()[1] == [1, 2, 3, 4, 0]


@pytest.mark.filterwarnings("ignore:invalid value")  # by numpy, which interprets
@pytest.mark.parametrize("normalise", [True, False])
def test_a_logit_that_is_no_number_spoils_its_token_alone(device: torch.device, normalise: bool) -> None:
    """All weights of that token, as torch's softmax has it: not one that an expert then adds nothing by."""
    logits = torch.randn(3, 6, device=device)
    logits[1, 4] = float("nan")
    weights, experts = topk_gate(logits, 3, normalise=normalise)
    assert weights.isnan().all(1).tolist() == [False, True, False]
    assert not weights[::2].isnan().any()
    assert int(experts[1, 0]) == 4


@interpreted
def test_the_gate_reads_logits_once(device: torch.device) -> None:
    with counted() as c:
        topk_gate(torch.randn(70, 12), 3)
    assert c.loaded == 70 * 12 * 4
    assert c.stored == 70 * 3 * 12


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(
    ("counts", "depth", "width"),
    [((5, 0, 130, 3), 40, 70), ((0, 0, 64), 64, 256), ((200,), 33, 17), ((0, 0), 16, 16)],
    ids=str,
)
def test_grouped_matmul_equals_float64(
    device: torch.device, dtype: torch.dtype, counts: tuple[int, ...], depth: int, width: int
) -> None:
    rows = torch.tensor(counts, device=device)
    x = torch.randn(sum(counts) + 5, depth, device=device).to(dtype).requires_grad_()  # five rows of no group
    w = torch.randn(len(counts), width, depth, device=device).to(dtype).transpose(1, 2).detach().requires_grad_()
    assert_agrees(lambda x, w: grouped_matmul(x, w, rows), lambda x, w: matmul_reference(x, w, rows), (x, w))


@interpreted
def test_an_empty_group_costs_nothing(device: torch.device) -> None:
    x = torch.randn(128, 64, requires_grad=True)
    w = torch.randn(3, 64, 64, requires_grad=True)
    w.data[1] = torch.nan
    with counted(trace=True) as c:
        y = grouped_matmul(x, w, torch.tensor([64, 0, 64]))
    assert c.flops == 2 * 128 * 64 * 64
    assert c.loaded_from["w"] == 2 * 64 * 64 * 4
    assert y.isfinite().all()
    with counted(trace=True) as again:
        y.sum().backward()
    assert again.flops == 2 * c.flops
    assert not c.races()
    assert not again.races()
    assert not again.outside
    assert w.grad is not None
    assert w.grad[1].count_nonzero() == 0


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_gives_nothing(device: torch.device, tokens: int) -> None:
    x = torch.randn(tokens, 0 if tokens else 4, device=device, requires_grad=True)
    order = sort_by_expert(torch.zeros(tokens, 2, dtype=torch.int64, device=device), 3)
    y = unpermute(permute(x, order), order)
    assert y.shape == x.shape
    y.sum().backward()
    empty = torch.randn(0, 8, device=device, requires_grad=True)
    w = torch.randn(2, 8, 5, device=device, requires_grad=True)
    grouped_matmul(empty, w, torch.zeros(2, dtype=torch.int32, device=device)).sum().backward()
    assert w.grad is not None
    assert w.grad.count_nonzero() == 0
    assert topk_gate(torch.randn(0, 4, device=device), 2)[0].shape == (0, 2)


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    x = torch.ones(4, 8, device=device)
    order = Order(torch.zeros(3, 2, dtype=torch.int32, device=device), torch.tensor([6], device=device))
    with pytest.raises(ValueError, match=r"permute: \[4, 8\] given, \[3, width\] needed"):
        permute(x, order)
    with pytest.raises(ValueError, match=r"unpermute: weights \[3, 1\] for \[3, 2\] copies"):
        unpermute(torch.ones(6, 8, device=device), order, torch.ones(3, 1, device=device))
    with pytest.raises(ValueError, match=r"topk_gate: k = 9 of logits \[4, 8\]"):
        topk_gate(x, 9)
    with pytest.raises(TypeError, match=r"counts is torch\.float32"):
        grouped_matmul(x, torch.ones(1, 8, 2, device=device), torch.ones(1, device=device))
    with pytest.raises(ValueError, match=r"x \[4, 8\], w \[1, 7, 2\], counts \[1\]"):
        grouped_matmul(x, torch.ones(1, 7, 2, device=device), torch.ones(1, dtype=torch.int32, device=device))


@interpreted
def test_values_that_cannot_be_are_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"experts go from 0 to 4; there are 0 to 3"):
        sort_by_expert(torch.tensor([[0, 4]]), 4)
    for counts in ([3, 2], [-1, 2]):
        with pytest.raises(ValueError, match="for 4 rows"):
            grouped_matmul(torch.ones(4, 8), torch.ones(2, 8, 2), torch.tensor(counts))
