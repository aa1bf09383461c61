"""Grades chapter 11, the layers: what goes through, what comes back, what each sends, and what stays alive."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.grading.compare import Wrong, equal, refused, require
from refimpl.grading.exchange import DTYPES, attached, numbers, of_ranks, sends, silent, total
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, let_go, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "not contiguous": lambda x: x.t().contiguous().t(),
}


@on_ranks(2, 3, 4)
def test_enter(answer: Answer, group: WatchedGroup) -> None:
    for dtype, laid in itertools.product(DTYPES, LAID):
        case(f"[3, 5] of {dtype}, {laid}")
        fresh, x = group.fresh(), LAID[laid](numbers(3, 5, seed=1, dtype=dtype)).requires_grad_()
        grads, other = of_ranks(group, 3, 5, seed=2, dtype=dtype), numbers(3, 5, seed=3, dtype=dtype)
        grads[0] *= laid == "contiguous"  # a rank whose gradient is zero takes part too
        mine = LAID[laid](grads[group.rank])
        with untouched(x=x):
            y = attached(answer.enter(x, fresh), "what enter returns")
        equal(y, x.detach(), "what enter returns", ranks=group.size)
        require(y.data_ptr() == x.data_ptr(), "what enter returns is a copy: it is as large as x, and nobody needs it")
        silent(fresh, "forward", "every rank has x already")
        with untouched(the_gradient_that_arrives=mine):
            torch.autograd.backward([y, x * 1], [mine, other])  # x is used beside: the residual stream
        sum_ = total(grads)
        equal(
            x.grad,
            sum_ + other,
            "the gradient of x",
            known={
                "this rank's part alone: what the other ranks computed from x is missing": mine + other,
                "nothing comes back through what enter returns: does its backward return the sum?": other,
                "x's other use is summed over the ranks too: it is outside what enters here": sum_ + group.size * other,
                "the mean over the ranks: they computed parts of one layer, so the parts add": (
                    (sum_ / group.size).to(dtype) + other
                ),
            },
            rtol=1e-2,
        )
        sends(fresh, "backward", x.detach(), "all_reduce")


@on_ranks(2, 3, 4)
def test_leave(answer: Answer, group: WatchedGroup) -> None:
    for dtype, laid in itertools.product(DTYPES, LAID):
        case(f"[3, 5] of {dtype}, {laid}")
        fresh, parts = group.fresh(), of_ranks(group, 3, 5, seed=1, dtype=dtype)
        x, grad = LAID[laid](parts[group.rank]).requires_grad_(), numbers(3, 5, seed=2, dtype=dtype)
        with untouched(x=x):
            y = attached(answer.leave(x, fresh), "what leave returns")
        equal(y, total(parts), "the sum", known={"this rank's part alone": x.detach()}, ranks=group.size)
        sends(fresh, "forward", x.detach(), "all_reduce")
        with untouched(the_gradient_that_arrives=grad):
            y.backward(grad)
        equal(
            x.grad,
            grad,
            "the gradient of x",
            known={
                f"{group.size}x the expected: the gradient that arrives is whole already, and was summed once more": (
                    grad * group.size
                )
            },
            ranks=group.size,
        )
        silent(fresh, "backward", "the gradient that arrives is equal on all ranks, and whole")
    case("what stays alive between forward and backward")
    x, kept = torch.ones(64, 64).requires_grad_(), Kept(group)
    y = answer.leave(x * 1, group.fresh())
    kept.judge(y.nbytes, "leave", "the sum alone may stay: backward needs nothing of x")
    held = [y]
    del y
    let_go(held, "the sum that leave returns")
    case("numbers that do not add exactly")
    x = torch.randn(99, generator=torch.Generator().manual_seed(group.rank)).requires_grad_()
    sums = group.everyone(answer.leave(x, group.fresh()).detach())
    bits = "the sum has other bits on each rank: return what the all-reduce gave, and nothing added to it"
    require(all(torch.equal(y, sums[0]) for y in sums), bits)


How = tuple[int, int, bool, torch.dtype, str]  # inputs, outputs, whether there is a bias, dtype, what is frozen


def plain_linear(K: int, M: int, bias: bool, dtype: torch.dtype, frozen: str) -> nn.Linear:
    plain = nn.Linear(K, M, bias=bias, dtype=dtype)
    with torch.no_grad():
        plain.weight.copy_(numbers(M, K, seed=4).clamp(-1, 1))
        if bias:
            plain.bias.copy_(numbers(M, seed=5))
    for name, p in plain.named_parameters():
        p.requires_grad_(name != frozen)
    return plain


LAYERS = {
    "a frozen bias, fp32": (12, 24, True, torch.float32, "bias"),
    "no bias, bf16": (24, 12, False, torch.bfloat16, ""),
    "the weight is frozen": (12, 12, True, torch.float32, "weight"),
}


def made(make: Callable[..., Any], how: How, group: WatchedGroup, dim: int) -> Any:
    """The layer, whose parts are this rank's, and nothing else of the plain layer is alive."""
    plain = plain_linear(*how)
    weight, bias = plain.weight.detach(), None if plain.bias is None else plain.bias.detach()
    part = weight.chunk(group.size, dim)[group.rank]
    expected = {"weight": part}
    if bias is not None:
        expected["bias"] = bias if dim else bias.chunk(group.size)[group.rank]
    room = sum(t.numel() * t.element_size() for t in expected.values())
    expected = {name: t.clone() for name, t in expected.items()}
    del plain, weight, bias, part
    kept, plain = Kept(group), plain_linear(*how)
    with untouched(**{f"plain.{name}": p for name, p in plain.named_parameters()}):
        layer = make(plain, group)
    require(isinstance(layer, nn.Module), f"the layer is a {type(layer).__name__}, expected an nn.Module")
    found = dict(layer.named_parameters())
    theirs = {p.untyped_storage().data_ptr() for p in plain.parameters()}
    lent = [name for name, p in found.items() if p.untyped_storage().data_ptr() in theirs]
    del plain
    require(
        sorted(found) == sorted(expected),
        f"the layer's parameters are {sorted(found)}, expected {sorted(expected)}: a part each, as nn.Parameter",
    )
    for name, t in expected.items():
        own_memory(found[name], name)
        equal(found[name].detach(), t, f"this rank's {name}", known=in_turn(how, name, dim, group))
        same = found[name].requires_grad == (name != how[4])
        require(same, f"the {name}'s requires_grad is not as in the plain layer: what is frozen there stays frozen")
    require(not lent, f"the {' and the '.join(lent)} is the plain layer's own, which then learns too: clone it")
    kept.judge(room, "the layer", "its own parts alone may stay, not the plain layer or its weights")
    silent(group, "making the layer", "every rank has the plain layer already")
    uneven = nn.Linear(7, 13) if dim == 0 else nn.Linear(13, 7)
    try:
        with refused(ValueError, f"13 features on {group.size} ranks"):
            make(uneven, group)
    except ValueError as error:
        both = "13" in str(error) and str(group.size) in str(error)
        require(both, f"the error for 13 features on {group.size} ranks does not name both numbers: {error}")
    else:
        raise Wrong(f"13 features on {group.size} ranks are accepted: expected a ValueError with both numbers")
    return layer


def in_turn(how: How, name: str, dim: int, group: WatchedGroup) -> dict[str, Tensor]:
    """Every N-th of a parameter, from the rank-th on."""
    whole, along = plain_linear(*how).get_parameter(name).detach(), dim if name == "weight" else 0
    every = torch.arange(group.rank, whole.shape[along], group.size)
    return {"dealt out in turn, where a rank has a run of them": whole.index_select(along, every)}


@on_ranks(2, 3, 4)
def test_ColumnLinear(answer: Answer, group: WatchedGroup) -> None:
    for name, how in LAYERS.items():
        case(name)
        fresh, plain = group.fresh(), plain_linear(*how)
        layer = made(answer.ColumnLinear, how, fresh, dim=0)
        x = numbers(2, 5, how[0], seed=6, dtype=how[3])
        grad = numbers(2, 5, how[1], seed=7, dtype=how[3])
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain(whole)
        expected.backward(grad)
        parts = grad.chunk(group.size, -1)
        y = attached(layer(mine), "what the layer returns")
        equal(y.detach(), expected.detach().chunk(group.size, -1)[group.rank], "this rank's outputs")
        silent(fresh, "forward", "x is whole on every rank, and so is each output that this rank computes")
        y.backward(parts[group.rank].contiguous())
        weight = plain.weight.detach().chunk(group.size)[group.rank]
        only = {"this rank's part alone: x enters every rank's part of the layer": parts[group.rank] @ weight}
        equal(mine.grad, whole.grad, "the gradient of x", known=only, ranks=group.size)
        sends(fresh, "backward", x, "all_reduce")
        judge_gradients(layer, plain, 0, group)


@on_ranks(2, 3, 4)
def test_RowLinear(answer: Answer, group: WatchedGroup) -> None:
    for name, how in LAYERS.items():
        case(name)
        fresh, plain = group.fresh(), plain_linear(*how)
        layer = made(answer.RowLinear, how, fresh, dim=1)
        x = numbers(2, 5, how[0], seed=6, dtype=how[3])
        grad = numbers(2, 5, how[1], seed=7, dtype=how[3])
        whole, mine = x.clone().requires_grad_(), x.chunk(group.size, -1)[group.rank].clone().requires_grad_()
        expected = plain(whole)
        expected.backward(grad)
        y = attached(layer(mine), "what the layer returns")
        equal(y.detach(), expected.detach(), "the outputs", known=sums_of_rows(plain, x, group))
        sends(fresh, "forward", expected.detach(), "all_reduce")
        y.backward(grad)
        silent(fresh, "backward", "the gradient that arrives is equal on all ranks, and whole")
        truth = whole.grad
        assert truth is not None
        times = {f"{group.size}x the expected: the sum's gradient is whole already": truth * group.size}
        equal(
            mine.grad,
            truth.chunk(group.size, -1)[group.rank],
            "the gradient of x",
            known={k: v.chunk(group.size, -1)[group.rank] for k, v in times.items()},
        )
        judge_gradients(layer, plain, 1, group)


def sums_of_rows(plain: nn.Linear, x: Tensor, group: WatchedGroup) -> dict[str, Tensor]:
    """Well-known mistakes of a row layer's forward."""
    with torch.no_grad():
        part = F.linear(x.chunk(group.size, -1)[group.rank], plain.weight.chunk(group.size, 1)[group.rank].contiguous())
        whole = F.linear(x, plain.weight)
        if plain.bias is None:
            return {"this rank's part of the sum alone: is it summed by `leave`?": part}
        return {
            "this rank's part of the sum alone: is it summed by `leave`?": part + plain.bias,
            f"the bias counts {group.size} times: each rank adds it before the sum": whole + group.size * plain.bias,
            "the bias is missing": whole,
        }


def judge_gradients(layer: nn.Module, plain: nn.Linear, dim: int, group: WatchedGroup) -> None:
    found = dict(layer.named_parameters())
    for name, p in plain.named_parameters():
        if not p.requires_grad:
            require(found[name].grad is None, f"the frozen {name} has a gradient")
            continue
        truth = p.grad
        assert truth is not None
        if name == "weight" or dim == 0:
            truth = truth.chunk(group.size, dim if name == "weight" else 0)[group.rank]
        require(found[name].grad is not None, f"the {name} has no gradient")
        equal(found[name].grad, truth, f"the gradient of the {name}", ranks=group.size)
