"""Which ranks share a parameter: those that hold a layer that uses it.

    layer  0 embedding (key "words")   on ranks {0}        words.weight: ranks 0 and 2
    layer  1 block                     on ranks {1}
    layer  2 head (key "words")        on ranks {2}

In DualPipe every layer is on two ranks, and all its parameters are shared.

What a key's modules have beside its tied weights, such as the bias of the head, is one parameter too where it has one
name: so it is if one rank holds all places, and a checkpoint has one place for it. DeepSpeed lets each rank train its
own, and its model then depends on the number of stages. Where layers of a class are built with other arguments, one as
an embedding with its norm and one as a head with the last norm (gdGPT's BLOOM), that would be another model: an error.
Ranks tell each other these names; all else is known on every rank from the list of layers, in one order on all.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from refimpl.parallel.pipeline.layers import Layer, TiedLayerSpec

Shared = tuple[tuple[int, ...], list[nn.Parameter]]
PLAIN = (bool, int, float, str, type(None))
Beside = dict[str, dict[str, torch.Size]]  # key -> names and shapes of what its module has beside the tied weights


def beside(layers: Sequence[Layer], modules: nn.ModuleDict) -> Beside:
    """What this rank has to tell the others. modules: the keys' that it holds."""
    found, places = Beside(), _places(layers)
    for key, module in modules.items():
        names = [name for spec in places.get(key, {}).values() for name in spec.tied_weight_attr]
        tied = {_attribute(module, name) for name in names}
        found[key] = {name: p.shape for name, p in module.named_parameters() if p not in tied}
    return found


def _attribute(module: nn.Module, name: str) -> Any:
    """That of a dotted name, a property too; None if it has none, as where another class calls the weight otherwise."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _places(layers: Sequence[Layer]) -> dict[str, dict[int, TiedLayerSpec]]:
    """Key -> the layers that have it, by their number."""
    found: dict[str, dict[int, TiedLayerSpec]] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            found.setdefault(layer.key, {})[i] = layer
    return found


def shared(
    layers: Sequence[Layer],
    holders: Sequence[set[int]],
    rank: int,
    module: Callable[[int], Any],
    told: Sequence[Beside],
) -> list[Shared]:
    """(ranks, parameters) for every set of several ranks that `rank` is in. All of them get the same list in one order.

    layers: all of the chain. holders: for each the ranks that hold it. module(i): what layer i became on this rank.
    told: `beside` of every rank. ValueError if a name has two shapes, or two layers of a key other arguments.
    """
    check_shapes(told)
    check_arguments(layers, told)
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
    for key, places in _places(layers).items():
        everywhere = set[int]().union(*(holders[i] for i in places))
        here = [i for i in places if rank in holders[i]]
        for i in here:
            yield from ((everywhere, module(i).get_parameter(name)) for name in places[i].tied_weight_attr)
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


def check_arguments(layers: Sequence[Layer], told: Sequence[Beside]) -> None:
    """ValueError, on all ranks alike, where layers of a key and class are built with other numbers, words or switches.

    Only where something stands beside the tied weights. Other objects than these cannot be compared, and are not.
    """
    for key, places in _places(layers).items():
        names = sorted({name for said in told for name in said.get(key, ())})
        (i, first), *others = places.items()
        for j, spec in others if names else ():
            if spec.typename is first.typename and (two := _differing(first, spec)):
                raise ValueError(
                    f"TiedLayerSpec {key!r}: layer {i} is built with {two[0]} and layer {j} with {two[1]}, but they "
                    f"are one module, {names[0]} too: build them alike, or of two classes in which what is not to be "
                    "tied has two names"
                )


def _differing(one: TiedLayerSpec, other: TiedLayerSpec) -> tuple[str, str] | None:
    """The first argument that can be compared and differs, as it is in both; what is not given is its default."""
    mine, others = _arguments(one), _arguments(other)
    for name, value in mine.items():
        if isinstance(value, PLAIN) and isinstance(others[name], PLAIN) and value != others[name]:
            return f"{name}={value!r}", f"{name}={others[name]!r}"
    return None


def _arguments(spec: TiedLayerSpec) -> dict[str, Any]:
    bound = signature(spec.typename).bind(*spec.module_args, **spec.module_kwargs)
    bound.apply_defaults()
    return bound.arguments
