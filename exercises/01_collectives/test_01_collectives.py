"""Grades chapter 01: results at 2, 3 and 4 ranks, and who sent how many bytes to whom."""

import math

import torch
from torch import Tensor

from refimpl.comm import ring
from refimpl.comm.work import Work
from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, one_at_a_time, same_traffic, starts

F32, BF16 = torch.float32, torch.bfloat16
OVERWRITTEN = "the next call overwrites this one's result: it must have memory of its own"
SIZES = ((5, F32), (1, F32), (3, BF16), (2, torch.int64))


def given(rank: int, n: int, dtype: torch.dtype = F32) -> Tensor:
    if dtype == F32:
        return torch.randn(n, generator=torch.Generator().manual_seed(rank)) + rank
    return ((torch.arange(n) * 5 + rank) % 11).to(dtype)  # sums of small integers are exact in any order


@on_ranks(2, 3, 4)
def test_ring_reduce_scatter(answer: Answer, group: WatchedGroup) -> None:
    for size, dtype in SIZES:
        case(f"{size} elements of {dtype} a rank")
        watched, oracle = group.fresh(), group.oracle()
        inputs = [given(r, size * group.size, dtype) for r in range(group.size)]
        x, expected = inputs[group.rank].clone(), torch.empty(size, dtype=dtype)
        ring.reduce_scatter(oracle, expected, inputs[group.rank])
        found = answer.ring_reduce_scatter(watched, x)
        total = torch.stack(inputs).sum(0)
        own = "it is your own chunk as it was: did chunk c start at rank c + 1, so that it is complete at rank c?"
        known = {own: inputs[group.rank].chunk(group.size)[group.rank]}
        known |= {
            f"it is chunk {i} of the sum, expected {group.rank}": c for i, c in enumerate(total.chunk(group.size))
        }
        known |= {"it is the whole sum, all N chunks; only this rank's is asked": total}
        equal(found, expected, "this rank's chunk", ranks=group.size, known=known)
        same = torch.equal(x, inputs[group.rank])
        require(same, "x was changed: partial sums were written into the input", f"  x is now {x.tolist()[:6]}")
        judge_ring(watched, oracle, "ring_reduce_scatter", dtype)
        own_memory(found, "the result", "return a tensor of one chunk, or a clone")
    case("200 elements of torch.float32 a rank: what stays alive")
    x = torch.ones(200 * group.size)
    watched = group.fresh()
    kept = Kept(watched)
    found = answer.ring_reduce_scatter(watched, x)
    kept.judge(found.nbytes, "ring_reduce_scatter", "the result alone may stay; where is what has arrived?")
    before = found.clone()
    answer.ring_reduce_scatter(group.fresh(), 2 * x)
    require(torch.equal(found, before), OVERWRITTEN)


@on_ranks(2, 3, 4)
def test_ring_all_gather(answer: Answer, group: WatchedGroup) -> None:
    for size, dtype in SIZES:
        case(f"{size} elements of {dtype} a rank")
        watched, oracle = group.fresh(), group.oracle()
        inputs = [given(r, size, dtype) for r in range(group.size)]
        x, expected = inputs[group.rank].clone(), torch.empty(size * group.size, dtype=dtype)
        ring.all_gather(oracle, expected, x)
        with untouched(x=x):
            found = answer.ring_all_gather(watched, x)
        arrival = [inputs[(group.rank - i) % group.size] for i in range(group.size)]
        known = {
            "the chunks are in the order of arrival, not in rank order": torch.cat(arrival),
            "the chunks are in the reverse order": torch.cat(inputs[::-1]),
            "every chunk is your own": x.repeat(group.size),
            "all others are the left neighbour's: send on what has just arrived, not your own again": torch.cat(
                [x if r == group.rank else inputs[group.rank - 1] for r in range(group.size)]
            ),
            "all others are the one that came last: each needs memory of its own": torch.cat(
                [x if r == group.rank else arrival[-1] for r in range(group.size)]
            ),
        }
        equal(found, expected, "the gathered tensor", known=known)
        judge_ring(watched, oracle, "ring_all_gather", dtype)
        own_memory(found, "the result", "make it N chunks long, and no longer")
        before = found.clone()
    answer.ring_all_gather(group.fresh(), 2 * x + 1)
    require(torch.equal(found, before), OVERWRITTEN)


@on_ranks(2, 3, 4, 5)
def test_ring_all_reduce(answer: Answer, group: WatchedGroup) -> None:
    more = 2 * group.size
    for n, dtype in ((2 * more, F32), (2 * more + 1, F32), (group.size - 1, F32), (more - 1, BF16), (1, torch.int64)):
        case(f"{n} elements of {dtype}")
        watched = group.fresh()
        inputs = [given(r, n, dtype) for r in range(group.size)]
        x, expected = inputs[group.rank].clone(), torch.stack(inputs).sum(0)
        place = x.data_ptr()
        answer.ring_all_reduce(watched, x)
        whole = n // group.size * group.size
        known = {
            "x is unchanged: the sum must be written into it": inputs[group.rank],
            "the elements behind the last whole chunk are not summed": torch.cat(
                [expected[:whole], inputs[group.rank][whole:]]
            ),
        }
        equal(x, expected, "x after the call", ranks=group.size, known=known)
        to_the_right(watched)
        messages = 2 * (group.size - 1)
        calls, sent = watched.ledger.calls(), watched.ledger.sent_bytes()
        most = messages * math.ceil(n / group.size) * x.element_size()
        if calls != {"send": messages, "recv": messages} or sent["send"] > most:
            oracle = group.oracle()
            ring.all_reduce(oracle, x.clone())
            same_traffic(watched, oracle, "ring_all_reduce", itemsize=dtype.itemsize)
        together, enough = sum(group.everyone(sent["send"])), messages * n * x.element_size()
        padded = f"all ranks together send {together} bytes, and {enough} are enough: is x padded? Cut it unevenly"
        require(together == enough, padded, *watched.transcript())
        each = {e.sent_bytes // x.element_size() for e in starts(watched.ledger, "send")}
        even = f"messages of {sorted(each)} elements, expected {n}/{group.size} rounded up or down: cut evenly"
        require(each <= {n // group.size, -(-n // group.size)}, even, *watched.transcript())
        one_at_a_time(watched, "ring_all_reduce")
        all_done(watched, "ring_all_reduce")
        require(x.data_ptr() == place, "x has new memory: write into the old, of which others may hold views")
        for rank, other in enumerate(group.everyone(x)):
            require(
                torch.equal(x, other), f"the last bits differ from those of rank {rank}: add each chunk once, then copy"
            )


@on_ranks(2, 3, 4, 5)
def test_tree_broadcast(answer: Answer, group: WatchedGroup) -> None:
    for root, dtype in ((0, F32), (group.size - 1, F32), (1, BF16)):
        case(f"root {root}, {dtype}")
        watched = group.fresh()
        inputs = [torch.arange(5, dtype=dtype) + 10 * r for r in range(group.size)]
        x = inputs[group.rank].clone()
        place = x.data_ptr()
        answer.tree_broadcast(watched, x, root)
        known = {f"it is the x of rank {r}, not of the root": inputs[r] for r in range(group.size) if r != root}
        equal(x, inputs[root], "x after the call", known=known)
        one_at_a_time(watched, "tree_broadcast")
        all_done(watched, "tree_broadcast")
        require(x.data_ptr() == place, "x has new memory: write into the old, of which others may hold views")
        words = [(e.op, int(e.tag.split()[-1])) for e in starts(watched.ledger) if e.op in ("send", "recv")]
        require(len(words) == len(starts(watched.ledger)), "only send and recv are wanted here", *watched.transcript())
        other = [e.sent_bytes for e in starts(watched.ledger) if e.op == "send" and e.sent_bytes != x.nbytes]
        require(not other, f"messages of {other} bytes, and x has {x.nbytes}: send x itself, in the dtype that it has")
        plans = group.everyone(words)
        sends = sum(op == "send" for plan in plans for op, _ in plan)
        most = math.ceil(math.log2(group.size))
        require(sends == group.size - 1, f"{sends} messages in all, expected N - 1 = {group.size - 1}", *story(plans))
        took = rounds(plans, root)
        require(took <= most, f"it takes {took} rounds, expected ceil(log2 {group.size}) = {most}", *story(plans))
    for size in (7, 8) if group.size == 5 else ():
        case(f"who sends to whom on {size} ranks, root 0")
        papers = [Paper(rank, size) for rank in range(size)]
        for paper in papers:
            answer.tree_broadcast(paper, torch.zeros(5), 0)
        plans = [paper.words for paper in papers]
        took = rounds(plans, 0)
        require(took <= 3, f"it takes {took} rounds, expected ceil(log2 {size}) = 3", *story(plans))


def judge_ring(watched: WatchedGroup, oracle: WatchedGroup, what: str, dtype: torch.dtype) -> None:
    """To the right alone, as many bytes as refimpl's ring, one message at a time, and none left open."""
    to_the_right(watched)
    same_traffic(watched, oracle, what, itemsize=dtype.itemsize)
    one_at_a_time(watched, what)
    all_done(watched, what)


def to_the_right(group: WatchedGroup) -> None:
    right = (group.rank + 1) % group.size
    wrong = sorted({e.tag for e in starts(group.ledger, "send")} - {f"to {right}"})
    headline = f"this rank sends {' and '.join(wrong)}: on a ring it sends to its right neighbour, {right}, alone"
    require(not wrong, headline, *group.transcript())


class Paper:
    """One of more ranks than there are: who is sent to and received from is written down, and nothing moves."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.words: list[tuple[str, int]] = []

    def send(self, x: Tensor, to: int, *, async_op: bool = False) -> Work:
        require(0 <= to < self.size, f"rank {self.rank} of {self.size} sends to {to}: there is none")
        self.words.append(("send", to))
        return Work()

    def recv(self, x: Tensor, source: int, *, async_op: bool = False) -> Work:
        require(0 <= source < self.size, f"rank {self.rank} of {self.size} receives from {source}: there is none")
        self.words.append(("recv", source))
        return Work()


def rounds(plans: list[list[tuple[str, int]]], root: int) -> int:
    """In which round the last rank gets x, if each message takes a round of its sender's and its receiver's time."""
    clock: dict[int, int] = {root: 0}
    position = [0] * len(plans)
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            if rank in clock and position[rank] < len(plan):
                op, other = plan[position[rank]]
                position[rank] += 1
                moved = True
                if op == "send":
                    clock[rank] += 1
                    clock[other] = clock[rank]
                    position[other] += 1
    if len(clock) < len(plans):
        raise Wrong("some rank never receives x", *story(plans))
    return max(clock.values())


def story(plans: list[list[tuple[str, int]]]) -> list[str]:
    words = {"send": "sends to", "recv": "receives from"}
    return [
        f"  rank {r}: {', then '.join(f'{words[op]} {o}' for op, o in plan) or 'nothing'}"
        for r, plan in enumerate(plans)
    ]
