"""Backward in two halves gives the bits of one backward, on graphs that are hard to cut."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from refimpl.model.gpt import Block, GPTConfig
from refimpl.parallel.pipeline.halves import Halves

Stage = Callable[[nn.Module, list[Tensor]], list[Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(GPTConfig(vocab=7, context=5, width=8, layers=1, heads=2))
        self.one, self.two, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(2, 2)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(5, 5, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.table = nn.Embedding(11, 8)


def tied(net: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    """One weight three times, with another between: what reaches it from above must count once."""
    return [net.one(net.two(F.gelu(net.one(net.norm(net.one(xs[0]))))))]


def two_inputs(net: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    return [net.one(xs[0]) * net.two(xs[1]), xs[0] + net.frozen(xs[1])]


STAGES: dict[str, Stage] = {
    "a block": lambda net, xs: [net.block(xs[0])],
    "tied": tied,
    "two inputs, two outputs": two_inputs,
    "an output of weights alone": lambda net, xs: [net.one(xs[0]), net.two(net.bias).sum()],
    "a weight shared with it": lambda net, xs: [net.one(xs[0]) + net.bias, net.bias * 2],
    "an input not used": lambda net, xs: [net.one(xs[0])],
    "an input passed on": lambda net, xs: [xs[0], net.one(xs[0])],
    "a convolution and views": lambda net, xs: [net.conv(xs[0]).transpose(1, 2).flatten(1).relu()],
    "no weights": lambda net, xs: [xs[0].sin() * 3],
    "weights alone": lambda net, xs: [net.table(torch.tensor([[1, 2], [2, 9]])) @ net.one.weight],
    "only frozen": lambda net, xs: [net.frozen(xs[0])],
    "an expanded output": lambda net, xs: [net.norm(xs[0] + net.bias.expand(2, 5, 8)).mean()],
}


@pytest.mark.parametrize("name", STAGES)
def test_the_halves_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    net = Net()
    given = [torch.randn(2, 5, 8) for _ in range(2)]

    def run(backward: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor | None]]) -> list[Tensor | None]:
        net.zero_grad()
        grads: list[Tensor | None] = []
        for step in range(2):  # gradients add up
            xs = [(x + step).requires_grad_() for x in given]
            outs = STAGES[name](net, xs)
            torch.manual_seed(step)
            grads += backward(outs, [torch.randn_like(out) for out in outs], xs)
        return [*grads, *(p.grad for p in net.parameters())]

    def whole(outs: list[Tensor], grads: list[Tensor], xs: list[Tensor]) -> list[Tensor | None]:
        torch.autograd.backward(outs, grads)
        return [x.grad for x in xs]

    def halves(outs: list[Tensor], grads: list[Tensor], xs: list[Tensor]) -> list[Tensor | None]:
        before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        work = Halves([get_gradient_edge(out) for out in outs], grads, xs)
        found = work.input_half()
        assert_equal([p.grad for p in net.parameters()], before)
        work.weight_half()
        assert [x.grad for x in xs] == [None, None]
        return found

    assert_equal(run(halves), run(whole))


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


def test_each_half_does_its_own_products_only() -> None:
    """Two of the six matrix products of three linear layers' training are the input half's, three the weight half's."""
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    x = torch.randn(2, 4, requires_grad=True)
    out = layers(x)
    work = Halves([get_gradient_edge(out)], [torch.ones_like(out)], [x])
    with torch.profiler.profile(acc_events=True) as first:
        work.input_half()
    with torch.profiler.profile(acc_events=True) as second:
        work.weight_half()
    for half in (first, second):
        assert sum(event.count for event in half.key_averages() if event.key == "aten::mm") == 3


def test_a_hook_that_scales_is_applied_once() -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)

    def run() -> Tensor:
        out = layer(x)
        out.register_hook(lambda grad: grad / 2)
        return out.sin()

    out = run()
    work = Halves([get_gradient_edge(out)], [torch.ones_like(out)], [x])
    (found,) = work.input_half()
    work.weight_half()
    mine, layer.weight.grad = layer.weight.grad, None
    run().sum().backward()
    assert_equal([found, mine], [x.grad, layer.weight.grad])


def test_a_hook_on_a_parameter_runs_once_a_micro_batch() -> None:
    """Data parallelism hangs on it."""
    layer = nn.Linear(3, 3)
    seen: list[Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    x = torch.randn(2, 3, requires_grad=True)
    out = layer(layer(x).relu())
    work = Halves([get_gradient_edge(out)], [torch.ones_like(out)], [x])
    work.input_half()
    assert seen == []
    work.weight_half()
    assert len(seen) == 1
