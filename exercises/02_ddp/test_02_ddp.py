"""Grades chapter 02: gradients equal to one process's, the bytes of one all-reduce a bucket, and their overlap."""

import torch
from torch import Tensor, nn

from refimpl.grading.compare import Wrong, equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic
from refimpl.measure.ledger import Ledger
from refimpl.zero.flat import cut_into_buckets

FEATURES = 6


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, a buffer, and a layer that only some ranks use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(FEATURES, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.spare = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.outer = nn.Linear(5, FEATURES, bias=False)
        self.head = nn.Linear(5, FEATURES)
        self.head.weight = self.outer.weight
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        h = self.frozen(torch.tanh(self.inner(x))) + self.shift
        h = torch.tanh(self.middle(self.spare(h) if spare else h))
        return self.head(h) * self.outer(h)


def loss(model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
    """This rank's loss; only even ranks use the spare layer."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    return model(x, spare=rank % 2 == 0).pow(2).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_process(ranks: int, steps: int, parts: int = 1, lr: float = 0.1) -> list[dict[str, Tensor]]:
    """The gradients of each step: the losses of all ranks and parts on one process, divided by the ranks."""
    model, history = Net(seed=0), []
    for step in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            for part in range(parts):
                (loss(model, rank, step, part) / ranks).backward()
        history.append(gradients(model))
        descend(model, lr)
    return history


def descend(model: nn.Module, lr: float = 0.1) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * p.grad


@on_ranks(2, 3, 4)
def test_average_gradients(answer: Answer, group: WatchedGroup) -> None:
    case("a layer unused on odd ranks, a frozen one, a tied weight")
    watched, oracle, model = group.fresh(), group.oracle(), Net(seed=0)
    params = list(model.parameters())
    loss(model, group.rank, step=0).backward()
    answer.average_gradients(watched, params)
    first_divergence([gradients(model)], one_process(group.size, 1), "the gradient", ranks=group.size)
    require(model.frozen.weight.grad is None, "a frozen parameter got a gradient: skip what requires none")
    oracle.all_reduce(torch.zeros(sum(p.numel() for p in params if p.requires_grad)))
    same_traffic(watched, oracle, "average_gradients")

    case("a gradient that is not contiguous (a transposed one)")
    p = nn.Parameter(torch.zeros(5, 3))
    local = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)).t() for r in range(group.size)]
    p.grad = local[group.rank]
    answer.average_gradients(group.fresh(), [p])
    known = {"it is still this rank's own: the mean was written into a copy": local[group.rank]}
    equal(p.grad, torch.stack(local).mean(0), "the gradient", ranks=group.size, known=known)


@on_ranks(2, 3, 4)
def test_token_mean_loss(answer: Answer, group: WatchedGroup) -> None:
    for counts in ([1, 3, 2, 7][: group.size], [5, 0, 1, 2][: group.size]):
        case(f"{counts} tokens on the ranks")
        data = [torch.randn(n, 4, generator=torch.Generator().manual_seed(r)) for r, n in enumerate(counts)]
        weight = torch.ones(4, requires_grad=True)
        watched = group.fresh()
        own = (data[group.rank] @ weight).pow(2).sum()
        found = answer.token_mean_loss(watched, own, counts[group.rank])
        require(
            isinstance(found, Tensor) and found.requires_grad, "the result is no loss that backward can be called on"
        )
        (mean,) = torch.autograd.grad(found, weight)
        group.all_reduce(mean, "mean")
        squares = [2 * (d @ torch.ones(4)) @ d for d in data]  # each rank's gradient of its sum
        total = torch.stack(squares).sum(0)
        each = torch.stack([s / max(1, n) for s, n in zip(squares, counts, strict=True)])
        known = {
            "it is the mean of the ranks' means: a token on a rank with few weighs more": each.mean(0),
            "it is the sum over tokens: nothing divides by their number": total,
            "each loss is divided by this rank's own number of tokens, and summed": each.sum(0),
        }
        equal(mean, total / sum(counts), "the averaged gradient", ranks=group.size, known=known)
        most = group.oracle()
        most.all_reduce(torch.zeros(1))
        if watched.ledger.calls() != {"all_reduce": 1}:
            same_traffic(watched, most, "token_mean_loss")


@on_ranks(1)
def test_assign_buckets(answer: Answer, group: WatchedGroup) -> None:
    for sizes, limit, frozen in (
        ([4, 3, 9, 2], 6, ()),
        ([4, 3, 9, 2], 7, ()),
        ([5, 5, 5, 5], 10, ()),
        ([1, 2, 3, 4, 5, 6], 7, (1, 5)),
        ([20, 1, 20], 5, ()),
        ([3], 100, ()),
    ):
        case(f"sizes {sizes}, limit {limit}" + (f", numbers {frozen} frozen" if frozen else ""))
        params = [nn.Parameter(torch.zeros(n), requires_grad=i not in frozen) for i, n in enumerate(sizes)]
        number = {p: i for i, p in enumerate(params)}
        trained = {p: 0 for p in params if p.requires_grad}
        expected = [[number[p] for p in b] for b in cut_into_buckets(list(trained), trained, limit)]
        buckets = answer.assign_buckets(params, limit)
        require(isinstance(buckets, list), f"the result is {buckets!r}, expected a list of lists of parameters")
        found = [[number[p] for p in bucket] for bucket in buckets]
        if found == expected:
            continue
        evidence = [f"  expected parameters {expected}", f"  found    parameters {found}"]
        flat = [i for bucket in found for i in bucket]
        require(not set(flat) & set(frozen), "a frozen parameter is in a bucket: it would wait for ever", *evidence)
        require(sorted(flat) == sorted(number[p] for p in trained), "some parameter is left out or twice", *evidence)
        require(flat == sorted(flat, reverse=True), "wrong order: backward reaches the last parameter first", *evidence)
        require([] not in found, "there is an empty bucket", *evidence)
        for bucket in found:
            total = sum(sizes[i] for i in bucket)
            require(
                total <= limit or len(bucket) == 1, f"a bucket holds {total} elements, the limit is {limit}", *evidence
            )
        raise Wrong("a bucket is closed although the next parameter would fit", *evidence)


@on_ranks(2, 3, 4)
def test_Ddp(answer: Answer, group: WatchedGroup) -> None:
    for limit in (40, 10_000, 1):
        case(f"3 steps, buckets of {limit} elements")
        train(answer, group, limit)
    case("ranks begin with different weights")
    model = Net(seed=group.rank)
    answer.Ddp(model, group.fresh(), 40)
    for name, tensor in Net(seed=0).state_dict().items():
        known = {"it is still this rank's own: broadcast it from rank 0": Net(seed=group.rank).state_dict()[name]}
        equal(model.state_dict()[name], tensor, f"{name} after Ddp(...)", known=known if group.rank else None)
    case("buckets of 40 elements: does the reduction overlap backward?")
    overlap(answer, group)
    case("2 micro-batches in no_sync(), then one that synchronises")
    accumulate(answer, group)


def train(answer: Answer, group: WatchedGroup, limit: int) -> None:
    """Three steps; gradients, traffic and open work after each."""
    watched, model, history = group.fresh(), Net(seed=0), []
    ddp = answer.Ddp(model, watched, limit)
    for step in range(3):
        watched.ledger.reset()
        model.zero_grad()
        loss(model, group.rank, step).backward()
        ddp.finish()
        all_done(watched, "finish")
        history.append(gradients(model))
        first_divergence(history, one_process(group.size, step + 1), "the gradient", ranks=group.size)
        same_traffic(watched, wanted(group, limit), f"step {step}")
        descend(model)


def wanted(group: WatchedGroup, limit: int) -> WatchedGroup:
    """A group that has made one step's all-reduces: one for each bucket that refimpl lays out."""
    oracle, model = group.oracle(), Net(seed=0)
    trained = {p: 0 for p in model.parameters() if p.requires_grad}
    for bucket in cut_into_buckets(list(trained), trained, limit):
        oracle.all_reduce(torch.zeros(sum(p.numel() for p in bucket)))
    return oracle


def overlap(answer: Answer, group: WatchedGroup) -> None:
    """Each bucket but the last must start before the last gradient exists, and still fly when the next one comes."""
    watched, model = group.fresh(), Net(seed=0)
    mark(model, watched.ledger)
    ddp = answer.Ddp(model, watched, 40)
    watched.ledger.reset()
    loss(model, rank=0, step=0).backward()
    in_backward = list(watched.ledger.events)
    ddp.finish()
    evidence = [
        "what happened in backward, in order:",
        *(f"  {e.phase if e.call >= 0 else ''} {e.op}" for e in in_backward),
    ]
    last = max(i for i, e in enumerate(in_backward) if e.phase == "mark")
    started = sum(e.phase == "start" for e in in_backward[:last])
    full = len(wanted(group, 40).ledger.events) // 2 - 1
    require(started, "no overlap: nothing is sent before the last gradient; launch from the hook", *evidence)
    headline = (
        f"{started} of the {full} buckets that are full before the last gradient have started: launch each at once"
    )
    require(started >= full, headline, *evidence)
    ended = any(e.phase == "end" for e in in_backward[:last])
    require(not ended, "no overlap: backward stands still until the all_reduce is over; use async_op=True", *evidence)


def mark(model: nn.Module, ledger: Ledger) -> None:
    """Enter each gradient in the ledger at the moment it is complete."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: ledger.mark(f"gradient of {name}"))


def accumulate(answer: Answer, group: WatchedGroup) -> None:
    watched, model, history = group.fresh(), Net(seed=0), []
    ddp = answer.Ddp(model, watched, 40)
    for step in range(2):
        watched.ledger.reset()
        model.zero_grad()
        with ddp.no_sync():
            for part in range(2):
                loss(model, group.rank, step, part).backward()
        require(not watched.ledger.calls(), "no_sync sends: nothing may travel inside it", *watched.transcript())
        loss(model, group.rank, step, part=2).backward()
        ddp.finish()
        history.append(gradients(model))
        first_divergence(history, one_process(group.size, step + 1, parts=3), "the gradient", ranks=group.size)
        same_traffic(watched, wanted(group, 40), f"step {step}")
        descend(model)
