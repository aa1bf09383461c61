"""The expert axis: which ranks share out the experts, which have the same ones."""

import pytest
import torch
from worlds import run

from refimpl.comm.axes import Axes, expert_groups
from refimpl.comm.group import Group


def found(sizes: dict[str, int], ep: int) -> tuple[list[int], list[int], float, float, bool]:
    """Runs on every rank: members of its two groups, asked of the groups themselves, and what they sum."""
    world = Group.world()
    axes = Axes.of_sizes(sizes, world).with_experts(ep)
    sums = [torch.tensor([10.0**world.rank]) for _ in range(2)]
    groups = axes.expert, axes.expert_data
    for group, x in zip(groups, sums, strict=True):
        group.all_reduce(x)
    one = axes.expert.ledger is axes.expert_data.ledger is axes.replicas.ledger
    members = [group.all_gather_object(world.rank) for group in groups]
    return members[0], members[1], sums[0].item(), sums[1].item(), one


@pytest.mark.parametrize(
    ("ranks", "sizes", "ep", "expert", "data"),
    [
        (1, {}, 1, [[0]], [[0]]),
        (3, {}, 1, [[0], [1], [2]], [[0, 1, 2]]),
        (3, {}, 3, [[0, 1, 2]], [[0], [1], [2]]),
        (4, {}, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (4, {"tp": 2}, 2, [[0, 2], [1, 3]], [[0], [1], [2], [3]]),
        (4, {"cp": 2}, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (4, {"pp": 2}, 2, [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        (6, {}, 2, [[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_experts_are_dealt_out_to_consecutive_replicas(
    ranks: int, sizes: dict[str, int], ep: int, expert: list[list[int]], data: list[list[int]]
) -> None:
    for rank, (mine, same, mine_sum, same_sum, one) in enumerate(run(found, sizes, ep, ranks=ranks)):
        assert [mine, same] == [next(row for row in rows if rank in row) for rows in (expert, data)]
        assert [mine_sum, same_sum] == [sum(10.0**r for r in row) for row in (mine, same)]
        assert one


def in_twos() -> None:
    expert_groups(Group.world(), 2)


def test_a_size_that_does_not_divide_the_ranks_is_named() -> None:
    with pytest.raises(Exception, match=r"ep_size 2: experts are dealt out to the 3 data-parallel ranks.*one of 1, 3"):
        run(in_twos, ranks=3)
