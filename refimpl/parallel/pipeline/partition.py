"""Where to cut a chain of layers into stages. The slowest stage sets the pace, so the largest sum is made least.

    uniform      the same number of layers, the first stages one more
    balanced     by a weight for each layer: parameters, whether its type matches, or measured seconds

Balanced is exact, by dynamic programming: the best cut of the first n layers into k stages is the best over where the
last stage begins. L^2 S steps for L layers and S stages, at most L^2 for layers of like weight: no stage is larger than
the largest of `uniform`. Of all cuts with the least largest stage it takes one whose smallest stage is largest, and
cuts late: a layer without weight stays with the one before it. DeepSpeed's (deepspeed/runtime/utils.py,
partition_balanced) makes largest less smallest least, stage by stage, which misses the least largest one for some
weights.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from refimpl.comm.collectives import chunk_sizes
from refimpl.measure.clock import now
from refimpl.parallel.pipeline.wire import form_of, tensors_of, with_gradient, writable

Bounds = list[int]  # stage s has layers bounds[s] to bounds[s + 1] - 1


def uniform(layers: int, stages: int) -> Bounds:
    """Bounds. With fewer layers than stages the last stages are empty."""
    return [0, *accumulate(chunk_sizes(layers, stages))]


def balanced(weights: Sequence[float], stages: int) -> Bounds:
    """Bounds with the least largest stage; each has a layer if there are enough. ValueError for weights below 0."""
    if stages < 1 or any(not weight >= 0 for weight in weights):
        raise ValueError(f"there must be a stage, and no weight below 0: got {stages} stages, weights {list(weights)}")
    if len(weights) <= stages:
        return uniform(len(weights), stages)
    sums = [0, *accumulate(weights)]
    some = max(sums[end] - sums[begin] for begin, end in pairwise(uniform(len(weights), stages)))
    largest, _ = _best(sums, stages, some, max, 0, min)
    return _best(sums, stages, largest, min, math.inf, max)[1]


def _best(
    sums: Sequence[float],
    stages: int,
    limit: float,
    join: Callable[[float, float], float],
    start: float,
    choose: Callable[..., tuple[float, int]],
) -> tuple[float, Bounds]:
    """The best value, and its bounds, of all cuts of the chain into stages of `limit` at most, of which there is one.

    `join`: a cut's value and its next stage's sum.
    """
    values = {0: start}  # number of layers -> the value of the best cut of them
    cuts: list[dict[int, int]] = []  # of each stage: where it ends -> where it begins
    for stage in range(1, stages + 1):
        best, first = {}, 0
        left = (stages - stage) * limit * (1 + 1e-9)  # that later stages hold, but for rounding
        for end in range(stage, len(sums) - stages + stage):  # each of them needs a layer
            if sums[-1] - sums[end] > left:
                continue
            while sums[end] - sums[first] > limit:
                first += 1
            if begins := [begin for begin in range(end - 1, first - 1, -1) if begin in values]:
                best[end] = choose(((join(values[b], sums[end] - sums[b]), b) for b in begins), key=itemgetter(0))
        values = {end: value for end, (value, _) in best.items()}
        cuts.append({end: begin for end, (_, begin) in best.items()})
    bounds = [len(sums) - 1]
    for cut in reversed(cuts):
        bounds.insert(0, cut[bounds[0]])
    return values[bounds[-1]], bounds


def matching(names: Sequence[str], pattern: str) -> list[float]:
    """Weights for `type:PATTERN`: 1 for each layer whose class name has it, in any case. ValueError if none has."""
    try:
        weights = [float(bool(re.search(pattern, name, re.IGNORECASE))) for name in names]
    except re.error as error:
        raise ValueError(f"partition 'type:{pattern}': {error}") from None
    if not any(weights):
        raise ValueError(f"partition 'type:{pattern}': no layer's type matches: {', '.join(dict.fromkeys(names))}")
    return weights


def seconds(layers: Iterable[Callable[[Any], Any]], sample: Any, repeat: int = 3) -> list[float]:
    """Of each layer's forward and backward, the least of `repeat`; the first gets `sample`, the next what it gives."""
    found = []
    for layer in layers:
        runs = [_timed(layer, sample) for _ in range(repeat)]
        found.append(min(duration for duration, _ in runs))
        sample = runs[-1][1]
    return found


def _timed(layer: Callable[[Any], Any], x: Any) -> tuple[float, Any]:
    x = form_of(x).fill(tensors_of(x))
    device = next((tensor.device for tensor in tensors_of(x)), torch.device("cpu"))
    begin = now(device)
    out = layer(writable(x))
    roots = with_gradient(out)
    weights = [p for p in layer.parameters() if p.requires_grad] if isinstance(layer, nn.Module) else []
    if roots and (leaves := [*with_gradient(x), *weights]):
        torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
    return now(device) - begin, out


def parameters(layer: object) -> float:
    """Trainable elements of a layer; 0 for a function."""
    return sum(p.numel() for p in layer.parameters() if p.requires_grad) if isinstance(layer, nn.Module) else 0
