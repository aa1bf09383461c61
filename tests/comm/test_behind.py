"""An all-reduce that nobody waits for is made to its end, over gloo too, with the bits of one that is waited for."""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import run

from refimpl import launch
from refimpl.comm import collectives
from refimpl.comm.behind import Behind
from refimpl.comm.group import Group
from refimpl.comm.levels import two_level
from refimpl.comm.link import Link
from refimpl.comm.process_group import ControlLine
from refimpl.comm.streams import Streams


def goes_on(link: Link | None, sizes: list[int]) -> list[bool]:
    group = Group.world(transport="gloo", link=link)

    def given(size: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(group.rank))

    wanted = [given(size) for size in sizes]
    for x in wanted:
        group.all_reduce(x, "mean")
    got = [given(size) for size in sizes]
    works = [group.all_reduce(x, "mean", async_op=True) for x in got]
    while not all(map(torch.equal, got, wanted)):
        torch.ones(200, 200) @ torch.ones(200, 200)  # and no call of the group
    for work in reversed(works):
        work.wait()
    sent = group.ledger.sent_bytes()["all_reduce"]
    crossed = sent if link else 0
    return [all(map(torch.equal, got, wanted)), group.ledger.crossed_bytes().get("all_reduce", 0) == crossed]


@pytest.mark.parametrize("link", [None, Link(1e9, 1e-3)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_goes_on_while_its_caller_computes(ranks: int, link: Link | None) -> None:
    assert run(goes_on, link, [1, 70_001, 12], ranks=ranks) == [[True, True]] * ranks


@pytest.mark.parametrize("link", [None, Link(1e9, 1e-3)])
@pytest.mark.parametrize("before", [0, 1])
def test_ranks_that_begin_it_differently_are_named(link: Link | None, before: int) -> None:
    """One rank's second half goes its own way, in which the other's never comes: both would wait for ever."""

    def check() -> None:
        group = Group.world(transport="gloo", link=link)
        for _ in range(before):
            group.all_reduce(torch.ones(3), async_op=True).wait()
        group.all_reduce(torch.ones(7), async_op=group.rank == 0).wait()

    with pytest.raises(launch.RankError, match="ranks called different collectives") as caught:
        launch.run(check, ranks=2, device="cpu")
    assert f"rank 0: all_reduce (sum) of 7 float32 at {__file__}" in str(caught.value)
    assert ", async_op=True\n  rank 1: all_reduce (sum) of 7 float32 at" in str(caught.value)


def test_tensors_of_an_evaluation_may_be_reduced() -> None:
    """Only in inference mode may those that were made in it be changed, and the thread is in no mode of its own."""

    def check() -> None:
        for group in (Group.world(transport="gloo"), two_level(Group.world(), near=2)):
            for evaluates in (True, False, True):
                with torch.inference_mode(evaluates):
                    x = torch.full((9,), float(group.rank), dtype=torch.bfloat16)
                    group.all_reduce(x, "mean", async_op=True).wait()
                    assert x.tolist() == [1.5] * 9

    run(check, ranks=4)


def test_its_buffers_are_counted_and_given_back() -> None:
    def kept() -> list[int]:
        group = Group.world(transport="gloo")
        sizes = []
        for async_op in (True, False):
            group.all_reduce(torch.ones(1000), async_op=async_op).wait()
            sizes.append(sum(buffer.nbytes for buffer in group.scratch()))
        group.trim()
        return [*sizes, len(group.scratch())]

    received = 4 * 1000 // 2
    assert run(kept, ranks=2) == [[received, received, 0]] * 2


def test_all_of_one_process_group_share_its_thread_and_the_group_beside() -> None:
    """Each had its own for good: 5 descriptors and 3 threads, and about 200 models reached the limit of 1,024."""

    def check() -> None:
        groups = [Group.world(transport="gloo") for _ in range(4)]
        for _ in range(2):
            under_way = [group.all_reduce(torch.full((5,), float(i)), async_op=True) for i, group in enumerate(groups)]
            for work in reversed(under_way):  # waiting has another order than beginning
                work.wait()
            now = threading.active_count(), len(os.listdir("/dev/fd"))
            groups = [groups[0], *(Group.world(transport="gloo") for _ in range(3))]
        last = [torch.full((5,), float(i)) for i in range(4)]
        for work in [group.all_reduce(x, async_op=True) for group, x in zip(groups, last, strict=True)]:
            work.wait()
        assert [x.tolist() for x in last] == [[2.0 * i] * 5 for i in range(4)]
        assert (threading.active_count(), len(os.listdir("/dev/fd"))) == now

    run(check, ranks=2)


def test_after_one_that_failed_none_is_begun() -> None:
    """The other ranks are still in that one: of another size, gloo would end their processes."""
    behind, begun = Behind(), list[str]()

    def fail() -> list[Any]:
        raise MemoryError("no room for the sum")

    def begin() -> list[Any]:
        begun.append("another")
        return []

    for task in (behind.begin(fail), behind.begin(begin)):
        with pytest.raises(MemoryError, match="no room for the sum"):
            task.wait()
    assert not begun


def test_ranks_of_a_group_may_be_in_different_numbers_of_groups() -> None:
    def check() -> float:
        handles = [dist.new_group(ranks) for ranks in ([0], [0, 2], [0, 1])]
        x = torch.ones(1)
        if dist.get_rank() < 2:
            Group(handles[-1], transport="gloo").all_reduce(x, async_op=True).wait()
            dist.barrier(ControlLine(handles[-1], "nccl").handle)
        return x.item()

    assert launch.run(check, ranks=3, timeout=30, device="cpu") == [2, 2, 1]  # they part in different numbers of groups


class OfThreads(Streams):
    """Streams on paper, of which each thread has a current one, as on a GPU: the default one at first."""

    def __init__(self) -> None:
        self.numbers, self.here = itertools.count(1), threading.local()

    def new(self) -> int:
        return next(self.numbers)

    def current(self) -> int:
        return getattr(self.here, "stream", 0)

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self.here.stream = self.current(), stream
        yield
        self.here.stream = before


def where_it_adds() -> tuple[list[tuple[bool, int]], int]:
    streams, added, add = OfThreads(), list[tuple[bool, int]](), collectives.ordered_reduce
    group = Group(dist.group.WORLD, device=torch.device("cpu"), streams=streams, transport="gloo")

    def noted(*args: Any) -> None:
        added.append((threading.current_thread() is threading.main_thread(), streams.current()))
        add(*args)

    with mock.patch.object(collectives, "ordered_reduce", noted):
        group.all_reduce(torch.ones(8), async_op=True).wait()
    assert group.route.direct.lane is not None
    return added, group.route.direct.lane.stream


def test_on_a_gpu_its_thread_adds_on_the_stream_that_communicates() -> None:
    """Not on the default one, where the kernels of a whole backward pass may be queued."""
    for added, lane in run(where_it_adds, ranks=2):
        assert added == [(False, lane)]
