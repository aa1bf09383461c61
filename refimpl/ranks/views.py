"""A tensor that is cut out of a larger one travels alone: torch's own pickle takes the whole memory along, for each.

The weights of DDP, ZeRO-1 and ZeRO-2 are views of a few flat buffers: of a model of 40 tensors in one bucket, pickled
by torch, 40 buckets would travel.
"""

from typing import Any

import torch
from torch import Tensor


def reduced(x: Tensor) -> Any:
    """What a pickler's `reducer_override` returns for x. Views never stayed views: each is pickled by itself."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_meta or x.is_quantized or vars(x):
        return NotImplemented
    if x.untyped_storage().nbytes() <= x.nbytes:
        return NotImplemented
    own = x.detach().clone().requires_grad_(x.requires_grad)
    return own.__reduce_ex__(2)  # type: ignore[no-untyped-call]
