"""Grades chapter 05's buckets under way: how many at once, which is waited for, what stays alive."""

import weakref

import torch
from torch import Tensor, UntypedStorage

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, soon
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import (
    WatchedGroup,
    all_done,
    most_under_way,
    places,
    same_traffic,
    starts,
)

F32 = torch.float32


@on_ranks(2, 3, 4)
def test_InFlight(answer: Answer, group: WatchedGroup) -> None:
    for most, dtype in ((2, F32), (1, F32), (3, F32), (2, torch.bfloat16)):
        numbers = [0, 1, 0, 2, 3, 1, 1, 1, 1, 0, 0, 0]  # bucket 1 again while it is under way, five times in all
        case(f"at most {most} under way, {dtype}: buckets {numbers}")
        watched = group.fresh()
        kept = Kept(watched)
        flights = answer.InFlight(watched, most)
        require(not flights.shards, "a new InFlight has shards: is the dictionary the class's, one for all of them?")
        buffers: list[weakref.ref[UntypedStorage]] = []
        copied, sent = False, places(watched, "reduce_scatter", "x")  # copied: other memory is sent than handed over
        for turn, number in enumerate(numbers):
            flat = sent_by(group.rank, turn, number, group.size, dtype)
            buffers.append(weakref.ref(flat.untyped_storage()))
            flights.launch(number, flat)
            copied |= sent[-1:] != [flat.data_ptr()]
            del flat
            for done, shard in flights.shards.items():
                own_memory(shard, f"shards[{done}]", "give the result memory of its own")
            judge_flights(watched, buffers, most)
        flights.land()
        all_done(watched, "land")
        ends = [e.call for e in watched.ledger.events if e.phase == "end"]
        require(ends == sorted(ends), "land waits for one that was launched later: the oldest arrives first")
        judge_landed(group, flights.shards, numbers, dtype)
        oracle = group.tally()
        for number in numbers:
            mine = torch.zeros(40 + number, dtype=dtype)
            oracle.reduce_scatter(mine, mine.repeat(group.size))
        del mine
        same_traffic(watched, oracle, "InFlight", itemsize=dtype.itemsize)
        require(not copied, "`flat` is copied before it travels, and costs its memory twice: send `flat` itself")
        room = sum(40 + number for number in set(numbers)) * dtype.itemsize
        kept.judge(room, "after land() InFlight", "the shards alone may stay; is what has arrived let go?")
        flights.land()  # once more: nothing is under way


def sent_by(rank: int, turn: int, number: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """The buffer [P] that a rank launches: small whole numbers, whose sums bf16 holds too."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-4, 5, (ranks * (40 + number),), generator=generator).to(dtype) * ranks


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

    def alive() -> int:
        return sum((s := ref()) is not None and s.nbytes() > 0 for ref in buffers[:-room])

    late = 1  # a buffer that gloo has not let go of yet
    few = soon(lambda: alive() <= late)
    require(few, f"{alive()} buffers that have arrived are still alive: let go of each, its memory is for the next")


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
        whole = torch.stack(parts).sum(0)
        known = {"only the launch that came last is there: add to the shard": parts[-1].to(dtype)}
        lost = "launch {} of {} of this bucket is missing: add when it arrives, to what is there then"
        known["it is the mean over its launches: add them up"] = (whole / len(parts)).to(dtype)
        if len(parts) > 1:
            known |= {lost.format(i, len(parts)): (whole - part).to(dtype) for i, part in enumerate(parts, 1)}
        equal(shards[number], whole.to(dtype), f"shards[{number}]", ranks=group.size, known=known)
