"""Grades chapter 02: gradients equal to one process's, the bytes of one all-reduce a bucket, and their overlap."""

import torch
from torch import Tensor, nn

from refimpl.grading.compare import Wrong, by_users, equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, storage_bytes, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, mark_gradients, not_too_early, same_traffic
from refimpl.measure.ledger import Event
from refimpl.zero.flat import cut_into_buckets

FEATURES = 6


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, a buffer, and a layer that only some ranks use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)  # without the stack that torch.manual_seed keeps for a GPU
        self.inner = nn.Linear(FEATURES, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.spare = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.outer = nn.Linear(5, FEATURES, bias=False)
        self.head = nn.Linear(5, FEATURES)
        self.head.weight = self.outer.weight
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("count", torch.tensor(2**40 + 2 * seed + 1))  # as BatchNorm's: no float

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        h = self.frozen(torch.tanh(self.inner(x))) + self.shift
        h = torch.tanh(self.middle(self.spare(h) if spare else h))
        return self.head(h) * self.outer(h)


def loss(model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
    """This rank's loss; only even ranks use the spare layer, and in every second micro-batch only odd ones do."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    dtype = next(model.parameters()).dtype
    return model(x.to(dtype), spare=(rank + part) % 2 == 0).pow(2).mean()


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
    for dtype in (torch.float32, torch.bfloat16):
        case(f"{dtype}, a layer unused on odd ranks, a frozen one, a tied weight")
        watched, oracle, model = group.fresh(), group.tally(), Net(seed=0).to(dtype)
        params = list(model.parameters())
        loss(model, group.rank, step=0).backward()
        kept, trained = Kept(watched), sum(p.numel() for p in params if p.requires_grad) * dtype.itemsize
        own = storage_bytes(p.grad for p in params if p.grad is not None)
        with untouched(params=params):
            answer.average_gradients(watched, params)
        kept.judge(trained - own, "average_gradients", "the old gradients, or a second copy of the new ones, stay")
        judge_gradients([gradients(model)], group, dtype, one_process(group.size, steps=1))
        require(model.frozen.weight.grad is None, "a frozen parameter got a gradient: skip what requires none")
        oracle.all_reduce(torch.zeros(trained // dtype.itemsize, dtype=dtype))
        same_traffic(watched, oracle, "average_gradients", itemsize=dtype.itemsize)

    case("a gradient that is not contiguous (a transposed one)")
    p = nn.Parameter(torch.zeros(5, 3))
    local = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)).t() for r in range(group.size)]
    p.grad = local[group.rank].clone()
    answer.average_gradients(group.fresh(), [p])
    known = {"it is still this rank's own: the mean was written into a copy": local[group.rank]}
    equal(p.grad, torch.stack(local).mean(0), "the gradient", ranks=group.size, known=known)

    case("a frozen parameter that has a gradient from before it was frozen, and a million elements beside it")
    p, frozen = nn.Parameter(torch.zeros(2**20)), nn.Parameter(torch.zeros(3))
    p.grad, frozen.grad = torch.full_like(p, group.rank), torch.ones(3)
    frozen.requires_grad_(False)
    watched, oracle = group.fresh(), group.tally()
    answer.average_gradients(watched, [frozen, p])
    require(frozen.grad is not None and bool((frozen.grad == 1).all()), "a frozen parameter's gradient was changed")
    equal(p.grad, torch.full_like(p, (group.size - 1) / 2), "the gradient", ranks=group.size)
    oracle.all_reduce(torch.zeros(2**20))
    same_traffic(watched, oracle, "average_gradients")

    case("40000 in fp16 on every rank: their mean fits, their sum does not; beside it one that no rank has used")
    p, unused = (nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2))
    p.grad = torch.full((3,), 40000.0, dtype=torch.float16)
    answer.average_gradients(group.fresh(), [p, unused])
    require(unused.grad is not None, "a parameter that no rank has used has no gradient: its mean is zero")
    known = {"it is Inf: fp16 ends at 65504, and the sum is beyond: all-reduce the mean": torch.full_like(p, torch.inf)}
    equal(p.grad, torch.full_like(p, 40000.0), "the gradient", known=known)


def judge_gradients(
    found: list[dict[str, Tensor]], group: WatchedGroup, dtype: torch.dtype, truth: list[dict[str, Tensor]]
) -> None:
    """Beside one process's of fp32, which takes bf16 for near enough."""
    if wrong := [n for n, g in found[-1].items() if g.dtype != dtype]:
        raise Wrong(f"the gradient of {wrong[0]} has dtype {found[-1][wrong[0]].dtype}, its parameter {dtype}")
    truth, exact = truth[: len(found)], dtype == torch.float32
    known = by_users(truth[-1], group.size, {"spare": (group.size + 1) // 2})
    if len(found) == 1:
        model = Net(seed=0)
        loss(model, group.rank, step=0).backward()
        for name, own in gradients(model).items():
            known.setdefault(name, {})["it is still this rank's own: nobody has put the mean there"] = own
    loose = {} if exact else {"rtol": 0.1, "atol": 0.02}
    first_divergence(
        [{n: g.float() for n, g in step.items()} for step in found], truth, "the gradient",
        ranks=group.size, known=known, **loose,
    )  # fmt: skip


@on_ranks(2, 3, 4)
def test_Ddp(answer: Answer, group: WatchedGroup) -> None:
    truth = one_process(group.size, steps=3)
    for limit in (40, 10_000, 1):
        case(f"3 steps, buckets of {limit} elements")
        train(answer, group, limit, torch.float32, truth)
    case("3 steps in bf16")
    train(answer, group, 40, torch.bfloat16, truth)
    case("ranks begin with different weights")
    model = Net(seed=group.rank)
    answer.Ddp(model, group.fresh(), 40)
    for name, tensor in Net(seed=0).state_dict().items():
        known = {"it is still this rank's own: broadcast it from rank 0": Net(seed=group.rank).state_dict()[name]}
        equal(model.state_dict()[name], tensor, f"{name} after Ddp(...)", known=known if group.rank else None)
    overlap(answer, group)
    case(f"{group.size} micro-batches in no_sync(), then one that synchronises")
    accumulate(answer, group)
    case("an exception inside no_sync()")
    interrupted(answer, group)
    case("two models of two layers, used in another order than they are registered in")
    both_at_once(answer, group)


def train(answer: Answer, group: WatchedGroup, limit: int, dtype: torch.dtype, truth: list[dict[str, Tensor]]) -> None:
    """Three steps; gradients, traffic and open work after each."""
    watched, history = group.fresh(), list[dict[str, Tensor]]()
    kept, model = Kept(watched), Net(seed=0).to(dtype)
    mark_gradients(model, watched.ledger)
    ddp = answer.Ddp(model, watched, limit)
    room = storage_bytes([*model.parameters(), *model.buffers()])
    room += sum(p.numel() for p in model.parameters() if p.requires_grad) * dtype.itemsize
    for step in range(3):
        watched.ledger.reset()
        model.zero_grad()
        loss(model, group.rank, step).backward()
        ddp.finish()
        all_done(watched, "finish")
        not_too_early(watched.ledger.events, [names for names, _ in layout(limit)], "all_reduce")
        history.append(gradients(model))
        judge_gradients(history if dtype == torch.float32 else history[:1], group, dtype, truth)
        same_traffic(watched, wanted(group, limit, dtype), f"step {step}", itemsize=dtype.itemsize)
        mine = room + sum(storage_bytes(h.values()) for h in history)
        kept.judge(mine, f"step {step}", "the model and its gradients, once, may stay; is a buffer or a copy kept?")
        descend(model)


def layout(limit: int) -> list[tuple[list[str], int]]:
    """The buckets that refimpl lays out: names of the parameters, and elements."""
    model = Net(seed=0)
    names = {p: n for n, p in model.named_parameters()}
    trained = {p: 0 for p in model.parameters() if p.requires_grad}
    buckets = cut_into_buckets(list(trained), trained, limit)
    return [([names[p] for p in bucket], sum(p.numel() for p in bucket)) for bucket in buckets]


def wanted(group: WatchedGroup, limit: int, dtype: torch.dtype = torch.float32) -> WatchedGroup:
    """A group that has made one step's all-reduces: one for each bucket that refimpl lays out."""
    oracle = group.tally()
    for _, numel in layout(limit):
        oracle.all_reduce(torch.zeros(numel, dtype=dtype))
    return oracle


def overlap(answer: Answer, group: WatchedGroup) -> None:
    """In every step."""
    watched, model = group.fresh(), Net(seed=0)
    mark_gradients(model, watched.ledger)
    ddp = answer.Ddp(model, watched, 40)
    for step in ("first", "second"):
        case(f"buckets of 40 elements: does the reduction overlap backward in the {step} step?")
        watched.ledger.reset()
        loss(model, rank=0, step=0).backward()
        in_backward = list(watched.ledger.events)
        ddp.finish()
        judge_overlap(in_backward, len(wanted(group, 40).ledger.events) // 2 - 1)


def judge_overlap(in_backward: list[Event], full: int) -> None:
    """Each bucket but the last must start before the last gradient exists, and still fly when the next one comes."""
    evidence = [
        "what happened in backward, in order:",
        *(f"  {e.phase if e.call >= 0 else ''} {e.op}" for e in in_backward),
    ]
    last = max(i for i, e in enumerate(in_backward) if e.phase == "mark")
    started = sum(e.phase == "start" for e in in_backward[:last])
    require(started, "no overlap: nothing is sent before the last gradient; launch from the hook", *evidence)
    headline = (
        f"{started} of the {full} buckets that are full before the last gradient have started: launch each at once"
    )
    require(started >= full, headline, *evidence)
    ended = any(e.phase == "end" for e in in_backward[:last])
    require(not ended, "no overlap: backward stands still until the all_reduce is over; use async_op=True", *evidence)


def accumulate(answer: Answer, group: WatchedGroup) -> None:
    watched, model, history = group.fresh(), Net(seed=0), []
    mark_gradients(model, watched.ledger)
    ddp = answer.Ddp(model, watched, 40)
    alone = Net(seed=0)
    for rank in range(group.size):
        (loss(alone, rank, step=0, part=group.size) / group.size).backward()
    sentence = "only the last micro-batch's: what added up inside no_sync() is lost"
    lost = {name: {sentence: grad} for name, grad in gradients(alone).items()}
    parts = group.size + 1
    truth = one_process(group.size, 2, parts)
    for step in range(2):
        watched.ledger.reset()
        model.zero_grad()
        with ddp.no_sync():
            for part in range(group.size):
                loss(model, group.rank, step, part).backward()
        require(not watched.ledger.calls(), "no_sync sends: nothing may travel inside it", *watched.transcript())
        loss(model, group.rank, step, part=group.size).backward()
        ddp.finish()
        not_too_early(watched.ledger.events, [names for names, _ in layout(40)], "all_reduce")
        history.append(gradients(model))
        first_divergence(history, truth[: step + 1], "the gradient", ranks=group.size, parts=parts, known=lost)
        same_traffic(watched, wanted(group, 40), f"step {step}")
        descend(model)


class Turned(nn.Module):
    """Backward completes the second layer first, which no bucket has first."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.second, self.first = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))).square().mean()
        return out


def both_at_once(answer: Answer, group: WatchedGroup) -> None:
    models, groups = [Turned(), Turned()], [group.fresh(), group.fresh()]
    ddps = [answer.Ddp(model, watched, 30) for model, watched in zip(models, groups, strict=True)]
    for watched in groups:
        watched.ledger.reset()
    sentence = "all zeros: its bucket left before it was there, or what is under way is kept in the class, not in self"
    for number, model in enumerate(models):
        model(torch.full((2, 5), 1.0 + number + group.rank)).backward()
        sent = [watched.ledger.calls().get("all_reduce", 0) for watched in groups]
        late = "1 of 2 buckets has left, and both are full: the second, full before the first, waits for nothing more"
        require(number or sent[0] != 1, f"{late}; launch all that can go (`while`, where you may have `if`)")
    shared = f"two models' backwards have sent {sent[0]} and {sent[1]} buckets, expected 2 and 2: is what is under way "
    require(sent == [2, 2], shared + "kept in the class, not in self?")
    for number, (ddp, model) in enumerate(zip(ddps, models, strict=True)):
        ddp.finish()
        others = groups[1].ledger.open_calls()
        alike = "finish() of one model waits for another's buckets: is what is under way kept outside of self?"
        require(number or others, alike)
        truth = Turned()
        for rank in range(group.size):
            (truth(torch.full((2, 5), 1.0 + number + rank)) / group.size).backward()
        early = {n: {sentence: g * 0} for n, g in gradients(truth).items()}
        what = f"model {number} of two whose backwards come before both finish(): the gradient"
        first_divergence([gradients(model)], [gradients(truth)], what, ranks=group.size, known=early)


def interrupted(answer: Answer, group: WatchedGroup) -> None:
    """An exception leaves the block, and the next backward synchronises all the same."""
    watched, model = group.fresh(), Net(seed=0)
    ddp = answer.Ddp(model, watched, 40)
    try:
        with ddp.no_sync():
            raise KeyboardInterrupt  # as in a notebook whose cell is stopped
    except KeyboardInterrupt:
        watched.ledger.reset()
    else:
        raise Wrong("an exception inside no_sync() is swallowed")
    loss(model, group.rank, step=0).backward()
    sent = bool(watched.ledger.calls())
    ddp.finish()
    require(sent, "after an exception inside no_sync() nothing is sent in backward: reset the flag in `finally`")
    first_divergence([gradients(model)], one_process(group.size, 1), "the gradient", ranks=group.size)
