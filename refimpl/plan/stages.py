"""What each pipeline stage has: a model's layers, cut where the engine cuts them, and how many parameters they are.

The chain is embedding, blocks, last norm and head; the stage with the most parameters, experts and all, has as few as
can be (`parallel/pipeline/partition.py`). Where the vocabulary is large the first and the last stage so have fewer
blocks than others: Llama 3's 126 on 16 stages are 7, 14 x 8 and 7 (arXiv:2407.21783, section 3.3.2).
"""

from functools import cache
from itertools import pairwise

from refimpl.parallel.pipeline.partition import balanced
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape


@cache
def bounds(shape: Shape, pp: int, tp: int) -> list[int]:
    """Stage s has the blocks bounds[s] to bounds[s + 1] - 1."""
    if pp == 1:
        return [0, shape.layers]
    experts = shape.experts.count * shape.expert if shape.experts else 0
    blocks = [shape.blocks(i, i + 1, tp) + shape.mixtures(i, i + 1) * experts for i in range(shape.layers)]
    vocabulary = shape.embedding(tp)
    chain = [vocabulary + shape.learned_positions, *blocks, shape.last_norm + vocabulary]
    return [min(max(end - 1, 0), shape.layers) for end in balanced(chain, pp)]


def range_of(shape: Shape, mesh: Mesh, stage: int) -> tuple[int, int]:
    """(the first block of a stage, the first of the next)."""
    ends = bounds(shape, mesh.pp, mesh.tp)
    return ends[stage], ends[stage + 1]


def layers_of(shape: Shape, mesh: Mesh, stage: int) -> int:
    """How many blocks a stage has."""
    first, end = range_of(shape, mesh, stage)
    return end - first


def mixtures_of(shape: Shape, mesh: Mesh, stage: int) -> int:
    """How many of them have experts."""
    return shape.mixtures(*range_of(shape, mesh, stage))


def parameters_of(shape: Shape, mesh: Mesh, stage: int) -> int:
    """On one rank of a stage, but for experts, before ZeRO divides them. A tied head of another stage is a copy."""
    count = shape.blocks(*range_of(shape, mesh, stage), mesh.tp)
    if stage == 0:
        count += shape.embedding(mesh.tp) + shape.learned_positions
    if stage == mesh.pp - 1:
        count += shape.last_norm
        if not shape.tied or mesh.pp > 1:
            count += shape.embedding(mesh.tp)
    return count


def experts_of(shape: Shape, mesh: Mesh, stage: int) -> int:
    """Parameters of experts on one rank of a stage, whole on each tensor rank, before ZeRO divides them."""
    each = shape.experts.count // mesh.ep * shape.expert if shape.experts else 0
    return mixtures_of(shape, mesh, stage) * each


@cache
def most_blocks(shape: Shape, pp: int, tp: int) -> int:
    """Of any stage: for it all others wait."""
    ends = bounds(shape, pp, tp)
    return max(end - first for first, end in pairwise(ends))


@cache
def kinds(shape: Shape, pp: int, tp: int) -> list[int]:
    """The first stage of each kind: of those with as many blocks and mixtures the earliest has most alive."""
    ends = bounds(shape, pp, tp)
    found: dict[tuple[int, int, bool], int] = {}
    for stage, (first, end) in enumerate(pairwise(ends)):
        kind = end - first, shape.mixtures(first, end), stage == 0
        found.setdefault(kind, stage)
    return sorted({*found.values(), pp - 1})
