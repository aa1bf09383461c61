"""What several ranks of a replica have a copy of must stay the same on all of them; nothing asks later whether it is.

    tensor      what is not split: norms, biases behind a sum; heads of keys, where there are fewer than ranks
    pipeline    what several stages use: a tied head

Equal gradients and equal optimizers keep copies equal, and so does rounding, unless a copy shares a scale, or a count
of the largest, with numbers that each rank has for itself. Most of what travels does:

    gradient_compression    a bucket is compressed as one; PowerSGD sends vectors, and small matrices, whole
    ZeRO++                  a unit's blocks; small parameters are in no unit (stage3_param_persistence_threshold)

Such copies were 0.05 apart after 5 steps of Adam at 0.01. DeepSpeed rounds every parameter by itself, and so all copies
alike: deepspeed/runtime/fp16/onebit/adam.py, deepspeed/runtime/comm/coalesced_collectives.py.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from refimpl.comm.axes import Axes
from refimpl.compress.powersgd import PowerSGD
from refimpl.engine.configuration.keys import ConfigError
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.zero.agreement.beyond import Spans
from refimpl.zero.flat import groups_of
from refimpl.zero.gather.unit import Unit
from refimpl.zero.loop.owned import not_taken
from refimpl.zero.stage import Stage
from refimpl.zero.zero3 import Zero3

Copies = Mapping[nn.Parameter, Spans | None]


def check_copies(stage: Stage, axes: Axes, copies: Copies) -> None:
    """ConfigError on all ranks of a replica if what travels would be rounded otherwise on others that have it too.

    copies: see `counted_elsewhere`. A collective of `axes.model`.
    """
    repeated = getattr(stage.model, "repeated", ())
    found = []
    for key, p, remedy in [*compressed(stage, copies), *quantised(stage, copies)]:
        of_stages = any(p is q for q in repeated)
        others = "pipeline stages" if of_stages else f"{axes.tensor.size} tensor ranks"
        untie = "use it in one stage alone (GPTConfig(tied=False)), " if of_stages else ""
        found.append(
            f"{key}: {stage.names[p]} is on several {others}, which would round it with numbers of their own, and its "
            f"copies would part: {untie}{remedy}"
        )
    if said := [text for texts in axes.model.all_gather_object(found[:1]) for text in texts]:
        raise ConfigError(said[0])


def compressed(stage: Stage, copies: Copies) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(key, parameter, remedy) of each copy whose gradient travels compressed."""
    compression = stage.config.compression
    if compression is None:
        return
    for p in copies:
        trained = p.requires_grad and p in stage.group_of
        if trained and not (copies[p] is None and travels_whole(p, compression.compressor)):
            yield "gradient_compression", p, "take it out, or let powersgd send that whole, by a larger least_ratio"


def travels_whole(p: nn.Parameter, operator: Any) -> bool:
    """Whether an operator leaves this parameter's gradient as it is."""
    rows = p.shape[0] if p.dim() else 1
    return isinstance(operator, PowerSGD) and not operator.takes(rows, math.prod(p.shape) // max(1, rows))


def quantised(stage: Stage, copies: Copies) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(key, parameter, remedy) of each copy in a unit of ZeRO-3 with other numbers, whose blocks are rounded."""
    if not isinstance(stage, Zero3):
        return
    for unit in stage.units:
        inside = [p for p in unit.params if p in copies]
        alone = len(inside) == len(unit.params) and all(copies[p] is None for p in inside)
        for key in () if alone else rounding(unit, stage):
            for p in inside:
                small = f"set zero_optimization.stage3_param_persistence_threshold to {p.numel()} or more, or "
                yield f"zero_optimization.{key}", p, f"{small}take the key out"


def rounding(unit: Unit, stage: Zero3) -> list[str]:
    """The keys by which a unit is rounded on its way."""
    config, frozen, keys = stage.config, unit.group_index < 0, []
    if config.zero_quantized_weights:
        keys.append("zero_quantized_weights")
    if config.zero_quantized_nontrainable_weights and frozen:
        keys.append("zero_quantized_nontrainable_weights")
    if config.zero_quantized_gradients and not frozen and unit.group.size > 1:
        keys.append("zero_quantized_gradients")
    return keys


def check_trained_alike(model: nn.Module, optimizer: Optimizer | None, axes: Axes) -> None:
    """ValueError, on all ranks, if a layer is trained on some of the ranks that share it and frozen on others.

    Of parts the product would be trained in part, copies would part. A collective of `axes.world`: a checksum each; of
    pipeline stages, what they share by its names.
    """
    known = groups_of(not_taken(optimizer), model)
    trained = {p: "trained" if p.requires_grad and p in known else "frozen" for p in model.parameters()}
    names = {p: name for name, p in model.named_parameters()}
    mine = {names[p]: what for p, what in trained.items()}
    text = None
    if len(set(axes.tensor.all_gather_object(zlib.crc32(repr(mine).encode())))) > 1:
        text = first_unlike(axes.tensor.ranks, axes.tensor.all_gather_object(mine))
    if isinstance(model, PipelineModule):
        repeated = set(model.repeated)
        shared = [p for _, params in model.shared for p in params]
        mine = {model.first_of(p) if p in repeated else model.name_in_whole(names[p]): trained[p] for p in shared}
        text = text or first_unlike(axes.pipeline.ranks, axes.pipeline.all_gather_object(mine))
    if said := [told for told in axes.world.all_gather_object(text) if told]:
        raise ValueError(said[0])


def first_unlike(ranks: list[int], said: list[dict[str, str]]) -> str | None:
    """What to say of the first parameter of which ranks that have it say different things."""
    for name in dict.fromkeys(name for one in said for name in one):
        told = {rank: one[name] for rank, one in zip(ranks, said, strict=True) if name in one}
        if len(set(told.values())) > 1:
            each = ", ".join(f"{what} on rank {rank}" for rank, what in told.items())
            return f"parameter {name} is {each}, and they share it: freeze, and give the optimizer, alike on all ranks"
    return None
