"""Bytes that a GPU of a layout sends in a step, on each axis: exactly what the ledger counts, control messages aside.

tensor     an all-reduce sends 2 n (tp - 1)/tp. Four of n = tokens x width a block and micro-batch, five if forward
           runs twice, up to what the last product needs (Megatron-LM runs it to its end: six); one for the embedding
           (forward), one for the head (backward), 12 bytes a token for the loss
pipeline   n to the next stage, n back; a tied head's gradient once, over to the embedding, and whether there is one
context    keys and values in a ring: cp - 1 hops forward, cp - 1 in backward, and cp of their gradients in fp32
data       `formulas.traffic` over dp x cp

n: bytes of one micro-batch's activations between two blocks, on this rank
"""

from collections.abc import Mapping
from typing import Protocol

from refimpl.plan import formulas
from refimpl.plan.shape import Shape


class Mesh(Protocol):
    """A layout, as far as bytes depend on it: see `mesh.py`."""

    @property
    def dp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def micro(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def zero(self) -> formulas.Strategy: ...


AXES = {  # -> the ledger's tags; what has another is a control message
    "tensor": ("tensor",),
    "pipeline": ("pipeline activations", "pipeline gradients", "pipeline shared gradients"),
    "context": ("keys and values", "gradients of keys and values"),
    "data": ("gradients", "parameters"),
}


def traffic(shape: Shape, mesh: Mesh, stage: int, padding: int = 0) -> dict[str, int]:
    """By axis, for a rank of a stage. `padding`: elements that the buckets of its data-parallel stage add."""
    tokens = mesh.micro * shape.context // mesh.cp
    n = tokens * shape.width * mesh.itemsize
    first, last = stage == 0, stage == mesh.pp - 1
    layers = layers_of(shape, mesh, stage)

    def all_reduce(size: int) -> int:
        return 2 * size * (mesh.tp - 1) // mesh.tp

    tensor = (5 if mesh.recompute else 4) * layers * all_reduce(n) + (first + last) * all_reduce(n)
    tensor += last * all_reduce(12 * tokens)
    between = (not first) * n + (not last) * n
    kv = 2 * tokens * shape.keys(mesh.tp) * mesh.itemsize  # of a block
    gradients = kv * 4 // mesh.itemsize
    forward = (2 if mesh.recompute else 1) * (mesh.cp - 1) * kv
    ring = layers * (forward + (mesh.cp - 1) * kv + mesh.cp * gradients) if mesh.cp > 1 else 0
    layout = formulas.Layout(parameters_of(shape, mesh, stage), padding, buckets=0)
    rows = formulas.traffic(mesh.zero, mesh.dp * mesh.cp, mesh.itemsize, layout, mesh.micro_batches)
    tied = shape.tied and first != last
    return {
        "tensor": mesh.micro_batches * tensor,
        "pipeline": mesh.micro_batches * between + tied * (shape.embedding // mesh.tp + 1) * mesh.itemsize,
        "context": mesh.micro_batches * ring,
        "data": sum(row.bytes for row in rows if row.tag in ("gradients", "parameters")),
    }


def by_axis(sent: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the ledger's tags -> by axis, and those of "control" messages."""
    found = {axis: sum(sent.get(tag, 0) for tag in tags) for axis, tags in AXES.items()}
    return found | {"control": sum(sent.values()) - sum(found.values())}


def busiest(shape: Shape, mesh: Mesh) -> dict[str, int]:
    """By axis, of the stage that sends most there: the first, the last, or one between."""
    stages = [traffic(shape, mesh, stage) for stage in sorted({0, min(1, mesh.pp - 1), mesh.pp - 1})]
    return {axis: max(sent[axis] for sent in stages) for axis in AXES}


def layers_of(shape: Shape, mesh: Mesh, stage: int) -> int:
    """Of a stage; of layers that the stages do not divide the first ones have one more."""
    return shape.layers // mesh.pp + (stage < shape.layers % mesh.pp)


def parameters_of(shape: Shape, mesh: Mesh, stage: int) -> int:
    """On one rank of a stage, before ZeRO divides them. A tied head of another stage is a copy of its own."""
    count = layers_of(shape, mesh, stage) * shape.block(mesh.tp)
    if stage == 0:
        count += shape.embedding // mesh.tp + shape.positions * shape.context * shape.width
    if stage == mesh.pp - 1:
        count += shape.last_norm
        if not shape.tied or mesh.pp > 1:
            count += shape.embedding // mesh.tp
    return count
