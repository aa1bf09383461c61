"""The optimizer's settings must be equal on all ranks: a checksum of them travels with the norm of every step.

With another learning rate, weight decay or betas on one rank the replicas of DDP part, shards are of no one optimizer,
and nothing fails by itself. A schedule that follows a rank's own loss does that (ReduceLROnPlateau).

    words of a rank       h, h^2       h: a checksum of 20 bits
    summed over N ranks   S, Q         all have the same exactly if N Q = S^2 (Cauchy-Schwarz): every rank sees it alike

In fp64 the sums are exact up to 8,192 ranks. Traffic: 16 of the norm's bytes. A tensor on a GPU (the rate of a
`capturable` optimizer) is compared when the stage is built, and not again: reading it would make the host wait.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, optim

Settings = dict[tuple[str, str], str]  # (whose, key) -> value, in words
WORDS = 2


def settings(optimizer: optim.Optimizer | None, kind: type, waits: bool = True) -> Settings:
    """The numbers and words in the optimizer's groups. `kind`: its class, for the reader; `waits`: for a GPU too."""
    return {
        (whose, key): words
        for i, group in enumerate(optimizer.param_groups if optimizer else ())
        for whose in [f"{kind.__name__}, group {i}:"]
        for key in sorted(group)
        if key != "params" and (words := in_words(group[key], waits))
    }


def in_words(value: Any, waits: bool) -> str:
    """A number (1 and 1.0 are one), a text, or several numbers; "" for anything else."""
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, float | int):
        return repr(float(value))
    if isinstance(value, tuple | list):
        parts = [in_words(x, waits) for x in value if isinstance(x, int | float | Tensor)]
        return f"({', '.join(parts)})" if parts and len(parts) == len(value) else ""
    if isinstance(value, Tensor):
        return in_words(value.tolist(), waits) if waits or value.device.type == "cpu" else ""
    return ""


def checksum(given: Settings) -> list[float]:
    """What this rank adds to the sums."""
    mine = float(zlib.crc32(repr(given).encode()) % 2**20)
    return [mine, mine * mine]


def are_equal(sums: list[float], ranks: int) -> bool:
    """Whether so many ranks have given the same."""
    total, squares = map(int, sums)
    return ranks * squares == total * total


def difference(of_ranks: Mapping[int, Settings]) -> str:
    """The first setting that ranks disagree on, in words: whose it is, its key, the ranks and their values."""
    first = next(iter(of_ranks.values()))
    given = next(given for given in of_ranks.values() if given != first)
    whose, key = next(name for name in (*first, *given) if first.get(name) != given.get(name))
    ranks: dict[str, list[int]] = {}
    for rank, values in of_ranks.items():
        ranks.setdefault(values.get((whose, key), "not there"), []).append(rank)
    said = "; ".join(f"rank {', '.join(map(str, those))}: {value}" for value, those in ranks.items())
    return f"{whose} {key} is not the same on all ranks ({said})"
