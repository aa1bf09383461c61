"""Norms of whole parameters of which every rank has a part: the squares of the parts, added up over the ranks.

For an optimizer that is element-wise but for such norms (`layerwise = True` on its class: LAMB): its slices are the
parts, and once a step it hands over their sums of squares. One all-reduce of 8 bytes a norm, fp64, in which each rank
writes what it has; none where every rank has all (DDP). A tied parameter is one; what is frozen has no slice that
moves. DeepSpeed lets no such optimizer into ZeRO (deepspeed/runtime/zero/utils.py, `is_zero_supported_optimizer`).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from refimpl.comm.streams import told
from refimpl.zero.optimizer.slices import Slices

if TYPE_CHECKING:
    from refimpl.comm.group import Group


class WholeSquares:
    """Callable as `Lamb.whole_squares`."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def __call__(self, params: list[Tensor], squares: Tensor) -> Tensor:
        """squares [K, n] of the slices `params`, fp64 -> [K, n] of the parameters they are of. A collective.

        Every rank calls it once a step, also one on which nothing moves (K = 0).
        """
        whole = {id(s.param): s.whole for slices in self.slices.of.values() for s in slices if s.whole is not None}
        row_of = {whole[id(p)]: row for row, p in enumerate(params) if id(p) in whole}
        summed = squares.clone()
        for group, members in self.cut().items():
            summed = summed.to(group.device)  # of a rank on which nothing moves they are the host's
            message = torch.zeros(len(members), squares.shape[1], dtype=torch.float64, device=group.device)
            mine = [(at, row_of[p]) for at, p in enumerate(members) if p in row_of]
            there, here = told(mine, torch.int64, group.device).view(-1, 2).unbind(1)
            message[there] = summed[here]
            group.all_reduce(message, "sum", tag="whole squares")
            group.settle()
            summed[here] = message[there]
        return summed

    def cut(self) -> dict["Group", list[nn.Parameter]]:
        """The parameters of which ranks have parts, in the same order on all of these ranks."""
        members: dict[Group, list[nn.Parameter]] = {}
        for bucket, length in self.slices.length.items():
            if length != bucket.padded:
                members.setdefault(bucket.group, []).extend(bucket.params)
        return members
