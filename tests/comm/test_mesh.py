"""The mesh: coordinates and groups against numpy-free arithmetic on the grid of ranks."""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import worlds

from refimpl import launch
from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.comm.mesh import Mesh
from refimpl.comm.process_group import ControlLine, anew, by_name

run = functools.partial(worlds.run, device="cpu")  # gloo, also where there is a GPU

SHAPES = [
    {"data": 1},
    {"data": 2},
    {"data": 3, "model": 1},
    {"data": 2, "model": 2},
    {"pipe": 1, "data": 2, "model": 2},
]


def ranks_of(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def members(group: Group) -> list[int]:
    """World ranks of a group's members in group order, by a collective of the group itself."""
    return group.all_gather_object(Group.world().rank)


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_each_axis_has_the_ranks_that_differ_along_it_only(axes: dict[str, int]) -> None:
    def check() -> tuple[dict[str, int], dict[str, list[int]], dict[str, int]]:
        mesh = Mesh(axes)
        groups = {axis: mesh.group(axis) for axis in axes}
        for axis, group in groups.items():
            assert (group.rank, group.size) == (mesh.coordinates[axis], mesh.size(axis))
        return mesh.coordinates, {axis: members(group) for axis, group in groups.items()}, mesh.axes

    results = run(check, ranks=ranks_of(axes))
    grid = torch.arange(ranks_of(axes)).view(*axes.values())
    for rank, (coordinates, groups, kept) in enumerate(results):
        assert kept == axes
        assert list(coordinates) == list(axes)
        assert grid[tuple(coordinates.values())] == rank
        for dim, axis in enumerate(axes):
            line = [slice(None) if d == dim else c for d, c in enumerate(coordinates.values())]
            assert groups[axis] == grid[tuple(line)].tolist()


def test_several_axes_make_the_plane_through_this_rank_in_row_order() -> None:
    axes = {"pipe": 2, "data": 1, "model": 2}

    def check() -> dict[str, list[int]]:
        mesh = Mesh(axes)
        wanted = [("pipe", "data"), ("data", "model"), ("pipe", "model"), ("pipe", "data", "model"), ()]
        return {" ".join(names): members(mesh.group(*names)) for names in wanted}

    for rank, groups in enumerate(run(check, ranks=4)):
        row, column = divmod(rank, 2)
        assert groups == {
            "pipe data": [column, 2 + column],
            "data model": [2 * row, 2 * row + 1],
            "pipe model": [0, 1, 2, 3],
            "pipe data model": [0, 1, 2, 3],
            "": [rank],
        }


def test_collectives_stay_on_their_line_and_share_one_ledger() -> None:
    def check() -> None:
        mesh = Mesh({"data": 2, "model": 2})
        rank, data, model = mesh.world.rank, mesh.group("data"), mesh.group("model")
        x = torch.tensor([10.0**rank])
        y, z = x.clone(), x.clone()
        data.all_reduce(x)
        model.all_reduce(y)
        mesh.world.all_reduce(z)
        assert (x.item(), y.item(), z.item()) == ([101, 1010][rank % 2], [11, 1100][rank // 2], 1111)
        # Roots and peers are numbered within the group.
        model.broadcast(x, root=1)
        assert x.item() == 1010
        if model.rank == 0:
            model.send(torch.tensor([float(rank)]), 1, tag="p2p")
        else:
            model.recv(x, 0, tag="p2p")
            assert x.item() == rank - 1
        assert data.ledger is model.ledger is mesh.world.ledger is mesh.ledger
        assert mesh.group("data") is data
        assert mesh.ledger.calls("tag") == {"": 4, "p2p": 1}

    run(check, ranks=4)


def test_the_order_of_sums_that_is_asked_for_is_that_of_all_groups() -> None:
    """Of NCCL, which has its own; gloo's and shared memory's order is that one anyway."""

    def check() -> list[bool]:
        mesh = Mesh({"data": 2, "model": 2}, deterministic=True)
        groups = [mesh.world, mesh.group("data"), *neighbours(mesh.world, 2), mesh.world.throttled(Link(1e9))]
        return [group.deterministic for group in groups]

    assert run(check, ranks=4) == [[True] * 5] * 4


def test_a_mesh_that_does_not_fit_the_job_is_an_error_that_says_both_numbers() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"mesh data=2 x model=2 needs 4 ranks, the job has 2"):
            Mesh({"data": 2, "model": 2})
        with pytest.raises(ValueError, match=r"mesh data=-1 x model=-2 needs 2 ranks"):
            Mesh({"data": -1, "model": -2})

    run(check, ranks=2)


def test_wrong_axes_are_an_error_that_names_the_right_ones() -> None:
    mesh = Mesh({"data": 1, "model": 1})
    with pytest.raises(KeyError, match=r"mesh has no axis 'tensor': its axes are \['data', 'model'\]"):
        mesh.group("tensor")
    with pytest.raises(KeyError, match="no axis 'tensor'"):
        mesh.size("tensor")
    with pytest.raises(ValueError, match=r"in the mesh's order \['data', 'model'\]: got \('model', 'data'\)"):
        mesh.group("model", "data")
    with pytest.raises(ValueError, match="once each"):
        mesh.group("data", "data")


def test_one_process_alone_needs_no_process_group() -> None:
    mesh = Mesh({"data": 1, "model": 1})
    assert mesh.coordinates == {"data": 0, "model": 0}
    for group in (mesh.group("data"), mesh.group("data", "model"), mesh.world):
        assert (group.size, group.backend) == (1, "none")
    x = torch.ones(2)
    mesh.group("model").all_reduce(x)
    assert x.tolist() == [1, 1]


def test_lines_of_the_same_ranks_share_one_process_group() -> None:
    """As many after 12 meshes as after the first: torch keeps every group, and its threads, until the job's end."""

    def check() -> None:
        def made() -> int:
            return len(dist.distributed_c10d._world.pg_map)

        def ask(axes: dict[str, int], *names: str) -> Group:
            group = Mesh(axes).group(*names)
            group.all_reduce(x := torch.ones(2))
            assert x.tolist() == [group.size] * 2
            return group

        first = ask({"data": 2, "model": 2}, "model")
        ask({"data": 2, "model": 2}, "data")
        before = made()
        for number in range(12):
            again = ask({"data": 2, "pipe": 1, "model": 2}, *(("pipe", "model") if number % 2 else ("model",)))
            assert again.handle is first.handle
            assert again is not first, "each mesh's groups have its ledger"
            ask({"data": 2, "pipe": 1, "model": 2}, "data")
        assert made() == before
        assert neighbours(Group.world(), 2)[0].handle is first.handle
        assert Mesh({"data": 2, "model": 2}).group("data", "model").handle is dist.group.WORLD

    run(check, ranks=4)


def test_a_group_of_some_ranks_waits_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on NCCL is bound to its devices: torch would split its communicator, for which every rank must come.

    Asked for a barrier after each new group, it holds that among the group's own ranks.
    """

    def check() -> None:
        job, cpu, device = dist.group.WORLD, torch.device("cpu"), torch.device("cuda:0")
        assert job is not None
        job.bound_device_id = device
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=AssertionError("a split")):
            if job.rank() != 1:
                group = Group(anew([[0, 2]]), device=cpu)
                group.all_reduce(x := torch.ones(2))
                assert x.tolist() == [2, 2]
                dist.barrier(ControlLine(by_name(group.handle.group_name), "nccl").handle)
        assert job.bound_device_id == device
        job.bound_device_id = None

    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    launch.run(check, ranks=3, device="cpu", timeout=20)


def test_a_group_of_a_users_own_is_not_taken() -> None:
    """Calls of one group are matched by their order, and who knows from which thread theirs come."""

    def check() -> None:
        theirs = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 1, 2])  # not as many on each rank
        mesh = Mesh({"data": 2, "model": 2})
        assert mesh.group("model").handle not in theirs
        assert members(mesh.group("data")) == [mesh.world.rank % 2, mesh.world.rank % 2 + 2]

    launch.run(check, ranks=4, device="cpu")  # ranks of its own: they part with different numbers of groups
