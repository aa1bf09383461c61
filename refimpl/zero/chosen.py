"""What a stage's configuration and its optimizer choose: how gradients are reduced, and which update there is.

optimizer averages by itself      its own (reduction/one_bit.py) beside the stage's `reduce`; `OneBitUpdate`
compression                       `Compressed` in place of the stage's `reduce`
optimizer_home                    `OffloadedUpdate`; one step late with delayed_update: `DelayedUpdate`; of an
                                  optimizer that asks about whole parameters: `OffloadedWhole`
none of these                     the stage's `reduce`, and `Update`
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import optim

from refimpl.optim.travelling import Travelling
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gradients import Gradients
from refimpl.zero.offload.delayed import DelayedUpdate
from refimpl.zero.offload.offloaded import OffloadedUpdate
from refimpl.zero.offload.offloaded_whole import OffloadedWhole
from refimpl.zero.optimizer.kind import is_layerwise
from refimpl.zero.reduction.compressed import Compressed
from refimpl.zero.reduction.one_bit import OneBitUpdate, Reduce, unless_local
from refimpl.zero.update import Update

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage


def gradients_of(stage: "Stage", optimizer: optim.Optimizer | None, compressed: Compressed | None) -> Gradients:
    """Those of the stage's buckets, with what reduces them."""
    reduce: Reduce = stage.reduce
    config = stage.config
    if isinstance(optimizer, Travelling):
        reduce = unless_local(stage, optimizer)
    elif compressed is not None:  # which rounds values itself, and feeds back what that loses
        reduce, config = compressed.reduce, replace(config, communication_data_type=None)
    gradients = Gradients(stage.buckets, reduce, stage.group, config, stage.names, stage.passes.sign, stage.in_order)
    if compressed is not None:
        gradients.dropping = compressed.drop
    return gradients


def update_kind(optimizer: optim.Optimizer | None, config: ZeroConfig) -> type[Update]:
    """The class of the stage's update."""
    if config.optimizer_home is not None and is_layerwise(type(optimizer)):
        return OffloadedWhole
    if config.optimizer_home is not None:
        return DelayedUpdate if config.delayed_update else OffloadedUpdate
    return OneBitUpdate if isinstance(optimizer, Travelling) else Update
