"""The double binary tree: two trees in which nobody only waits, right sums, the promised bytes and order."""

import functools

import pytest
import torch
import torch.distributed as dist
import worlds
from given import SIZES, agrees, everyone, given
from torch import Tensor

from refimpl.comm import tree
from refimpl.comm.group import Group

run = functools.partial(worlds.run, device="cpu")


def test_both_are_trees_of_all_ranks_with_two_children_at_most() -> None:
    for size in range(1, 50):
        for which in (0, 1):
            places = [tree.places(rank, size)[which] for rank in range(size)]
            [root] = [r for r, place in enumerate(places) if place.parent is None]
            assert root == (0 if which == 0 or size == 1 else 1 if size % 2 else size - 1)
            edges = {(place.parent, r) for r, place in enumerate(places) if place.parent is not None}
            assert edges == {(r, child) for r, place in enumerate(places) for child in place.children}
            assert max(len(place.children) for place in places) <= 2
            for rank in range(size):
                steps, at = 0, rank
                while (above := places[at].parent) is not None:
                    steps, at = steps + 1, above
                assert steps <= tree.height(size)


def test_who_passes_on_in_one_tree_is_a_leaf_in_the_other() -> None:
    """But for one rank of an odd number: there is one leaf too few."""
    for size in range(2, 50):
        both = [r for r in range(size) if all(place.children for place in tree.places(r, size))]
        assert len(both) == size % 2
        sends = [sum((p.parent is not None) + len(p.children) for p in tree.places(r, size)) for r in range(size)]
        assert sum(sends) == 4 * (size - 1)  # of half a buffer each
        assert max(sends) <= 4


def all_of_it() -> list[str]:
    group, wrong = Group.world(), []
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            rows = everyone(group.size, n, dtype)
            for op in ("sum", "max") if dtype == torch.int64 else ("sum", "mean", "max"):
                for pieces in (1, 4):
                    x = rows[group.rank].clone()
                    tree.all_reduce(group, x, op, pieces=pieces)
                    if not agrees(x, rows, op):
                        wrong.append(f"{n} {dtype} {op} {pieces}")
    scalar = torch.tensor(float(group.rank))
    tree.all_reduce(group, scalar)
    return wrong if scalar.item() == sum(range(group.size)) else [*wrong, "a number without dimensions"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_right_on_every_size_dtype_and_operation(ranks: int) -> None:
    assert run(all_of_it, ranks=ranks) == [[]] * ranks


def added_up(rows: Tensor, which: int, rank: int) -> Tensor:
    """What `rank` sends up: its own numbers, plus the lower child's, plus the other's."""
    total = rows[rank]
    for child in tree.places(rank, len(rows))[which].children:
        total = total + added_up(rows, which, child)
    return total


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_order_and_torchs_own(ranks: int) -> None:
    n = 1001

    def check() -> tuple[int, Tensor, Tensor]:
        group = Group.world()
        x, theirs = given(group.rank, n), given(group.rank, n, torch.float64)
        tree.all_reduce(group, x, pieces=3)
        dist.all_reduce(theirs)
        assert group.ledger.open_calls() == []
        return group.ledger.sent_bytes()["send"], x, theirs

    results = run(check, ranks=ranks)
    halves = [len(half) for half in torch.empty(n).tensor_split(2)]
    for rank, (sent, x, theirs) in enumerate(results):
        places = tree.places(rank, ranks)
        edges = [(place.parent is not None) + len(place.children) for place in places]
        assert sent == 4 * sum(half * count for half, count in zip(halves, edges, strict=True))
        assert torch.equal(x, results[0][1])
        torch.testing.assert_close(x.double(), theirs, rtol=1e-4, atol=1e-2)
    assert sum(sent for sent, _, _ in results) == 2 * 4 * n * (ranks - 1)
    first, second = everyone(ranks, n).tensor_split(2, dim=1)
    root = [next(r for r in range(ranks) if tree.places(r, ranks)[which].parent is None) for which in (0, 1)]
    assert torch.equal(results[0][1], torch.cat([added_up(first, 0, root[0]), added_up(second, 1, root[1])]))
    in_rank_order = functools.reduce(torch.add, everyone(ranks, n))
    assert torch.equal(results[0][1], in_rank_order) == (ranks == 2)


def test_the_order_that_is_written_down() -> None:
    g = everyone(6, 50)
    assert torch.equal(added_up(g, 0, 0), g[0] + ((g[4] + ((g[2] + g[1]) + g[3])) + g[5]))


def test_no_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="pieces must be at least 1, not 0"):
        tree.all_reduce(Group(None), torch.zeros(3), pieces=0)
