"""Grades chapter 05's collector: mean gradients in shards, sent inside backward, and memory that is really freed."""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from refimpl.comm.work import Work
from refimpl.grading.compare import by_users, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, mark_gradients, most_under_way, not_too_early, same_traffic
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.flat import lay_out

FEATURES = 6
LIMIT = 40


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, and a layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(FEATURES, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.spare = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
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


class Scene:
    """The Net on this rank with an answer that collects its gradients, and the buckets they should travel in."""

    def __init__(self, answer: Answer, group: WatchedGroup, limit: int, dtype: torch.dtype = torch.float32) -> None:
        self.group, self.dtype = group, dtype
        self.watched, self.model = group.fresh(), Net().to(dtype)
        names = {p: name for name, p in Net().named_parameters()}  # lay_out changes what it lays out
        trained = {p: 0 for p in names if p.requires_grad}
        self.buckets = [[names[p] for p in b.params] for b in lay_out(list(trained), trained, group, limit)]
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.sizes = [sum(self.shapes[name].numel() for name in names) for names in self.buckets]
        self.parts = [-(-size // group.size) for size in self.sizes]  # elements of each shard
        mark_gradients(self.model, self.watched.ledger)
        self.kept = Kept(self.watched)
        self.gradients = answer.GradientShards(self.model, self.watched, limit)

    def step(self, step: int, parts: int) -> None:
        """So many micro-batches, and what must be there after them; then the caller clears the shards."""
        self.watched.ledger.reset()
        for part in range(parts):
            begun = len(self.watched.ledger.events)
            loss(self.model, self.group.rank, step, part).backward()
            self.gradients.finish()
            all_done(self.watched, "finish")
            events = self.watched.ledger.events[begun:]
            not_too_early(events, self.buckets, "reduce_scatter")
            most = most_under_way(events)
            require(most <= 1, f"{most} buckets are under way at once: settle the one before, or their buffers add up")
        left = [name for name, p in self.model.named_parameters() if p.grad is not None][:3]
        gone = f"{', '.join(left)}: .grad is still there after finish(); set it to None when it has left"
        require(not left, gone)
        self.judge_shards(self.gradients.shards)
        self.judge_values(self.whole(self.gradients.shards), step, parts)
        same_traffic(self.watched, self.wanted(parts), f"step {step}", itemsize=self.dtype.itemsize)
        room, advice = sum(self.parts) * self.dtype.itemsize, "are sent buckets, or a copy of the model, kept?"
        self.kept.judge(room, f"step {step}", f"the shards alone may stay; {advice}")
        self.gradients.shards.clear()
        held = "the caller has cleared the shards: who else holds them?"
        self.kept.judge(0, f"step {step}, after shards.clear(),", held)

    def wanted(self, times: int) -> WatchedGroup:
        """A group that has sent every bucket so often."""
        oracle = self.group.tally()
        for part in self.parts * times:
            mine = torch.zeros(part, dtype=self.dtype)
            oracle.reduce_scatter(mine, mine.repeat(self.group.size))
        return oracle

    def judge_shards(self, shards: Any) -> None:
        """A shard has 1/N of the padded bucket, and memory for no more."""
        there = isinstance(shards, dict) and sorted(shards) == list(range(len(self.parts)))
        require(there, f"self.shards has no entry for each of the {len(self.parts)} buckets")
        for number, (part, size) in enumerate(zip(self.parts, self.sizes, strict=True)):
            shard, what = shards[number], f"shards[{number}]"
            fits = isinstance(shard, Tensor) and shard.numel() == part
            require(fits, f"{what} has not {part} elements, which is 1/{self.group.size} of {size}, rounded up")
            require(shard.dtype == self.dtype, f"{what} has dtype {shard.dtype}, and the gradients have {self.dtype}")
            own_memory(shard, what, "give the result memory of its own")

    def whole(self, shards: dict[int, Tensor]) -> dict[str, Tensor]:
        """All ranks' shards put together again, by name of the parameter."""
        everyones = self.group.everyone({n: t.detach().clone() for n, t in shards.items()})
        found = {}
        for number, (names, size) in enumerate(zip(self.buckets, self.sizes, strict=True)):
            flat = torch.cat([each[number].reshape(-1) for each in everyones]).float()
            require(not flat[size:].any(), f"the padding of shards[{number}] is not zero: a norm would count it")
            pieces = flat[:size].split([self.shapes[name].numel() for name in names])
            found |= {name: piece.view(self.shapes[name]) for name, piece in zip(names, pieces, strict=True)}
        return found

    def judge_values(self, found: dict[str, Tensor], step: int, parts: int) -> None:
        """The mean over ranks of the micro-batches' sum."""
        ranks, exact = self.group.size, self.dtype == torch.float32
        expected = one_process(ranks, step, range(parts))
        last = one_process(ranks, step, [parts - 1])
        only_last = parts > 1 and all(torch.allclose(found[n], last[n], atol=1e-6) for n in last)
        said = "only the last micro-batch is there: each backward overwrites what the one before reduced"
        require(not only_last, said)
        known = by_users(expected, ranks, {"spare": (ranks + 1) // 2} if parts == 1 else {})
        bounds = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.1, "atol": 0.02}
        first_divergence([found], [expected], "the gradient", ranks=ranks, parts=parts, known=known, **bounds)


@on_ranks(2, 3, 4)
def test_GradientShards(answer: Answer, group: WatchedGroup) -> None:
    for limit, parts, dtype, what in (
        (LIMIT, 1, torch.float32, "a layer unused on odd ranks, a frozen one"),
        (10_000, 1, torch.float32, "all in one bucket"),
        (1, 1, torch.float32, "a bucket for each parameter"),
        (LIMIT, group.size + 1, torch.float32, "a layer that even ranks use in the first, odd ones in the second"),
        (LIMIT, 1, torch.bfloat16, "bf16"),
    ):
        case(f"2 steps of {parts} micro-batch{'es' * (parts > 1)}, buckets of {limit} elements; {what}")
        scene = Scene(answer, group, limit, dtype)
        for step in range(2):
            scene.step(step, parts)
        del scene
    case(f"buckets of {LIMIT} elements: do they travel inside backward?")
    overlap(answer, group)
    case("10 layers of 900 elements, a bucket each: is memory freed?")
    freed(answer, group)


def overlap(answer: Answer, group: WatchedGroup) -> None:
    """Every bucket but the last starts before the last gradient exists, and the next gradient comes while it flies."""
    scene = Scene(answer, group, LIMIT)
    scene.watched.ledger.reset()
    loss(scene.model, rank=0, step=0).backward()
    events = list(scene.watched.ledger.events)
    scene.gradients.finish()
    evidence = ["what happened in backward, in order:", *(f"  {e.phase if e.call >= 0 else ''} {e.op}" for e in events)]
    last = max(i for i, e in enumerate(events) if e.phase == "mark")
    started = sum(e.phase == "start" for e in events[:last])
    full = len(scene.buckets) - 1
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
    gradients = answer.GradientShards(model, watched, size)
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
