"""What a stage is made of: `Stage` sets it, and the classes that a stage is put together from read it.

Stage      stage.py              trains: backward, step, gather
Hooked     loop/hooked.py        acts when the model's forward and backward run
Beside     agreement/beside.py   knows of other ranks than those that share its shards
ByName     loop/access.py        gives and takes single parameters
Held       loop/held.py          says what it holds, saves and loads it
Changing   loop/changing.py      has the optimizer, takes in what is to be trained later, and lets go
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, optim

if TYPE_CHECKING:
    from refimpl.comm.group import Group
    from refimpl.zero.backward import BackwardPass
    from refimpl.zero.config import ZeroConfig
    from refimpl.zero.flat import Bucket
    from refimpl.zero.gradients import Gradients
    from refimpl.zero.loop.buffers import Buffers
    from refimpl.zero.loop.grad_view import GradientView
    from refimpl.zero.loop.parked import Parked
    from refimpl.zero.loop.scaled import Scaled
    from refimpl.zero.reduction.compressed import Compressed
    from refimpl.zero.update import Update


class Built(ABC):
    """The parts of a stage."""

    model: nn.Module
    names: dict[nn.Parameter, str]
    group: "Group"
    config: "ZeroConfig"
    experts: Mapping[nn.Parameter, "Group"]  # the parameters that not all ranks have, and which ranks do
    group_of: dict[nn.Parameter, int]  # the optimizer's group of each parameter that it has
    buckets: "list[Bucket]"  # of what is trained
    thawed: dict[nn.Parameter, None]  # to be trained from the next pass on; an ordered set
    later: list[str]  # what is trained since the stage was built, in words
    passes: "BackwardPass"
    gradients: "Gradients"
    view: "GradientView"
    update: "Update"
    buffers: "Buffers"
    compressed: "Compressed | None"
    scaled: "Scaled"
    parked: "Parked"
    handles: list[Any]  # of its hooks
    on_drop: list[Callable[[], None]]  # told that gradients were dropped: who counts micro-batches

    @abstractmethod
    def build(self, optimizer: optim.Optimizer | None) -> None:
        """See `Stage.build`."""

    @abstractmethod
    def owned(self, bucket: "Bucket") -> Tensor:
        """See `Stage.owned`."""

    @abstractmethod
    def gather(self) -> None:
        """See `Stage.gather`."""

    @abstractmethod
    def catch_up(self) -> None:
        """See `Stage.catch_up`."""

    @abstractmethod
    def free_gathered(self) -> None:
        """See `Stage.free_gathered`."""

    @abstractmethod
    def include_thawed(self) -> list[nn.Parameter]:
        """See `Changing.include_thawed`."""
