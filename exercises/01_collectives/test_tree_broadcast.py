"""Grades chapter 01's broadcast: x everywhere, N - 1 messages, and as few rounds as doubling takes, on 2 to 8 ranks."""

import math

import torch
from torch import Tensor

from refimpl.comm.work import Work
from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, one_at_a_time, starts

F32, BF16 = torch.float32, torch.bfloat16


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
