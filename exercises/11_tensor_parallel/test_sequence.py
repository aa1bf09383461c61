"""Grades chapter 11, sequence parallelism: tokens gathered and scattered, what is kept, and who drops what."""

import itertools
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.exchange import DTYPES, attached, numbers, of_ranks, sends, total
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, let_go, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

B, T, C = 2, 12, 5


def own(x: Tensor, group: WatchedGroup) -> Tensor:
    """This rank's tokens."""
    return x.chunk(group.size, 1)[group.rank]


def behind_one_another(parts: list[Tensor]) -> Tensor:
    """What all_gather gives, read as [B, T, C]."""
    return torch.stack(parts).reshape(parts[0].shape[0], -1, parts[0].shape[2])


def runs_of_memory(x: Tensor, group: WatchedGroup) -> Tensor:
    """What reduce_scatter gives of x as it lies."""
    return x.contiguous().view(group.size, -1)[group.rank].view(x.shape[0], -1, x.shape[2])


MIXED = "the sequences are mixed: the group takes elements as they lie, and [N, B, T/N, C] is not [B, T, C]"


def keeps_its_result(layer: Callable[[Tensor, WatchedGroup], Tensor], group: WatchedGroup) -> None:
    """Raise Wrong if more than what it returns stays alive."""
    case("what stays alive between forward and backward")
    x, kept = torch.ones(B, T, 64).requires_grad_(), Kept(group)
    y = layer(x * 1, group.fresh())
    kept.judge(y.nbytes, "forward", "the result alone may stay: backward needs nothing of x")
    held = [y]
    del y
    let_go(held, "the result")


@on_ranks(2, 3, 4)
def test_gather_tokens(answer: Answer, group: WatchedGroup) -> None:
    for dtype in DTYPES:
        case(f"[{B}, {T}/{group.size}, {C}] of {dtype}, not contiguous")
        fresh, whole = group.fresh(), numbers(B, T, C, seed=1, dtype=dtype)
        parts, grads = list(whole.chunk(group.size, 1)), of_ranks(group, B, T, C, seed=2, dtype=dtype)
        x = parts[group.rank].mT.contiguous().mT.requires_grad_()
        grad, summed = grads[group.rank], total(grads)
        with untouched(x=x):
            y = attached(answer.gather_tokens(x, fresh), "all tokens")
        equal(y.detach(), whole, "all tokens", known={MIXED: behind_one_another(parts)})
        sends(fresh, "forward", whole, "all_gather")
        with untouched(the_gradient_that_arrives=grad):
            y.backward(grad)
        known = {
            "this rank's part alone: each rank used all tokens in its own way, and the ways add up": own(grad, group),
            MIXED: runs_of_memory(summed, group),
        }
        equal(x.grad, own(summed, group), "the gradient of x", known=known, ranks=group.size)
        sends(fresh, "backward", whole, "reduce_scatter")
    keeps_its_result(answer.gather_tokens, group)


@on_ranks(2, 3, 4)
def test_scatter_sum(answer: Answer, group: WatchedGroup) -> None:
    for dtype in DTYPES:
        case(f"[{B}, {T}, {C}] of {dtype}, not contiguous")
        fresh, xs = group.fresh(), of_ranks(group, B, T, C, seed=3, dtype=dtype)
        whole = numbers(B, T, C, seed=4, dtype=dtype)
        grads = list(whole.chunk(group.size, 1))
        x, grad = (t.mT.contiguous().mT for t in (xs[group.rank], grads[group.rank]))  # neither is contiguous
        x, summed = x.requires_grad_(), total(xs)
        with untouched(x=x):
            y = attached(answer.scatter_sum(x, fresh), "this rank's tokens of the sum")
        known = {
            "this rank's part alone, not summed": own(xs[group.rank], group),
            MIXED: runs_of_memory(summed, group),
        }
        equal(y.detach(), own(summed, group), "this rank's tokens of the sum", known=known, ranks=group.size)
        sends(fresh, "forward", whole, "reduce_scatter")
        with untouched(the_gradient_that_arrives=grad):
            y.backward(grad)
        zeros = torch.zeros_like(whole)
        own(zeros, group).copy_(grad)
        known = {
            "zeros for the other ranks' tokens: their gradients must be gathered": zeros,
            MIXED: behind_one_another(grads),
        }
        equal(x.grad, whole, "the gradient of x", known=known, ranks=group.size)
        sends(fresh, "backward", whole, "all_gather")
    keeps_its_result(answer.scatter_sum, group)


@on_ranks(2, 3, 4)
def test_gathered_linear(answer: Answer, group: WatchedGroup) -> None:
    for dtype, frozen in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        K, M = 40, 12
        case(f"K = {K}, M = {M}, {dtype}" + (", the weight is frozen" if frozen else ""))
        fresh, whole = group.fresh(), numbers(B, T, K, seed=5, dtype=dtype)
        weight = numbers(M, K, seed=6, dtype=dtype).clamp(-1, 1).chunk(group.size)[group.rank]
        weight, bias = weight.clone().requires_grad_(not frozen), numbers(M // group.size, seed=7, dtype=dtype)
        bias.requires_grad_()
        x, grads = (
            own(whole, group).clone().requires_grad_(),
            of_ranks(group, B, T, M // group.size, seed=8, dtype=dtype),
        )
        weights = numbers(M, K, seed=6, dtype=dtype).clamp(-1, 1).chunk(group.size)
        grad = grads[group.rank].mT.contiguous().mT  # not contiguous
        truth = F.linear(whole, weight.detach(), bias.detach())
        room, kept = truth.nbytes, Kept(group)
        with untouched(x=x, weight=weight, bias=bias):
            given = x * 1 if frozen else x  # which nobody keeps but the answer
            y = attached(answer.gathered_linear(given, weight, bias, fresh), "the result")
        del given
        of_frozen = "the result alone may stay: where the weight is frozen, backward needs no x"
        advice = of_frozen if frozen else "the result alone may stay; all tokens are gathered once more in backward"
        kept.judge(room, "forward", advice)
        equal(y.detach(), truth, "the result")
        sends(fresh, "forward", whole, "all_gather")
        held = [y]
        del y
        with untouched(the_gradient_that_arrives=grad, x=x, weight=weight):
            torch.autograd.backward(let_go(held, "the result"), grad)
        back = [g @ w for g, w in zip(grads, weights, strict=True)]
        known = {"this rank's part alone, not summed over the ranks": own(back[group.rank], group)}
        equal(x.grad, own(total(back), group), "the gradient of x", known=known, ranks=group.size)
        rows = grad.flatten(0, 1).float()
        known = {"of this rank's tokens alone": own(grad, group).flatten(0, 1).float().sum(0).to(dtype)}
        equal(bias.grad, rows.sum(0).to(dtype), "the gradient of the bias", known=known)
        if frozen:
            require(weight.grad is None, "the frozen weight has a gradient")
            sends(fresh, "backward with a frozen weight", whole, "reduce_scatter")
            continue
        truth = (rows.T @ whole.flatten(0, 1).float()).to(dtype)
        few = own(grad, group).flatten(0, 1).float().T @ x.detach().flatten(0, 1).float()
        parts = [(g.flatten(0, 1).float().T @ whole.flatten(0, 1).float()).to(dtype) for g in grads]
        known = {
            "of this rank's tokens alone: its outputs are computed from all tokens": few.to(dtype),
            "summed over the ranks: each has other outputs, and of its own the gradient is whole": total(parts),
        }
        equal(weight.grad, truth, "the gradient of the weight", known=known)
        sends(fresh, "backward", whole, "all_gather", "reduce_scatter")


@on_ranks(1)
def test_dropout_seed(answer: Answer, group: WatchedGroup) -> None:
    with mock.patch("builtins.hash", stable_hash):
        judge_seeds(answer)


def stable_hash(value: object) -> int:
    """In place of hash(), which gives another number for a text in each process."""
    parts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(part, str) for part in parts):
        raise Wrong("hash() of a text is another number in each process: the ranks would not agree")
    return value.__hash__()


def judge_seeds(answer: Answer) -> None:
    sizes = ((1, 5), (2, 5), (3, 5), (16, 5), (130, 3), (600, 2), (2, 1200))
    for sequence, (ranks, replicas) in itertools.product((False, True), sizes):
        seed = {3: 0, 16: 2**32 - 1}.get(ranks, 1234)
        on = "on" if sequence else "off"
        case(f"seed {seed}, {ranks} tensor ranks, {replicas} data ranks, sequence parallelism {on}")
        seeds: dict[int, tuple[str, int, int]] = {}
        for data, tensor, place in itertools.product(range(replicas), range(ranks), ("outside", "inside")):
            found = answer.dropout_seed(seed, place, data, tensor, ranks, sequence)
            require(isinstance(found, int), f"the seed is {found!r}, expected an int")
            within = f"the seed is {found}, expected at least the {seed} given, and less than 2**63"
            require(seed <= found < 2**63, within)
            again = answer.dropout_seed(seed, place, data, tensor, ranks, sequence)
            require(found == again, "asked twice, it is another")
            # What a rank draws: alike only outside, within a tensor group, where tensors are whole.
            here = (place, data, tensor)
            if found in seeds:
                judge_same(seeds[found], here, sequence)
            elif place == "outside" and not sequence and tensor:
                raise Wrong(
                    f"outside, ranks 0 and {tensor} of a tensor group have seeds of their own: they hold the same "
                    "tensor, and must drop the same elements, or their copies of it drift apart"
                )
            seeds.setdefault(found, here)
    case("another seed")
    found = {seed: answer.dropout_seed(seed, "inside", 1, 1, 2, False) for seed in (0, 1_000_000)}
    require(len(set(found.values())) == 2, "the seed that is given makes no difference")


def judge_same(one: tuple[str, int, int], other: tuple[str, int, int], sequence: bool) -> None:
    """Raise Wrong unless the generators at these two must draw the same."""
    (a, data_a, tensor_a), (b, data_b, tensor_b) = one, other
    where = f"{a} on rank {tensor_a} of replica {data_a}, and {b} on rank {tensor_b} of replica {data_b}"
    if data_a != data_b:
        raise Wrong(f"the same seed for other samples: {where}", "Data-parallel ranks must not drop alike.")
    if a != b:
        raise Wrong(f"the same seed at two places: {where}", "Both would draw the same numbers.")
    if a == "inside":
        raise Wrong(
            f"the same seed for other heads: {where}",
            "All ranks would drop the same elements of other heads: 1/N of the randomness that was asked for.",
        )
    if sequence:
        raise Wrong(
            f"the same seed for other tokens: {where}", "With sequence parallelism each rank has its own tokens."
        )
