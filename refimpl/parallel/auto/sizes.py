"""Numbers in a model's modules that belong to the whole layer: `num_heads`, `split_size`, `inner_dim`, ...

A forward that says view(-1, self.num_heads, self.head_dim) must find this rank's number of heads. Which attributes are
meant is not read from a list of names: those whose value is a number of heads or a width of the region's layers may be,
and which of them are, the rehearsal shows. None is changed that need not be; one in a config that others read too, in a
copy of it for this module. What a module is given by keyword, a slope for each head, is such a number too: of its rows
the rank's own go on. DeepSpeed divides by name:
deepspeed/module_inject/auto_tp.py, `update_mp_params`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, combinations, islice, product
from typing import Any

from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.parallel.auto.regions import Region
from refimpl.parallel.auto.trace import Call
from refimpl.parallel.split import Split

Attribute = tuple[str, Any, Split]  # name, value, and what it counts; "NAME=": an argument, its rows
Given = dict[str, dict[str, int]]  # module -> keyword argument -> rows
MOST = 12  # choices beyond the likely ones


def choices(model: nn.Module, region: Region, given: Given) -> Iterator[tuple[Attribute, ...]]:
    """Sets of attributes that may have to be divided, the likely ones first. `given`: each module's arguments."""
    if region.units is None:
        yield ()
        return
    counts, sizes = (attributes(model, region.around, known) for known in (region.counts, region.sizes))
    deep_counts, deep_sizes = (attributes(model, region.around, known, True) for known in (region.counts, region.sizes))
    more = deep_counts + arguments(given, region.around, region.counts)
    likely = chain([()], *map(ways, (counts, sizes, counts + sizes, counts + more, counts + sizes + more + deep_sizes)))
    fewer = (some for some in combinations(counts + more, max(1, len(counts + more) - 1)))
    subsets = (some for n in range(1, len(counts + sizes)) for some in combinations(counts + sizes, n))
    others = (choice for some in chain(fewer, subsets) for choice in ways(some))
    yield from islice(dict.fromkeys(chain(likely, others)), 6 + MOST)


def ways(several: Sequence[tuple[Attribute, ...]]) -> Iterator[tuple[Attribute, ...]]:
    """One for each: an attribute whose number may count one thing or another has an entry for both."""
    return product(*several)


def attributes(
    model: nn.Module, around: Sequence[str], known: Mapping[int, list[Split]], deep: bool = False
) -> list[tuple[Attribute, ...]]:
    """Of the modules around those whose value, or one of whose values, is among these, with what it may count.

    `deep`: of their configs, "config.num_attention_heads".
    """
    found = dict[tuple[str, Any], tuple[Attribute, ...]]()
    for name in around:
        own = vars(model.get_submodule(name))
        inside = {f"{key}.{n}": v for key, config in own.items() if is_config(config) for n, v in vars(config).items()}
        for attribute, value in (inside if deep else own).items():
            several = tuple(value) if isinstance(value, tuple | list) else (value,)
            if several and all(type(n) is int for n in several):
                splits = dict.fromkeys(split for n in several for split in known.get(n, []))
                if splits:
                    value = several if isinstance(value, tuple | list) else value
                    found[attribute, value] = tuple((attribute, value, split) for split in splits)
    return list(found.values())


def arguments(given: Given, around: Sequence[str], known: Mapping[int, list[Split]]) -> list[tuple[Attribute, ...]]:
    """Tensors that the modules around are given by keyword, and that may have a row a head: BLOOM's `alibi`."""
    found = {(key, rows): None for name in around for key, rows in given.get(name, {}).items()}
    return [
        tuple((f"{key}=", rows, split) for split in splits)
        for key, rows in found
        if (splits := [s for n, several in known.items() for s in several if rows % n == 0 and s.units == n])
    ]


def keywords(model: nn.Module, call: Call) -> Given:
    """Each module's keyword arguments in one call: of floating-point tensors the number of rows."""
    given: Given = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        tensors = {key: x for key, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        given.setdefault(name, {}).update({key: x.shape[0] for key, x in tensors.items() if x.dim() > 1})

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        call(model)
    return given


def part_of_argument(key: str, split: Split, rank: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: of [heads, ..], or [batch * heads, ..], this rank's heads. ValueError for other rows."""
    if (x := kwargs.get(key)) is None:
        return None
    if x.shape[0] % split.each[0]:
        raise ValueError(
            f"{type(module).__name__}: {key} of {tuple(x.shape)} has no row for each of {split.each[0]} heads"
        )
    mine = split.units_of(rank)
    part = x.unflatten(0, (-1, split.each[0]))[:, mine.start : mine.stop].flatten(0, 1)
    return args, {**kwargs, key: part}


def is_config(value: Any) -> bool:
    """An object that keeps settings: no module, and nothing that a copy would tear from what it belongs to."""
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | Group) and not callable(value)


def get(module: nn.Module, attribute: str) -> Any:
    """`num_heads`, or `config.num_heads`; None if there is none."""
    holder, _, key = attribute.rpartition(".")
    return getattr(getattr(module, holder, None) if holder else module, key, None)


def put(module: nn.Module, attribute: str, value: Any) -> None:
    """In a config: in a copy of it, which is this module's own from here on."""
    holder, _, key = attribute.rpartition(".")
    if holder:
        config = copy.copy(getattr(module, holder))
        vars(config)[key] = value
        attribute, value = holder, config
    setattr(module, attribute, value)


def divided(value: Any, split: Split, rank: int) -> Any:
    """This rank's part of a number that counts these units, or a multiple of them, or of each such number."""
    if isinstance(value, tuple | list):
        return type(value)(divided(n, split, rank) if n % split.units == 0 else n for n in value)
    return value // split.units * len(split.units_of(rank))
