"""A policy's kept results stand for a second run of their operations, or the second run says why they cannot."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.policy import Policy, can_keep, named

Fn = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Fn] = {
    "views": lambda x, y: (x.view(-1).view(4, 4).t().expand(2, 4, 4) @ y).sin(),
    "split": lambda x, y: torch.cat([a.sin() * b for a, b in zip(x.split(2), y.split(2), strict=True)]),
    "several results": lambda x, y: (x @ y).topk(2).values.exp() + (x @ y).max(1, keepdim=True).values,
    "a number read": lambda x, y: (x @ y).sin() * x.detach().sum().item(),
    "indices": lambda x, y: torch.zeros(4, 4).index_put((torch.tensor([0, 2]),), (x @ y)[:2].sin()).exp(),
    "detached": lambda x, y: (x @ y).sin() * (x @ y).detach().exp(),
}


def gradients(fn: Fn, policy: Policy | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, y = (torch.randn(4, 4).requires_grad_() for _ in range(2))
    call = (lambda f, *args: f(*args)) if policy is None else Checkpoint(policy=policy)
    return torch.autograd.grad(call(fn, x, y).sum(), [x, y])


def is_same(fn: Fn, policy: Policy) -> bool:
    return all(map(torch.equal, gradients(fn, policy), gradients(fn)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_everything_may_be_kept(name: str) -> None:
    """`detach` too, which autograd's own bookkeeping runs more often the second time."""
    assert is_same(FUNCTIONS[name], lambda op: True)
    assert is_same(FUNCTIONS[name], named("view", "expand", "t", "split", "detach", "topk"))


def test_what_is_drawn_or_written_in_place_is_never_kept() -> None:
    """Else the second run would draw less before what it draws anew, and not write."""
    assert is_same(lambda x, y: torch.dropout(x @ y * torch.rand_like(x), 0.5, True).exp(), named("rand_like", "mul"))
    assert is_same(lambda x, y: [h := x @ y, h.mul_(y)][0].exp(), named("mul_"))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert [can_keep(flash, (), given) for given in ({}, {"dropout_p": 0.0}, {"dropout_p": 0.1})] == [True, True, False]


def test_a_policy_that_counts_is_asked_in_the_first_run_alone() -> None:
    """Every second product, as torchtitan's does; a count that goes on in the second run would begin there at odd."""
    products: list[object] = []

    def every_second(op: object) -> bool:
        if op is not torch.ops.aten.mm.default:
            return False
        products.append(op)
        return len(products) % 2 == 0

    def loop(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(5):
            x = (x @ y).tanh()
        return x

    assert is_same(loop, every_second)
    assert len(products) == 5


@pytest.mark.parametrize("change", [torch.relu_, lambda h: h.view(-1).mul_(2).view_as(h)], ids=["itself", "a view"])
def test_a_kept_result_that_was_changed_in_place_is_an_error(change: Callable[[Tensor], Tensor]) -> None:
    """As by `nn.ReLU(inplace=True)` behind a kept product: there it would be changed a second time."""
    with pytest.raises(RuntimeError, match=r"aten\.mm\.default: its kept result was changed in place"):
        gradients(lambda x, y: change(x @ y).exp(), named("mm"))


def test_another_order_in_the_second_run_is_an_error() -> None:
    runs: list[int] = []

    def fickle(x: Tensor, y: Tensor) -> Tensor:
        runs.append(1)
        return (x @ y).sin() if len(runs) == 1 else (x.sin() @ y).sin()

    with pytest.raises(RuntimeError, match=r"the second run asks for aten\.sin\.default where the first had aten\.mm"):
        gradients(fickle, named("mm", "sin"))
