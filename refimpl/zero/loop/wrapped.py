"""torch's DistributedDataParallel around a stage's model, which would average every gradient once more, is refused.

It asks first which parameters it is to leave alone: `LeftAlone` answers in the place of the model's own list.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from refimpl.zero.parameter import stage_of

ASKED = "_ddp_params_and_buffers_to_ignore"  # torch/nn/parallel/distributed.py


class LeftAlone:
    """The model's own list, `before`; a TypeError while a stage has a parameter of the model."""

    def __init__(self, model: nn.Module, before: Iterable[str]) -> None:
        self.model, self.before = model, frozenset(before)

    def __iter__(self) -> Iterator[str]:
        if stage := next(filter(None, map(stage_of, self.model.parameters())), None):
            raise TypeError(
                f"DistributedDataParallel around a model that {type(stage).__name__} trains, which averages gradients "
                "over the ranks itself: call the model, or its engine, in its place"
            )
        return iter(self.before)

    def __reduce__(self) -> Any:
        """A copy of the model is a plain one."""
        return frozenset, (self.before,)


def refuse_wrapping(model: nn.Module) -> None:
    """From now on, as long as a stage has a parameter of the model."""
    if not isinstance(before := getattr(model, ASKED, ()), LeftAlone):
        setattr(model, ASKED, LeftAlone(model, before))
