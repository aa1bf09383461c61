"""Grades chapter 15's gates: who is chosen, with what weight, what learns from it, and which place a route gets."""

from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.exchange import attached, numbers
from refimpl.grading.grade import on_ranks
from refimpl.grading.lines import Lines
from refimpl.grading.memory import Largest, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = (
    (7, 4, 2, FP32),
    (9, 8, 3, BF16),
    (6, 5, 1, FP32),
    (8, 5, 1, BF16),
    (4, 3, 3, FP32),
    (40, 24, 5, FP32),
    (0, 4, 2, FP32),
)


def pair(found: Any, names: str) -> tuple[Tensor, Tensor]:
    require(isinstance(found, tuple) and len(found) == 2, f"the result is no pair ({names})")
    first, second = found
    return first, second


def logits_of(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Halves around 100, which exp cannot take and bf16 holds: many are equal; of 3 in fp32 all but equal."""
    if (experts, dtype) == (3, FP32):
        return 100 + torch.arange(3.0).expand(tokens, 3) * 2**-12  # equal in 16 bits, probabilities of them too
    return (numbers(tokens, experts, seed=tokens) / 2 + 100).to(dtype)


def first_highest(by: Tensor, k: int) -> Tensor:
    return by.argsort(dim=1, descending=True, stable=True)[:, :k]


def judge_order(found: Any, by: Tensor, k: int, what: str, known: dict[str, Tensor]) -> None:
    """Raise Wrong unless `found` are the places of the k highest of each row, of equal ones the first."""
    expected = first_highest(by, k)
    known = known | {"in the order of their numbers: the best stands first": expected.sort(1).values}
    if isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype:
        inside = bool(((found >= 0) & (found < by.shape[1])).all())
        same = inside and torch.equal(by.gather(1, found), by.gather(1, expected))
        require(
            torch.equal(found, expected) or not same,
            f"{what}: of equally high ones the first is to be taken, on any device",
            f"  expected {str(expected.tolist())[:100]}",
            f"  found    {str(found.tolist())[:100]}",
        )
    equal(found, expected, what, known={k: t for k, t in known.items() if not torch.equal(t, expected)})


def judge_gradient(
    found: Tensor, expected: Tensor, mine: Tensor, truth: Tensor, known: dict[str, Tensor], held: Tensor | None = None
) -> None:
    """Backward of both, with the same slope; `mine` and `truth` are their logits. held: by a sum without a graph."""
    slope = numbers(*expected.shape, seed=9)
    if held is not None:
        (of_held,) = torch.autograd.grad((held * slope).sum(), truth, retain_graph=True)
        known = known | {"the sum that divides has a gradient too, and is detached here": of_held}
    (expected * slope).sum().backward()
    (attached(found, "the weights") * slope).sum().backward()
    assert truth.grad is not None
    rtol = 2e-2 if truth.dtype == BF16 else 1e-4
    equal(mine.grad, truth.grad, "the gradient of the logits", known=known, rtol=rtol, atol=1e-2 * rtol)


@on_ranks(1)
def test_top_k_gate(answer: Answer, group: WatchedGroup) -> None:
    for tokens, number, k, dtype in SHAPES:
        case(f"{tokens} tokens, {number} experts, k = {k}, {dtype}")
        logits = logits_of(tokens, number, dtype).requires_grad_()
        truth = logits.detach().clone().requires_grad_()
        with untouched(logits=logits):
            experts, weights = pair(answer.top_k_gate(logits, k), "experts, weights")
        probs = truth.float().softmax(1)
        low = first_highest(truth.detach().float().softmax(1).to(BF16), k)
        judge_order(experts, truth.detach().float(), k, "the experts", {"compared in 16 bits: logits are fp32": low})
        raw = probs.gather(1, first_highest(truth.detach().float(), k))
        expected = raw / raw.sum(1, keepdim=True) if k > 1 else raw
        low = truth.detach().softmax(1).gather(1, first_highest(truth.detach(), k)).float()
        known = {
            "not divided by their sum": raw,
            "all 1: for k = 1 the weight is the probability, or no gradient reaches the gate": torch.ones_like(raw),
            "the softmax is in bf16: 8 bits are too few for a gate": low / low.sum(1, keepdim=True) if k > 1 else low,
            "the softmax is in bf16: 8 bits are too few for a gate.": (low / low.sum(1, keepdim=True)).to(BF16).float(),
        }
        different = {s: t.detach() for s, t in known.items() if not torch.equal(t, expected)}
        if isinstance(weights, Tensor) and weights.dtype == BF16:
            raise Wrong("the weights are bf16: the softmax of a gate is in fp32 whatever the model has")
        equal(weights, expected, "the weights", known=different)
        held = raw / raw.sum(1, keepdim=True).detach() if k > 1 else raw
        judge_gradient(weights, expected, logits, truth, {"zeros: the sum must have a gradient too": truth * 0}, held)


@on_ranks(1)
def test_biased_gate(answer: Answer, group: WatchedGroup) -> None:
    for tokens, number, k, dtype in SHAPES:
        case(f"{tokens} tokens, {number} experts, k = {k}, {dtype}")
        logits = logits_of(tokens, number, dtype) - 100
        logits[1:2] -= 16  # scores of 1e-7: whatever keeps their sum from 0 is as large
        logits.requires_grad_()
        truth = logits.detach().clone().requires_grad_()
        bias = torch.tensor([0.5, 0.0, -1.0, 0.25, 2.0, 0.0, -0.125, 0.0]).repeat(3)[:number]
        if dtype == BF16:
            bias = 0.5 + 2.0**-10 * torch.arange(number)  # not in bf16, and decides where scores are equal
        if tokens == 7:
            bias -= 4  # no score + bias is above 0
        bias.requires_grad_()
        with untouched(logits=logits, bias=bias):
            experts, weights = pair(answer.biased_gate(logits, bias, k), "experts, weights")
        scores = truth.float().sigmoid()
        by = scores.detach() + bias.detach()
        soft, chosen = truth.detach().float().softmax(1), first_highest(by, k)
        low = truth.detach().sigmoid().float().gather(1, chosen)
        wrong_ways = {
            "chosen by the scores alone: the bias is there to decide who is chosen": first_highest(scores.detach(), k),
            "chosen by a softmax: the scores are sigmoids": first_highest(soft + bias.detach(), k),
            "the bias is added to the logits: it is added to the scores": first_highest(
                (truth + bias).detach().float().sigmoid(), k
            ),
            "the bias is taken off": first_highest(scores.detach() - bias.detach(), k),
            "in the order of their scores: that of score + bias is asked": chosen.gather(
                1, first_highest(scores.detach().gather(1, chosen), k)
            ),
            "the bias is rounded to 16 bits: it is fp32": first_highest(scores.detach() + bias.detach().to(BF16), k),
            "score + bias is cut off at 0: a bias may be below -1": first_highest(by.clamp(min=0), k),
        }
        judge_order(experts, by, k, "the experts", wrong_ways)
        raw, biased = scores.gather(1, experts), by.gather(1, experts)
        expected = raw / raw.sum(1, keepdim=True)
        known = {
            "the bias is in the weights: it decides who is chosen, and nothing else": biased / biased.sum(1, True),
            "not divided by their sum": raw.detach(),
            "divided by the sum over all E: it is that of the k chosen": raw / scores.sum(1, keepdim=True),
            "the sigmoid is in bf16: 8 bits are too few for a gate": low / low.sum(1, keepdim=True),
            "a softmax of the logits: the scores are sigmoids": (s := soft.gather(1, experts)) / s.sum(1, keepdim=True),
        }
        different = {s: t for s, t in known.items() if not torch.equal(t, expected.detach())}
        equal(weights, expected.detach(), "the weights", known=different)
        judge_gradient(weights, expected, logits, truth, {}, raw / raw.sum(1, keepdim=True).detach())
        none = bias.grad is None or not bias.grad.any()
        require(none, "the bias has a gradient: it is moved by `rebalance`, not by the optimizer")


@on_ranks(1)
def test_expert_choice(answer: Answer, group: WatchedGroup) -> None:
    shapes = ((12, 4, 5, FP32), (9, 3, 2, BF16), (3, 4, 8, FP32), (60, 2, 25, FP32), (0, 2, 3, FP32))
    for tokens, number, capacity, dtype in shapes:
        case(f"{tokens} tokens, {number} experts, capacity {capacity}, {dtype}")
        logits = logits_of(tokens, number, dtype).requires_grad_()
        truth = logits.detach().clone().requires_grad_()
        with untouched(logits=logits):
            chosen, weights = pair(answer.expert_choice(logits, capacity), "tokens, weights")
        probs, most = truth.float().softmax(1).t(), min(capacity, tokens)
        over_tokens = truth.detach().float().softmax(0).t()
        by_logits = "the order of the logits, or of a softmax over the tokens: the softmax is over each token's experts"
        known = {
            by_logits: first_highest(over_tokens, most),
            f"{by_logits}.": truth.detach().float().t().topk(most)[1],
        }
        judge_order(chosen, probs.detach(), most, "the tokens", known)
        expected = probs.gather(1, chosen)
        low = truth.detach().softmax(1).t().gather(1, chosen).float()
        known = {
            "a softmax over the tokens: it is over each token's experts": over_tokens.gather(1, chosen),
            "divided by their sum": expected.detach() / expected.detach().sum(1, keepdim=True),
            "the softmax is in bf16: 8 bits are too few for a gate": low,
        }
        different = {s: t for s, t in known.items() if not torch.equal(t, expected.detach())}
        equal(weights, expected.detach(), "the weights", known=different)
        judge_gradient(weights, expected, logits, truth, {})


CHOICES = {
    "the example": ([[0, 1], [0, 1], [1, 0]], 2, 2),
    "an expert that nobody chooses, one that all do": ([[2, 0], [2, 3], [2, 0], [2, 3], [2, 0]], 4, 3),
    "padding between": ([[1, 0], [-1, -1], [1, 2], [-1, -1], [2, 1], [0, 1]], 3, 2),
    "one choice": ([[3], [0], [3], [3], [-1], [0]], 4, 2),
    "no place at all": ([[0, 1], [1, 0]], 2, 0),
    "more places than tokens": ([[0, 2, 1], [1, 0, 2]], 3, 64),
    "no token": ([], 4, 3),
}


@on_ranks(1)
def test_positions(answer: Answer, group: WatchedGroup) -> None:
    drawn = torch.rand(40, 8, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :3]
    for name, (choices, number, capacity) in {**CHOICES, "40 tokens": (drawn.tolist(), 8, 11)}.items():
        case(f"{name}: {len(choices)} tokens, {number} experts, {capacity} places")
        experts = torch.tensor(choices, dtype=torch.int64).view(len(choices), -1 if choices else 2)
        with untouched(experts=experts), Largest() as largest:
            found = answer.positions(experts, number, capacity)
        by_choice, by_token = places(experts, number, capacity, True), places(experts, number, capacity, False)
        apart = torch.stack([places(column[:, None], number, capacity, True)[:, 0] for column in experts.t()], 1)
        known = {
            "a token's choices follow one another: all first choices come before any second one": by_token,
            "each choice is counted from 0: two routes have one place": apart,
            "a place beyond the capacity is no place: -1": places(experts, number, 10**6, True),
            "the last place is given again and again: what does not fit is dropped, -1": places(
                experts, number, 10**6, True
            ).clamp(max=capacity - 1),
            "places are counted from 1": places(experts, number, capacity - 1, True, start=1),
            "places are counted from 1: the first is 0": places(experts, number, capacity, True, start=1),
            "places of padding are counted: a token that goes nowhere takes none": padded(experts, number, capacity),
        }
        equal(found, by_choice, "the places", known={s: t for s, t in known.items() if not torch.equal(t, by_choice)})
        room = max(experts.numel() * (number + 1), 64)  # a column more for padding: one_hot(experts + 1)
        require(
            largest.numel <= room,
            f"something of {largest.numel:,} elements is made, k T x (E + 1) are {room:,}: no one-hot matrix of places",
        )
    judge_many(answer)


def judge_many(answer: Answer) -> None:
    """10^5 tokens: what is counted in 16 bits is wrong, and lines of Python are not run for each."""
    case("100,000 tokens, 3 experts, 60,000 places")
    experts, counted = torch.arange(200_000).mul(7).remainder(3).view(-1, 2), []
    for tokens in (100, 200):
        with Lines() as lines:
            answer.positions(experts[:tokens], 3, 60_000)
        counted.append(lines.run)
    more = counted[1] - counted[0]
    require(more < 50, f"{more} lines of Python run for 100 tokens more: no loop over tokens, of which there are 10^5")
    flat = experts.t().reshape(-1)
    before = torch.nn.functional.one_hot(flat, 3).cumsum(0).gather(1, flat[:, None]).view(2, -1).t() - 1
    found = answer.positions(experts, 3, 60_000)
    right = isinstance(found, Tensor) and torch.equal(found, before.masked_fill(before >= 60_000, -1))
    require(right, "right for a few tokens, wrong for 10^5: 16 bits cannot count them; bf16 ends at 256, fp16 at 2,048")


def places(experts: Tensor, number: int, capacity: int, by_choice: bool, start: int = 0) -> Tensor:
    """One route after the other."""
    out, used = torch.full_like(experts, -1), [start] * number
    tokens, k = experts.shape
    order = (
        [(t, j) for j in range(k) for t in range(tokens)] if by_choice else [divmod(r, k) for r in range(tokens * k)]
    )
    for t, j in order:
        expert = int(experts[t, j])
        if expert >= 0:
            out[t, j] = used[expert] if used[expert] - start < capacity else -1
            used[expert] += 1
    return out


def padded(experts: Tensor, number: int, capacity: int) -> Tensor:
    """As if padding went to an expert of its own accord: the first, or the last one."""
    return places(experts.clamp(min=0), number, capacity, True).masked_fill(experts < 0, -1)
