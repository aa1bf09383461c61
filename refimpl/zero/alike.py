"""What must be equal on all ranks when they step, in words that ranks of one machine compare before they send anything.

An option that is set on one rank alone, weights that are loaded or written there, a gradient that is clipped there:
the weights of DDP part, those of ZeRO-1 and ZeRO-2 become a mixture, and nothing ever fails. So the step's message (the
norm's, see `Update._agree`) is announced with the optimizer's numbers, a few microseconds, and at the 1st, 2nd, 4th,
8th, ... step with a checksum of the weights as well, for which all of them are read. No byte more travels. Weights on a
GPU are left out (the host would wait for it), and so are those of which a rank has a part alone.
"""

import zlib
from collections.abc import Iterable

import torch
from torch import optim

from refimpl.zero.flat import Bucket

NUMBERS = float, int
LONGEST = 200  # characters: a call has 500 on the board, with where it was made


def words(optimizer: optim.Optimizer | None, whole: Iterable[Bucket], step: int) -> str:
    """For the announcement of step 1, 2, ...: "a step with lr 0.001, betas (0.9, 0.999), which must be ...".

    A number that differs between the optimizer's groups is there for each. A tensor is not: the host would wait for it.
    `whole`: the buckets whose parameters every rank has.
    """
    numbers = [
        (key, str(value))
        for group in (optimizer.param_groups if optimizer else ())
        for key, value in group.items()
        if type(value) in NUMBERS or (type(value) in (tuple, list) and value and type(value[0]) in NUMBERS)
    ]
    found: dict[str, list[str]] = {}
    for key, text in numbers:
        found.setdefault(key, []).append(text)
    parts = [f"{key} {', '.join(texts[: None if len(set(texts)) > 1 else 1])}" for key, texts in found.items()]
    if not step & (step - 1) and (sums := [int(b.full.view(torch.int64).sum()) for b in whole if b.full.is_cpu]):
        parts.insert(0, f"weights of checksum {sum(sums)}")
    said = ", ".join(parts)
    if len(said) > LONGEST:
        said = f"{said[:LONGEST]}... (all of it: {zlib.crc32(said.encode()):x})"
    return f"a step with {said}, which must be equal on all ranks" if parts else ""
