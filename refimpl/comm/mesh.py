"""A mesh: the ranks laid out on a grid with a name for each axis, and a `Group` for every line of it.

`Mesh({"data": 2, "model": 3})` numbers six ranks row by row, the last axis fastest:

                 model 0   model 1   model 2
        data 0      0         1         2       <- rank 1's model group: ranks 0, 1, 2 (same data coordinate)
        data 1      3         4         5
                              ^
                              rank 1's data group: ranks 1, 4 (same model coordinate)

Every strategy that combines parallel axes asks for its own line: `mesh.group("data")` averages gradients while
`mesh.group("model")` sums partial products. The last axis should be the one that sends most: its ranks have consecutive
numbers, so they share a node, where links are fastest.
Several axes make one group too: `mesh.group("data", "model")` is the plane through this rank.
Two meshes, or two axes, whose lines are the same ranks share torch's process group for them (`process_group.of_rows`).
torch: torch/distributed/device_mesh.py. DeepSpeed: deepspeed/runtime/pipe/topology.py (ProcessTopology) and
deepspeed/utils/groups.py.
"""

import math
from collections.abc import Mapping
from itertools import accumulate, product
from operator import mul

from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.comm.process_group import of_rows
from refimpl.measure.ledger import Ledger


class Mesh:
    """Named axes over all ranks of the job. Making one, and asking it for a group, are collective: every rank does."""

    def __init__(
        self,
        axes: Mapping[str, int],
        ledger: Ledger | None = None,
        *,
        deterministic: bool = False,
        link: Link | None = None,
    ) -> None:
        """`axes`: name -> size, outermost first. `link`: see `Group`.

        ValueError when the sizes do not multiply to the number of ranks.
        """
        self.world = Group.world(ledger, deterministic, link=link)
        self.ledger = self.world.ledger  # one for all groups: a rank's traffic is one story
        self.axes = dict(axes)
        self._deterministic = deterministic
        self._groups: dict[tuple[str, ...], Group] = {}
        if math.prod(self.axes.values()) != self.world.size or min(self.axes.values(), default=1) < 1:
            sizes = " x ".join(f"{name}={size}" for name, size in self.axes.items())
            raise ValueError(f"mesh {sizes} needs {math.prod(self.axes.values())} ranks, the job has {self.world.size}")

    def size(self, axis: str) -> int:
        """Ranks along an axis. KeyError for an axis the mesh does not have."""
        self._check(axis)
        return self.axes[axis]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place: axis -> 0 .. size-1."""
        place, rest = {}, self.world.rank
        for axis, size in reversed(self.axes.items()):
            rest, place[axis] = divmod(rest, size)
        return {axis: place[axis] for axis in self.axes}

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one along `axes` only, made once and kept.

        With several axes, named in the mesh's order, ranks are numbered row by row as in the mesh; with none, it is a
        group of one. KeyError for an unknown axis, ValueError for axes out of order.
        """
        self._check(*axes)
        if list(axes) != [axis for axis in self.axes if axis in axes]:
            raise ValueError(
                f"name the axes of a group once each and in the mesh's order {list(self.axes)}: got {axes}"
            )
        if axes not in self._groups:
            world = self.world
            handle = of_rows(self._lines(axes)) if axes and world.handle is not None else None
            self._groups[axes] = Group(handle, self.ledger, world.device, self._deterministic, link=world.link)
        return self._groups[axes]

    def _lines(self, axes: tuple[str, ...]) -> list[list[int]]:
        """The ranks of every line along `axes`, ascending in each: they differ along these axes only."""
        inner = list(accumulate(reversed(self.axes.values()), mul, initial=1))[-2::-1]  # ranks between two neighbours
        along, across = (
            [range(0, size * step, step) for (axis, size), step in zip(self.axes.items(), inner, strict=True)
             if (axis in axes) == chosen] for chosen in (True, False)
        )  # fmt: skip
        return [[sum(begin) + sum(place) for place in product(*along)] for begin in product(*across)]

    def _check(self, *axes: str) -> None:
        for axis in axes:
            if axis not in self.axes:
                raise KeyError(f"mesh has no axis {axis!r}: its axes are {list(self.axes)}")
