"""Weights that every rank updates must be the same bits on all: their checksum joins the optimizer's settings.

Where weights are loaded or written on one rank alone, or a gradient is clipped there, those of DDP part, and nothing
ever fails. So at the 1st, 2nd, 4th, 8th, ... step all of them are read, and no byte more travels (see `settings.py`).
Left out: weights on a GPU, for which the host would wait, and all of ZeRO's: there a rank may write its own part alone.
"""

from collections.abc import Iterable

import torch

from refimpl.zero.flat import Bucket
from refimpl.zero.settings import Settings


def weights(replicated: Iterable[Bucket], step: int) -> Settings:
    """For step 1, 2, ...; `replicated`: the buckets that every rank updates."""
    if step & (step - 1):
        return {}
    sums = [int(bucket.full.view(torch.int64).sum()) for bucket in replicated if bucket.full.is_cpu]
    return {("the weights'", "checksum"): str(sum(sums))} if sums else {}
