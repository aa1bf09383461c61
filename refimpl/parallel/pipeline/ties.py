"""Which ranks share a parameter: those that hold a layer that uses it.

    layer  0 embedding (key "words")   on ranks {0}        words.weight: ranks 0 and 2
    layer  1 block                     on ranks {1}
    layer  2 head (key "words")        on ranks {2}

In DualPipe every layer is on two ranks, and all its parameters are shared.

What a key's modules have beside its tied weights, such as the bias of the head, is one parameter too where it has one
name: so it is if one rank holds all places, and a checkpoint has one place for it. DeepSpeed lets each rank train its
own, and its model then depends on the number of stages.
Ranks tell each other these names; all else is known on every rank from the list of layers, in one order on all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from refimpl.parallel.pipeline.layers import Layer, TiedLayerSpec

Shared = tuple[tuple[int, ...], list[nn.Parameter]]
Beside = dict[str, dict[str, torch.Size]]  # key -> names and shapes of what its module has beside the tied weights


def beside(layers: Sequence[Layer], modules: nn.ModuleDict) -> Beside:
    """What this rank has to tell the others. modules: the keys' that it holds."""
    tied = {(x.key, name) for x in layers if isinstance(x, TiedLayerSpec) for name in x.tied_weight_attr}
    return {
        key: {name: p.shape for name, p in module.named_parameters() if (key, name) not in tied}
        for key, module in modules.items()
    }


def shared(
    layers: Sequence[Layer],
    holders: Sequence[set[int]],
    rank: int,
    module: Callable[[int], Any],
    told: Sequence[Beside],
) -> list[Shared]:
    """(ranks, parameters) for every set of several ranks that `rank` is in. All of them get the same list in one order.

    layers: all of the chain. holders: for each the ranks that hold it. module(i): what layer i became on this rank.
    told: `beside` of every rank. ValueError if a name has two shapes.
    """
    check_shapes(told)
    found: dict[tuple[int, ...], dict[nn.Parameter, None]] = {}
    for ranks, p in [*_built(layers, holders), *_specified(layers, holders, rank, module, told)]:
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
    layers: Sequence[Layer],
    holders: Sequence[set[int]],
    rank: int,
    module: Callable[[int], Any],
    told: Sequence[Beside],
) -> Iterator[tuple[set[int], nn.Parameter]]:
    """Of modules that only their holders have: tied ones by the place of a key's first layer, then the others."""
    by_key: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            by_key.setdefault(layer.key, []).append(i)
    for key, places in by_key.items():
        everywhere = set[int]().union(*(holders[i] for i in places))
        here = [i for i in places if rank in holders[i]]
        for i in here:
            yield from ((everywhere, module(i).get_parameter(name)) for name in layers[i].tied_weight_attr)  # type: ignore[union-attr]
        for name in sorted(told[rank].get(key, ())):
            ranks = {other for other, said in enumerate(told) if name in said.get(key, ())}
            yield ranks, module(here[0]).get_parameter(name)
    for i, (layer, where) in enumerate(zip(layers, holders, strict=True)):
        made = module(i) if rank in where and not isinstance(layer, nn.Module | TiedLayerSpec) else None
        yield from ((where, p) for p in made.parameters()) if isinstance(made, nn.Module) else ()


def check_shapes(told: Sequence[Beside]) -> None:
    """ValueError, on all ranks alike, where what has one name has two shapes."""
    found: dict[tuple[str, str], tuple[int, torch.Size]] = {}
    for rank, said in enumerate(told):
        for key, name, shape in ((key, *item) for key, shapes in said.items() for item in shapes.items()):
            first, its = found.setdefault((key, name), (rank, shape))
            if shape != its:
                raise ValueError(
                    f"TiedLayerSpec {key!r}: {name} is {list(its)} on rank {first} and {list(shape)} on rank {rank}; "
                    "what has one name is one parameter: give it another name in one of the classes"
                )
