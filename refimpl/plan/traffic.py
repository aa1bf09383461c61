"""Bytes that a GPU of a layout sends in a step, on each axis: exactly what the ledger counts, control messages aside.

tensor     an all-reduce sends 2 n (tp - 1)/tp. Four of n = tokens x width a block and micro-batch, five if forward
           runs twice, up to what the last product needs (Megatron-LM runs it to its end: six), two where attention is
           whole; one for the embedding (forward), one for the head (backward), 12 bytes a token for the loss
           in a mixture: two gathers of n in the place of two all-reduces, none under sequence parallelism; the sums of
           the experts' gradients, which are whole on each rank, and of a gate's where each has other tokens. Nothing
           where each rank computes all tokens' experts: without sequence parallelism, and not dealt out
pipeline   n to the next stage, n back; a tied head's gradient once, over to the embedding, and whether there is one
context    keys and values in a ring: cp - 1 hops forward, cp - 1 in backward, and cp of their gradients in fp32
expert     each token to its k experts and back, forward and backward (`expert.py`), if all experts get as many
data       `formulas.traffic` over dp x cp, of experts over the dp x cp / ep that have the same ones

n: bytes of one micro-batch's activations between two blocks, on this rank
"""

from collections.abc import Mapping

from refimpl.plan import expert, formulas
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape
from refimpl.plan.stages import experts_of, kinds, layers_of, mixtures_of, parameters_of

AXES = {  # -> the ledger's tags; what has another is a control message
    "tensor": ("tensor", "tokens, tensor", "experts, tensor"),
    "pipeline": ("pipeline activations", "pipeline gradients", "pipeline shared gradients"),
    "context": ("keys and values", "gradients of keys and values"),
    "data": ("gradients", "parameters"),
    "expert": ("tokens", "tokens per expert"),  # where ep > 1
}


def traffic(shape: Shape, mesh: Mesh, stage: int, padding: int = 0, of_experts: int = 0) -> dict[str, int]:
    """By axis, for a rank of a stage. padding, of_experts: elements that the buckets of its data-parallel stage add,
    those of dense parameters and those of experts.
    """
    tokens = mesh.tokens(shape)
    n = tokens * shape.width * mesh.itemsize
    first, last = stage == 0, stage == mesh.pp - 1
    layers, mixtures = layers_of(shape, mesh, stage), mixtures_of(shape, mesh, stage)

    def all_reduce(size: int) -> int:
        return 2 * size * (mesh.tp - 1) // mesh.tp

    each = 2 if shape.whole(mesh.tp) else 5 if mesh.recompute else 4
    ends = 0 if shape.scaled else (first + last) * all_reduce(n) + last * all_reduce(12 * tokens)
    tensor = each * layers * all_reduce(n) + ends + (mixtures * of_mixture(shape, mesh, tokens) if mixtures else 0)
    between = (not first) * n + (not last) * n
    kv = tokens * (shape.keys(mesh.tp) + shape.values(mesh.tp)) * mesh.itemsize  # of a block
    gradients = kv * 4 // mesh.itemsize
    forward = (2 if mesh.recompute else 1) * (mesh.cp - 1) * kv
    ring = layers * (forward + (mesh.cp - 1) * kv + mesh.cp * gradients) if mesh.cp > 1 else 0
    replicas, data = mesh.dp * mesh.cp, 0
    for elements, added, ranks in (
        (parameters_of(shape, mesh, stage), padding, replicas),
        (experts_of(shape, mesh, stage), of_experts, replicas // mesh.ep),
    ):
        layout = formulas.Layout(elements, added, buckets=0)
        rows = formulas.traffic(mesh.zero, ranks, mesh.itemsize, layout, mesh.micro_batches)
        data += sum(row.bytes for row in rows if row.tag in ("gradients", "parameters"))
    tied = shape.tied and first != last
    found = {
        "tensor": mesh.micro_batches * tensor,
        "pipeline": mesh.micro_batches * between + tied * (shape.embedding(mesh.tp) + 1) * mesh.itemsize,
        "context": mesh.micro_batches * ring,
        "data": data,
    }
    if mesh.ep > 1:
        found["expert"] = mesh.micro_batches * mixtures * of_tokens(shape, mesh, tokens)
    return found


def of_mixture(shape: Shape, mesh: Mesh, tokens: int) -> int:
    """What tensor ranks send more for a mixture than for an MLP: less than nothing but for the experts' gradients."""
    e, others = shape.experts, mesh.tp - 1
    assert e is not None
    n, w = tokens * shape.width * mesh.itemsize, shape.width * mesh.itemsize
    experts = 2 * (e.count // mesh.ep * shape.expert) * mesh.itemsize * others // mesh.tp
    mlp = 0 if e.shared else 2 * 2 * n * others // mesh.tp
    if mesh.before_experts == 1:
        return -mlp
    if mesh.between > 1:
        return experts + 2 * e.count * w * others // mesh.tp - mlp
    return experts + (2 * n + 4 * tokens * e.k) * others // mesh.tp - mlp


def of_tokens(shape: Shape, mesh: Mesh, tokens: int) -> int:
    """What the ranks that share the experts send for a mixture: of a rank's tokens each tensor rank sends its part."""
    e, forwards = shape.experts, 2 if mesh.recompute else 1
    assert e is not None
    rows = expert.even_sent(tokens // mesh.tp, e.k, shape.width, mesh.ep, mesh.itemsize, forwards)
    return int(rows) + forwards * expert.COUNT * e.count * (mesh.ep - 1)


def by_axis(sent: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the ledger's tags -> by axis, and those of "control" messages."""
    there = {axis: tags for axis, tags in AXES.items() if axis != "expert" or not sent.keys().isdisjoint(tags)}
    found = {axis: sum(sent.get(tag, 0) for tag in tags) for axis, tags in there.items()}
    return found | {"control": sum(sent.values()) - sum(found.values())}


def busiest(shape: Shape, mesh: Mesh) -> dict[str, int]:
    """By axis, of the stage that sends most there."""
    stages = [traffic(shape, mesh, stage) for stage in kinds(shape, mesh.pp, mesh.tp)]
    return {axis: max(sent[axis] for sent in stages) for axis in stages[0]}
