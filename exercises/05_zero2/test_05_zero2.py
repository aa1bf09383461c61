"""Grades chapter 05's collector: mean gradients in shards, sent inside backward, and memory that is really freed."""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from refimpl.comm.work import Work
from refimpl.grading.compare import a_tensor, by_users, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import (
    WatchedGroup,
    all_done,
    mark_gradients,
    most_under_way,
    not_too_early,
    same_traffic,
)
from refimpl.measure.ledger import Event
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.flat import Bucket, lay_out

FEATURES = 6
LIMIT = 40


class Net(nn.Module):
    """Odd sizes, a tied weight, one that lies transposed, a frozen layer, and a layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(FEATURES, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.spare = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.middle.weight.data = self.middle.weight.data.t().contiguous().t()  # and so does its gradient
        self.outer = nn.Linear(5, FEATURES, bias=False)
        self.head = nn.Linear(5, FEATURES)
        self.head.weight = self.outer.weight

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        h = self.frozen(torch.tanh(self.inner(x)))
        h = torch.tanh(self.middle(self.spare(h) if spare else h))
        return self.head(h) * self.outer(h)


def loss(model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
    """This rank's loss; only even ranks use the spare layer, and in every second micro-batch only odd ones do."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    dtype = next(model.parameters()).dtype
    return model(x.to(dtype), spare=(rank + part) % 2 == 0).pow(2).mean()


def one_process(ranks: int, step: int, parts: Sequence[int]) -> dict[str, Tensor]:
    """The gradients of one step: the losses of all ranks and parts on one process, divided by the ranks."""
    model = Net()
    for rank in range(ranks):
        for part in parts:
            (loss(model, rank, step, part) / ranks).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def layout(group: WatchedGroup, limit: int) -> tuple[list[Bucket], dict[nn.Parameter, str]]:
    """refimpl's buckets of the Net, and the names of their parameters."""
    model = Net()
    trained = {p: 0 for p in model.parameters() if p.requires_grad}
    return lay_out(list(trained), trained, group, limit), {p: n for n, p in model.named_parameters()}


@on_ranks(2, 3, 4)
def test_GradientShards(answer: Answer, group: WatchedGroup) -> None:
    for limit in (LIMIT, 10_000, 1):
        case(f"2 steps of one micro-batch, buckets of {limit} elements; a layer unused on odd ranks, a frozen one")
        train(answer, group, limit, parts=1)
    case(f"2 steps of {group.size + 1} micro-batches; a layer that even ranks use in the first, odd ones in the second")
    train(answer, group, LIMIT, parts=group.size + 1)
    case("2 steps in bf16")
    train(answer, group, LIMIT, parts=1, dtype=torch.bfloat16)
    overlap(answer, group)
    case("two layers, the second used first: its bucket is the first to leave, and the last to be full")
    out_of_turn(answer, group)
    case("10 layers of 900 elements, a bucket each: is memory freed?")
    freed(answer, group)


def new_shards(answer: Answer, model: nn.Module, group: WatchedGroup, limit: int) -> Any:
    gradients = answer.GradientShards(model, group, limit)
    shards = getattr(gradients, "shards", {})
    kind = f"self.shards is a {type(shards).__name__}, expected a dict: bucket number -> shard"
    require(isinstance(shards, dict), kind)
    require(not shards, "a new GradientShards has shards already: are they kept in the class, not in self?")
    return gradients


def train(answer: Answer, group: WatchedGroup, limit: int, parts: int, dtype: torch.dtype = torch.float32) -> None:
    watched, model = group.fresh(), Net().to(dtype)
    buckets, names = layout(group, limit)
    mark_gradients(model, watched.ledger)
    kept = Kept(watched)
    gradients = new_shards(answer, model, watched, limit)
    for step in range(2):
        watched.ledger.reset()
        for part in range(parts):
            begun = len(watched.ledger.events)
            loss(model, group.rank, step, part).backward()
            gradients.finish()
            all_done(watched, "finish")
            judge_order(watched.ledger.events[begun:], [[names[p] for p in b.params] for b in buckets])
        sent, every = watched.ledger.calls().get("reduce_scatter", 0), len(buckets) * parts
        few = f"{sent} of {every} buckets have left after finish(): one that never filled is launched there"
        require(not 0 < sent < every, few)
        left = [n for n, p in model.named_parameters() if p.grad is not None]
        require(
            not left, f"{', '.join(left[:3])}: .grad is still there after finish(); set it to None when it has left"
        )
        require(
            isinstance(gradients.shards, dict) and sorted(gradients.shards) == list(range(len(buckets))),
            f"self.shards has no entry for each of the {len(buckets)} buckets",
        )
        judge_shards(group, gradients.shards, buckets, dtype)
        judge_values(group, gradients.shards, buckets, names, step, parts, dtype)
        same_traffic(watched, wanted(group, buckets * parts, dtype), f"step {step}", itemsize=dtype.itemsize)
        room = sum(-(-packed(b) // group.size) for b in buckets) * dtype.itemsize
        kept.judge(room, f"step {step}", "the shards alone may stay; are sent buckets, or a copy of the model, kept?")
        gradients.shards.clear()
        kept.judge(0, f"step {step}, after shards.clear(),", "the caller has cleared the shards: who else holds them?")


def wanted(group: WatchedGroup, buckets: list[Bucket], dtype: torch.dtype) -> WatchedGroup:
    """A group that has sent these buckets."""
    oracle = group.tally()
    for bucket in buckets:
        mine = torch.zeros(-(-packed(bucket) // group.size), dtype=dtype)
        oracle.reduce_scatter(mine, mine.repeat(group.size))
    return oracle


def judge_order(events: list[Event], buckets: list[list[str]]) -> None:
    """No bucket leaves before its gradients are there, and none while another is under way."""
    not_too_early(events, buckets, "reduce_scatter")
    most = most_under_way(events)
    require(most <= 1, f"{most} buckets are under way at once: settle the one before, or their buffers add up")


def judge_values(
    group: WatchedGroup, shards: dict[int, Tensor], buckets: list[Bucket], names: dict[nn.Parameter, str], step: int,
    parts: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    expected = expected_gradients(group, shards, buckets, names, step, parts)
    users = {"spare": (group.size + 1) // 2} if parts == 1 else {}
    first_divergence(
        [{n: t.float() for n, t in whole(group, shards, buckets, names).items()}],
        [expected],
        "the gradient",
        ranks=group.size,
        parts=parts,
        known=by_users(expected, group.size, users),
        rtol=1e-5 if dtype == torch.float32 else 0.1,
        atol=1e-6 if dtype == torch.float32 else 0.02,
    )


def judge_shards(group: WatchedGroup, shards: dict[int, Tensor], buckets: list[Bucket], dtype: torch.dtype) -> None:
    """A shard has 1/N of the padded bucket, and memory for no more."""
    for number, bucket in enumerate(buckets):
        size = -(-packed(bucket) // group.size)
        shard = shards[number]
        what = f"shards[{number}]"
        a_tensor(shard, what)
        require(
            shard.numel() == size,
            f"{what} has not {size} elements, which is 1/{group.size} of {packed(bucket)}, rounded up",
        )
        require(shard.dtype == dtype, f"{what} has dtype {shard.dtype}, and the gradients have {dtype}")
        own_memory(shard, what, "give the result memory of its own")


def whole(
    group: WatchedGroup, shards: dict[int, Tensor], buckets: list[Bucket], names: dict[nn.Parameter, str]
) -> dict[str, Tensor]:
    """All ranks' shards put together again, by name of the parameter."""
    everyones = group.everyone({n: t.detach().clone() for n, t in shards.items()})
    found = {}
    for number, bucket in enumerate(buckets):
        flat = torch.cat([each[number].reshape(-1) for each in everyones])
        sizes = [p.numel() for p in bucket.params]
        early = f"shards[{number}] holds NaN: it was read, or added to, before its work.wait()"
        require(not flat[: sum(sizes)].isnan().any(), early)
        require(not flat[sum(sizes) :].any(), f"the padding of shards[{number}] is not zero: a norm would count it")
        pieces = flat[: sum(sizes)].split(sizes)
        found |= {names[p]: piece.view(p.shape) for p, piece in zip(bucket.params, pieces, strict=True)}
    return found


def packed(bucket: Bucket) -> int:
    """Elements of a bucket whose parameters lie end to end."""
    return sum(p.numel() for p in bucket.params)


def expected_gradients(
    group: WatchedGroup,
    shards: dict[int, Tensor],
    buckets: list[Bucket],
    names: dict[nn.Parameter, str],
    step: int,
    parts: int,
) -> dict[str, Tensor]:
    """The truth; raises Wrong at once if the shards hold only the last micro-batch."""
    expected = one_process(group.size, step, range(parts))
    if parts > 1:
        last = one_process(group.size, step, [parts - 1])
        found = whole(group, shards, buckets, names)
        only_last = all(torch.allclose(found[n].float(), last[n], atol=1e-6) for n in last)
        require(
            not only_last, "only the last micro-batch is there: each backward overwrites what the one before reduced"
        )
    return expected


def overlap(answer: Answer, group: WatchedGroup) -> None:
    """In every backward."""
    watched, model = group.fresh(), Net()
    mark_gradients(model, watched.ledger)
    gradients = new_shards(answer, model, watched, LIMIT)
    for backward in ("first", "second"):
        case(f"buckets of {LIMIT} elements: do they travel inside the {backward} backward?")
        watched.ledger.reset()
        loss(model, rank=0, step=0).backward()
        events = list(watched.ledger.events)
        gradients.finish()
        judge_overlap(events, len(layout(group, LIMIT)[0]) - 1)


def out_of_turn(answer: Answer, group: WatchedGroup) -> None:
    """One gradient can make two buckets ready to go, and a bucket that is full may have to wait for its turn."""
    watched, layers = group.fresh(), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    mark_gradients(layers, watched.ledger)
    gradients = new_shards(answer, layers, watched, 30)
    layers[0](torch.tanh(layers[1](torch.ones(2, 5)))).sum().backward()
    sent = watched.ledger.calls().get("reduce_scatter", 0)
    not_too_early(watched.ledger.events, [["1.bias", "1.weight"], ["0.bias", "0.weight"]], "reduce_scatter")
    gradients.finish()
    late = f"{sent} of 2 buckets leave in backward, and both are full: launch all that can go (`while`, not `if`)"
    require(sent == 2, late)


def judge_overlap(events: list[Event], full: int) -> None:
    """Every bucket but the last starts before the last gradient exists, and the next gradient comes while it flies."""
    evidence = ["what happened in backward, in order:", *(f"  {e.phase if e.call >= 0 else ''} {e.op}" for e in events)]
    last = max(i for i, e in enumerate(events) if e.phase == "mark")
    started = sum(e.phase == "start" for e in events[:last])
    require(started, "nothing is sent before the last gradient: launch from the hook", *evidence)
    headline = (
        f"{started} of the {full} buckets that are full before the last gradient have started: launch each at once"
    )
    require(started >= full, headline, *evidence)
    flying = any(a.phase == "start" and b.phase == "mark" for a, b in pairwise(events))
    require(flying, "no overlap: backward stands still until the bucket has travelled; use async_op=True", *evidence)


def gradients_at_each_wait(model: nn.Module, group: WatchedGroup) -> list[int]:
    """How many parameters have a .grad when somebody waits for a reduce-scatter of this group for the first time."""
    found: list[int] = []
    send = group.reduce_scatter

    def sent(*args: Any, **options: Any) -> Work:
        work = send(*args, **options)
        wait = work.wait

        def waited() -> None:
            found.append(sum(p.grad is not None for p in model.parameters()))
            work.wait = wait  # type: ignore[method-assign]
            wait()

        work.wait = waited  # type: ignore[method-assign]
        return work

    group.reduce_scatter = sent  # type: ignore[method-assign]
    return found


def freed(answer: Answer, group: WatchedGroup) -> None:
    """Ten equal layers: of .grad, one at a time is alive; of everything, the shards and a few buckets."""
    watched, layers, size = group.fresh(), 10, 900
    model = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(layers)))
    grads: list[weakref.ref[UntypedStorage]] = []
    alive: list[int] = []

    def look(p: nn.Parameter) -> None:
        assert p.grad is not None
        grads.append(weakref.ref(p.grad.untyped_storage()))
        alive.append(sum(s is not None and s.nbytes() > 0 for s in (ref() for ref in grads)))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    waits = gradients_at_each_wait(model, watched)
    gradients = new_shards(answer, model, watched, size)
    meter = MemoryMeter(lambda: {"not its own": [*model.parameters(), *watched.scratch()]})
    total = model(torch.ones(1, 30)).sum()
    with meter:
        total.backward()
        gradients.finish()
    most = max(alive)
    evidence = f"gradients of layers alive at the same time, as backward went on: {', '.join(map(str, alive))}"
    require(
        most <= 1,
        f"{most} of {layers} gradients were alive at once: free each as soon as it is in its bucket",
        evidence,
    )
    early = waits.count(0) <= 1  # finish's
    require(early, "a bucket is in its buffer before the one before has gone: settle first, or two are in memory")
    shards = -(-size // group.size) * layers
    peak, now = meter.peak["other"] // 4, meter.now()["other"] // 4
    require(
        now <= shards + 2 * size,  # gloo lets go of its last buffer a little late
        f"after finish() {now} elements are alive, and the shards are {shards}: buckets that have travelled are kept",
    )
    room = shards + 5 * size
    require(
        peak <= room,
        f"{peak} elements were alive at the peak of backward: shards ({shards}) and 5 buckets of {size} should do",
        "Does each buffer go when its bucket has travelled?",
    )
