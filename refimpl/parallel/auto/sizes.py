"""Numbers in a model's modules that belong to the whole layer: `num_heads`, `split_size`, `inner_dim`, ...

A forward that says view(-1, self.num_heads, self.head_dim) must find this rank's number of heads. Which attributes are
meant is not read from a list of names: those whose value is a number of heads or a width of the region's layers may be,
and which of them are, the rehearsal shows. None is changed that need not be. DeepSpeed divides by name:
deepspeed/module_inject/auto_tp.py, `update_mp_params`.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from torch import nn

from refimpl.parallel.auto.regions import Region
from refimpl.parallel.split import Split

Attribute = tuple[str, Any]  # name and value
MOST = 12  # choices beyond the likely ones


def choices(model: nn.Module, region: Region) -> Iterator[tuple[Attribute, ...]]:
    """Sets of attributes that may have to be divided, the likely ones first."""
    units = region.units
    if units is None:
        yield ()
        return
    heads = {n for n in {units.number, *units.heads.values()} if n % units.number == 0 and n > 1}
    widths = {n for n in region.widths if n % units.number == 0} - heads
    counts, sizes = (attributes(model, region.around, values) for values in (heads, widths))
    likely = [(), counts, sizes, counts + sizes]
    others = [c for n in range(1, len(counts + sizes)) for c in combinations(counts + sizes, n)]
    yield from dict.fromkeys([*likely, *others[:MOST]])


def attributes(model: nn.Module, around: Sequence[str], values: set[int]) -> tuple[Attribute, ...]:
    """Those of the modules around whose value, or one of whose values, is among these."""
    found = dict[Attribute, None]()
    for name in around:
        for attribute, value in vars(model.get_submodule(name)).items():
            several = tuple(value) if isinstance(value, tuple | list) else (value,)
            if any(type(n) is int and n in values for n in several) and all(type(n) is int for n in several):
                found[attribute, tuple(value) if isinstance(value, tuple | list) else value] = None
    return tuple(found)


def divided(value: Any, units: int, ranks: int, rank: int) -> Any:
    """This rank's part of a number that is a multiple of `units`, or of each such number."""
    if isinstance(value, tuple | list):
        return type(value)(divided(n, units, ranks, rank) if n % units == 0 else n for n in value)
    return value // units * len(Split((units,), units, ranks).units_of(rank))
