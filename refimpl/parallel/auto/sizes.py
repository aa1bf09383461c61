"""Numbers in a model's modules that belong to the whole layer: `num_heads`, `split_size`, `inner_dim`, ...

A forward that says view(-1, self.num_heads, self.head_dim) must find this rank's number of heads. Which attributes are
meant is not read from a list of names: those whose value is a number of heads or a width of the region's layers may be,
and which of them are, the rehearsal shows. None is changed that need not be. DeepSpeed divides by name:
deepspeed/module_inject/auto_tp.py, `update_mp_params`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, islice, product
from typing import Any

from torch import nn

from refimpl.parallel.auto.regions import Region
from refimpl.parallel.split import Split

Attribute = tuple[str, Any, Split]  # name, value, and what it counts
MOST = 12  # choices beyond the likely ones


def choices(model: nn.Module, region: Region) -> Iterator[tuple[Attribute, ...]]:
    """Sets of attributes that may have to be divided, the likely ones first."""
    if region.units is None:
        yield ()
        return
    counts, sizes = (attributes(model, region.around, known) for known in (region.counts, region.sizes))
    likely = chain([()], ways(counts), ways(sizes), ways(counts + sizes))
    others = (c for n in range(1, len(counts + sizes)) for some in combinations(counts + sizes, n) for c in ways(some))
    yield from islice(dict.fromkeys(chain(likely, others)), 4 + MOST)


def ways(several: Sequence[tuple[Attribute, ...]]) -> Iterator[tuple[Attribute, ...]]:
    """One for each: an attribute whose number may count one thing or another has an entry for both."""
    return product(*several)


def attributes(
    model: nn.Module, around: Sequence[str], known: Mapping[int, list[Split]]
) -> list[tuple[Attribute, ...]]:
    """Of the modules around those whose value, or one of whose values, is among these, with what it may count."""
    found = dict[tuple[str, Any], tuple[Attribute, ...]]()
    for name in around:
        for attribute, value in vars(model.get_submodule(name)).items():
            several = tuple(value) if isinstance(value, tuple | list) else (value,)
            if several and all(type(n) is int for n in several):
                splits = dict.fromkeys(split for n in several for split in known.get(n, []))
                if splits:
                    value = several if isinstance(value, tuple | list) else value
                    found[attribute, value] = tuple((attribute, value, split) for split in splits)
    return list(found.values())


def divided(value: Any, split: Split, rank: int) -> Any:
    """This rank's part of a number that counts these units, or a multiple of them, or of each such number."""
    if isinstance(value, tuple | list):
        return type(value)(divided(n, split, rank) if n % split.units == 0 else n for n in value)
    return value // split.units * len(split.units_of(rank))
