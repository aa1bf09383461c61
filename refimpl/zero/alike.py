"""Weights that every rank has whole must be the same bits on all: their checksum joins the optimizer's settings.

Weights that are loaded or written on one rank alone, or a gradient clipped there: those of DDP part, those of ZeRO-1
and ZeRO-2 become a mixture, and nothing ever fails. So at the 1st, 2nd, 4th, 8th, ... step all of them are read, and no
byte more travels (see `settings.py`). Left out: weights on a GPU, for which the host would wait, and those of which a
rank has a part alone.
"""

from collections.abc import Iterable

import torch

from refimpl.zero.flat import Bucket
from refimpl.zero.settings import Settings


def weights(whole: Iterable[Bucket], step: int) -> Settings:
    """For step 1, 2, ...; `whole`: the buckets whose parameters every rank has."""
    if step & (step - 1):
        return {}
    sums = [int(bucket.full.view(torch.int64).sum()) for bucket in whole if bucket.full.is_cpu]
    return {("the weights'", "checksum"): str(sum(sums))} if sums else {}
