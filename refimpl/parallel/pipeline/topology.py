"""DeepSpeed's names for a grid of ranks: which rank stands where, on axes that have names. Nothing is sent.

`refimpl.comm.mesh.Mesh` is the grid that makes groups; this is the same numbering, row by row with the last axis
fastest, asked in DeepSpeed's words. `PipeDataParallelTopology(num_pp=2, num_dp=2)`: ranks 0 and 1 are the replicas of
stage 0, ranks 0 and 2 one pipeline.
DeepSpeed: deepspeed/runtime/pipe/topology.py.
"""

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any


class ProcessTopology:
    """Ranks on axes: `axes` are names, outermost first, `dims` their sizes."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        """ValueError if there are not as many sizes as names, or one is below 1."""
        if len(axes) != len(dims) or any(dim < 1 for dim in dims):
            raise ValueError(f"each axis needs a size of at least 1: axes {list(axes)}, sizes {list(dims)}")
        self.axes, self.dims = list(axes), list(dims)
        make: Any = namedtuple  # its fields are not known to a type checker
        self.ProcessCoord = make("ProcessCoord", self.axes)
        places = product(*(range(dim) for dim in dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def world_size(self) -> int:
        return len(self.mapping)

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 for one that there is not, as in DeepSpeed."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place, every axis named. ValueError if one is missing or there is no such place."""
        if set(coordinates) != set(self.axes):
            raise ValueError(f"get_rank needs a coordinate on each of {self.axes}, got {sorted(coordinates)}")
        place = self.ProcessCoord(**coordinates)
        if place not in self.mapping:
            raise ValueError(
                f"there is no place {place} on axes of sizes {dict(zip(self.axes, self.dims, strict=True))}"
            )
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """A rank's place, a named tuple. ValueError for a rank that there is not."""
        for place, other in self.mapping.items():
            if other == rank:
                return place
        raise ValueError(f"rank {rank} is not on a grid of {self.world_size()} ranks")

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks with these coordinates, on any number of axes."""
        return [r for place, r in self.mapping.items() if all(getattr(place, a) == c for a, c in coordinates.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate on an axis is idx."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups along an axis: lists of ranks that differ on it only. Empty for an axis that there is not."""
        if axis not in self.axes:
            return []
        others = [a for a in self.axes if a != axis]
        places = product(*(range(self.get_dim(a)) for a in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's place as a part of a file's name: "model_01". Axes in `omit_axes` are left out."""
        place = self.get_coord(rank)
        axes = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in axes)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Replicas of a stage are neighbours: their gradients are more than what passes between stages."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """As that, with the ranks of a layer (tensor parallelism) nearest to each other."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
