"""Two levels: the flat collectives' results, near ranks first, and far only the bytes of the formulas."""

import functools
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import worlds
from given import SIZES, agrees, everyone, given
from torch import Tensor

from refimpl.comm import halving, hierarchy, ring, tree
from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.measure.ledger import Ledger

run = functools.partial(worlds.run, device="cpu")

SHAPES = [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (4, 1)]  # nodes, ranks of each
WAYS: list[type[Group] | ModuleType] = [Group, ring, halving]


def levels(nodes: int, each: int) -> tuple[Group, Group]:
    """(near, far), each with a ledger of its own."""
    mesh = Mesh({"far": nodes, "near": each})
    near, far = mesh.group("near"), mesh.group("far")
    near.ledger, far.ledger = Ledger(), Ledger()
    return near, far


def all_of_it(nodes: int, each: int) -> list[str]:
    (near, far), wrong = levels(nodes, each), []
    world = Group.world()
    me, ranks = world.rank, world.size
    for way in WAYS:
        for n in SIZES:
            for dtype in (torch.float32, torch.bfloat16) if way is Group else (torch.float32,):
                rows = everyone(ranks, n * ranks, dtype)
                for op in ("sum", "mean", "max"):
                    case, x, out = f"{way} {n} {dtype} {op}", rows[me].clone(), torch.empty(n, dtype=dtype)
                    hierarchy.reduce_scatter(near, far, out, x, op, within=way, between=way)
                    if not agrees(out, rows.view(ranks, ranks, n)[:, me], op) or not torch.equal(x, rows[me]):
                        wrong.append(f"reduce_scatter {case}")
                    whole = torch.empty_like(x)
                    hierarchy.all_gather(near, far, whole, out, within=way, between=way)
                    odd = rows[me][: max(0, len(x) - 1)].clone()
                    hierarchy.all_reduce(near, far, odd, op, within=way, between=way)
                    if not agrees(odd, rows[:, : len(odd)], op):
                        wrong.append(f"all_reduce {case}")
                    if way is Group and not torch.equal(odd, whole[: len(odd)]):
                        wrong.append(f"an all-reduce's bits are not a reduce-scatter's: {case}")
    return wrong


@pytest.mark.parametrize(("nodes", "each"), SHAPES)
def test_right_on_every_size_dtype_and_operation(nodes: int, each: int) -> None:
    assert run(all_of_it, nodes, each, ranks=nodes * each) == [[]] * nodes * each


def exchanged(nodes: int, each: int) -> None:
    near, far = levels(nodes, each)
    world = Group.world()
    me, ranks = world.rank, world.size
    for shape in ((0,), (ranks,), (2 * ranks, 3), (ranks, 2, 2)):
        x = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * me
        ours, theirs = torch.empty_like(x), torch.empty_like(x)
        hierarchy.all_to_all(near, far, ours, x)
        world.all_to_all(theirs, x)
        assert torch.equal(ours, theirs)
    # Uneven: rank r sends (r + i) % 3 rows to rank i, so to some of them none.
    sizes = [[(r + 2 * i) % 3 for i in range(ranks)] for r in range(ranks)]
    x = torch.randn(sum(sizes[me]), 5) + me
    taken = [sizes[r][me] for r in range(ranks)]
    ours, theirs = torch.empty(sum(taken), 5), torch.empty(sum(taken), 5)
    hierarchy.all_to_all(near, far, ours, x, out_splits=taken, in_splits=sizes[me])
    world.all_to_all(theirs, x, out_splits=taken, in_splits=sizes[me])
    assert torch.equal(ours, theirs)
    for root in range(ranks):
        x = torch.full((3, 3), float(me))
        hierarchy.broadcast(near, far, x, root)
        assert torch.equal(x, torch.full((3, 3), float(root)))
    scalar = torch.tensor(float(me))
    hierarchy.all_reduce(near, far, scalar)
    assert scalar.shape == ()
    assert scalar.item() == sum(range(ranks))


@pytest.mark.parametrize(("nodes", "each"), SHAPES)
def test_all_to_all_and_broadcast_are_the_flat_ones(nodes: int, each: int) -> None:
    run(exchanged, nodes, each, ranks=nodes * each)


@pytest.mark.parametrize(("nodes", "each"), [(3, 2), (2, 3)])
def test_six_ranks_sum_within_nodes_first(nodes: int, each: int) -> None:
    n = 61

    def check() -> tuple[Tensor, Tensor, Tensor]:
        near, far = levels(nodes, each)
        x, scattered, theirs = given(dist.get_rank(), 6 * n), torch.empty(n), given(dist.get_rank(), 6 * n)
        hierarchy.reduce_scatter(near, far, scattered, x)
        hierarchy.all_reduce(near, far, x)
        exchanged(nodes, each)
        dist.all_reduce(theirs)
        return x, scattered, theirs

    g = everyone(6, 6 * n)
    by_node = [functools.reduce(torch.add, g[f * each : (f + 1) * each]) for f in range(nodes)]
    near_first = functools.reduce(torch.add, by_node)
    far_first = functools.reduce(torch.add, [functools.reduce(torch.add, g[place::each]) for place in range(each)])
    in_rank_order = functools.reduce(torch.add, g)
    assert not torch.equal(near_first, far_first)  # or this test could not tell them apart
    assert not torch.equal(near_first, in_rank_order)
    for rank, (x, scattered, theirs) in enumerate(run(check, ranks=6)):
        assert torch.equal(x, near_first)
        assert torch.equal(scattered, near_first.view(6, n)[rank])
        torch.testing.assert_close(x, theirs, rtol=1e-4, atol=1e-2)


def test_a_mean_is_divided_once_and_one_of_16_bits_does_not_overflow() -> None:
    def check() -> tuple[Tensor, Tensor, Tensor]:
        near, far = levels(2, 2)
        x = given(dist.get_rank(), 1001)
        hierarchy.all_reduce(near, far, x, "mean")
        large, wide = torch.full((12,), 60000.0, dtype=torch.float16), torch.empty(3)
        hierarchy.all_reduce(near, far, large, "mean")
        hierarchy.reduce_scatter(near, far, wide, large, "mean")
        return x, large, wide

    g = everyone(4, 1001)
    for x, large, wide in run(check, ranks=4):
        assert torch.equal(x, ((g[0] + g[1]) + (g[2] + g[3])) / 4)
        assert torch.equal(large, torch.full((12,), 60000.0, dtype=torch.float16))
        assert torch.equal(wide, torch.full((3,), 60000.0))


@pytest.mark.parametrize("way", WAYS)
def test_bytes_near_and_far_are_those_of_the_formulas(way: type[Group] | ModuleType) -> None:
    n = 48  # elements of the whole buffer
    nodes, each = 2, 2

    def check() -> list[tuple[int, int]]:
        near, far = levels(nodes, each)
        whole, other, part = torch.zeros(n), torch.zeros(n), torch.zeros(n // 4)
        found = []
        for collective in (
            lambda: hierarchy.all_reduce(near, far, whole, within=way, between=way),
            lambda: hierarchy.reduce_scatter(near, far, part, whole, within=way, between=way),
            lambda: hierarchy.all_gather(near, far, whole, part, within=way, between=way),
            lambda: hierarchy.all_to_all(near, far, other, whole),
        ):
            near.ledger.reset(), far.ledger.reset()
            collective()
            found.append((sum(near.ledger.sent_bytes().values()), sum(far.ledger.sent_bytes().values())))
            assert near.ledger.open_calls() == far.ledger.open_calls() == []
        return found

    size = 4 * n
    half = size * (each - 1) // each, size // each * (nodes - 1) // nodes
    expected = [(2 * half[0], 2 * half[1]), half, half, (half[0], size * (nodes - 1) // nodes)]
    assert run(check, ranks=4) == [expected] * 4
    flat = 2 * size * 3 // 4
    assert sum(expected[0]) == flat  # a rank sends no more in all; its node, less:
    assert each * expected[0][1] == 2 * size * (nodes - 1) // nodes < flat


def test_a_tree_between_nodes() -> None:
    def check() -> Tensor:
        near, far = levels(2, 2)
        x = given(dist.get_rank(), 33)
        hierarchy.all_reduce(near, far, x, within=halving, between=tree)
        return x

    assert all(agrees(x, everyone(4, 33), "sum") for x in run(check, ranks=4))


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    def check() -> None:
        near, far = levels(2, 1)
        with pytest.raises(ValueError, match=r"on rank .: 5 elements are not 2 ranks x 2"):
            hierarchy.reduce_scatter(near, far, torch.empty(2), torch.empty(5))
        with pytest.raises(ValueError, match="two-level all_gather"):
            hierarchy.all_gather(near, far, torch.empty(5), torch.empty(2))
        with pytest.raises(ValueError, match=r"mean of torch\.int32"):
            hierarchy.all_reduce(near, far, torch.zeros(2, dtype=torch.int32), "mean")
        with pytest.raises(ValueError, match="root=2, but this group has 2 ranks"):
            hierarchy.broadcast(near, far, torch.zeros(2), 2)
        with pytest.raises(ValueError, match="splits are"):
            hierarchy.all_to_all(near, far, torch.zeros(2), torch.zeros(2), in_splits=[2, 1])
        assert near.ledger.events == far.ledger.events == []

    run(check, ranks=2)
