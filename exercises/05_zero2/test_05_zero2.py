"""Grades chapter 05: mean gradients in shards, memory that is really freed, the norm of all, and bytes as counted."""

import weakref
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, UntypedStorage, nn, optim

from refimpl.grading.compare import Wrong, by_users, close, equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import (
    WatchedGroup,
    all_done,
    mark_gradients,
    most_under_way,
    not_too_early,
    same_traffic,
    starts,
)
from refimpl.measure.ledger import Event
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.ddp import DDP
from refimpl.zero.flat import Bucket, lay_out
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2

FEATURES = 6
LIMIT = 40
F32 = torch.float32
STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2}


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


def one_process(ranks: int, step: int, parts: int) -> dict[str, Tensor]:
    """The gradients of one step: the losses of all ranks and parts on one process, divided by the ranks."""
    model = Net()
    for rank in range(ranks):
        for part in range(parts):
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
    case(f"buckets of {LIMIT} elements: do they travel inside backward?")
    overlap(answer, group)
    case("10 layers of 900 elements, a bucket each: is memory freed?")
    freed(answer, group)


def train(answer: Answer, group: WatchedGroup, limit: int, parts: int, dtype: torch.dtype = torch.float32) -> None:
    watched, model = group.fresh(), Net().to(dtype)
    buckets, names = layout(group, limit)
    mark_gradients(model, watched.ledger)
    kept = Kept(watched)
    gradients = answer.GradientShards(model, watched, limit)
    for step in range(2):
        watched.ledger.reset()
        for part in range(parts):
            begun = len(watched.ledger.events)
            loss(model, group.rank, step, part).backward()
            gradients.finish()
            all_done(watched, "finish")
            judge_order(watched.ledger.events[begun:], [[names[p] for p in b.params] for b in buckets])
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


def wanted(group: WatchedGroup, buckets: list[Bucket], dtype: torch.dtype) -> WatchedGroup:
    """A group that has sent these buckets."""
    oracle = group.oracle()
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
        require(
            isinstance(shard, Tensor) and shard.numel() == size,
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
    expected = one_process(group.size, step, parts)
    if parts > 1:
        before = one_process(group.size, step, parts - 1)
        last = {n: g - before[n] for n, g in expected.items()}
        found = whole(group, shards, buckets, names)
        only_last = all(torch.allclose(found[n].float(), last[n], atol=1e-6) for n in last)
        require(
            not only_last, "only the last micro-batch is there: each backward overwrites what the one before reduced"
        )
    return expected


def overlap(answer: Answer, group: WatchedGroup) -> None:
    """Every bucket but the last starts before the last gradient exists, and the next gradient comes while it flies."""
    watched, model = group.fresh(), Net()
    mark_gradients(model, watched.ledger)
    gradients = answer.GradientShards(model, watched, LIMIT)
    watched.ledger.reset()
    loss(model, rank=0, step=0).backward()
    events = list(watched.ledger.events)
    gradients.finish()
    evidence = ["what happened in backward, in order:", *(f"  {e.phase if e.call >= 0 else ''} {e.op}" for e in events)]
    last = max(i for i, e in enumerate(events) if e.phase == "mark")
    started = sum(e.phase == "start" for e in events[:last])
    full = len(layout(group, LIMIT)[0]) - 1
    require(started, "nothing is sent before the last gradient: launch from the hook", *evidence)
    headline = (
        f"{started} of the {full} buckets that are full before the last gradient have started: launch each at once"
    )
    require(started >= full, headline, *evidence)
    flying = any(a.phase == "start" and b.phase == "mark" for a, b in pairwise(events))
    require(flying, "no overlap: backward stands still until the bucket has travelled; use async_op=True", *evidence)


def freed(answer: Answer, group: WatchedGroup) -> None:
    """Ten equal layers: of .grad, a few at a time are alive; of everything, the shards and a few buckets."""
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
    gradients = answer.GradientShards(model, watched, size)
    meter = MemoryMeter(lambda: {"not its own": [*model.parameters(), *watched.scratch()]})
    total = model(torch.ones(1, 30)).sum()
    with meter:
        total.backward()
        gradients.finish()
    most = max(alive)
    evidence = f"gradients of layers alive at the same time, as backward went on: {', '.join(map(str, alive))}"
    require(
        most <= 3,
        f"{most} of {layers} gradients were alive at once: free each as soon as it is in its bucket",
        evidence,
    )
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


@on_ranks(2, 3, 4)
def test_InFlight(answer: Answer, group: WatchedGroup) -> None:
    for most, dtype in ((2, F32), (1, F32), (3, F32), (2, torch.bfloat16)):
        numbers = [0, 1, 2, 3, 1, 1, 0]  # bucket 1 is launched again while it is under way
        case(f"at most {most} under way, {dtype}: buckets {numbers}")
        watched = group.fresh()
        kept = Kept(watched)
        flights = answer.InFlight(watched, most)
        buffers: list[weakref.ref[UntypedStorage]] = []
        for turn, number in enumerate(numbers):
            flat = sent_by(group.rank, turn, number, group.size, dtype)
            buffers.append(weakref.ref(flat.untyped_storage()))
            flights.launch(number, flat)
            del flat
            judge_flights(watched, buffers, most)
        flights.land()
        all_done(watched, "land")
        judge_landed(group, flights.shards, numbers, dtype)
        oracle = group.oracle()
        for number in numbers:
            mine = torch.zeros(3 + number, dtype=dtype)
            oracle.reduce_scatter(mine, mine.repeat(group.size))
        same_traffic(watched, oracle, "InFlight", itemsize=dtype.itemsize)
        room = sum(3 + number for number in set(numbers)) * dtype.itemsize
        kept.judge(room, "after land() InFlight", "the shards alone may stay; is what has arrived let go?")
        flights.land()  # once more: nothing is under way


def sent_by(rank: int, turn: int, number: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """The buffer [P] that a rank launches: small whole numbers, whose sums bf16 holds too."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-4, 5, (ranks * (3 + number),), generator=generator).to(dtype) * ranks


def judge_flights(watched: WatchedGroup, buffers: list[weakref.ref[UntypedStorage]], most: int) -> None:
    """As many under way as may be, those launched last, and no other's buffer alive."""
    flying, launched = [e.call for e in watched.ledger.open_calls()], len(starts(watched.ledger))
    require(launched == len(buffers), f"launch({len(buffers) - 1}) has started nothing: start it, and do not wait")
    room = min(most, launched)
    at_once = most_under_way(watched.ledger.events)
    more = f"{at_once} buckets are under way at once, and at most {most} may be: wait for the oldest, then launch"
    require(at_once <= room, more)
    require(
        len(flying) == room,
        f"{len(flying)} under way after launch {launched}, and {room} could be: launch waits although there is room, "
        "or for more than the oldest",
    )
    youngest = [e.call for e in starts(watched.ledger)][-room:]
    require(flying == youngest, "launch waits for one that was launched later: the oldest arrives first, wait for that")
    alive = [i for i, ref in enumerate(buffers[:-room]) if (s := ref()) is not None and s.nbytes()]
    require(
        len(alive) <= 1,  # gloo lets go of its last buffer a little late
        f"{len(alive)} buffers that have arrived are still alive: let go of each, its memory is for the next",
    )


def judge_landed(group: WatchedGroup, shards: dict[int, Tensor], numbers: list[int], dtype: torch.dtype) -> None:
    """The mean over ranks of each buffer, summed by its number."""
    require(isinstance(shards, dict), f"shards is {shards!r}, expected a dict")
    require(sorted(shards) == sorted(set(numbers)), f"shards has {sorted(shards)}, expected an entry for each bucket")
    turns: dict[int, list[Tensor]] = {}
    for turn, number in enumerate(numbers):
        everyones = [sent_by(rank, turn, number, group.size, F32) for rank in range(group.size)]
        mean = torch.stack(everyones).sum(0) / group.size
        turns.setdefault(number, []).append(mean.view(group.size, -1)[group.rank])
    for number, parts in turns.items():
        own_memory(shards[number], f"shards[{number}]", "give the result memory of its own")
        known = {"only the launch that came last is there: add to the shard": parts[-1].to(dtype)}
        if len(parts) > 1:
            known["the first launch is missing: add to the shard what has arrived"] = sum(parts[1:]).to(dtype)
            known["the last launch is missing: does land() wait for all?"] = sum(parts[:-1]).to(dtype)
        equal(shards[number], sum(parts).to(dtype), f"shards[{number}]", ranks=group.size, known=known)


@on_ranks(2, 3, 4)
def test_clip_global_norm(answer: Answer, group: WatchedGroup) -> None:
    for size, limit, dtype in (
        (1.0, 2.0, torch.float32),
        (1.0, 100.0, torch.float32),
        (1e20, 2.0, torch.float32),
        (0.0, 2.0, torch.float32),
        (900.0, 5.0, torch.float16),
        (3.0, 5.0, torch.bfloat16),
    ):
        case(f"{dtype}, elements of size {size:g}, limit {limit:g}; one tensor under two names, rank 1 owns nothing")
        everyones = [shards_of(rank, size, dtype) for rank in range(group.size)]
        unique = [{id(t): t for t in shards.values()}.values() for shards in everyones]
        flats = [torch.cat([t.double().flatten() for t in mine]) if mine else torch.zeros(0) for mine in unique]
        norm = float(torch.cat(flats).norm())
        mine, watched = shards_of(group.rank, size, dtype), group.fresh()
        given = dict(mine)
        found = answer.clip_global_norm(watched, given, limit)
        require(list(given) == list(mine), "the dict of shards has other names than before")
        require(isinstance(found, float), f"the result is {found!r}, expected a Python float")
        told = group.everyone(found)
        own = [float(f.norm()) for f in flats]
        local = norm > 0 and torch.allclose(torch.tensor(told), torch.tensor(own), rtol=1e-3)
        require(
            not local, "each rank has the norm of its own shards: the sum of squares must be all-reduced", f"  {told}"
        )
        if found != norm:
            judge_norm(found, norm, everyones, own, limit)
        require(len(set(told)) == 1, f"the ranks must clip by the same norm, but have {told}")
        factor = min(1.0, limit / norm) if norm else 1.0
        for name, t in everyones[group.rank].items():
            names = sum(t is other for other in everyones[group.rank].values())
            known = {
                "it is not clipped": t,
                f"it is clipped {names} times: it is one tensor under {names} names": (t * factor**names).to(dtype),
                "it is multiplied by limit / norm although the norm is within the limit": (
                    t.double() * limit / max(norm, 1e-30)
                ).to(dtype),
            }
            if given[name] is not mine[name] and close(given[name], t * factor, rtol=1e-2):
                raise Wrong("the dict has new tensors: clip in place, whoever holds the old ones must see it")
            wanted = (t.double() * factor).to(dtype)
            equal(
                mine[name], wanted, f"the shard of {name}", known=known, rtol=1e-5 if dtype == torch.float32 else 2e-3
            )
        oracle = group.oracle()
        oracle.all_reduce(torch.zeros(1))
        if watched.ledger.calls() != {"all_reduce": 1}:
            same_traffic(watched, oracle, "clip_global_norm")
        sent = sum(watched.ledger.sent_bytes().values())
        oracle.ledger.reset()
        oracle.all_reduce(torch.zeros(1, dtype=torch.float64))
        most = sum(oracle.ledger.sent_bytes().values())
        require(
            sent <= most, f"{sent} bytes for one norm, one number takes {most}: add up here, then reduce one number"
        )


def shards_of(rank: int, size: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a rank holds: odd sizes; rank 0 has one tensor under two names, rank 1 nothing."""
    if rank == 1:
        return {}
    generator = torch.Generator().manual_seed(rank)
    shards = {n: (size * torch.randn(3 + i + rank, generator=generator)).to(dtype) for i, n in enumerate(("a", "b"))}
    if rank == 0:
        shards["wte.weight"] = shards["head.weight"] = (size * torch.ones(7)).to(dtype)
        shards["x"] = shards["y"] = shards["a"]  # tied under any names, and next, equal but not tied
        shards["twin"] = shards["b"].clone()
    return shards


def judge_norm(found: float, norm: float, everyones: list[dict[str, Tensor]], own: list[float], limit: float) -> None:
    def of(once: Callable[[str, Tensor], object]) -> float:
        """The norm if `once` is what tells two tensors apart."""
        kept = [t for shards in everyones for t in {once(n, t): t for n, t in shards.items()}.values()]
        return float(torch.cat([t.double().flatten() for t in kept]).norm())

    known = {
        "the tied parameter is counted twice: it is one tensor under two names": of(lambda name, t: name),
        "tied parameters are known by a name: any two names can hold one tensor; compare with `is`, or by id": of(
            lambda name, t: name.replace("head", "wte")
        ),
        "two tensors of equal values count once: tied are those that are one tensor": of(
            lambda n, t: tuple(t.tolist())
        ),
        "it is the sum of the ranks' norms: add up squares, then take one root": sum(own),
        "it is the norm after clipping": min(norm, limit),
        "the root is missing": norm**2,
    }
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in known.items()}
    value, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)
    equal(value, wanted, "the norm", known=tensors, rtol=1e-5, atol=0)


@on_ranks(2, 3)
def test_accumulated_bytes(answer: Answer, group: WatchedGroup) -> None:
    for name, kind in STAGES.items():
        for samples, room, dtype in ((1, 4, F32), (4, 4, F32), (5, 2, F32), (6, 1, F32), (5, 2, torch.bfloat16)):
            case(f"{name}, {samples} samples, room for {room}, {dtype}")
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(6, 64, bias=False)).to(dtype)
            stage = kind(model, optim.AdamW(model.parameters()), group.oracle())
            stage.group.ledger.reset()
            batches = torch.ones(samples, 64).split(room)
            for batch in batches:
                stage.backward(model(batch.to(dtype)).sum(), sync=batch is batches[-1])
            stage.step()
            counted: dict[str, int] = {}
            for e in stage.group.ledger.events:
                if e.phase == "start" and e.tag in ("gradients", "parameters"):
                    counted[e.op] = counted.get(e.op, 0) + e.sent_bytes
            padded = sum(b.padded for b in stage.buckets)
            found = answer.accumulated_bytes(name, padded, group.size, dtype.itemsize, samples, room)
            evidence = [
                f"{padded} parameters of {dtype.itemsize} bytes, {group.size} ranks, {len(batches)} backwards",
                f"  counted  {counted}",
                f"  found    {found}",
            ]
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict", *evidence)
            judge_bytes(found, counted, name, len(batches), evidence)
    case("64 ranks: zero2, 640 parameters of 2 bytes, one backward")
    chunks = dict.fromkeys(("reduce_scatter", "all_gather"), 63 * 10 * 2)  # to each other rank a chunk of 10
    judge_bytes(answer.accumulated_bytes("zero2", 640, 64, 2, 3, 4), chunks, "zero2", 1, [])


def judge_bytes(found: dict[str, int], counted: dict[str, int], name: str, backwards: int, evidence: list[str]) -> None:
    require(found.keys() == counted.keys(), f"{name} sends with {' and '.join(counted)} only", *evidence)
    for op, sent in counted.items():
        why = ""
        if found[op] * backwards == sent:
            why = f": {name} sends with each of {backwards} backwards"
        elif found[op] == sent * backwards:
            why = f": {name} does this once a step, not with each backward"
        elif op == "reduce_scatter" and found[op] < sent:
            why = ": does the last micro-batch, which is not full, count too?"
        elif found[op] == 2 * sent:
            why = ": exactly 2x: is `itemsize` what an element takes?"
        require(found[op] == sent, f"{name}: {found[op]} bytes by {op}, the ledger counts {sent}{why}", *evidence)


@on_ranks(2, 3, 4)
def test_peak_gradient_bytes(answer: Answer, group: WatchedGroup) -> None:
    for buckets in ([8, 4], [4, 8], [24], [6, 6, 6, 6], [7, 1, 5, 12], [1, 1, 30]):
        for dtype, ranks in ((torch.float32, group.size), (torch.bfloat16, group.size), (torch.bfloat16, 16)):
            case(f"buckets {buckets}, {dtype.itemsize} bytes an element, {ranks} ranks")
            expected, story = counted_peak(buckets, group, dtype, ranks)
            with untouched(buckets=buckets):
                found = answer.peak_gradient_bytes(buckets, ranks, dtype.itemsize)
            if found == expected:
                continue
            padded = [-(-n // ranks) * ranks for n in buckets]
            shards = sum(padded) // ranks
            known = {
                "that is the largest bucket: shards take memory too": max(padded),
                "that is a whole gradient: the buckets before are freed already": sum(padded),
                "that is what stays in the end: a bucket that travels is larger than its shard": shards,
                "that is all shards and the largest bucket: are all shards there when it travels?": shards
                + max(padded),
            }
            why = next((k for k, v in known.items() if v * dtype.itemsize == found), "")
            raise Wrong(f"{found} bytes, counted {expected}" + (f": {why}" if why else ""), *story)


def counted_peak(buckets: list[int], group: WatchedGroup, dtype: torch.dtype, ranks: int) -> tuple[int, list[str]]:
    """Send the buckets one after another (if there are as many ranks) and count what is alive each time."""
    shards: list[Tensor] = []
    peak, story = 0, ["alive while each bucket travels, in bytes:"]
    for number, numel in enumerate(buckets):
        shard = -(-numel // ranks)
        flat = torch.zeros(shard * ranks, dtype=dtype)
        shards.append(torch.empty(shard, dtype=dtype))
        if ranks == group.size:
            group.oracle().reduce_scatter(shards[-1], flat)
        sizes = MemoryMeter(lambda flat=flat: {"flat": [flat], "shards": shards}).now()
        story.append(f"  bucket {number}: flat buffer {sizes['flat']}, shards {sizes['shards']}")
        peak = max(peak, sizes["flat"] + sizes["shards"])
    return peak, story
