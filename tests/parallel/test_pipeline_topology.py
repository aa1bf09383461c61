"""Ranks on named axes: by what they are, and as the mesh that makes groups numbers them."""

from itertools import product

import pytest
from worlds import run

from refimpl.comm.mesh import Mesh
from refimpl.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

TOPOLOGIES = [
    ProcessTopology(["a"], [3]),
    ProcessTopology(["row", "col"], [2, 3]),
    PipeDataParallelTopology(num_pp=2, num_dp=4),
    PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_rank_has_a_place_and_every_place_a_rank(topology: ProcessTopology) -> None:
    places = list(product(*(range(dim) for dim in topology.dims)))
    assert topology.world_size() == len(places)
    for rank, place in enumerate(places):
        named = dict(zip(topology.get_axis_names(), place, strict=True))
        assert topology.get_rank(**named) == rank
        assert topology.get_coord(rank) == topology.ProcessCoord(**named) == place
        assert topology.filter_match(**named) == [rank]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_groups_of_an_axis_are_its_lines(topology: ProcessTopology) -> None:
    for axis in topology.axes:
        lines = topology.get_axis_comm_lists(axis)
        assert sorted(rank for line in lines for rank in line) == list(range(topology.world_size()))
        for line in lines:
            places = [topology.get_coord(rank)._asdict() for rank in line]
            assert [place.pop(axis) for place in places] == list(range(topology.get_dim(axis)))
            assert all(place == places[0] for place in places)
        for i in range(topology.get_dim(axis)):
            assert sorted(topology.get_axis_list(axis, i)) == sorted(line[i] for line in lines)
    assert topology.get_axis_comm_lists("nothing") == []
    assert topology.get_dim("nothing") == 0


def lines() -> dict[str, list[int]]:
    """The ranks of each of this rank's groups in a mesh."""
    mesh = Mesh({"pipe": 2, "data": 2})
    return {axis: mesh.group(axis).all_gather_object(mesh.world.rank) for axis in mesh.axes}


def test_the_mesh_numbers_alike() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    for rank, found in enumerate(run(lines, ranks=4)):
        for axis, ranks in found.items():
            assert ranks in topology.get_axis_comm_lists(axis)
            assert rank in ranks


def test_a_rank_as_a_part_of_a_files_name() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=[]) == "pipe_01-data_00-model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="+", outer_sep=" ") == "pipe+01 model+01"


def test_places_that_there_are_not() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    with pytest.raises(ValueError, match=r"a coordinate on each of \['pipe', 'data'\], got \['pipe'\]"):
        topology.get_rank(pipe=0)
    with pytest.raises(ValueError, match=r"no place ProcessCoord\(pipe=2, data=0\)"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="rank 4 is not on a grid of 4 ranks"):
        topology.get_coord(4)
    with pytest.raises(ValueError, match=r"axes \['a', 'b'\], sizes \[2\]"):
        ProcessTopology(["a", "b"], [2])
