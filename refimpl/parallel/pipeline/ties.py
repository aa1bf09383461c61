"""Which ranks share a parameter: those that hold a layer that uses it.

    layer  0 embedding (key "words")   on ranks {0}        words.weight: ranks 0 and 2
    layer  1 block                     on ranks {1}
    layer  2 head (key "words")        on ranks {2}

In DualPipe every layer is on two ranks, and all its parameters are shared. Known on every rank from the list of layers
alone, in one order on all; nothing is sent to find it out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from refimpl.parallel.pipeline.layers import Layer, TiedLayerSpec

Shared = tuple[tuple[int, ...], list[nn.Parameter]]


def shared(
    layers: Sequence[Layer], holders: Sequence[set[int]], rank: int, module: Callable[[int], Any]
) -> list[Shared]:
    """(ranks, parameters) for every set of several ranks that `rank` is in. All of them get the same list in one order.

    layers: all of the chain. holders: for each the ranks that hold it. module(i): what layer i became on this rank.
    """
    found: dict[tuple[int, ...], dict[nn.Parameter, None]] = {}
    for ranks, p in [*_built(layers, holders), *_specified(layers, holders, rank, module)]:
        if len(ranks) > 1 and rank in ranks:
            found.setdefault(tuple(sorted(ranks)), {})[p] = None
    return [(ranks, list(params)) for ranks, params in sorted(found.items(), key=lambda item: item[0])]


def _built(layers: Sequence[Layer], holders: Sequence[set[int]]) -> Iterator[tuple[set[int], nn.Parameter]]:
    """Of modules that every rank was given: one object in several layers is shared by all their ranks."""
    found: dict[nn.Parameter, set[int]] = {}
    for layer, where in zip(layers, holders, strict=True):
        for p in layer.parameters() if isinstance(layer, nn.Module) else ():
            found.setdefault(p, set()).update(where)
    yield from ((ranks, p) for p, ranks in found.items())


def _specified(
    layers: Sequence[Layer], holders: Sequence[set[int]], rank: int, module: Callable[[int], Any]
) -> Iterator[tuple[set[int], nn.Parameter]]:
    """Of modules that only their holders have: tied ones by the place of a key's first layer, then the others."""
    by_key: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            by_key.setdefault(layer.key, []).append(i)
    for places in by_key.values():
        everywhere = set[int]().union(*(holders[i] for i in places))
        for i in (i for i in places if rank in holders[i]):
            yield from ((everywhere, module(i).get_parameter(name)) for name in layers[i].tied_weight_attr)  # type: ignore[union-attr]
    for i, (layer, where) in enumerate(zip(layers, holders, strict=True)):
        here = module(i) if rank in where and not isinstance(layer, nn.Module) else None
        tied = layer.tied_weight_attr if isinstance(layer, TiedLayerSpec) else ()
        if isinstance(here, nn.Module):
            yield from ((where, p) for name, p in here.named_parameters() if name not in tied)
