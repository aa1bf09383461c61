"""An all-reduce that nobody waits for is made to its end, over gloo too, with the bits of one that is waited for."""

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.link import Link


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
        pass  # with no call of the group
    for work in reversed(works):
        work.wait()
    sent = group.ledger.sent_bytes()["all_reduce"]
    crossed = sent if link else 0
    return [all(map(torch.equal, got, wanted)), group.ledger.crossed_bytes().get("all_reduce", 0) == crossed]


@pytest.mark.parametrize("link", [None, Link(1e9, 1e-3)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_goes_on_while_its_caller_computes(ranks: int, link: Link | None) -> None:
    assert run(goes_on, link, [1, 70_001, 12], ranks=ranks) == [[True, True]] * ranks


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
    assert run(kept, ranks=2) == [[received, 2 * received, 0]] * 2
